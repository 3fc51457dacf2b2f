"""Workspaces of kernels that sort indices: the gradients of embeddings, and accumulation by index."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from batchwright.estimation.trace import BlockBytes, Bound
from batchwright.estimation.tracing.kernel_workspaces.workspace import FLOAT_BYTES, INDEX_BYTES, bytes_of
from batchwright.schemas.gpus import KernelProfile

_INDICES_PER_SUM = 10
_MAXIMUM = 2
"""Mode of an embedding bag."""
SUMMING_WORKSPACES = 4
"""Number of the last workspaces of ``embedding_backward``, which come after the result: it is made between the two."""

_LONGEST_SMALL_SORT = 4096
_FEW_ROWS = 128
_LONGEST_OF_ROWS = 1_000_000
"""Values of a row that are sorted within a kernel, rows that are few, and values that make it the only one."""


def embedding_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspaces of ``EmbeddingBackwardKernel.cu``: sorted indices with their positions, then fp32 sums per segment.

    A segment is a row that occurs in the indices, so there are at most as many as indices, or rows. There is a partial
    sum for every ten indices and for every segment; here a tenth of a sum per index, so that the block grows evenly. Up
    to 3,072 indices without a padding index are summed without sorting (``Embedding.cu``). Their small workspaces are
    counted all the same, because the list of blocks must not depend on the micro-batch size.
    """
    del outputs, profile
    gradient, indices, rows = args[:3]
    count, width = indices.numel(), gradient.shape[-1]
    sum_bytes = width * max(FLOAT_BYTES, gradient.element_size())

    def per_segment(nbytes: int) -> Bound:
        return Bound(unbounded_bytes=count * nbytes, max_bytes=rows * nbytes)

    def per_partial_sum(nbytes: int) -> Bound:
        beside = count * -(-nbytes // _INDICES_PER_SUM)
        return per_segment(nbytes).model_copy(update={"beside_bytes": beside})

    return [
        *[count * INDEX_BYTES] * 4,
        *[per_segment(INDEX_BYTES)] * 2,
        per_partial_sum(INDEX_BYTES),
        per_partial_sum(sum_bytes),
    ]


def sorted_index_put(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspaces of ``Indexing.cu`` with ``accumulate``: linear indices, sorted indices, and their positions twice."""
    del outputs, profile
    accumulates = len(args) > 3 and bool(args[3])  # noqa: PLR2004 - (self, indices, values, accumulate)
    indices = [index for index in args[1] if isinstance(index, Tensor)]
    return [max(index.numel() for index in indices) * INDEX_BYTES] * 4 if accumulates and indices else []


def embedding_bag_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[BlockBytes]:
    """Workspaces of ``EmbeddingBag.cu``: those of an embedding for sums and means, and none for maxima."""
    gradient, indices, rows, mode = args[0], args[1], args[6], args[8]
    return [] if mode == _MAXIMUM else embedding_backward((gradient, indices, rows), outputs, profile)


def scatter_mean(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspaces of ``scatter_reduce`` for means: ones, their sums, and which sums are zero."""
    del profile
    values, _, _, source, kind = args[:5]
    del outputs
    return [bytes_of(values), bytes_of(source), values.numel()] if kind == "mean" else []


def sort(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspaces of ``Sort.cpp`` and ``SortStable.cu``, all as one block, since their number depends on the shape.

    Long rows are sorted by cub, with positions of 64 bits: one row after the other, few rows at once (by value, then by
    row), or many. Cub holds the values and positions once more. Rows that are not neighbours are copied.
    """
    del outputs, profile
    values = args[0]
    dimension = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
    length = values.shape[dimension] if values.dim() else 1
    if length <= _LONGEST_SMALL_SORT:
        return [length * INDEX_BYTES]
    rows = values.numel() // length
    pair = values.element_size() + INDEX_BYTES
    if rows == 1 or length >= _LONGEST_OF_ROWS:
        nbytes = length * (INDEX_BYTES + pair)
    else:
        nbytes = values.numel() * (INDEX_BYTES + pair + (pair if rows < _FEW_ROWS else 0))
    return [nbytes + (0 if values.stride(dimension) == 1 else values.numel() * (pair + values.element_size()))]
