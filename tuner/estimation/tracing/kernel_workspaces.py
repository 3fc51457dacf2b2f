"""Workspaces that kernels and libraries allocate beside their results, invisible to a trace of operators.

Each figure names its source in torch 2.13. Those of cuDNN, which does not document its own, are measured ones where
there is a table for the compute capability (``tuner.hardware.workspace_tables``), else estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tuner.estimation.trace import Bound
from tuner.estimation.tracing.torch_internals import (
    ADDMM_ACTIVATION,
    CTC_LOSS_BACKWARD,
    CUDNN_ATTENTION,
    CUDNN_ATTENTION_BACKWARD,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION_BACKWARD,
    FOREACH_NORM,
    GRU_CELL,
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    SAFE_SOFTMAX,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    OpOverload,
    backward_task,
)
from tuner.hardware.gpu_table import blas_workspace_bytes
from tuner.hardware.workspace_tables import MeasuredWorkspaces, measured_workspaces
from tuner.schemas.gpus import KernelProfile

_aten = torch.ops.aten
_INDEX_BYTES = 8
_FLOAT_BYTES = 4
_RECURRENT_BYTES = 62
_LOCK_BYTES = 16
_IMAGE_DIMENSIONS = 4
"""Of a batch of images: samples, channels, height and width."""

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

_MATRICES: Mapping[OpOverload, tuple[int, ...]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten.addbmm.default: (1, 2),
    ADDMM_ACTIVATION: (1, 2),
}
"""Positions of the matrices among the arguments of matrix products."""

_MADE_CONTIGUOUS: Mapping[OpOverload, tuple[int, ...]] = {
    SOFTMAX: (0,),
    LOG_SOFTMAX: (0,),
    LOG_SOFTMAX_BACKWARD: (0, 1),
    RMS_NORM: (0,),
    RMS_NORM_BACKWARD: (0, 1),
    _aten.native_layer_norm.default: (0,),
    _aten.native_layer_norm_backward.default: (0, 1),
    _aten.native_group_norm.default: (0,),
    _aten.native_group_norm_backward.default: (0, 1),
    _aten.embedding_dense_backward.default: (0,),
    _aten.index_put.default: (2,),
    _aten.index_put_.default: (2,),
    _aten.max_pool2d_with_indices.default: (0,),
    _aten.max_pool2d_with_indices_backward.default: (0, 1),
    _aten.avg_pool2d.default: (0,),
    _aten.avg_pool2d_backward.default: (0, 1),
    _aten.upsample_bilinear2d_backward.default: (0,),
    _aten.upsample_nearest2d_backward.default: (0,),
    _aten.reflection_pad2d_backward.default: (0,),
    _aten.convolution.default: (0, 1),
    _aten.convolution_backward.default: (0, 1, 2),
    _aten.roll.default: (0,),
    _aten.im2col.default: (0,),
    _aten.col2im.default: (0,),
}
"""Positions of the arguments that a kernel makes contiguous. Images may be in the format of channels last, too."""

_ALLOCATED_IN_ORDER: Mapping[OpOverload, tuple[int, ...]] = {
    GRU_CELL: (1, 0),  # the workspace, then the state (`RNN.cu`)
    _aten.native_dropout.default: (1, 0),  # the mask, then the result (`dropout_cuda` in `Dropout.cu`)
}
"""Positions of the results of an operator, in the order in which its kernel allocates them where that is another."""

Workspace: TypeAlias = "Callable[[Sequence[Any], Sequence[Tensor], KernelProfile], Sequence[int | Bound]]"
"""Function from an operator's arguments and results to the bytes of the workspaces it holds while it runs."""


