"""Estimate the peaks that probes are expected to measure: the memory curve that seeds a search, from two traces."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tuner.estimation.allocator.config import AllocatorSettings
from tuner.estimation.cuda_shim import Shim
from tuner.estimation.trace import SizedTrace
from tuner.estimation.tracing.runs import TracedRuns
from tuner.planning.fingerprint import installed_versions
from tuner.schemas.gpus import KernelProfile
from tuner.schemas.requests import ExpectationRequest
from tuner.schemas.results import ExpectedPeak, ExpectedPeaks
from tuner.training.micro_batches.splitting import tensors_of
from tuner.workloads.base import Workload
from tuner.workloads.build import build_workload

_TRACED_SIZES = (4, 6)
"""Memory is linear in the size for nearly every workload, so that two sizes suffice. With fewer samples, code may run
different operators."""
_PROCESS_OVERHEAD_BYTES = 4 * 1024**2
"""Memory of a process beside its tensors: stacks and heap of threads, buffers of matrix products. Probes of GPT-2,
BERT, a ViT and an MLP, with 4 to 64 samples, held 2.6 to 7.2 MiB more than their traces (benchmarks/estimator.py)."""
_MAX_LIMIT_RATIO = 4
"""The curve ends at this multiple of the limit, since no larger size is probed."""
_PAGE_BYTES, _MMAP_THRESHOLD_BYTES = 4096, 65_536
"""Blocks of at least this size are mapped separately, in pages (``MALLOC_MMAP_THRESHOLD_`` of the CPU's probes)."""


def expected_peaks(request: ExpectationRequest, shim: Shim | None = None, *, processes: int = 1) -> ExpectedPeaks:
    """Estimate the memory curve of a workload.

    Args:
        request: the workload and the device that will be probed.
        shim: the stand-in for CUDA, for a GPU; without it the CPU's decisions are traced.
        processes: how many processes may trace in parallel, as in ``tuner.estimation.tracing.runs.TracedRuns``.

    Raises:
        EstimateError: when the workload cannot be traced, or PYTORCH_ALLOC_CONF cannot be simulated.
        SpecError, WorkloadError: when the workload cannot be built.
    """
    began = time.monotonic()
    held = (
        _bytes_held_on_card(request, shim, processes)
        if request.compute_capability
        else _bytes_held_on_cpu(request, processes)
    )
    points: list[ExpectedPeak] = []
    residents: list[int] = []
    for size in _powers_of_two(request.largest_micro_batch):
        resident, peak = held(size)
        residents.append(resident)
        points.append(ExpectedPeak(micro_batch_size=size, used_bytes=max(1, peak)))
        if peak > _MAX_LIMIT_RATIO * request.limit_bytes and len(points) > 1:
            break
    return ExpectedPeaks(
        points=tuple(points),
        resident_bytes=residents[0],
        seconds=time.monotonic() - began,
        versions=installed_versions(),
    )


_BytesHeld: TypeAlias = Callable[[int], tuple[int, int]]
"""Function from a micro-batch size to the bytes held between updates, and the peak during an update."""


def _bytes_held_on_card(request: ExpectationRequest, shim: Shim | None, processes: int) -> _BytesHeld:
    """Return the bytes that torch's caching allocator counts as allocated, with the settings of this environment."""
    settings = AllocatorSettings.from_environment(os.environ)
    profile = KernelProfile(compute_capability=request.compute_capability or (0, 0), kind="cuda")
    sized = _sized_trace(TracedRuns(request.spec, shim=shim, processes=processes, shards=False), profile)
    began = sized.trace.position("measured-update")

    def held(size: int) -> tuple[int, int]:
        sizes = [settings.rounded(nbytes) for nbytes in sized.sizes_at(size)]
        return _resident_and_peak(sized.trace.events, sizes, began)

    return held


def _bytes_held_on_cpu(request: ExpectationRequest, processes: int) -> _BytesHeld:
    """Return the bytes that glibc takes from the system, including the samples of the whole accumulation window."""
    sized = _sized_trace(TracedRuns(request.spec, processes=processes, warm_up=False, shards=False))
    sample_bytes = _sample_bytes(build_workload(request.spec))
    began = sized.trace.position("measured-update")

    def held(size: int) -> tuple[int, int]:
        waiting = max(0, request.samples_per_window - 2 * size) * sample_bytes
        sizes = [
            -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES if nbytes >= _MMAP_THRESHOLD_BYTES else nbytes
            for nbytes in sized.sizes_at(size)
        ]
        resident, peak = _resident_and_peak(sized.trace.events, sizes, began)
        return resident + waiting + _PROCESS_OVERHEAD_BYTES, peak + waiting + _PROCESS_OVERHEAD_BYTES

    return held


def _sized_trace(runs: TracedRuns, profile: KernelProfile | None = None) -> SizedTrace:
    runs.prepare((profile, size, True) for size in _TRACED_SIZES)
    return SizedTrace.of([runs.get(profile, size, accumulates=True).trace for size in _TRACED_SIZES])


def _powers_of_two(largest: int) -> list[int]:
    """Return 1, 2, 4 ... and ``largest``; at least two sizes."""
    powers = [1 << power for power in range(max(2, largest.bit_length()))]
    return sorted({*powers, largest})


def _sample_bytes(workload: Workload) -> int:
    one, two = (
        sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(workload.make_batch(size))) for size in (1, 2)
    )
    return max(0, two - one)


def _resident_and_peak(events: Sequence[int], sizes: Sequence[int], began: int) -> tuple[int, int]:
    held = sum(sizes[event] if event >= 0 else -sizes[~event] for event in events[:began])
    resident = peak = held
    for event in events[began:]:
        held += sizes[event] if event >= 0 else -sizes[~event]
        peak = max(peak, held)
    return resident, peak
