"""From traces to an answer: what fits on each GPU, how sure that is, and which plan follows. Pure, no torch.

How far an estimate may be off (``_errors``) is put together from what is known:

* against eight published measurements (ConvNeXt, MnasNet, MobileNet; fp32, RTX 3060, NVML) the median error of the
  method is 2.45 %, that of xMem (arXiv 2510.21048), which works alike, 3.59 %; the interval takes about twice that, and
  more upwards than downwards, since a wrong "fits" costs a run and a wrong "uncertain" a probe;
* sizes between traced ones are exact to 0.34 %; where traces tell no size exactly, the interval is widened by an
  assumption;
* with the CPU's decisions instead of CUDA's five models of transformers (8 samples; fp32, bf16-mixed, bf16) came out
  between 12 % too low (GPT-2, bf16-mixed: the CPU's autocast leaves powers in bf16) and 21 % too high (T5, bf16: the
  CPU keeps what drops out as numbers);
* nothing was measured on ROCm, on a card of which only the memory is known, or of what a trace says it could not
  follow: there the interval is widened by assumptions;
* outside of the allocator come the context (by card, ``tuner.hardware.gpu_table``) and, for several ranks, NCCL's
  buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from tuner.errors import BatchwrightError
from tuner.estimation.allocator.config import DEFAULT_SETTINGS, EXPANDABLE_SEGMENTS
from tuner.estimation.memory_curve import LARGEST_SIZE, MemoryCurve, TracedWorkload
from tuner.estimation.trace import Category
from tuner.hardware.gpu_lookup import find_gpu
from tuner.planning.accumulation import balanced_plan, share_per_rank
from tuner.schemas.estimates import Estimate, EstimateRequest, GpuEstimate, PeakBreakdown, PeakEstimate, Verdict
from tuner.schemas.gpus import ByteInterval, Gpu, KernelProfile

__all__ = ["TracedWorkload", "answer", "profiles"]

_PERCENT = Fraction(1, 100)
_METHOD = (5 * _PERCENT, 7 * _PERCENT)
_CPU_DECISIONS = (18 * _PERCENT, 14 * _PERCENT)
"""A figure 21 % too high is to be lowered by 18 %, one 12 % too low to be raised by 14 %."""
_NOT_FOLLOWED = (4 * _PERCENT, 4 * _PERCENT)
_SIZES_NOT_CHECKED = (20 * _PERCENT, 20 * _PERCENT)
_OTHER_KERNELS = (4 * _PERCENT, 4 * _PERCENT)
_NCCL_BYTES = ByteInterval(low=500_000_000, expected=1_000_000_000, high=1_600_000_000)
"""Of one communicator: 0.5 to 1.6 GB."""
_SHOWN_LENGTH = 500
_DOUBT = 2
"""How many times the memory of a card what it surely has to hold must exceed, for nothing more to be looked at."""
_MOST_LISTED = 4096
"""Micro-batches of a plan that is told whole: an answer for many cards stays a matter of kilobytes."""


def profiles(request: EstimateRequest) -> tuple[KernelProfile, ...]:
    """The kernels that a workload has to be traced with, each once.

    Raises:
        EstimateError: when a GPU's name is not known, or is that of several.
    """
    return tuple(dict.fromkeys(find_gpu(name).profile for name in request.gpus))


def answer(
    request: EstimateRequest,
    traced: Mapping[KernelProfile, TracedWorkload | Exception],
    *,
    versions: dict[str, str],
    seconds: float,
) -> Estimate:
    """What the traced workload takes on each GPU.

    Args:
        request: what is asked.
        traced: the workload, for each of ``profiles(request)``, or why there is none; one object for those that run the
            same kernels.
        versions: of what took part in tracing.
        seconds: time that tracing took.

    Raises:
        EstimateError: when a GPU's name is not known, or is that of several.
        PlanError: when a rank would have no sample.
        Exception: what tracing failed with, when there is no trace for any of the GPUs.
    """
    cards = [find_gpu(name) for name in request.gpus]
    distinct = {id(it): it for it in (traced[card.profile] for card in cards)}
    most_bytes = max(it.total_bytes for it in cards)
    known = {key: _judged(request, it, most_bytes) for key, it in distinct.items()}
    found = [it for it in known.values() if isinstance(it, _Workload)]
    if not found:
        raise next(it for it in known.values() if isinstance(it, Exception))
    return Estimate(
        decisions="cpu" if any(it.follows_cpu for it in found) else "cuda",
        parameters=found[0].traced.parameters,
        gpus=tuple(_estimate(request, card, known[id(traced[card.profile])]) for card in cards),
        versions=versions,
        seconds=seconds,
        notes=("Estimated, not measured: a tuning on the card proves what fits.",),
    )


@dataclass(frozen=True)
class _Workload:
    """A traced workload with the curves that all cards of a profile share.

    Attributes:
        share: samples of a rank in one update; None when no effective batch was asked for.
        several: the curve of updates with several micro-batches.
        single: that of updates with one, in which no gradients wait while it runs.
        whole: whether the whole share may fit in one micro-batch; else such updates are not traced.
    """

    traced: TracedWorkload
    share: int | None
    whole: bool
    several: MemoryCurve
    single: MemoryCurve
    follows_cpu: bool
    notes: tuple[str, ...]

    @classmethod
    def of(cls, request: EstimateRequest, traced: TracedWorkload, most_bytes: int) -> _Workload:
        """The workload for cards of at most ``most_bytes``."""
        ranks, batch = request.spec.parallelism.world_size, request.effective_batch_size
        settings = EXPANDABLE_SEGMENTS if request.allocator == "expandable-segments" else DEFAULT_SETTINGS
        share = None if batch is None else share_per_rank(batch, ranks)[0]
        several = MemoryCurve(traced, settings, accumulates=True)
        whole = share is not None and (request.micro_batch_size == share or _may_fit_whole(several, share, most_bytes))
        kinds = [True] * (share != 1) + [False] * whole  # of updates: with several micro-batches, or with one
        traces = [traced.trace_at(share or 1, accumulates=it) for it in kinds]
        return cls(
            traced=traced,
            share=share,
            whole=whole,
            several=several,
            single=MemoryCurve(traced, settings, accumulates=False),
            follows_cpu=any(it.decisions == "cpu" for it in traces),
            notes=tuple(dict.fromkeys((*traced.notes, *(note for it in traces for note in it.notes)))),
        )

    def accumulates(self, size: int) -> bool:
        """Whether an update takes several micro-batches of this size."""
        return self.share is None or size < self.share

    def fits(self, size: int, limit_bytes: int) -> bool:
        """Whether a size fits, of several micro-batches or of one, as the case may be."""
        return (self.whole or self.accumulates(size)) and self.curve(size).fits(size, limit_bytes)

    def curve(self, size: int) -> MemoryCurve:
        """Of the updates that micro-batches of this size make."""
        return self.several if self.accumulates(size) else self.single

    def largest(self, limit_bytes: int) -> int:
        """The largest size within a limit of the allocator: the whole share, or what fits below it; 0 for none."""
        if self.share is None:
            return self.several.largest(limit_bytes)
        if self.fits(self.share, limit_bytes):
            return self.share
        return self.several.largest(limit_bytes, self.share - 1)

    def perhaps(self, limit_bytes: int) -> int:
        """The same without trying whether just this size fits: not below ``largest``."""
        if self.share is None:
            return self.several.candidate(limit_bytes)
        if self.fits(self.share, limit_bytes):
            return self.share
        return self.several.candidate(limit_bytes, self.share - 1)


def _may_fit_whole(several: MemoryCurve, share: int, most_bytes: int) -> bool:
    """Whether a card may hold an update of one micro-batch: all that one of several holds, but the gradients."""
    if share == 1:
        return True
    gradients = several.held_at_peak(share).get(Category.GRADIENTS, 0)
    return several.replayed(share).peak_allocated_bytes - gradients <= _DOUBT * most_bytes


def _judged(request: EstimateRequest, traced: TracedWorkload | Exception, most_bytes: int) -> _Workload | Exception:
    """The workload, traced at all kinds of updates that matter, or what that failed with."""
    if isinstance(traced, Exception):
        return traced
    try:
        return _Workload.of(request, traced, most_bytes)
    except Exception as error:  # noqa: BLE001 - user code runs here; other cards may do without what fails
        return error


def _estimate(request: EstimateRequest, gpu: Gpu, workload: _Workload | Exception) -> GpuEstimate:
    """The answer for one card; where the workload cannot be traced for it, that nothing is known, and why."""
    if isinstance(workload, _Workload):
        return _Card(request, gpu, workload).estimate()
    words = " ".join(str(workload).split())[:_SHOWN_LENGTH]
    kind = "" if isinstance(workload, BatchwrightError) else f"{type(workload).__name__}: "
    return GpuEstimate(
        gpu=gpu.name,
        usable_bytes=_usable_bytes(gpu, request),
        feasible=Verdict.UNCERTAIN,
        largest_micro_batch_size=0,
        surely_fits=0,
        may_fit=0,
        notes=(*gpu.notes, f"Nothing is known: the workload cannot be traced for this GPU ({kind}{words})."),
    )


@dataclass(frozen=True)
class _Limits:
    """What the allocator may need on a card, if the estimate is right, and if it is as far off as may be."""

    surely: int
    expected: int
    perhaps: int


class _Card:
    """The answer for one card."""

    def __init__(self, request: EstimateRequest, gpu: Gpu, workload: _Workload) -> None:
        self._request = request
        self._gpu = gpu
        self._workload = workload
        self._usable = _usable_bytes(gpu, request)
        self._lacking = _without_margin(gpu.total_bytes, request) - _without_margin(gpu.least_total_bytes, request)
        self._too_high, self._too_low = _errors(gpu, workload)
        self._outside = _outside(request, gpu)

    def estimate(self) -> GpuEstimate:
        """What fits, with the peak at the size of interest and the plan."""
        limits = self._limits()
        workload, request = self._workload, self._request
        largest = workload.largest(limits.expected)
        surely, perhaps = workload.largest(limits.surely), workload.perhaps(limits.perhaps)
        ranks, batch = request.spec.parallelism.world_size, request.effective_batch_size
        listed = _micro_batches(batch, ranks, largest) if batch is not None and largest else 0
        peak = self._peak(request.micro_batch_size or max(1, largest), limits)
        return GpuEstimate(
            gpu=self._gpu.name,
            usable_bytes=self._usable,
            feasible=_verdict(surely=surely > 0, perhaps=perhaps > 0),
            largest_micro_batch_size=largest,
            surely_fits=surely,
            may_fit=perhaps,
            peak=peak,
            plan=balanced_plan(batch, ranks, largest) if batch is not None and 0 < listed <= _MOST_LISTED else None,
            notes=(*self._notes(largest, listed), *_thrashing(peak)),
        )

    def _limits(self) -> _Limits:
        """Where each bound of ``_device_bytes`` meets what the card offers."""
        sure = Fraction(self._usable - self._lacking - self._outside.high) / (1 + self._too_low)
        perhaps = Fraction(self._usable - self._outside.low) / (1 - self._too_high)
        return _Limits(surely=floor(sure), expected=self._usable - self._outside.expected, perhaps=floor(perhaps))

    def _device_bytes(self, capacity: int) -> ByteInterval:
        """What the card has to have; what it may have less than expected counts as needed."""
        return ByteInterval(
            low=floor(capacity * (1 - self._too_high)) + self._outside.low,
            expected=capacity + self._outside.expected,
            high=ceil(capacity * (1 + self._too_low)) + self._outside.high + self._lacking,
        )

    def _peak(self, size: int, limits: _Limits) -> PeakEstimate:
        workload = self._workload
        curve = workload.curve(size)
        replayed, capacity = curve.replayed(size), curve.capacity(size)
        return PeakEstimate(
            micro_batch_size=size,
            accumulates=workload.accumulates(size),
            verdict=_verdict(surely=workload.fits(size, limits.surely), perhaps=workload.fits(size, limits.perhaps)),
            allocated_bytes=replayed.peak_allocated_bytes,
            reserved_bytes=replayed.peak_reserved_bytes,
            capacity_bytes=capacity,
            device_bytes=self._device_bytes(capacity),
            thrashes=curve.thrashes(size, limits.expected),
            breakdown=_peak_breakdown(curve.held_at_peak(size), self._outside.expected),
        )

    def _notes(self, largest: int, listed: int) -> tuple[str, ...]:
        gpu, workload = self._gpu, self._workload
        notes = [*gpu.notes, *workload.notes]
        if gpu.evidence == "derived":
            notes.append(f"The memory of this card was not reported by anybody we know of, but {gpu.sources['total']}.")
        if workload.follows_cpu:
            notes.append("The kernels of the CPU were followed instead of CUDA's, which tends to be too high.")
        if self._request.spec.parallelism.world_size > 1:
            notes.append("NCCL's buffers are counted with 0.5 to 1.6 GB.")
        if workload.share is not None and largest == workload.share > 1:
            notes.append(f"{largest} is the whole share of a rank: an update takes one micro-batch.")
        if workload.share is not None and listed > _MOST_LISTED:
            steps = -(-workload.share // largest)
            notes.append(
                f"The plan has {steps:,} accumulation steps of at most {largest:,} samples; its {listed:,} "
                f"micro-batches are not listed, being more than {_MOST_LISTED:,}."
            )
        if workload.share is None and largest == LARGEST_SIZE:
            notes.append(f"Sizes above {LARGEST_SIZE} were not looked at.")
        return tuple(notes)


def _micro_batches(batch: int, ranks: int, largest: int) -> int:
    """How many micro-batches a balanced plan lists over all ranks."""
    shares = share_per_rank(batch, ranks)
    steps = -(-shares[0] // largest)
    return sum(min(steps, share) for share in shares)


def _usable_bytes(gpu: Gpu, request: EstimateRequest) -> int:
    return max(1, _without_margin(gpu.total_bytes, request))


def _without_margin(total_bytes: int, request: EstimateRequest) -> int:
    return int(total_bytes * (1.0 - request.memory_margin))


def _thrashing(peak: PeakEstimate) -> tuple[str, ...]:
    size = f"At size {peak.micro_batch_size:,} the allocator"
    return (f"{size} gives back its cache in every update: a smaller one may be faster.",) if peak.thrashes else ()


def _verdict(*, surely: bool, perhaps: bool) -> Verdict:
    if surely:
        return Verdict.FITS
    return Verdict.UNCERTAIN if perhaps else Verdict.DOES_NOT_FIT


def _errors(gpu: Gpu, workload: _Workload) -> tuple[Fraction, Fraction]:
    """By which shares what the allocator needs may be less, and more, than estimated."""
    parts = [_METHOD]
    if workload.follows_cpu:
        parts.append(_CPU_DECISIONS)
    if workload.notes:
        parts.append(_NOT_FOLLOWED)
    if not workload.traced.exact_sizes:
        parts.append(_SIZES_NOT_CHECKED)
    if gpu.vendor != "nvidia":
        parts.append(_OTHER_KERNELS)
    return sum((it[0] for it in parts), Fraction()), sum((it[1] for it in parts), Fraction())


def _outside(request: EstimateRequest, gpu: Gpu) -> ByteInterval:
    """What a process takes of the card outside of torch's allocator."""
    context = gpu.context_bytes
    if request.spec.parallelism.world_size == 1:
        return context
    return ByteInterval(
        low=context.low + _NCCL_BYTES.low,
        expected=context.expected + _NCCL_BYTES.expected,
        high=context.high + _NCCL_BYTES.high,
    )


def _peak_breakdown(held: Mapping[Category, int], outside_bytes: int) -> PeakBreakdown:
    return PeakBreakdown(
        parameters_bytes=held[Category.PARAMETERS],
        gradients_bytes=held[Category.GRADIENTS],
        optimizer_state_bytes=held[Category.OPTIMIZER_STATE],
        activations_bytes=held[Category.ACTIVATIONS],
        temporaries_bytes=held[Category.TEMPORARIES],
        workspace_bytes=held[Category.WORKSPACE],
        outside_allocator_bytes=outside_bytes,
    )
