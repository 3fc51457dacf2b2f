"""What kernels and libraries take from the allocator beside their results: hidden from a trace of operators.

Each figure names its source in torch 2.13; those of cuDNN, which tells nobody, are estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tuner.estimation.trace import Bound
from tuner.estimation.tracing.torch_internals import (
    ADDMM_ACTIVATION,
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
_INDEX = 8
_FLOAT = 4
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
"""From an operator's arguments and results: bytes of what it holds while it runs."""


class CudaKernels:
    """What the kernels of a card take by themselves."""

    def __init__(self, profile: KernelProfile) -> None:
        self._profile = profile
        self._blas_bytes = blas_workspace_bytes(profile.compute_capability, profile.kind)

    def lasting(self, func: OpOverload, args: Sequence[Any]) -> Sequence[tuple[str, int]]:
        """CuBLAS's workspace: one for the thread of forward passes, one for that of backward passes."""
        del args
        if func not in _MATRIX_PRODUCTS:
            return ()
        backward = backward_task() >= 0
        return (("cublas of the backward pass" if backward else "cublas", self._blas_bytes),)

    def passing(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[int | Bound]:
        """What ``func`` holds while it runs."""
        workspace = _WORKSPACES.get(func)
        return () if workspace is None else workspace(args, outputs, self._profile)


def onednn_recurrent_workspace_bytes(args: Sequence[Any]) -> int:
    """What ``mkldnn_rnn_layer`` leaves for its backward pass, by the operator's arguments.

    oneDNN tells its size only when it runs: 61 to 66 bytes for each hidden unit, step and sample, measured with LSTMs
    of 64 and 128 units over 64 to 128 steps of samples.
    """
    steps, samples, _ = args[0].shape
    return int(steps * samples * args[10] * _RECURRENT_BYTES)


class NoKernels:
    """A device whose kernels take nothing but their results, as far as is known: the CPU."""

    def lasting(self, func: OpOverload, args: Sequence[Any]) -> Sequence[tuple[str, int]]:
        """Nothing."""
        del func, args
        return ()

    def passing(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[int | Bound]:
        """Nothing."""
        del func, args, outputs
        return ()


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """FlashAttention-2's ``mha_bwd``: the query's gradient in fp32, row sums, and gradients per query head."""
    del outputs, profile
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * _rounded(length, 128)
    taken = [rows * _rounded(width, 32) * _FLOAT, rows * _FLOAT]
    if key.shape[1] != heads:  # each query head's own, summed over the group afterwards
        taken += [batch * heads * key.shape[2] * width * query.element_size()] * 2
    return taken


def _efficient_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[int | Bound]:
    """``_efficient_attention_backward``: ``delta`` per row, and fp32 accumulators of the query's half gradient."""
    del outputs, profile
    query = args[1]
    batch, heads, length, width = query.shape
    delta = batch * heads * length * _FLOAT
    return [delta] if query.dtype is torch.float32 else [delta, batch * heads * length * width * _FLOAT]


def _cudnn_attention_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[int | Bound]:
    """An estimate: the query's gradient in fp32 and sums of two kinds per row."""
    del outputs, profile
    batch, heads, length, width = args[1].shape
    rows = batch * heads * length
    return [rows * width * _FLOAT + 2 * rows * _FLOAT]


_INDICES_PER_SUM = 10


def _embedding_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[int | Bound]:
    """``EmbeddingBackwardKernel.cu``: indices sorted with their places, then a partial sum per segment, in fp32.

    A segment is a row that occurs: as many as there are indices, or rows. There is a partial sum for every ten indices
    and every segment; here these are two blocks, with a tenth of a sum for each index, so that they grow evenly. Up to
    3,072 indices without a padding index are added up without sorting (``Embedding.cu``): that little is counted here
    all the same, since which blocks there are must not depend on the micro-batch.
    """
    del outputs, profile
    gradient, indices, rows = args[:3]
    count, width = indices.numel(), gradient.shape[-1]
    sum_bytes = width * max(_FLOAT, gradient.element_size())

    def per_segment(nbytes: int) -> Bound:
        return Bound(growing=count * nbytes, most=rows * nbytes)

    return [
        *[count * _INDEX] * 4,
        *[per_segment(_INDEX)] * 3,
        count * -(-_INDEX // _INDICES_PER_SUM),
        per_segment(sum_bytes),
        count * -(-sum_bytes // _INDICES_PER_SUM),
    ]


def _sorted_index_put(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """``Indexing.cu``, with ``accumulate``: linear indices, the same sorted, and their places twice."""
    del outputs, profile
    accumulates = len(args) > 3 and bool(args[3])  # noqa: PLR2004 - (self, indices, values, accumulate)
    indices = [it for it in args[1] if isinstance(it, Tensor)]
    return [max(it.numel() for it in indices) * _INDEX] * 4 if accumulates and indices else []


_CHUNK = 65536


def _many_norms(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """``ForeachReduceOp.cu``: a value for each chunk of each tensor, as many as the largest has."""
    del outputs, profile
    tensors = args[0]
    return [len(tensors) * max(-(-it.numel() // _CHUNK) for it in tensors) * _FLOAT]


def _convolution(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    return _transposed([args[0], args[1], *outputs], groups=args[8], profile=profile)


def _convolution_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[int | Bound]:
    """The larger of the two kernels, for the input's and the weight's gradient, which run one after the other."""
    gradient, inputs, weight = args[:3]
    del outputs
    return _transposed([gradient, inputs, weight], groups=args[9], profile=profile)


def _transposed(tensors: Sequence[Tensor], *, groups: int, profile: KernelProfile) -> Sequence[int | Bound]:
    """An estimate: kernels on tensor cores want channels last, and copy what is not (half types; fp32 by TF32)."""
    images = tensors[0]
    needed = (8, 0) if images.dtype in {torch.float32, torch.bfloat16} else (7, 0)
    if groups != 1 or profile.compute_capability < needed or images.dtype is torch.float64:
        return []
    if images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last):  # noqa: PLR2004 - (n, c, h, w)
        return []
    return [sum(it.numel() * it.element_size() for it in tensors)]


_WORKSPACES: Mapping[OpOverload, Workspace] = {
    FLASH_ATTENTION_BACKWARD: _flash_backward,
    EFFICIENT_ATTENTION_BACKWARD: _efficient_backward,
    CUDNN_ATTENTION_BACKWARD: _cudnn_attention_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.index_put_.default: _sorted_index_put,
    _aten.index_put.default: _sorted_index_put,
    FOREACH_NORM: _many_norms,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
}


def representative(profile: KernelProfile) -> KernelProfile:
    """The profile that stands for all that run the same kernels, as far as traces tell: one trace serves them."""
    major = profile.compute_capability[0]
    if profile.kind == "rocm":
        return profile
    same = {7: (7, 0), 8: (8, 0) if profile.compute_capability == (8, 0) else (8, 6), 9: (9, 0), 10: (10, 0)}
    return profile.model_copy(update={"compute_capability": same.get(major, profile.compute_capability)})
