"""Recommendations: the plan, its evidence, alternatives and what-ifs. Pure data, no torch."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator
from typing_extensions import override

from batchwright.schemas.base import STORABLE, Document, Environment, NonNegativeFloat, NonNegativeInt, PositiveInt
from batchwright.schemas.plans import Plan, PlanSummary, UniformPlan
from batchwright.schemas.requests import Labels, Name, Named, Project, TuningRequest
from batchwright.schemas.results import DeviceInfo, ExpectedPeaks, ProbeResult

UNFINISHED: Literal["unfinished-tuning"] = "unfinished-tuning"
"""Kind of the document of a tuning that was stopped before its recommendation."""

StopReason = Literal["interrupted", "time-limit", "error"]
"""Cause of an early end of a tuning: a signal, its time limit, or an error."""


class Proof(Document):
    """Proof of the largest size: a fit, and the reason why the next size is not possible."""

    fits: NonNegativeInt
    """The largest size known to fit; 0 when none does."""
    stopped_by: Literal[
        "oom", "invalid-size", "bound", "warm-start", "timeout", "error", "lost", "interrupted", "time-limit", "quick"
    ]
    """Reason for the end of the search: a measured OOM, a kernel's own limit, a bound set before, or an OOM that the
    tuning of the warm start measured under other versions or another limit. Or a probe that was inconclusive: it did
    not end in time (`timeout`), failed for another reason than memory (`error`), or was ended from outside twice
    (`lost`). Or a signal (`interrupted`) or the time limit of the whole tuning (`time-limit`), after a plan was proven,
    or the fit of a quick tuning (`quick`). Larger sizes than `fits` were shown to fail by the first two and by
    `warm-start` alone."""
    next_size: PositiveInt | None = None
    """The next size on the grid, which was probed and failed: by the tuning of the warm start where the proof rests on
    one. None when a bound stops the search. For `timeout`, `error` and `lost` the size of the inconclusive probe:
    sizes between that and `fits` may not have been tried."""
    statement: str
    """The proof in a sentence."""

    @property
    def is_conclusive(self) -> bool:
        """Return whether the search came to its end, so that another one would end the same way."""
        return self.stopped_by not in {"timeout", "error", "lost", "interrupted", "time-limit", "quick"}

    @property
    def shows_larger_fail(self) -> bool:
        """Return whether the next size was measured to fail. Sizes between it and `fits` may be off the grid."""
        return self.stopped_by in {"oom", "invalid-size", "warm-start"}


class WarmStart(Document):
    """A stored recommendation for the same request, under other versions or another limit, that seeded a search."""

    recommendation_id: str
    """Identifier of the stored recommendation."""
    created_at: datetime
    """Creation time (UTC)."""
    fingerprint: str
    """Fingerprint of the stored recommendation, which differs from the new one."""
    versions: dict[str, str]
    """Versions of the stored recommendation."""
    memory_limit_bytes: PositiveInt | None = None
    """Memory limit of the stored recommendation, before the margin; none where nothing fitted."""
    proof: Proof
    """Proof of the stored recommendation."""


class CouplingCheck(Document):
    """Comparison of the loss and gradient of a batch with those of its parts, made before the first probe."""

    verdict: Literal["separate", "coupled", "not-compared"]
    """`separate`: the loss is a sum over samples, which accumulation reproduces. `coupled`: samples depend on each
    other, or on state that every forward pass changes. `not-compared`: the check was not possible."""
    message: str
    """The differences, their cause and the remedy; or the reason why the check was not possible."""
    samples: NonNegativeInt = 0
    """Samples of the batch that was compared; 0 where none was."""
    precision: Literal["fp64", "fp32"] | None = None
    """Arithmetic of the comparison."""
    loss_error: NonNegativeFloat | None = None
    """Largest relative difference of a loss term; none where it is not finite."""
    gradient_error: NonNegativeFloat | None = None
    """Largest relative difference of a gradient; none where it is not finite."""


class DataReading(Document):
    """The reading of the data that the spec names, before the first probe: all of it, or a sample within a minute."""

    read: NonNegativeInt
    """Number of `unit` that were read."""
    total: NonNegativeInt | None = None
    """Number of all. None if it is not known, as of files that were read in part."""
    unit: Literal["samples", "rows", "bytes"] = "samples"
    """What is counted: samples are rows with a text, images, or sequences."""
    seconds: NonNegativeFloat
    """Time that the reading took."""
    reason: str = ""
    """Why nothing or only a part was read. Empty if all was read, or if the time was up while samples were read."""

    @property
    def in_words(self) -> str:
        """How much was read, such as `a sample: 120,000 of 3,000,000 rows`."""
        if not self.read:
            return f"nothing{self.reason and f': {self.reason}'}"
        if self.read == self.total:
            return f"all {self.total:,} {self.unit}"
        return f"a sample: {self.read:,} of {'more' if self.total is None else f'{self.total:,}'} {self.unit}"


class Evidence(Document):
    """All probes of a tuning in order, and the proof that they give."""

    probes: tuple[ProbeResult, ...]
    """Every probe, in the order of the runs."""
    tuning_id: str | None = None
    """Identifier of the tuning of a service that ran the probes: of another one where a stored recommendation answered
    the request. None for a tuning on the command line."""
    proof: Proof
    """Proof of the largest size."""
    simulated_ranks: PositiveInt | None = None
    """Ranks of the process group in which one rank was probed without the others, where there were fewer devices. None
    where all ranks ran, where there is one, and where only the gradients' buckets depend on their number (`ddp`)."""
    plan_proof: str = ""
    """The probe that shows that the plan fits: its own run, or one that was at least as demanding. With the plans that
    were run before and did not fit. Empty where nothing fits."""
    expected: ExpectedPeaks | None = None
    """The memory curve that seeded the search: an estimated one, or the measured one of a warm start. None where no
    estimate was possible, and where the tuning was resumed from its recorded probes after a restart."""
    warm_start: WarmStart | None = None
    """The recommendation that warm-started the search. The proof rests on that one where `proof.stopped_by` is
    `warm-start`; otherwise this recommendation has a proof of its own."""
    coupling: CouplingCheck | None = None
    """Check for coupled samples. None where an update cannot take more than one micro-batch, and in recommendations
    of versions without the check."""
    data: DataReading | None = None
    """The reading of the data before the first probe. None if the spec names no files of data."""


