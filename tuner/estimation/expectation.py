"""What probes are expected to measure: the memory curve that leads a search, from two traces in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tuner.estimation.shapes import Shapes
from tuner.estimation.trace import SizedTrace, Trace
from tuner.estimation.tracing import trace
from tuner.requests import ExpectationRequest
from tuner.results import ExpectedPeak, ExpectedPeaks
from tuner.training.micro_batches import tensors_of
from tuner.workloads.base import Workload
from tuner.workloads.build import build_workload

_TRACED_SIZES = (2, 3)
"""Memory is linear in the size for nearly every workload, so that two tell it; a size of one is often special."""
_PROCESS_BYTES = 8 * 1024**2
"""What a process takes beside its tensors: stacks and heap of threads, scratch of matrix products. Probes of a GPT, a
BERT and a ViT peaked 6.0 to 9.5 MiB above their traces, at sizes from 8 to 73."""
_FARTHEST = 4
"""The curve ends where it is this many times the limit: nothing is searched there."""
_PAGE_BYTES, _MAPPED_BYTES = 4096, 65_536
"""Blocks from this size on are mapped by themselves, in pages (``MALLOC_MMAP_THRESHOLD_`` of the CPU's probes)."""


def expected_peaks(request: ExpectationRequest) -> ExpectedPeaks:
    """The memory curve of a workload on the CPU, in whose budget the whole window's samples are held.

    Raises:
        EstimateError: when the workload cannot be traced.
        SpecError, WorkloadError: as building the workload.
    """
    began = time.monotonic()
    shapes = Shapes()
    sized = SizedTrace.of(
        [trace(request.spec, it, accumulates=True, shapes=shapes, warm_up=False) for it in _TRACED_SIZES]
    )
    sample_bytes = _sample_bytes(build_workload(request.spec))
    points: list[ExpectedPeak] = []
    residents: list[int] = []
    for size in _doubled(request.largest_micro_batch):
        waiting = max(0, request.samples_per_window - 2 * size) * sample_bytes
        resident, peak = (it + waiting for it in _held_bytes(sized.trace, sized.sizes_at(size)))
        residents.append(resident)
        points.append(ExpectedPeak(micro_batch_size=size, used_bytes=peak + _PROCESS_BYTES))
        if peak > _FARTHEST * request.limit_bytes and len(points) > 1:
            break
    return ExpectedPeaks(points=tuple(points), resident_bytes=residents[0], seconds=time.monotonic() - began)


def _doubled(largest: int) -> list[int]:
    """1, 2, 4 ... and ``largest``; two at least."""
    powers = [1 << power for power in range(max(2, largest.bit_length()))]
    return sorted({*powers, largest})


def _sample_bytes(workload: Workload) -> int:
    one, two = (sum(it.untyped_storage().nbytes() for it in tensors_of(workload.make_batch(size))) for size in (1, 2))
    return max(0, two - one)


def _held_bytes(trace: Trace, sizes: Sequence[int]) -> tuple[int, int]:
    """What is held between updates, and at most during the measured update, with glibc's allocator."""
    began = next(mark.position for mark in trace.marks if mark.name == "measured-update")
    taken = [-(-size // _PAGE_BYTES) * _PAGE_BYTES if size >= _MAPPED_BYTES else size for size in sizes]
    held = sum(taken[event] if event >= 0 else -taken[~event] for event in trace.events[:began])
    resident = peak = held
    for event in trace.events[began:]:
        held += taken[event] if event >= 0 else -taken[~event]
        peak = max(peak, held)
    return resident, peak
