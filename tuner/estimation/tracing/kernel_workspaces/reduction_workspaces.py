"""Workspaces of sums, norms and losses, and of functions that are several kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tuner.estimation.trace import Bound
from tuner.estimation.tracing.kernel_workspaces.workspace import FLOAT_BYTES, INDEX_BYTES, Workspace, bytes_of
from tuner.schemas.gpus import KernelProfile

_THREADS_OF_A_BLOCK = 512
_THREADS_OF_A_WARP = 32
_VALUES_OF_A_THREAD = 16
_RESIDENT_THREADS: Mapping[int, int] = {7: 80 * 2048, 8: 128 * 1536, 9: 132 * 2048, 10: 148 * 2048, 12: 170 * 1536}
"""By the major part of the compute capability: threads that a large card runs at once."""
_CHUNK = 65536


def softmax_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspace of ``SoftMax.cu``: the product of the gradient and the result."""
    del outputs, profile
    gradient, result = args[:2]
    return [result.numel() * max(gradient.element_size(), result.element_size())]


def like_input(times: int) -> Workspace:
    """Return a workspace of ``times`` the first argument, which functions hold that are several kernels."""

    def workspace(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
        del outputs, profile
        return [bytes_of(args[0])] * times

    return workspace


def safe_softmax(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspace of ``safe_softmax``: a byte for each value, whether it is masked."""
    del outputs, profile
    return [args[0].numel()]


def sum_of_values(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspaces of sums: Booleans and small integers are converted to 64 bits first."""
    del outputs
    values = args[0]
    if not values.dtype.is_floating_point:
        return [values.numel() * INDEX_BYTES] if values.element_size() < INDEX_BYTES else []
    others = tuple(range(values.dim() - 1))
    over_rows = len(args) > 1 and others and tuple(sorted(dim % values.dim() for dim in args[1] or ())) == others
    return _sums_of_rows(values, profile) if over_rows and values.is_contiguous() else []


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
    share = sums * FLOAT_BYTES
    rows_of_a_block = _THREADS_OF_A_BLOCK // sums * _VALUES_OF_A_THREAD
    return [
        Bound(
            unbounded_bytes=rows.numel() * -(-share // rows_of_a_block),
            max_bytes=columns * share * -(-most // across),
        )
    ]


def _resident_threads(profile: KernelProfile) -> int:
    """Return the threads that a large card of a profile runs at once; 0 where the kernel divides its work otherwise."""
    if profile.kind == "rocm":
        return 0
    return (
        108 * 2048
        if profile.compute_capability == (8, 0)
        else _RESIDENT_THREADS.get(profile.compute_capability[0], max(_RESIDENT_THREADS.values()))
    )


def roll(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspace of rolls over several dimensions, which are done one after the other."""
    del outputs, profile
    several = len(args) > 2 and len(args[2]) > 1  # noqa: PLR2004 - (self, shifts, dims)
    return [bytes_of(args[0])] if several else []


def foreach_norm(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspaces of ``ForeachReduceOp.cu``: for each tensor as many values as the largest tensor has chunks."""
    del outputs, profile
    tensors = args[0]
    return [len(tensors) * max(-(-tensor.numel() // _CHUNK) for tensor in tensors) * FLOAT_BYTES]


def ctc_backward(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int | Bound]:
    """Workspace of ``LossCTC.cu``: the backward variables, as many as the forward variables."""
    del outputs, profile
    alphas = args[6]
    return [alphas.numel() * alphas.element_size()]
