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
_MOST_PARTS = 200
"""Parts of 64 keys, of all samples and heads, whose sums ``_efficient_attention_backward`` keeps apart."""


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

    The sums are held in whole tiles with a lock each (``GradQTempStorage`` in ``kernel_backward.h``). Some kernels have
    sums of the gradients of key and value too, for each part that the keys are divided into. In fp32 ``delta`` is the
    sum of a product of gradient and result, and a copy of that sum: all three are held before the sums are.
    """
    del outputs
    gradient, query, key, value = args[:4]
    batch, heads, length, width = query.shape
    is_half, capability = query.dtype is not torch.float32, profile.compute_capability
    rows, columns, sums_keys = _efficient_tiles(width, capability, is_half=is_half)
    tiles = -(-length // rows) * -(-width // columns)
    sums = tiles * (rows * columns * FLOAT_BYTES + _LOCK_BYTES)
    is_split = capability >= (7, 0)
    if sums_keys:
        parts = max(1, min(-(-key.shape[2] // 64), _MOST_PARTS // (batch * heads))) if is_split else 1
        sums += parts * 64 * (rounded_up(width, rows) + rounded_up(value.shape[3], rows)) * FLOAT_BYTES
    sums *= batch * heads if is_half or is_split else 0
    delta = batch * heads * length * FLOAT_BYTES
    product = delta * value.shape[3]
    workspaces = [delta, sums, 0] if is_half or sums > product + delta else [product, delta, delta]
    return workspaces if _is_dense_by_token(gradient) else [bytes_of(gradient), *workspaces]


def _efficient_tiles(width: int, capability: tuple[int, int], *, is_half: bool) -> tuple[int, int, bool]:
    """Return rows and columns of a tile of the backward kernel, and whether it sums the gradients of key and value.

    Torch takes the first kernel of the type and the width whose shared memory the card has
    (``_efficient_attention_backward`` in ``attention_backward.cu``). Read off virtual cards of torch 2.13.
    """
    has_much_shared_memory = capability == (8, 0) or 9 <= capability[0] <= 11  # noqa: PLR2004 - 163 kB or more
    narrow, wide = width <= 64, width > 128  # noqa: PLR2004 - the widest heads of kernels
    if narrow or not is_half or capability < (7, 0):
        is_tall = not narrow and not is_half and has_much_shared_memory
        return 128 if is_tall else 64, 64, is_half and not narrow
    if wide:
        return 128, 64, True
    if has_much_shared_memory:
        return 128, 128, False
    is_tall = capability < (8, 0) or (capability[0] == 8 and width <= 96)  # noqa: PLR2004
    return 128 if is_tall else 64, 64, not is_tall


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
