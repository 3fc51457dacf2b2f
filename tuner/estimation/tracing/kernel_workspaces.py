"""Workspaces that kernels and libraries allocate beside their results, invisible to a trace of operators.

Each figure names its source in torch 2.13. Those of cuDNN are estimates, because cuDNN does not document its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tuner.estimation.trace import Bound
from tuner.estimation.tracing.torch_internals import (
    ADDMM_ACTIVATION,
    CTC_LOSS_BACKWARD,
    CUDNN_ATTENTION_BACKWARD,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION_BACKWARD,
    FOREACH_NORM,
    OpOverload,
    backward_task,
)
from tuner.hardware.gpu_table import blas_workspace_bytes
from tuner.schemas.gpus import KernelProfile

_aten = torch.ops.aten
_INDEX_BYTES = 8
_FLOAT_BYTES = 4
_RECURRENT_BYTES = 62

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

Workspace: TypeAlias = "Callable[[Sequence[Any], Sequence[Tensor], KernelProfile], Sequence[int | Bound]]"
"""Function from an operator's arguments and results to the bytes of the workspaces it holds while it runs."""


class CudaKernels:
    """Workspaces of a GPU's kernels."""

    def __init__(self, profile: KernelProfile) -> None:
        self._profile = profile
        self._blas_bytes = blas_workspace_bytes(profile.compute_capability, profile.kind)

    def persistent(self, func: OpOverload, args: Sequence[Any]) -> Sequence[tuple[str, int]]:
        """Return cuBLAS's workspaces: one for the thread of forward passes, one for that of backward passes."""
        del args
        if func not in _MATRIX_PRODUCTS:
            return ()
        backward = backward_task() >= 0
        return (("cublas of the backward pass" if backward else "cublas", self._blas_bytes),)

    def temporary(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[int | Bound]:
        """Return the workspaces that ``func`` holds while it runs."""
        workspace = _WORKSPACES.get(func)
        return () if workspace is None else workspace(args, outputs, self._profile)


def onednn_recurrent_workspace_bytes(args: Sequence[Any]) -> int:
    """Return the bytes that ``mkldnn_rnn_layer`` keeps for its backward pass, by the operator's arguments.

    oneDNN reports the size only at run time: 61 to 66 bytes for each hidden unit, step and sample, measured with LSTMs
    of 64 and 128 units over 64 to 128 steps.
    """
    steps, samples, _ = args[0].shape
    return int(steps * samples * args[10] * _RECURRENT_BYTES)


class NoKernels:
    """Kernels without workspaces, as far as is known: those of the CPU."""

    def persistent(self, func: OpOverload, args: Sequence[Any]) -> Sequence[tuple[str, int]]:
        """Return no workspaces."""
        del func, args
        return ()

    def temporary(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[int | Bound]:
        """Return no workspaces."""
        del func, args, outputs
        return ()


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspaces of FlashAttention-2's ``mha_bwd``: the query's gradient in fp32, row sums, gradients per head."""
    del outputs, profile
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * _rounded(length, 128)
    workspaces = [rows * _rounded(width, 32) * _FLOAT_BYTES, rows * _FLOAT_BYTES]
    if key.shape[1] != heads:  # each query head's own, summed over the group afterwards
        workspaces += [batch * heads * key.shape[2] * width * query.element_size()] * 2
    return workspaces


def _efficient_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[int | Bound]:
    """Workspaces of ``_efficient_attention_backward``: ``delta`` per row, and fp32 sums of half gradients."""
    del outputs, profile
    query = args[1]
    batch, heads, length, width = query.shape
    delta = batch * heads * length * _FLOAT_BYTES
    return [delta] if query.dtype is torch.float32 else [delta, batch * heads * length * width * _FLOAT_BYTES]


def _cudnn_attention_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[int | Bound]:
    """Estimate of the workspaces: the query's gradient in fp32, and two sums per row."""
    del outputs, profile
    batch, heads, length, width = args[1].shape
    rows = batch * heads * length
    return [rows * width * _FLOAT_BYTES + 2 * rows * _FLOAT_BYTES]


_INDICES_PER_SUM = 10


def _embedding_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[int | Bound]:
    """Workspaces of ``EmbeddingBackwardKernel.cu``: sorted indices with their positions, then fp32 sums per segment.

    A segment is a row that occurs in the indices, so there are at most as many as indices, or rows. There is a partial
    sum for every ten indices and for every segment. Here these are two blocks, with a tenth of a sum per index, so that
    they grow evenly. Up to 3,072 indices without a padding index are summed without sorting (``Embedding.cu``). Their
    small workspaces are counted all the same, because the list of blocks must not depend on the micro-batch size.
    """
    del outputs, profile
    gradient, indices, rows = args[:3]
    count, width = indices.numel(), gradient.shape[-1]
    sum_bytes = width * max(_FLOAT_BYTES, gradient.element_size())

    def per_segment(nbytes: int) -> Bound:
        return Bound(unbounded_bytes=count * nbytes, max_bytes=rows * nbytes)

    return [
        *[count * _INDEX_BYTES] * 4,
        *[per_segment(_INDEX_BYTES)] * 3,
        count * -(-_INDEX_BYTES // _INDICES_PER_SUM),
        per_segment(sum_bytes),
        count * -(-sum_bytes // _INDICES_PER_SUM),
    ]


def _sorted_index_put(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspaces of ``Indexing.cu`` with ``accumulate``: linear indices, sorted indices, and their positions twice."""
    del outputs, profile
    accumulates = len(args) > 3 and bool(args[3])  # noqa: PLR2004 - (self, indices, values, accumulate)
    indices = [index for index in args[1] if isinstance(index, Tensor)]
    return [max(index.numel() for index in indices) * _INDEX_BYTES] * 4 if accumulates and indices else []


_CHUNK = 65536


def _foreach_norm(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspaces of ``ForeachReduceOp.cu``: for each tensor as many values as the largest tensor has chunks."""
    del outputs, profile
    tensors = args[0]
    return [len(tensors) * max(-(-tensor.numel() // _CHUNK) for tensor in tensors) * _FLOAT_BYTES]


def _convolution(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    return _transposed([args[0], args[1], *outputs], groups=args[8], profile=profile)


def _convolution_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[int | Bound]:
    """Workspaces of the larger of the two kernels, for the gradients of input and weight, which run in sequence."""
    gradient, inputs, weight = args[:3]
    del outputs
    return _transposed([gradient, inputs, weight], groups=args[9], profile=profile)


def _transposed(tensors: Sequence[Tensor], *, groups: int, profile: KernelProfile) -> Sequence[int | Bound]:
    """Estimate of the copies to channels-last format that kernels on tensor cores make (half types, fp32 by TF32)."""
    images = tensors[0]
    needed = (8, 0) if images.dtype in {torch.float32, torch.bfloat16} else (7, 0)
    if groups != 1 or profile.compute_capability < needed or images.dtype is torch.float64:
        return []
    if images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last):  # noqa: PLR2004 - (n, c, h, w)
        return []
    return [sum(tensor.numel() * tensor.element_size() for tensor in tensors)]


def _ctc_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspace of ``LossCTC.cu``: the backward variables, as many as the forward variables."""
    del outputs, profile
    alphas = args[6]
    return [alphas.numel() * alphas.element_size()]


_WORKSPACES: Mapping[OpOverload, Workspace] = {
    FLASH_ATTENTION_BACKWARD: _flash_backward,
    EFFICIENT_ATTENTION_BACKWARD: _efficient_backward,
    CUDNN_ATTENTION_BACKWARD: _cudnn_attention_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.index_put_.default: _sorted_index_put,
    _aten.index_put.default: _sorted_index_put,
    FOREACH_NORM: _foreach_norm,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    **dict.fromkeys(CTC_LOSS_BACKWARD, _ctc_backward),
}


def representative(profile: KernelProfile) -> KernelProfile:
    """Return one profile for all profiles that run the same kernels as far as traces are concerned."""
    major = profile.compute_capability[0]
    if profile.kind == "rocm":
        return profile
    same = {7: (7, 0), 8: (8, 0) if profile.compute_capability == (8, 0) else (8, 6), 9: (9, 0), 10: (10, 0)}
    return profile.model_copy(update={"compute_capability": same.get(major, profile.compute_capability)})