class Headroom(Document):
    """Free memory at the recommended size."""

    limit_bytes: PositiveInt
    """Memory limit of the run, before the margin."""
    peak_bytes: NonNegativeInt
    """Most memory held at the recommended size: on CUDA the sum of `reserved_bytes` and `context_bytes`, on the CPU of
    the process."""
    allocated_bytes: NonNegativeInt | None = None
    """CUDA: most bytes held by tensors at the recommended size (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: NonNegativeInt | None = None
    """CUDA: most bytes held by torch's allocator at the recommended size (`torch.cuda.max_memory_reserved`)."""
    context_bytes: NonNegativeInt | None = None
    """CUDA: bytes of the process outside the allocator, which are the same for every size; none where not known."""
    free_bytes: NonNegativeInt
    """The limit (or, if less, the memory that other processes leave on the device) minus the peak."""
    free_fraction: Annotated[float, Field(ge=0.0, le=1.0)]
    """Free memory as a share of the limit."""


class Alternative(Document):
    """A plan for the same effective batch that fits as well."""

    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update."""
    micro_batch_size: PositiveInt
    """The plan's largest micro-batch."""
    chosen: bool
    """True for the recommended plan."""
    source: Literal["measured", "modelled"]
    """`measured` if a probe ran this size; `modelled` if the figures are interpolated between measured sizes."""
    peak_bytes: NonNegativeInt | None = None
    """Most memory held: on CUDA reserved, with the `context_bytes` of the headroom; on the CPU of the process. None
    where not known."""
    samples_per_second: NonNegativeFloat | None = None
    """Samples of a rank over the time of an update, without reading data and without communication between ranks. Where
    the plan has more micro-batches than a timed update, the others are taken to last as long. None if not known."""
    timed_updates: NonNegativeInt = 0
    """Updates that were timed at this size; with 0 the throughput is modelled."""
    noise: NonNegativeFloat = 0.0
    """Relative standard error of the throughput; 0 where not known."""
    thrashing: bool = False
    """CUDA: true if the allocator had to release its cache and retry, so that the size fits, but runs slowly."""


