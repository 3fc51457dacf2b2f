"""Workspaces of sums, norms and losses, and of functions that are several kernels."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from batchwright.estimation.trace import BlockBytes, RowSums
from batchwright.estimation.tracing.kernel_workspaces.kept_storages import is_reduced
from batchwright.estimation.tracing.kernel_workspaces.workspace import FLOAT_BYTES, INDEX_BYTES, bytes_of
from batchwright.hardware.gpu_table import GPUS
from batchwright.schemas.gpus import KernelProfile

_CHUNK = 65536


def softmax_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of ``SoftMax.cu``: the product of the gradient and the result."""
    del outputs, profile
    gradient, result = args[:2]
    return [result.numel() * max(gradient.element_size(), result.element_size())]


def log_sum_exp(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspaces of ``logsumexp``: the largest values, and the exponentials of all values less those."""
    del profile
    return [*map(bytes_of, outputs), bytes_of(args[0])]


def reduced_loss(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of losses that are computed for each value before they are reduced."""
    del outputs, profile
    return [bytes_of(args[0])] if is_reduced(args, 2) else []


def soft_margin_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[BlockBytes]:
    """Workspaces of ``soft_margin_loss_backward``: a product and its exponential (``Loss.cpp``)."""
    del outputs, profile
    return [bytes_of(args[1])] * 2


def distances_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of ``_cdist_backward`` (``DistanceKernel.cu``): the gradient of each pair of rows."""
    del outputs, profile
    return [bytes_of(args[0]) * args[1].shape[-1]]


def own_distances_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[BlockBytes]:
    """Workspace of ``_pdist_backward`` (``DistanceKernel.cu``): for each row, the gradient of it and every other."""
    del outputs, profile
    return [bytes_of(args[1]) * (len(args[1]) - 1)]


def of_complex(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of real functions of complex numbers, which are computed as complex numbers (``UnaryOps.cpp``)."""
    del outputs, profile
    return [bytes_of(args[0])] if args[0].is_complex() else []


def widened(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of sums and products of Booleans and small integers: they are converted to 64 bits first."""
    del outputs, profile
    values = args[0]
    is_small = not (values.is_floating_point() or values.is_complex()) and values.element_size() < INDEX_BYTES
    return [values.numel() * INDEX_BYTES] if is_small else []


def sum_of_values(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspaces of sums: those of ``widened``, or partial sums."""
    return (partial_sums if args[0].is_floating_point() else widened)(args, outputs, profile)


def partial_sums(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of ``Reduce.cuh`` for a sum or a mean over dimensions before the last one, as of a bias' gradient.

    Each block of threads writes its partial sums. Sums over the last dimension are divided otherwise, and hold little.
    """
    del outputs
    values = args[0]
    summed = {dimension % max(1, values.dim()) for dimension in (args[1] if len(args) > 1 else ()) or ()}
    is_divided_so = summed and max(summed) < values.dim() - 1 and values.numel() and _has_dense_rows(values, summed)
    if not is_divided_so or profile.kind == "rocm":  # where the kernel divides its work otherwise
        return []
    rows = prod(values.shape[dimension] for dimension in summed)
    return [
        RowSums(
            rows=rows,
            columns=values.numel() // rows,
            width=prod(values.shape[max(summed) + 1 :]),
            element_bytes=values.element_size(),
            threads=profile.resident_threads or most_resident_threads(profile),
        )
    ]


def _has_dense_rows(values: Tensor, summed: set[int]) -> bool:
    """Return whether values are contiguous, or rows of neighbours that lie apart and are all summed."""
    row = range(max(summed) + 1, values.dim())
    is_dense = values[(0,) * row.start].is_contiguous()
    least = min((values.stride(at) for at in summed if values.shape[at] > 1), default=0)
    rows_apart = len(summed) == row.start and is_dense and least >= prod(values.shape[at] for at in row)
    return values.is_contiguous() or rows_apart


def most_resident_threads(profile: KernelProfile) -> int:
    """Return the threads that the largest card of a profile runs at once, for cards of which nothing is known."""
    same = [
        gpu.resident_threads
        for gpu in GPUS
        if gpu.resident_threads is not None and gpu.compute_capability == profile.compute_capability
    ]
    return max(same or (gpu.resident_threads or 0 for gpu in GPUS))


def roll(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of rolls over several dimensions, which are done one after the other."""
    del outputs, profile
    several = len(args) > 2 and len(args[2]) > 1  # noqa: PLR2004 - (self, shifts, dims)
    return [bytes_of(args[0])] if several else []


def foreach_norm(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspaces of ``ForeachReduceOp.cu``: for each tensor as many values as the largest tensor has chunks."""
    del outputs, profile
    tensors = args[0]
    return [len(tensors) * max(-(-tensor.numel() // _CHUNK) for tensor in tensors) * FLOAT_BYTES]


def ctc_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of ``LossCTC.cu``: the backward variables, as many as the forward variables."""
    del outputs, profile
    return [bytes_of(args[6])]


def unfolded(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of ``Im2Col.cu``, whose result is first made like the input."""
    del outputs, profile
    return [bytes_of(args[0])]
