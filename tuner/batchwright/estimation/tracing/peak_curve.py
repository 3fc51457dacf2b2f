"""Estimate the peaks that probes are expected to measure: the memory curve that seeds a search, from two traces.

On a card a probe measures the bytes of tensors, but runs out of memory by the segments that the allocator reserves. So
replays in the simulated allocator tell where on the curve memory runs out (``ExpectedPeaks.usable_bytes``).
"""

import os
import time
from collections.abc import Sequence

from batchwright.estimation.allocator.config import AllocatorSettings, rounded_up
from batchwright.estimation.allocator.replay import ReplayResult, replay
from batchwright.estimation.cuda_shim import Shim
from batchwright.estimation.memory_curve import largest_fitting
from batchwright.estimation.trace import SizedTrace, Trace
from batchwright.estimation.tracing.runs import TracedRuns
from batchwright.planning.fingerprint import installed_versions
from batchwright.schemas.gpus import KernelProfile
from batchwright.schemas.requests import ExpectationRequest
from batchwright.schemas.results import ExpectedPeak, ExpectedPeaks
from batchwright.training.micro_batches.nested_batches import tensors_of
from batchwright.workloads.base import Workload
from batchwright.workloads.build import build_workload

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
        processes: how many processes may trace in parallel, as in ``batchwright.estimation.tracing.runs.TracedRuns``.

    Raises:
        EstimateError: when the workload cannot be traced, or PYTORCH_ALLOC_CONF cannot be simulated.
        SpecError, WorkloadError: when the workload cannot be built.
    """
    began = time.monotonic()
    memory = _CardMemory(request, shim, processes) if request.compute_capability else _CpuMemory(request, processes)
    points: list[ExpectedPeak] = []
    residents: list[int] = []
    powers = (1 << power for power in range(max(2, request.largest_micro_batch.bit_length())))
    for size in sorted({*powers, request.largest_micro_batch}):
        resident, peak = memory.held(size)
        residents.append(resident)
        points.append(ExpectedPeak(micro_batch_size=size, used_bytes=max(1, peak)))
        if peak > _MAX_LIMIT_RATIO * request.limit_bytes and len(points) > 1:
            break
    peaks = ExpectedPeaks(points=tuple(points), resident_bytes=residents[0], versions=installed_versions())
    if isinstance(memory, _CardMemory):
        by_replays = {"usable_bytes": memory.usable_bytes(peaks), "reservable_bytes": memory.limit_bytes or None}
        peaks = peaks.model_copy(update=by_replays)
    return peaks.model_copy(update={"seconds": time.monotonic() - began})


class _CardMemory:
    """The memory of an update on a card: bytes that torch's caching allocator counts, with this environment's settings.

    Args:
        request: the workload and the card.
        shim: the stand-in for CUDA.
        processes: how many processes may trace in parallel.

    Attributes:
        limit_bytes: bytes that the allocator may reserve.
    """

    def __init__(self, request: ExpectationRequest, shim: Shim | None, processes: int) -> None:
        self._settings = AllocatorSettings.from_environment(os.environ)
        self._bound = request.largest_micro_batch
        self.limit_bytes = max(0, request.limit_bytes - request.context_bytes)
        profile = KernelProfile(compute_capability=request.compute_capability or (0, 0), kind="cuda")
        runs = TracedRuns(request.spec, (profile,), shim=shim, processes=processes, shards=False)
        self._sized = _sized_trace(runs, profile)

    def held(self, size: int) -> tuple[int, int]:
        """Return the bytes held between updates, and the peak during an update."""
        sizes = [self._settings.rounded(nbytes) for nbytes in self._sized.sizes_at(size)]
        return _resident_and_peak(self._sized.trace, sizes)

    def usable_bytes(self, peaks: ExpectedPeaks) -> int:
        """Return the bytes on the curve ``peaks`` at which the allocator runs out of memory.

        They lie halfway between the largest size whose replay fits and the next one. Above a bound that fits, memory is
        taken to be lost to fragmentation in the same proportion as at the bound.
        """
        by_tensors = largest_fitting(lambda size: peaks.used_bytes(size) <= self.limit_bytes, self._bound, self._bound)
        largest = largest_fitting(
            lambda size: self._replay(size, self.limit_bytes).fits, self._bound, max(1, by_tensors)
        )
        if largest < self._bound:
            return max(1, round(peaks.used_bytes(largest + 0.5)))
        reserved = self._replay(largest).peak_reserved_bytes
        return round(peaks.used_bytes(largest) * max(1.0, self.limit_bytes / reserved))

    def _replay(self, size: int, capacity_bytes: int | None = None) -> ReplayResult:
        return replay(self._sized.trace.events, self._sized.sizes_at(size), self._settings, capacity_bytes)


class _CpuMemory:
    """The memory of an update on the CPU: bytes that glibc takes, with the samples of the whole accumulation window.

    Args:
        request: the workload.
        processes: how many processes may trace in parallel.
    """

    def __init__(self, request: ExpectationRequest, processes: int) -> None:
        self._sized = _sized_trace(TracedRuns(request.spec, processes=processes, warm_up=False, shards=False))
        self._sample_bytes = _sample_bytes(build_workload(request.spec))
        self._samples = request.samples_per_window

    def held(self, size: int) -> tuple[int, int]:
        """Return the bytes held between updates, and the peak during an update."""
        sizes = [
            rounded_up(nbytes, _PAGE_BYTES) if nbytes >= _MMAP_THRESHOLD_BYTES else nbytes
            for nbytes in self._sized.sizes_at(size)
        ]
        resident, peak = _resident_and_peak(self._sized.trace, sizes)
        others = max(0, self._samples - 2 * size) * self._sample_bytes + _PROCESS_OVERHEAD_BYTES
        return resident + others, peak + others


def _sized_trace(runs: TracedRuns, profile: KernelProfile | None = None) -> SizedTrace:
    runs.prepare((profile,), _TRACED_SIZES, accumulates=True)
    return SizedTrace.of([runs.get(profile, size, accumulates=True) for size in _TRACED_SIZES])


def _sample_bytes(workload: Workload) -> int:
    one, two = (
        sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(workload.make_batch(size))) for size in (1, 2)
    )
    return max(0, two - one)


def _resident_and_peak(trace: Trace, sizes: Sequence[int]) -> tuple[int, int]:
    began = trace.position("measured-update")
    held = sum(sizes[event] if event >= 0 else -sizes[~event] for event in trace.events[:began])
    resident = peak = held
    for event in trace.events[began:]:
        held += sizes[event] if event >= 0 else -sizes[~event]
        peak = max(peak, held)
    return resident, peak
