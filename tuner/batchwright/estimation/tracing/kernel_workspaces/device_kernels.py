"""The kernels of a device, as a trace asks for their workspaces: those of a GPU, and those of the CPU."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor

from batchwright.estimation.trace import BlockBytes
from batchwright.estimation.tracing.kernel_workspaces.attention_workspaces import (
    cudnn_attention_backward,
    efficient_backward,
    flash_backward,
)
from batchwright.estimation.tracing.kernel_workspaces.contiguous_copies import contiguous_copies
from batchwright.estimation.tracing.kernel_workspaces.fourier_workspaces import fourier_error, fourier_transform
from batchwright.estimation.tracing.kernel_workspaces.index_workspaces import (
    SUMMING_WORKSPACES,
    embedding_backward,
    embedding_bag_backward,
    scatter_mean,
    sort,
    sorted_index_put,
)
from batchwright.estimation.tracing.kernel_workspaces.library_calls import (
    CONVOLUTIONS,
    UNMEASURED_CONVOLUTION,
    convolution,
    convolution_backward,
    library_call,
)
from batchwright.estimation.tracing.kernel_workspaces.recurrent_workspaces import (
    dropout_state_bytes,
    onednn_scratchpad,
    packed_steps,
    recurrent_error,
)
from batchwright.estimation.tracing.kernel_workspaces.reduction_workspaces import (
    ctc_backward,
    distances_backward,
    foreach_norm,
    log_sum_exp,
    most_resident_threads,
    of_complex,
    own_distances_backward,
    partial_sums,
    reduced_loss,
    roll,
    soft_margin_backward,
    softmax_backward,
    sum_of_values,
    unfolded,
    widened,
)
from batchwright.estimation.tracing.kernel_workspaces.workspace import Workspace
from batchwright.estimation.tracing.torch_internals import (
    ADDMM_ACTIVATION,
    CDIST_BACKWARD,
    CTC_LOSS_BACKWARD,
    CUDNN_ATTENTION_BACKWARD,
    CUDNN_RNN,
    EFFICIENT_ATTENTION_BACKWARD,
    EMBEDDING_BAG,
    EMBEDDING_BAG_BACKWARD,
    FLASH_ATTENTION_BACKWARD,
    FOREACH_NORM,
    FOURIER_TRANSFORMS,
    GRU_CELL,
    PACK_SEQUENCES,
    PDIST_BACKWARD,
    SOFTMAX_BACKWARD,
    OpOverload,
    backward_task,
)
from batchwright.hardware.gpu_table import blas_workspace_bytes
from batchwright.hardware.workspace_tables import MeasuredWorkspaces, measured_workspaces
from batchwright.schemas.gpus import KernelProfile

_aten = torch.ops.aten
_Workspace = TypeVar("_Workspace")

_MATRIX_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.addbmm.default,
        _aten.addmv.default,
        _aten.mv.default,
        ADDMM_ACTIVATION,
        _aten.linear.default,
    }
)

_ALLOCATED_IN_ORDER: Mapping[OpOverload, tuple[int, ...]] = {
    GRU_CELL: (1, 0),  # the workspace, then the state (`RNN.cu`)
    _aten.native_dropout.default: (1, 0),  # the mask, then the result (`dropout_cuda` in `Dropout.cu`)
    EMBEDDING_BAG: (2, 1, 0, 3),  # the sizes and bags of the indices, then the result (`EmbeddingBag.cu`)
}
"""Positions of the results of an operator, in the order in which its kernel allocates them where that is another."""

_WORKSPACES_AFTER_RESULTS: Mapping[OpOverload, int] = {
    _aten.embedding_dense_backward.default: SUMMING_WORKSPACES,
    EMBEDDING_BAG_BACKWARD: SUMMING_WORKSPACES,
    FLASH_ATTENTION_BACKWARD: 4,  # `mha_bwd` and `_efficient_attention_backward` make the gradients first
    EFFICIENT_ATTENTION_BACKWARD: 3,
    **dict.fromkeys(FOURIER_TRANSFORMS, 3),
    CUDNN_ATTENTION_BACKWARD: 1,  # `run_cudnn_SDP_bprop` takes the gradients that it is to write
}
"""Most of the last workspaces of an operator that its kernel allocates after the results; of others it is 0."""

_WORKSPACES: Mapping[OpOverload, Workspace] = {
    FLASH_ATTENTION_BACKWARD: flash_backward,
    EFFICIENT_ATTENTION_BACKWARD: efficient_backward,
    CUDNN_ATTENTION_BACKWARD: cudnn_attention_backward,
    _aten.embedding_dense_backward.default: embedding_backward,
    EMBEDDING_BAG_BACKWARD: embedding_bag_backward,
    PACK_SEQUENCES: packed_steps,
    _aten.index_put_.default: sorted_index_put,
    _aten.index_put.default: sorted_index_put,
    FOREACH_NORM: foreach_norm,
    SOFTMAX_BACKWARD: softmax_backward,
    _aten.logsumexp.default: log_sum_exp,
    _aten.mse_loss.default: reduced_loss,
    _aten.smooth_l1_loss.default: reduced_loss,
    _aten.huber_loss.default: reduced_loss,
    _aten.soft_margin_loss_backward.default: soft_margin_backward,
    CDIST_BACKWARD: distances_backward,
    PDIST_BACKWARD: own_distances_backward,
    _aten.scatter_reduce.two: scatter_mean,
    _aten.sort.default: sort,
    _aten.sort.stable: sort,
    _aten.cumsum.default: widened,
    _aten.cumprod.default: widened,
    _aten.abs.default: of_complex,
    _aten.angle.default: of_complex,
    _aten.im2col.default: unfolded,
    _aten.roll.default: roll,
    _aten.sum.default: sum_of_values,
    _aten.sum.dim_IntList: sum_of_values,
    _aten.mean.dim: partial_sums,
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
    **dict.fromkeys(CTC_LOSS_BACKWARD, ctc_backward),
    **dict.fromkeys(FOURIER_TRANSFORMS, fourier_transform),
}


_ONEDNN_RECURRENT = frozenset({_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default})
CARD_DEPENDENT = frozenset({*_WORKSPACES, *_MATRIX_PRODUCTS, *_ONEDNN_RECURRENT, CUDNN_RNN})
"""The operators whose workspaces may depend on the card. Of others only copies of arguments are known."""


class CudaKernels:
    """Workspaces of a GPU's kernels.

    Args:
        profile: the kernel profile.
        measured: the workspaces measured on such a card; those of the tables by default.

    Attributes:
        has_miopen: whether MIOpen runs recurrent layers, in the place of cuDNN.
    """

    def __init__(self, profile: KernelProfile, measured: MeasuredWorkspaces | None = None) -> None:
        self._profile = profile
        self._measured = measured or measured_workspaces(profile)
        self.has_miopen = profile.kind == "rocm"
        own_bytes = self._measured.table.blas_workspace_bytes if self._measured else None
        self._blas_bytes = own_bytes or blas_workspace_bytes(profile.compute_capability, profile.kind)

    def persistent(self, func: OpOverload, args: Sequence[Any]) -> Sequence[tuple[str, int]]:
        """Return what libraries keep: a workspace of cuBLAS for each of the two passes' threads, cuDNN's generators."""
        if func is CUDNN_RNN:
            threads = self._profile.resident_threads or most_resident_threads(self._profile)
            nbytes = dropout_state_bytes(args, threads)
            return (("dropout of cudnn", nbytes),) if nbytes else ()
        if func not in _MATRIX_PRODUCTS:
            return ()
        backward = backward_task() >= 0
        return (("cublas of the backward pass" if backward else "cublas", self._blas_bytes),)

    def temporary(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[BlockBytes]:
        """Return the workspaces that ``func`` holds while it runs, contiguous copies of its arguments included."""
        copies = contiguous_copies(func, args)
        call = library_call(func, args, outputs)
        share = self._measured.share(call.kind) if call and self._measured else None
        if call and share:
            return (*copies, ceil(share.expected * call.operand_bytes))
        workspace = _WORKSPACES.get(func)
        return copies if workspace is None else (*copies, *workspace(args, outputs, self._profile))

    def error(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
        """Return by how many bytes the workspace of ``func`` may be smaller, and larger, than ``temporary`` has it."""
        if func is CUDNN_RNN:
            return recurrent_error(args, is_miopen=self.has_miopen)
        if func in FOURIER_TRANSFORMS:
            return fourier_error(args, outputs)
        call = library_call(func, args, outputs)
        if call is None:
            return 0, 0
        share = self._measured.share(call.kind) if self._measured else None
        if share:
            return (
                ceil((share.expected - share.low) * call.sample_bytes),
                ceil((share.high - share.expected) * call.sample_bytes),
            )
        fewer, more = UNMEASURED_CONVOLUTION if func in CONVOLUTIONS else (0, 0)
        return fewer * call.sample_bytes, more * call.sample_bytes


class CpuKernels:
    """Workspaces of the CPU's kernels: those of oneDNN for recurrent layers; no others are known."""

    has_miopen = False

    def error(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
        """Return no error."""
        del func, args, outputs
        return 0, 0

    def persistent(self, func: OpOverload, args: Sequence[Any]) -> Sequence[tuple[str, int]]:
        """Return no workspaces."""
        del func, args
        return ()

    def temporary(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[BlockBytes]:
        """Return the workspaces that ``func`` holds while it runs."""
        return onednn_scratchpad(args, outputs, None) if func in _ONEDNN_RECURRENT else ()


def in_order_of_allocation(
    func: OpOverload, workspaces: Sequence[_Workspace], outputs: Sequence[Tensor]
) -> list[_Workspace | Tensor]:
    """Return workspaces and results of an operator in the order in which its CUDA kernel allocates them."""
    order = _ALLOCATED_IN_ORDER.get(func, range(len(outputs)))
    first = max(0, len(workspaces) - _WORKSPACES_AFTER_RESULTS.get(func, 0))
    return [*workspaces[:first], *(outputs[position] for position in order), *workspaces[first:]]


def representative(profile: KernelProfile) -> KernelProfile:
    """Return one profile for all profiles that run the same kernels as far as traces are concerned.

    Where workspaces were measured, those of a compute capability are used for that one alone.
    """
    major = profile.compute_capability[0]
    if profile.kind == "rocm":
        return profile
    same = {7: (7, 0), 8: (8, 0) if profile.compute_capability == (8, 0) else (8, 6), 9: (9, 0), 10: (10, 0)}
    found = profile.model_copy(update={"compute_capability": same.get(major, profile.compute_capability)})
    return profile if measured_workspaces(profile) or measured_workspaces(found) else found