class Gain(Document):
    """Gain of the recommended plan over the baseline of the request. Figures that no probe shows are absent."""

    baseline: PlanSummary
    """The plan of the baseline. Its effective batch may differ from the requested one."""
    baseline_fits: bool | None = None
    """False where the baseline runs out of memory under this limit; none where neither is known."""
    speedup: NonNegativeFloat | None = None
    """Samples per second of the recommended plan over those of the baseline; none where not both are known."""
    speed_source: Literal["measured", "estimated"] | None = None
    """`measured` if updates of both plans were timed, for the objective `fastest`; `estimated` if the step times of
    probes of these or of other sizes stand for them."""
    samples_per_second: NonNegativeFloat | None = None
    """Samples of a rank over the time of an update of the recommended plan, as in the alternatives."""
    baseline_samples_per_second: NonNegativeFloat | None = None
    """Samples of a rank over the time of an update of the baseline."""
    peak_bytes: NonNegativeInt
    """Most memory held by the recommended plan, as in the alternatives."""
    baseline_peak_bytes: NonNegativeInt | None = None
    """Most memory held by the baseline; none where not known."""
    memory_source: Literal["measured", "estimated"] | None = None
    """`measured` if a probe ran the baseline's size; `estimated` if the peak is interpolated between measured sizes."""
    limit_bytes: PositiveInt
    """Memory limit of the run, before the margin."""
    statement: str
    """The gain in a sentence or two."""


class WhatIf(Document):
    """Changes of the spec that take less memory, with an estimate of what would fit. No probe has run them."""

    changes: Annotated[dict[str, JsonValue], STORABLE, Field(min_length=1, examples=[{"precision": "bf16-mixed"}])]
    """Changed fields of the spec, by dotted path, with their new values."""
    measured: Literal[False] = False
    """Always false: an estimate is not a proof. Tune the changed spec to measure."""
    source: Literal["estimated"] = "estimated"
    """Source of the figures: an estimated memory curve, calibrated with the probes of the requested spec."""
    plan: PlanSummary | None = None
    """The plan for the effective batch around the largest size; none when none is expected to fit."""
    largest_micro_batch_size: NonNegativeInt
    """The largest size that is expected to fit; 0 when none is."""
    surely_fits: NonNegativeInt
    """The largest size that fits even if memory exceeds the estimate by `error`."""
    may_fit: NonNegativeInt
    """The largest size that fits if memory is below the estimate by `error`."""
    error: Annotated[float, Field(ge=0.0, lt=1.0)]
    """Relative error of the estimate."""
    peak_bytes: NonNegativeInt
    """Most memory expected at the largest size, or at the smallest when none is expected to fit: on CUDA held by
    tensors, as the `allocated_bytes` of the headroom; on the CPU by the process."""


class Advice(Document):
    """A warning to read before using a recommendation."""

    code: str
    """A stable word, for example `batch-coupled-modules`."""
    message: str
    """Meaning and remedy."""


class Timings(Document):
    """Duration of the tuning."""

    total_seconds: NonNegativeFloat
    """Time from start to recommendation."""
    probe_seconds: NonNegativeFloat
    """Time spent in probes, from the start of each in its process to its end."""
    start_seconds: NonNegativeFloat = 0.0
    """Time in which the process that makes the steps below started: it imports torch and the model's libraries. That of
    a command is a part of its probes."""
    data_seconds: NonNegativeFloat = 0.0
    """Time in which the data was read."""
    coupling_check_seconds: NonNegativeFloat = 0.0
    """Time of the check for coupled samples."""
    estimate_seconds: NonNegativeFloat = 0.0
    """Time in which the search waited for its estimate. Most of the estimate is made during the steps before."""
    what_if_seconds: NonNegativeFloat = 0.0
    """Time of the what-ifs."""
    probes: NonNegativeInt
    """Number of probes."""
    out_of_memory_probes: NonNegativeInt
    """Probes that ended in OOM."""


class Verification(Document):
    """One run of a training command with the figures of a recommendation's plan, as the user trains."""

    created_at: datetime
    """Time of the run (UTC)."""
    argv: tuple[str, ...]
    """The command, before its placeholders were replaced."""
    format: str | None = None
    """Export format whose plan was verified; none for the recommended plan itself."""
    plan: PlanSummary
    """The plan that was verified."""
    verdict: Literal["as-planned", "not-as-planned", "does-not-fit", "not-known"]
    """`as-planned`: the run fits, and its counted updates are those of the plan. `not-known`: neither was shown."""
    statement: str
    """The counted figures, or the reason of a failure, in a sentence."""
    samples_per_second: NonNegativeFloat | None = None
    """Samples over all ranks and the time of an update, including the reading of data; none where nothing was timed."""
    probe: ProbeResult
    """The run."""


