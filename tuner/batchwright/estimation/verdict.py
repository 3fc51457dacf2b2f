"""Turn traces into an estimate: the sizes that fit on each GPU, with their uncertainty, and a plan. Pure, no torch.

The error of an estimate (``_error_shares``) is the sum of these parts:

* The method. Against eight published measurements (ConvNeXt, MnasNet, MobileNet; fp32, RTX 3060, NVML) its median error
  is 2.45 %, and that of xMem (arXiv 2510.21048), a similar method, 3.59 %. The interval is about twice that, and wider
  upwards than downwards, since a wrong "fits" costs a run and a wrong "uncertain" a probe.
* Inexact sizes. Sizes between traced ones are exact to 0.34 %. If the growth of the blocks is not exact, the interval
  is widened by an assumption.
* The CPU's decisions instead of CUDA's. Five models of transformers (8 samples; fp32, bf16-mixed, bf16) were between
  12 % too low (GPT-2, bf16-mixed: the CPU's autocast leaves powers in bf16) and 21 % too high (T5, bf16: the CPU keeps
  dropout masks as numbers).
* Workspaces of convolutions, which cuDNN chooses when it runs and does not document. A trace counts the tensors of a
  convolution once more, as copies to another format, where kernels are known to need them. VGG16 on an A100 (fp32; 32,
  64 and 128 images, nvidia-smi, GPUMemNet) held 0.9, 1.4 and 2.3 times the tensors of its largest convolution beside
  what was estimated. So the interval is widened by their share of the memory downwards, and by twice that upwards.
  Where workspaces were measured on a card of the compute capability, it is widened by the range that they had.
* The reserve space of recurrent layers with cuDNN, of which one report is known (``recurrent_workspaces``): half of it
  downwards, and as much again upwards.
* ``torch.compile``, which takes 0.8 to 1.14 of the memory that was traced without it.
* The training loops of others. With their first optimizer steps emulated, one card's figure was off by 1.9 %.
* Assumptions for cases that were not measured: ROCm, a GPU of which only the memory is known, and operations that a
  trace could not follow.

Memory outside of the allocator is added: the context (by GPU, ``batchwright.hardware.gpu_table``) and, for several
ranks, NCCL's buffers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from batchwright.errors import BatchwrightError, SpecError
from batchwright.estimation.allocator.config import DEFAULT_SETTINGS, EXPANDABLE_SEGMENTS
from batchwright.estimation.allocator.replay import CapacitySearch
from batchwright.estimation.memory_curve import (
    LARGEST_SIZE,
    MemoryCurve,
    Replayable,
    TracedWorkload as TracedWorkload,
)
from batchwright.estimation.trace import COMPILED_NOTE, Category
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.hardware.workspace_tables import measured_workspaces
from batchwright.planning.accumulation import balanced_plan, share_per_rank, steps_of
from batchwright.schemas.estimates import (
    Estimate,
    EstimateRequest,
    GpuEstimate,
    Loop,
    PeakBreakdown,
    PeakEstimate,
    Verdict,
)
from batchwright.schemas.gpus import ByteInterval, Gpu, KernelProfile
from batchwright.schemas.plans import Plan

_PERCENT = Fraction(1, 100)
_METHOD_ERROR = (5 * _PERCENT, 7 * _PERCENT)
_CPU_DECISIONS_ERROR = (18 * _PERCENT, 14 * _PERCENT)
"""A figure 21 % too high must be lowered by 18 %; one 12 % too low must be raised by 14 %."""
_NOT_TRACED_ERROR = (4 * _PERCENT, 4 * _PERCENT)
_COMPILED_ERROR = (20 * _PERCENT, 14 * _PERCENT)
"""On virtual cards, compiled models reserved 0.80 to 1.14 of the memory of the same models without ``torch.compile``
(benchmarks/compiled_models.py)."""
_OTHER_LOOP_ERROR = (2 * _PERCENT, 2 * _PERCENT)
_INEXACT_SIZES_ERROR = (20 * _PERCENT, 20 * _PERCENT)
_OTHER_KERNELS_ERROR = (4 * _PERCENT, 4 * _PERCENT)
_MOST_OVERESTIMATE = 50 * _PERCENT
_NCCL_BYTES = ByteInterval(low=500_000_000, expected=1_000_000_000, high=1_600_000_000)
"""Buffers of one communicator: 0.5 to 1.6 GB."""
_MAX_MESSAGE_LENGTH = 500
_SMALL_SHARE = 16
"""A share of at most this many samples often fits whole, so that updates of one micro-batch are traced first."""
_ACCUMULATION_FACTOR = Fraction(5, 4)
"""Upper bound on the memory of accumulation without its waiting gradients, as a multiple of that of one micro-batch:
it also holds a gradient that is to be added."""
_MAX_LISTED = 4096
"""Micro-batches of a plan that is listed in full, so that an estimate for many GPUs stays within kilobytes."""


def profiles(request: EstimateRequest) -> tuple[KernelProfile, ...]:
    """Return the distinct kernel profiles with which the workload must be traced.

    Raises:
        EstimateError: when a GPU's name is not known, or is that of several.
    """
    return tuple(dict.fromkeys(find_gpu(name).profile for name in request.gpus))


def make_estimate(
    request: EstimateRequest,
    traced: Mapping[KernelProfile, TracedWorkload],
    *,
    versions: dict[str, str],
    seconds: float,
) -> Estimate:
    """Estimate the memory of the traced workload on each GPU.

    Args:
        request: the request.
        traced: for each of ``profiles(request)`` the traced workload. Profiles that run the same kernels share one.
        versions: the versions of the packages that took part in tracing.
        seconds: time that tracing took.

    Raises:
        EstimateError: when a GPU's name is not known, or is that of several.
        SpecError: when the spec is invalid.
        PlanError: when a rank would have no sample.
        Exception: the error for the first GPU, when there is no estimate for any.
    """
    cards = [find_gpu(name) for name in request.gpus]
    distinct = {id(traced[card.profile]): traced[card.profile] for card in cards}
    searches: dict[Replayable, CapacitySearch] = {}
    workloads = {key: _prepared(request, result, cards, searches) for key, result in distinct.items()}
    results = [_estimate(request, card, workloads[id(traced[card.profile])]) for card in cards]
    errors = [result for result in results if isinstance(result, Exception)]
    if len(errors) == len(results):
        raise errors[0]
    found = [workload for workload in workloads.values() if isinstance(workload, _Workload)]
    return Estimate(
        decisions="cpu" if any(workload.follows_cpu for workload in found) else "cuda",
        parameters=found[0].traced.parameters,
        gpus=tuple(
            unknown_estimate(request, card, result, "traced") if isinstance(result, Exception) else result
            for card, result in zip(cards, results, strict=True)
        ),
        versions=versions,
        seconds=seconds,
        notes=tuple(_notes_on(request)),
    )


def accumulates_at_first(request: EstimateRequest) -> bool:
    """Return whether updates of several micro-batches are traced first, or those of a rank's whole share.

    The others are traced where a GPU needs them: they are not, where the whole share surely fits.
    """
    share = share_of(request)
    return share is None or (share > _SMALL_SHARE and request.micro_batch_size != share)


def share_of(request: EstimateRequest) -> int | None:
    """Return the samples of a rank in one update; None when no effective batch was requested."""
    batch = request.effective_batch_size
    return None if batch is None else share_per_rank(batch, request.spec.parallelism.world_size)[0]


def _notes_on(request: EstimateRequest) -> Iterator[str]:
    """Yield what holds for all GPUs."""
    yield "Estimated, not measured: a tuning on the card proves what fits."
    if request.loop != "batchwright":
        yield f"The estimate is for the training loop `{request.loop}`; a tuning measures Batchwright's own loop."
    adapter = request.spec.adapter
    if adapter is not None and adapter.quantization is not None and request.spec.precision == "bf16":
        yield (
            "The usual recipe of QLoRA (`prepare_model_for_kbit_training` of peft) keeps norms, embeddings and the "
            "stream between layers in fp32: that is `precision: bf16-mixed`, which takes more memory."
        )


class _Workload:
    """A traced workload with the memory curves that all GPUs of a profile share.

    Args:
        request: the request.
        traced: the workload; of one kind of updates it is traced here, of the other where a GPU needs it.
        cards: the GPUs.
        searches: as in ``MemoryCurve``.

    Attributes:
        share: samples of a rank in one update; None when no effective batch was requested.
        accumulating: the curve of updates with several micro-batches.
        single: the curve of updates with one micro-batch, which holds no gradients while it runs.
        follows_cpu: whether the CPU's decisions were traced in the place of CUDA's.
    """

    def __init__(
        self,
        request: EstimateRequest,
        traced: TracedWorkload,
        cards: Sequence[Gpu],
        searches: dict[Replayable, CapacitySearch],
    ) -> None:
        settings = EXPANDABLE_SEGMENTS if request.allocator == "expandable-segments" else DEFAULT_SETTINGS
        self.traced = traced
        self.share = share_of(request)
        self.accumulating = MemoryCurve(traced, settings, accumulates=True, searches=searches)
        self.single = MemoryCurve(traced, settings, accumulates=False, searches=searches)
        several = accumulates_at_first(request)
        first = traced.trace_at(self.share or 1, accumulates=several)
        self.follows_cpu = first.decisions == "cpu"
        self._whole_share = not several or any(_may_fit_whole(self, card, request.loop) for card in cards)
        """Whether the whole share may fit in one micro-batch; if not, such updates are not traced."""

    def accumulates(self, size: int) -> bool:
        """Return whether an update has several micro-batches of this size."""
        return self.share is None or size < self.share

    def fits(self, size: int, limit_bytes: int) -> bool:
        """Return whether updates with micro-batches of this size fit."""
        return (self._whole_share or self.accumulates(size)) and self.curve(size).fits(size, limit_bytes)

    def curve(self, size: int) -> MemoryCurve:
        """Return the memory curve of updates with micro-batches of this size."""
        return self.accumulating if self.accumulates(size) else self.single

    def largest(self, limit_bytes: int) -> int:
        """Return the largest size within a limit of the allocator, at most the share; 0 if none fits."""
        if self.share is None:
            return self.accumulating.largest(limit_bytes)
        if self.fits(self.share, limit_bytes):
            return self.share
        return self.accumulating.largest(limit_bytes, self.share - 1)

    def optimistic(self, limit_bytes: int) -> int:
        """Return a size not below ``largest``, interpolated without a replay at that size."""
        if self.share is None:
            return self.accumulating.candidate(limit_bytes)
        if self.fits(self.share, limit_bytes):
            return self.share
        return self.accumulating.candidate(limit_bytes, self.share - 1)


def _may_fit_whole(workload: _Workload, gpu: Gpu, loop: Loop) -> bool:
    """Return whether a GPU may hold an update of one micro-batch: that of several, less the waiting gradients."""
    if workload.share is None:
        return False
    requested = workload.accumulating.requested_at_peak(workload.share)
    needed = sum(requested.values()) - requested[Category.GRADIENTS]
    workspaces = _workspace_error(workload.accumulating.workspace_error(workload.share), needed)
    overestimate, _ = _error_shares(gpu, workload, workspaces, loop)
    return needed * (1 - overestimate) <= _ACCUMULATION_FACTOR * gpu.total_bytes


def _prepared(
    request: EstimateRequest,
    traced: TracedWorkload,
    cards: Sequence[Gpu],
    searches: dict[Replayable, CapacitySearch],
) -> _Workload | Exception:
    """Trace the updates that matter first, and return the workload, or the error.

    Raises:
        SpecError: when the spec is invalid, which it is for every GPU.
    """
    try:
        return _Workload(request, traced, cards, searches)
    except SpecError:
        raise
    except Exception as error:  # noqa: BLE001 - user code runs here, and may succeed for other GPUs
        return error


def _estimate(request: EstimateRequest, gpu: Gpu, workload: _Workload | Exception) -> GpuEstimate | Exception:
    """Estimate for one GPU, or return the error of tracing the updates that it needs."""
    if isinstance(workload, Exception):
        return workload
    try:
        return _CardEstimator(request, gpu, workload).estimate()
    except Exception as error:  # noqa: BLE001 - as above
        return error


def unknown_estimate(request: EstimateRequest, gpu: Gpu, error: Exception, attempted: str) -> GpuEstimate:
    """Return the estimate for a GPU for which the workload cannot be ``attempted``, with the error as its note."""
    message = " ".join(str(error).split())[:_MAX_MESSAGE_LENGTH]
    kind = "" if isinstance(error, BatchwrightError) else f"{type(error).__name__}: "
    return GpuEstimate(
        gpu=gpu.name,
        usable_bytes=usable_bytes(gpu, request),
        feasible=Verdict.UNCERTAIN,
        largest_micro_batch_size=0,
        surely_fits=0,
        may_fit=0,
        notes=(*gpu.notes, f"Unknown: the workload cannot be {attempted} for this GPU ({kind}{message})."),
    )


@dataclass(frozen=True)
class _Limits:
    """Limits of the allocator on a GPU: if the estimate is exact (``expected``), and at both ends of its interval."""

    certain: int
    expected: int
    optimistic: int


class _CardEstimator:
    """Makes the estimate for one GPU."""

    def __init__(self, request: EstimateRequest, gpu: Gpu, workload: _Workload) -> None:
        self._request = request
        self._gpu = gpu
        self._workload = workload
        self._usable_bytes = usable_bytes(gpu, request)
        self._shortfall_bytes = shortfall_bytes(gpu, request)
        self._outside_bytes = outside_bytes(request, gpu)
        self._expected_limit = self._usable_bytes - self._outside_bytes.expected
        self._largest = workload.largest(self._expected_limit)
        size = max(1, self._largest, request.micro_batch_size or 0)
        curve = workload.curve(size)
        fewer, more = curve.workspace_error(size)
        workspaces = _workspace_error((fewer, more), curve.capacity(size) if fewer or more else 0)
        self._overestimate, self._underestimate = _error_shares(gpu, workload, workspaces, request.loop)

    def estimate(self) -> GpuEstimate:
        """Return the sizes that fit, the peak at the requested or the largest size, and the plan."""
        limits = self._limits()
        workload, request = self._workload, self._request
        largest = self._largest
        certain, optimistic = workload.largest(limits.certain), workload.optimistic(limits.optimistic)
        plan, plan_note = plan_to_list(request, largest)
        peak = self._peak(request.micro_batch_size or max(1, largest), limits)
        notes = [*self._notes(largest), *plan_note]
        if peak.thrashes:
            size = f"At size {peak.micro_batch_size:,} the allocator"
            notes.append(f"{size} frees its cache in every update: a smaller size may be faster.")
        return GpuEstimate(
            gpu=self._gpu.name,
            usable_bytes=self._usable_bytes,
            feasible=_verdict(certain=certain > 0, optimistic=optimistic > 0),
            largest_micro_batch_size=largest,
            surely_fits=certain,
            may_fit=optimistic,
            peak=peak,
            plan=plan,
            notes=tuple(notes),
        )

    def _limits(self) -> _Limits:
        """Return the allocator's limits at which the bounds of the ``device_bytes`` equal the usable memory."""
        sure = self._usable_bytes - self._shortfall_bytes - self._outside_bytes.high
        optimistic = self._usable_bytes - self._outside_bytes.low
        return _Limits(
            certain=floor(sure / (1 + self._underestimate)),
            expected=self._expected_limit,
            optimistic=floor(optimistic / (1 - self._overestimate)),
        )

    def _peak(self, size: int, limits: _Limits) -> PeakEstimate:
        workload = self._workload
        curve = workload.curve(size)
        replayed, capacity = curve.replayed(size), curve.capacity(size)
        return PeakEstimate(
            micro_batch_size=size,
            accumulates=workload.accumulates(size),
            verdict=_verdict(
                certain=workload.fits(size, limits.certain), optimistic=workload.fits(size, limits.optimistic)
            ),
            allocated_bytes=replayed.peak_allocated_bytes,
            reserved_bytes=replayed.peak_reserved_bytes,
            capacity_bytes=capacity,
            outside_allocator_bytes=self._outside_bytes,
            device_bytes=ByteInterval(  # memory that the card may have less than expected counts as needed
                low=floor(capacity * (1 - self._overestimate)) + self._outside_bytes.low,
                expected=capacity + self._outside_bytes.expected,
                high=ceil(capacity * (1 + self._underestimate)) + self._outside_bytes.high + self._shortfall_bytes,
            ),
            thrashes=curve.thrashes(size, limits.expected),
            breakdown=PeakBreakdown(
                **{f"{category}_bytes": nbytes for category, nbytes in curve.held_at_peak(size).items()}
            ),
        )

    def _notes(self, largest: int) -> tuple[str, ...]:
        gpu, workload = self._gpu, self._workload
        notes = [*gpu.notes, *workload.traced.notes]
        if measured := measured_workspaces(gpu.profile):
            notes.append(measured.note)
        if gpu.evidence == "derived":
            notes.append(f"No report of this card's memory was found; it is derived: {gpu.sources['total']}.")
        if workload.follows_cpu:
            notes.append("The CPU's kernels were traced instead of CUDA's, which tends to overestimate.")
        if self._request.spec.parallelism.world_size > 1:
            notes.append("NCCL's buffers are assumed to take 0.5 to 1.6 GB.")
        if workload.share is not None and largest == workload.share > 1:
            notes.append(f"{largest} is the whole share of a rank: an update has one micro-batch.")
        if workload.share is None and largest == LARGEST_SIZE:
            notes.append(f"Sizes above {LARGEST_SIZE} were not examined.")
        return tuple(notes)


