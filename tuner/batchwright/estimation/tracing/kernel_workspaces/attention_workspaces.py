"""Workspaces of the backward passes of attention kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from batchwright.estimation.allocator.config import rounded_up
from batchwright.estimation.trace import BlockBytes
from batchwright.estimation.tracing.kernel_workspaces.workspace import FLOAT_BYTES, bytes_of
from batchwright.schemas.gpus import KernelProfile

_LOCK_BYTES = 16


def flash_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspaces of FlashAttention-2's ``mha_bwd``: row sums, the query's gradient in fp32, gradients per head."""
    del outputs, profile
    gradient, query, key, _, out = args[:5]
    batch, heads, length, width = query.shape
    rows = batch * heads * rounded_up(length, 128)
    copies = [bytes_of(tensor) for tensor in (gradient, out) if not _is_dense_by_token(tensor)]
    # each query head's own, summed over the group afterwards
    expanded = batch * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
    return [*copies, rows * FLOAT_BYTES, rows * rounded_up(width, 32) * FLOAT_BYTES, expanded, expanded]


def efficient_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
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
    sums = tiles * (rows * columns * FLOAT_BYTES + _LOCK_BYTES)
    if is_half and width > 128:  # noqa: PLR2004 - as above
        sums += rounded_up(key.shape[2], 64) * (rounded_up(width, 128) + rounded_up(value.shape[3], 128)) * FLOAT_BYTES
    sums *= batch * heads
    delta = batch * heads * length * FLOAT_BYTES
    product = delta * value.shape[3]
    workspaces = [delta, sums, 0] if is_half or sums > product + delta else [product, delta, delta]
    return workspaces if _is_dense_by_token(gradient) else [bytes_of(gradient), *workspaces]


def _is_dense_by_token(heads: Tensor) -> bool:
    """Return whether all heads of a token are neighbours; attention kernels copy other gradients and results."""
    return heads.transpose(1, 2).is_contiguous()


_CUDNN_ALIGNMENT_BYTES = 256
"""Bytes that cuDNN takes beside its tensors, to align them."""


def cudnn_attention_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[BlockBytes]:
    """Workspace: the query's gradient in fp32, a sum per row, and of fewer key heads the gradients of all query heads.

    As measured with cuDNN 9.19 on an H100 for half types, of widths 64, 96 and 128, to the byte.
    """
    del outputs, profile
    query, key, value = args[1:4]
    batch, heads, length, width = query.shape
    rows = batch * heads * length
    expanded = sum(bytes_of(tensor) // tensor.shape[1] * heads for tensor in (key, value) if tensor.shape[1] != heads)
    return [rows * (width + 1) * FLOAT_BYTES + expanded + _CUDNN_ALIGNMENT_BYTES]