class Recommendation(Document):
    """The durable result of a tuning: plan, proof and evidence."""

    plan: Plan | None = None
    """Plan to train with: micro-batches that sum to exactly the effective batch. None when nothing fits, and for a
    command that takes no accumulation and makes other updates than requested."""
    largest_micro_batch_size: PositiveInt | None = None
    """The micro-batch size that fits, proven by a run: the largest, or the one for the request's objective, or that of
    a smaller plan where the plan for it did not fit. All micro-batches of the plan are at most this large, and may all
    be smaller."""
    schema_version: Literal[1] = 1
    """Version of this document's layout."""
    id: str
    """Identifier, unique to this recommendation."""
    name: Name | None = None
    """Name of the tuning."""
    project: Project | None = None
    """Project of the tuning."""
    labels: Labels = Field(default_factory=dict)
    """Labels of the tuning, by key."""
    created_at: datetime
    """Creation time (UTC)."""
    feasible: bool
    """True if there is a plan."""
    infeasible_reason: str | None = None
    """Reason why there is no plan, with the numbers and the remedies."""
    choice: str = ""
    """Reason for this plan, in a sentence."""
    alternatives: tuple[Alternative, ...] = ()
    """Plans that fit, from the fewest steps upward, with their memory and throughput. Includes the recommended one."""
    what_ifs: tuple[WhatIf, ...] = ()
    """Changes of the spec with which a larger micro-batch is expected to fit, the largest first, when requested.
    Estimated, not run."""
    uniform: UniformPlan | None = None
    """The plan with one size repeated, when it was requested."""
    evidence: Evidence
    """Every probe, and the proof."""
    headroom: Headroom | None = None
    """Free memory at the recommended size."""
    gain: Gain | None = None
    """Gain over the baseline of the request; none without a baseline, and where nothing fits."""
    device: DeviceInfo
    """The device that was probed."""
    fingerprint: str
    """SHA-256 of everything the recommendation depends on."""
    environment: Environment
    """Environment variables the job must run with: the probes ran with them."""
    warnings: tuple[Advice, ...] = ()
    """Warnings about the recommendation."""
    versions: dict[str, str]
    """Versions of software that affects memory: Python, torch, transformers, driver."""
    timings: Timings
    """Durations and counts of probes."""
    request: TuningRequest
    """The request, the spec included."""
    verified: Verification | None = None
    """The last run of a training command that `batchwright verify` made with this plan; none where none was made."""

    @property
    @override
    def headline(self) -> str:
        """What to train with, or why there is no plan."""
        if self.plan is None:
            return f"No plan: {self.infeasible_reason}"
        given = self.plan.requested_effective_batch_size
        batch = "exactly as requested" if self.plan.exact else f"not the {given:,} that were requested"
        return f"Train with {self.plan.headline}, {batch}"

    @field_validator("largest_micro_batch_size")
    @classmethod
    def _is_no_smaller_than_the_plan(cls, largest: int | None, info: ValidationInfo) -> int | None:
        plan = info.data.get("plan")
        if plan is not None and (largest is None or largest < plan.micro_batch_size):
            raise ValueError(f"must be at least plan.micro_batch_size, {plan.micro_batch_size}")
        return largest

    @field_validator("feasible")
    @classmethod
    def _is_whether_there_is_a_plan(cls, feasible: bool, info: ValidationInfo) -> bool:  # noqa: FBT001 - of pydantic
        if "plan" in info.data and feasible != (info.data["plan"] is not None):
            raise ValueError(f"must be {not feasible}: there is {'no' if feasible else 'a'} plan")
        return feasible

    @field_validator("evidence")
    @classmethod
    def _proves_the_size(cls, evidence: Evidence, info: ValidationInfo) -> Evidence:
        largest = info.data.get("largest_micro_batch_size")
        if largest is not None and evidence.proof.fits < largest:
            raise ValueError(f"must prove largest_micro_batch_size, {largest}: proof.fits is {evidence.proof.fits}")
        return evidence

    @field_validator("request")
    @classmethod
    def _is_what_the_plan_answers(cls, request: TuningRequest, info: ValidationInfo) -> TuningRequest:
        plan = info.data.get("plan")
        wanted = request.effective_batch_size
        if plan is not None and {plan.effective_batch_size, plan.requested_effective_batch_size} != {wanted}:
            raise ValueError(
                f"must be what the plan answers: its effective_batch_size is {wanted}, and that of the plan "
                f"{plan.effective_batch_size} (requested {plan.requested_effective_batch_size})"
            )
        return request

    @override
    @classmethod
    def mistaken(cls, data: Mapping[str, object]) -> str | None:
        if data.get("kind") != UNFINISHED:
            return None
        return "is a tuning that was stopped before it had a plan: go on with `batchwright tune ... --resume FILE`"

    @property
    def names(self) -> Named:
        """The names of the tuning."""
        return Named(name=self.name, project=self.project, labels=self.labels)
