"""Workspaces of kernels that sort indices: the gradients of embeddings, and accumulation by index."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from batchwright.estimation.trace import BlockBytes, Bound
from batchwright.estimation.tracing.kernel_workspaces.workspace import FLOAT_BYTES, INDEX_BYTES
from batchwright.schemas.gpus import KernelProfile

_INDICES_PER_SUM = 10
_MAXIMUM = 2
"""Mode of an embedding bag."""
SUMMING_WORKSPACES = 4
"""Number of the last workspaces of ``embedding_backward``, which come after the result: it is made between the two."""


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


def embedding_bag_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[BlockBytes]:
    """Workspaces of ``EmbeddingBag.cu``: those of an embedding for sums and means, and none for maxima."""
    gradient, indices, rows, mode = args[0], args[1], args[6], args[8]
    return [] if mode == _MAXIMUM else embedding_backward((gradient, indices, rows), outputs, profile)


def sorted_index_put(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspaces of ``Indexing.cu`` with ``accumulate``: linear indices, sorted indices, and their positions twice."""
    del outputs, profile
    accumulates = len(args) > 3 and bool(args[3])  # noqa: PLR2004 - (self, indices, values, accumulate)
    indices = [index for index in args[1] if isinstance(index, Tensor)]
    return [max(index.numel() for index in indices) * INDEX_BYTES] * 4 if accumulates and indices else []