class CudaKernels:
    """Workspaces of a GPU's kernels.

    Args:
        profile: the kernel profile.
        measured: the workspaces measured on such a card; those of the tables by default.
    """

    def __init__(self, profile: KernelProfile, measured: MeasuredWorkspaces | None = None) -> None:
        self._profile = profile
        self._measured = measured or measured_workspaces(profile)
        own_bytes = self._measured.table.blas_workspace_bytes if self._measured else None
        self._blas_bytes = own_bytes or blas_workspace_bytes(profile.compute_capability, profile.kind)

    def persistent(self, func: OpOverload, args: Sequence[Any]) -> Sequence[tuple[str, int]]:
        """Return cuBLAS's workspaces: one for the thread of forward passes, one for that of backward passes."""
        del args
        if func not in _MATRIX_PRODUCTS:
            return ()
        backward = backward_task() >= 0
        return (("cublas of the backward pass" if backward else "cublas", self._blas_bytes),)

    def temporary(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[int | Bound]:
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
        call = library_call(func, args, outputs)
        if call is None:
            return 0, 0
        share = self._measured.share(call.kind) if self._measured else None
        if share:
            return (
                ceil((share.expected - share.low) * call.sample_bytes),
                ceil((share.high - share.expected) * call.sample_bytes),
            )
        fewer, more = _UNMEASURED_CONVOLUTION if func in _CONVOLUTIONS else (0, 0)
        return fewer * call.sample_bytes, more * call.sample_bytes


def in_order_of_allocation(func: OpOverload, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the results of an operator in the order in which its CUDA kernel allocates them."""
    order = _ALLOCATED_IN_ORDER.get(func)
    return outputs if order is None else [outputs[position] for position in order]


def contiguous_copies(func: OpOverload, args: Sequence[Any]) -> list[int]:
    """Return the bytes of the copies that a CUDA kernel makes of arguments whose strides it cannot read.

    The gradient of a sum is the usual case: it is one number, expanded to a shape with strides of 0.
    """
    matrices = _MATRICES.get(func)
    if matrices is not None:
        return [_bytes_of(args[index]) for index in matrices if not _is_matrix_of_blas(args[index])]
    made_contiguous = (args[index] for index in _MADE_CONTIGUOUS.get(func, ()) if index < len(args))
    return [_bytes_of(tensor) for tensor in made_contiguous if isinstance(tensor, Tensor) and not _is_dense(tensor)]


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous, or consists of images in the format of channels last."""
    is_image = tensor.dim() == _IMAGE_DIMENSIONS
    return tensor.is_contiguous() or (is_image and tensor.is_contiguous(memory_format=torch.channels_last))


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_matrix_of_blas(matrix: Tensor) -> bool:
    """Return whether cuBLAS reads a matrix, or a batch of matrices, in place (``cuda/Blas.cpp``).

    The elements of a row or of a column must be neighbours, and rows (columns) must not overlap.
    """
    (rows, columns), (row_stride, column_stride) = matrix.shape[-2:], matrix.stride()[-2:]
    if matrix.is_contiguous() and 0 not in matrix.stride()[-2:]:
        return True
    by_row = (column_stride == 1 or columns == 1) and (row_stride >= max(1, columns) or rows == 1)
    by_column = (row_stride == 1 or rows == 1) and (column_stride >= max(1, rows) or columns == 1)
    return by_row or by_column


@dataclass(frozen=True)
class LibraryCall:
    """A call whose workspace is the choice of a library: of cuDNN.

    Attributes:
        kind: the operator, the type and the layout of the call, by which measured workspaces are found.
        operand_bytes: bytes of all tensors of the call.
        sample_bytes: bytes of those that have a dimension of samples, so that the same call of a workload is the
            largest one at every micro-batch size.
    """

    kind: str
    operand_bytes: int
    sample_bytes: int


def library_call(func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> LibraryCall | None:
    """Return the call of a library that ``func`` is; None for the operators whose workspaces torch itself chooses."""
    name = _LIBRARY_CALLS.get(func)
    if name is None:
        return None
    if func in _CONVOLUTIONS:
        weight = args[1] if func is _aten.convolution.default else args[2]
        samples = (args[0], *outputs) if func is _aten.convolution.default else args[:2]
        layout = _layout(args[0]) if args[8 if func is _aten.convolution.default else 9] == 1 else "grouped"
    else:
        weight, layout = None, "heads"
        samples = (*args[:3], outputs[0]) if func is CUDNN_ATTENTION else args[:5]
    sample_bytes = sum(_bytes_of(tensor) for tensor in samples)
    return LibraryCall(
        kind=f"{name} {_TYPES.get(args[0].dtype, 'other')} {layout}",
        operand_bytes=sample_bytes + (_bytes_of(weight) if weight is not None else 0),
        sample_bytes=sample_bytes,
    )


def _layout(images: Tensor) -> str:
    if images.dim() != _IMAGE_DIMENSIONS:
        return f"{images.dim()}d"
    is_plain = images.is_contiguous() or not images.is_contiguous(memory_format=torch.channels_last)
    return "contiguous" if is_plain else "channels-last"


_CONVOLUTIONS = frozenset({_aten.convolution.default, _aten.convolution_backward.default})
_LIBRARY_CALLS: Mapping[OpOverload, str] = {
    _aten.convolution.default: "convolution",
    _aten.convolution_backward.default: "convolution-backward",
    CUDNN_ATTENTION: "attention",
    CUDNN_ATTENTION_BACKWARD: "attention-backward",
}
_TYPES: Mapping[torch.dtype, str] = {torch.float32: "fp32", torch.float16: "half", torch.bfloat16: "half"}
"""Both half types run the same kernels."""
_UNMEASURED_CONVOLUTION = (1, 2)
"""Multiples of ``sample_bytes`` that a workspace may be smaller and larger than estimated: see the verdict."""


def onednn_recurrent_workspace_bytes(args: Sequence[Any]) -> int:
    """Return the bytes that ``mkldnn_rnn_layer`` keeps for its backward pass, by the operator's arguments.

    oneDNN reports the size only at run time: 61 to 66 bytes for each hidden unit, step and sample, measured with LSTMs
    of 64 and 128 units over 64 to 128 steps.
    """
    steps, samples, _ = args[0].shape
    return int(steps * samples * args[10] * _RECURRENT_BYTES)


class NoKernels:
    """Kernels without workspaces, as far as is known: those of the CPU."""

    def error(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
        """Return no error."""
        del func, args, outputs
        return 0, 0

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
    gradient, query, key, _, out = args[:5]
    batch, heads, length, width = query.shape
    rows = batch * heads * _rounded(length, 128)
    workspaces = [rows * _rounded(width, 32) * _FLOAT_BYTES, rows * _FLOAT_BYTES]
    workspaces += [_bytes_of(tensor) for tensor in (gradient, out) if not _is_dense_by_token(tensor)]
    if key.shape[1] != heads:  # each query head's own, summed over the group afterwards
        workspaces += [batch * heads * key.shape[2] * width * query.element_size()] * 2
    return workspaces


def _efficient_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[int | Bound]:
    """Workspaces of ``_efficient_attention_backward``: ``delta`` per row, and sums in fp32 of the query's gradient.

    The sums are held in whole tiles with a lock each (``GradQTempStorage`` in ``kernel_backward.h``). For heads of half
    types wider than 128 there are sums of the gradients of key and value too. In fp32 ``delta`` is the sum of a product
    of gradient and result, and a copy of that sum: all three are held before the sums are.
    """
    del outputs, profile
    gradient, query, key, value = args[:4]
    batch, heads, length, width = query.shape
    is_half = query.dtype is not torch.float32
    rows, columns = (64, 64) if width <= 64 else (128, 128 if is_half and width <= 128 else 64)  # noqa: PLR2004 - tiles
    tiles = -(-length // rows) * -(-width // columns)
    sums = tiles * (rows * columns * _FLOAT_BYTES + _LOCK_BYTES)
    if is_half and width > 128:  # noqa: PLR2004 - as above
        sums += _rounded(key.shape[2], 64) * (_rounded(width, 128) + _rounded(value.shape[3], 128)) * _FLOAT_BYTES
    sums *= batch * heads
    delta = batch * heads * length * _FLOAT_BYTES
    product = delta * value.shape[3]
    workspaces = [delta, sums] if is_half or sums > product + delta else [product, delta, delta]
    return workspaces if _is_dense_by_token(gradient) else [*workspaces, _bytes_of(gradient)]


def _is_dense_by_token(heads: Tensor) -> bool:
    """Return whether all heads of a token are neighbours; attention kernels copy other gradients and results."""
    return heads.transpose(1, 2).is_contiguous()


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


def _softmax_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspace of ``SoftMax.cu``: the product of the gradient and the result."""
    del outputs, profile
    gradient, result = args[:2]
    return [result.numel() * max(gradient.element_size(), result.element_size())]


def _like_input(times: int) -> Workspace:
    """Return a workspace of ``times`` the first argument, which functions hold that are several kernels."""

    def workspace(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
        del outputs, profile
        return [_bytes_of(args[0])] * times

    return workspace


def _safe_softmax(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspace of ``_safe_softmax``: a byte for each value, whether it is masked."""
    del outputs, profile
    return [args[0].numel()]


def _sum(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspaces of sums: Booleans and small integers are converted to 64 bits first."""
    del outputs
    values = args[0]
    if not values.dtype.is_floating_point:
        return [values.numel() * _INDEX_BYTES] if values.element_size() < _INDEX_BYTES else []
    others = tuple(range(values.dim() - 1))
    over_rows = len(args) > 1 and others and tuple(sorted(dim % values.dim() for dim in args[1] or ())) == others
    return _sums_of_rows(values, profile) if over_rows and values.is_contiguous() else []


_THREADS_OF_A_BLOCK = 512
_THREADS_OF_A_WARP = 32
_VALUES_OF_A_THREAD = 16


def _sums_of_rows(rows: Tensor, profile: KernelProfile) -> list[int | Bound]:
    """Workspace of ``Reduce.cuh`` where a bias' gradient is summed: each block of threads writes its partial sums.

    ``setReduceConfig`` shares the rows among blocks until they fill the card, or until a thread has 16 values left.
    The buffer is as large as all blocks times all sums. Below 16 values for each of the threads that sum a column there
    is none; it is counted all the same, because the list of blocks must not depend on the micro-batch size.
    """
    columns = rows.shape[-1]
    threads = _resident_threads(profile)
    if not columns or not threads:
        return []
    vector = next(count for count in (4, 2, 1) if columns % count == 0)
    lanes = min(_THREADS_OF_A_WARP, 1 << (columns // vector).bit_length() - 1)
    sums = lanes * vector
    across, most = -(-columns // sums), threads * vector // _THREADS_OF_A_BLOCK
    if across > most:
        return []
    share = sums * _FLOAT_BYTES
    rows_of_a_block = _THREADS_OF_A_BLOCK // sums * _VALUES_OF_A_THREAD
    return [
        Bound(
            unbounded_bytes=rows.numel() * -(-share // rows_of_a_block),
            max_bytes=columns * share * -(-most // across),
        )
    ]


_RESIDENT_THREADS: Mapping[int, int] = {7: 80 * 2048, 8: 128 * 1536, 9: 132 * 2048, 10: 148 * 2048, 12: 170 * 1536}
"""By the major part of the compute capability: threads that a large card runs at once."""


def _resident_threads(profile: KernelProfile) -> int:
    """Return the threads that a large card of a profile runs at once; 0 where the kernel divides its work otherwise."""
    if profile.kind == "rocm":
        return 0
    return (
        108 * 2048
        if profile.compute_capability == (8, 0)
        else _RESIDENT_THREADS.get(profile.compute_capability[0], max(_RESIDENT_THREADS.values()))
    )


def _roll(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspace of rolls over several dimensions, which are done one after the other."""
    del outputs, profile
    several = len(args) > 2 and len(args[2]) > 1  # noqa: PLR2004 - (self, shifts, dims)
    return [_bytes_of(args[0])] if several else []


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
    if images.dim() == _IMAGE_DIMENSIONS and images.is_contiguous(memory_format=torch.channels_last):
        return []
    return [sum(_bytes_of(tensor) for tensor in tensors)]


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
    SOFTMAX_BACKWARD: _softmax_backward,
    SAFE_SOFTMAX: _safe_softmax,
    _aten.logsumexp.default: _like_input(1),
    _aten.mse_loss.default: _like_input(1),
    _aten.binary_cross_entropy_with_logits.default: _like_input(2),
    _aten.roll.default: _roll,
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    **dict.fromkeys(CTC_LOSS_BACKWARD, _ctc_backward),
}


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
