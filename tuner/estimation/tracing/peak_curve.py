"""What probes are expected to measure: the memory curve that leads a search, from two traces."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tuner.estimation.allocator.config import AllocatorSettings
from tuner.estimation.cuda_shim import Shim
from tuner.estimation.trace import SizedTrace
from tuner.estimation.tracing.runs import TracedRuns
from tuner.schemas.gpus import KernelProfile
from tuner.schemas.requests import ExpectationRequest
from tuner.schemas.results import ExpectedPeak, ExpectedPeaks
from tuner.training.micro_batches.splitting import tensors_of
from tuner.workloads.base import Workload
from tuner.workloads.build import build_workload

_TRACED_SIZES = (4, 6)
"""Memory is linear in the size for nearly every workload, so that two tell it; with few samples code may differ."""
_PROCESS_BYTES = 4 * 1024**2
"""What a process takes beside its tensors: stacks and heap of threads, scratch of matrix products. Probes of GPT-2, of
BERT, of a ViT and an MLP, of 4 to 64 samples, held 2.6 to 7.2 MiB more than their traces (benchmarks/estimator.py)."""
_FARTHEST = 4
"""The curve ends where it is this many times the limit: nothing is searched there."""
_PAGE_BYTES, _MAPPED_BYTES = 4096, 65_536
"""Blocks from this size on are mapped by themselves, in pages (``MALLOC_MMAP_THRESHOLD_`` of the CPU's probes)."""


def expected_peaks(request: ExpectationRequest, shim: Shim | None = None, *, processes: int = 1) -> ExpectedPeaks:
    """The memory curve of a workload.

    Args:
        request: what will be probed, and where.
        shim: for a card the device that stands in for it; without one operators take the CPU's decisions.
        processes: how many processes may trace at once, as of ``tuner.estimation.tracing.runs.TracedRuns``.

    Raises:
        EstimateError: when the workload cannot be traced, or PYTORCH_ALLOC_CONF not followed.
        SpecError, WorkloadError: as building the workload.
    """
    began = time.monotonic()
    held = _held_on_card(request, shim, processes) if request.compute_capability else _held_on_cpu(request, processes)
    points: list[ExpectedPeak] = []
    residents: list[int] = []
    for size in _doubled(request.largest_micro_batch):
        resident, peak = held(size)
        residents.append(resident)
        points.append(ExpectedPeak(micro_batch_size=size, used_bytes=max(1, peak)))
        if peak > _FARTHEST * request.limit_bytes and len(points) > 1:
            break
    return ExpectedPeaks(points=tuple(points), resident_bytes=residents[0], seconds=time.monotonic() - began)


_Held: TypeAlias = Callable[[int], tuple[int, int]]
"""Bytes held between updates, and at most during an update, by micro-batch size."""


def _held_on_card(request: ExpectationRequest, shim: Shim | None, processes: int) -> _Held:
    """What torch's caching allocator counts as allocated, set as this process's environment sets it."""
    settings = AllocatorSettings.from_environment(os.environ)
    profile = KernelProfile(compute_capability=request.compute_capability or (0, 0), kind="cuda")
    sized = _sized(TracedRuns(request.spec, shim=shim, processes=processes, shards=False), profile)
    began = sized.trace.position("measured-update")

    def held(size: int) -> tuple[int, int]:
        sizes = [settings.rounded(it) for it in sized.sizes_at(size)]
        return _resident_and_peak(sized.trace.events, sizes, began)

    return held


def _held_on_cpu(request: ExpectationRequest, processes: int) -> _Held:
    """What glibc takes from the system, with the whole window's samples, which the budget bounds too."""
    sized = _sized(TracedRuns(request.spec, processes=processes, warm_up=False, shards=False))
    sample_bytes = _sample_bytes(build_workload(request.spec))
    began = sized.trace.position("measured-update")

    def held(size: int) -> tuple[int, int]:
        waiting = max(0, request.samples_per_window - 2 * size) * sample_bytes
        sizes = [-(-it // _PAGE_BYTES) * _PAGE_BYTES if it >= _MAPPED_BYTES else it for it in sized.sizes_at(size)]
        resident, peak = _resident_and_peak(sized.trace.events, sizes, began)
        return resident + waiting + _PROCESS_BYTES, peak + waiting + _PROCESS_BYTES

    return held


def _sized(runs: TracedRuns, profile: KernelProfile | None = None) -> SizedTrace:
    runs.prepare((profile, it, True) for it in _TRACED_SIZES)
    return SizedTrace.of([runs.get(profile, it, accumulates=True).trace for it in _TRACED_SIZES])


def _doubled(largest: int) -> list[int]:
    """1, 2, 4 ... and ``largest``; two at least."""
    powers = [1 << power for power in range(max(2, largest.bit_length()))]
    return sorted({*powers, largest})


def _sample_bytes(workload: Workload) -> int:
    one, two = (sum(it.untyped_storage().nbytes() for it in tensors_of(workload.make_batch(size))) for size in (1, 2))
    return max(0, two - one)


def _resident_and_peak(events: Sequence[int], sizes: Sequence[int], began: int) -> tuple[int, int]:
    held = sum(sizes[event] if event >= 0 else -sizes[~event] for event in events[:began])
    resident = peak = held
    for event in events[began:]:
        held += sizes[event] if event >= 0 else -sizes[~event]
        peak = max(peak, held)
    return resident, peak