def plan_to_list(request: EstimateRequest, largest: int) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the plan around the largest size, and a note in its place where it is too long to be listed."""
    batch, ranks = request.effective_batch_size, request.spec.parallelism.world_size
    if batch is None or not largest:
        return None, ()
    shares = share_per_rank(batch, ranks)
    steps = steps_of(shares[0], largest)
    length = sum(min(steps, share) for share in shares)
    if length <= _MAX_LISTED:
        return balanced_plan(batch, ranks, largest), ()
    note = (
        f"The plan has {steps:,} accumulation steps of at most {largest:,} samples; its {length:,} "
        f"micro-batches are not listed: they are more than {_MAX_LISTED:,}."
    )
    return None, (note,)


def usable_bytes(gpu: Gpu, request: EstimateRequest) -> int:
    """Return the expected memory of the card, less the margin."""
    return max(1, _less_margin(gpu.total_bytes, request))


def shortfall_bytes(gpu: Gpu, request: EstimateRequest) -> int:
    """Return the usable memory that the card may lack, by its driver or ECC setting."""
    return _less_margin(gpu.total_bytes, request) - _less_margin(gpu.least_total_bytes, request)


def _less_margin(total_bytes: int, request: EstimateRequest) -> int:
    return int(total_bytes * (1.0 - request.memory_margin))


def _verdict(*, certain: bool, optimistic: bool) -> Verdict:
    if certain:
        return Verdict.FITS
    return Verdict.UNCERTAIN if optimistic else Verdict.DOES_NOT_FIT


def _error_shares(
    gpu: Gpu, workload: _Workload, workspaces: tuple[Fraction, Fraction], loop: Loop
) -> tuple[Fraction, Fraction]:
    """Return by which shares the allocator may need less and more than estimated, with those of ``workspaces``."""
    parts = [_METHOD_ERROR, workspaces]
    if workload.follows_cpu:
        parts.append(_CPU_DECISIONS_ERROR)
    if workload.traced.notes:
        parts.append(_NOT_TRACED_ERROR)
    if COMPILED_NOTE in workload.traced.notes:
        parts.append(_COMPILED_ERROR)
    if loop != "batchwright":
        parts.append(_OTHER_LOOP_ERROR)
    if not workload.traced.exact_sizes:
        parts.append(_INEXACT_SIZES_ERROR)
    if gpu.vendor != "nvidia":
        parts.append(_OTHER_KERNELS_ERROR)
    return sum((low for low, _ in parts), Fraction()), sum((high for _, high in parts), Fraction())


def _workspace_error(error_bytes: tuple[int, int], needed_bytes: int) -> tuple[Fraction, Fraction]:
    """Return the error of the workspaces that libraries choose, as shares of the memory that the allocator needs."""
    fewer, more = (Fraction(nbytes, max(1, needed_bytes)) for nbytes in error_bytes)
    return min(fewer, _MOST_OVERESTIMATE), more


def outside_bytes(request: EstimateRequest, gpu: Gpu) -> ByteInterval:
    """Return the memory that a process takes outside of torch's allocator."""
    context = gpu.context_bytes
    if request.spec.parallelism.world_size == 1:
        return context
    return ByteInterval(
        low=context.low + _NCCL_BYTES.low,
        expected=context.expected + _NCCL_BYTES.expected,
        high=context.high + _NCCL_BYTES.high,
    )
