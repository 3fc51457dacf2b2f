"""Workspaces of sums, norms and losses, and of functions that are several kernels."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from batchwright.estimation.trace import BlockBytes, RowSums
from batchwright.estimation.tracing.kernel_workspaces.workspace import FLOAT_BYTES, INDEX_BYTES, Workspace, bytes_of
from batchwright.hardware.gpu_table import GPUS
from batchwright.schemas.gpus import KernelProfile

_CHUNK = 65536


def softmax_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of ``SoftMax.cu``: the product of the gradient and the result."""
    del outputs, profile
    gradient, result = args[:2]
    return [result.numel() * max(gradient.element_size(), result.element_size())]


def like_input(times: int) -> Workspace:
    """Return a workspace of ``times`` the first argument, which functions hold that are several kernels."""

    def workspace(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
        del outputs, profile
        return [bytes_of(args[0])] * times

    return workspace


def safe_softmax(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspace of ``safe_softmax``: a byte for each value, whether it is masked."""
    del outputs, profile
    return [args[0].numel()]


def sum_of_values(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Workspaces of sums: Booleans and small integers are converted to 64 bits first."""
    values = args[0]
    if not values.dtype.is_floating_point:
        return [values.numel() * INDEX_BYTES] if values.element_size() < INDEX_BYTES else []
    return partial_sums(args, outputs, profile)


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
