"""Recommendations: the plan, its evidence, alternatives and what-ifs. Pure data, no torch."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from tuner.schemas.base import Document, Environment, NonNegativeFloat, NonNegativeInt, PositiveInt
from tuner.schemas.plans import Plan, PlanSummary, UniformPlan
from tuner.schemas.requests import TuningRequest
from tuner.schemas.results import DeviceInfo, ExpectedPeaks, ProbeResult


class Proof(Document):
    """Why the size is the largest: a fit, and what stops the next size."""

    fits: NonNegativeInt
    """The largest size known to fit; 0 when none does."""
    stopped_by: Literal["oom", "invalid-size", "bound", "warm-start", "timeout", "error", "lost"]
    """Reason for the end of the search: a measured OOM, a kernel's own limit, a bound set before, or an OOM that the
    tuning of the warm start measured under other versions or another limit. Or a probe that was inconclusive: it did
    not end in time (`timeout`), failed for another reason than memory (`error`), or was ended from outside again and
    again (`lost`). Larger sizes than `fits` were not shown to fail by `bound`, `timeout`, `error` and `lost`."""
    next_size: PositiveInt | None = None
    """The next size on the grid, which was probed and failed: by the tuning of the warm start where the proof rests on
    one. None when a bound stops the search. For `timeout`, `error` and `lost` the size whose probe did not tell: sizes
    between it and `fits` may not have been tried."""
    statement: str
    """The proof in a sentence."""

    @property
    def is_conclusive(self) -> bool:
        """Return whether the same search again would end alike; not where a probe could not tell."""
        return self.stopped_by not in {"timeout", "error", "lost"}

    @property
    def shows_larger_fail(self) -> bool:
        """Return whether the next size was measured to fail: `fits` is the largest then; else larger ones may fit."""
        return self.stopped_by in {"oom", "invalid-size", "warm-start"}


class WarmStart(Document):
    """A stored recommendation for the same request, under other versions or another limit, that seeded a search."""

    recommendation_id: str
    """Its identifier."""
    created_at: datetime
    """When it was made (UTC)."""
    fingerprint: str
    """Its fingerprint: another than this recommendation's."""
    versions: dict[str, str]
    """The versions it was measured with."""
    memory_limit_bytes: PositiveInt | None = None
    """The limit it was measured under, before the margin; none where nothing fitted."""
    proof: Proof
    """Its proof."""


class CouplingCheck(Document):
    """Comparison of the loss and gradient of a batch with those of its parts, made before the first probe."""

    verdict: Literal["separate", "coupled", "not-compared"]
    """`separate`: the loss is a sum over samples, which accumulation reproduces. `coupled`: samples depend on each
    other, or on state that every forward pass moves. `not-compared`: nothing is known."""
    message: str
    """The figures, what is at fault, and what to do; or why nothing could be compared."""
    samples: NonNegativeInt = 0
    """Samples of the batch that was compared; 0 where none was."""
    precision: Literal["fp64", "fp32"] | None = None
    """Arithmetic of the comparison."""
    loss_error: NonNegativeFloat | None = None
    """Largest relative difference of a loss term; none where it is no finite number."""
    gradient_error: NonNegativeFloat | None = None
    """Largest relative difference of a gradient; none where it is no finite number."""


class Evidence(Document):
    """Everything that was tried, in order, and what it proves."""

    probes: tuple[ProbeResult, ...]
    """Every probe, in the order it ran."""
    proof: Proof
    """Why the size is the largest."""
    expected: ExpectedPeaks | None = None
    """The memory curve that seeded the search: an estimate's, or the one that a warm start had measured. None where
    no estimate could be made, and where the tuning went on from its recorded probes after a restart."""
    warm_start: WarmStart | None = None
    """The recommendation that warm-started the search. This one rests on it where `proof.stopped_by` is `warm-start`;
    else it has a proof of its own."""
    coupling: CouplingCheck | None = None
    """Check for coupled samples. None where no update can take more than one micro-batch, and in
    recommendations made before this was checked."""


class Headroom(Document):
    """What stays free at the recommended size."""

    limit_bytes: PositiveInt
    """The memory limit of the run, before the margin was taken off."""
    peak_bytes: NonNegativeInt
    """Most memory held at the recommended size: reserved, with the context, on CUDA; of the process on the CPU."""
    free_bytes: NonNegativeInt
    """Limit, or what other processes leave of the device if that is less, less peak."""
    free_fraction: Annotated[float, Field(ge=0.0, le=1.0)]
    """The same as a share of the limit."""


class Alternative(Document):
    """A plan for the same effective batch that fits as well."""

    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update."""
    micro_batch_size: PositiveInt
    """The plan's largest micro-batch."""
    chosen: bool
    """Whether it is the recommended plan."""
    source: Literal["measured", "modelled"]
    """Whether a probe ran this size, or memory and throughput are read off the lines between the sizes that ran."""
    peak_bytes: NonNegativeInt | None = None
    """Most memory held: reserved, with the context, on CUDA; of the process on the CPU. None where nothing tells."""
    samples_per_second: NonNegativeFloat | None = None
    """Samples of a rank over the time of an update, without reading data and without communication between ranks. Where
    the plan has more micro-batches than a timed update, the others are taken to last as long. None if nothing tells."""
    timed_updates: NonNegativeInt = 0
    """Updates that were timed at this size: one says little, none means that the throughput is modelled."""
    noise: NonNegativeFloat = 0.0
    """Standard error of the throughput, as a share of it; 0 where it is not known."""
    thrashing: bool = False
    """CUDA: whether the allocator had to give back its cache and try again, so that it fits, but slowly."""


class WhatIf(Document):
    """The same training with some choices changed that take less memory: estimated, no probe has run it."""

    changes: Annotated[dict[str, JsonValue], Field(min_length=1, examples=[{"precision": "bf16-mixed"}])]
    """Fields of the spec by dotted path, and what they would say instead."""
    measured: Literal[False] = False
    """It is no proof: a tuning of the changed spec measures."""
    source: Literal["estimated"] = "estimated"
    """Where the figures come from: an estimate's memory curve, calibrated with the probes of the requested spec."""
    plan: PlanSummary | None = None
    """The plan for the effective batch around the largest size; none when none is expected to fit."""
    largest_micro_batch_size: NonNegativeInt
    """The largest size that is expected to fit; 0 when none is."""
    surely_fits: NonNegativeInt
    """The largest size that fits also if memory is as much above the estimate as `error` allows."""
    may_fit: NonNegativeInt
    """The largest size that fits if memory is as much below the estimate as `error` allows."""
    error: Annotated[float, Field(ge=0.0, lt=1.0)]
    """How far the memory may be from the estimate, as a share of it."""
    peak_bytes: NonNegativeInt
    """Most memory expected at the largest size, or at the smallest when none is expected to fit: held by tensors on
    CUDA, by the process on the CPU."""


class Advice(Document):
    """Something the reader should know before using a recommendation."""

    code: str
    """A stable word, for example `batch-coupled-modules`."""
    message: str
    """What it means and what to do."""


class Timings(Document):
    """How long the tuning took."""

    total_seconds: NonNegativeFloat
    """From start to recommendation."""
    probe_seconds: NonNegativeFloat
    """Spent in probes."""
    probes: NonNegativeInt
    """Number of probes."""
    out_of_memory_probes: NonNegativeInt
    """Probes that ended in OOM."""


class Recommendation(Document):
    """The durable result of a tuning: plan, proof and evidence."""

    plan: Plan | None = None
    """What to train with: micro-batches that sum to exactly the effective batch. None when nothing fits."""
    largest_micro_batch_size: PositiveInt | None = None
    """The micro-batch that fits, proven by a run: the largest, or the one that the request's objective asks for. No
    micro-batch of the plan is above it, and those of the plan may all be smaller."""
    schema_version: Literal[1] = 1
    """Version of this document's layout."""
    id: str
    """Identifier, unique to this recommendation."""
    created_at: datetime
    """When it was made (UTC)."""
    feasible: bool
    """Whether any micro-batch fits."""
    infeasible_reason: str | None = None
    """Why none fits, with the numbers and what to change."""
    choice: str = ""
    """Why this plan and no other, in a sentence."""
    alternatives: tuple[Alternative, ...] = ()
    """Plans that fit, from the fewest steps upward, and what they take; the recommended one is among them."""
    what_ifs: tuple[WhatIf, ...] = ()
    """When requested: changes of the spec with which a larger micro-batch is expected to fit, the largest first. They
    are estimated, not run."""
    uniform: UniformPlan | None = None
    """The plan with one size repeated, when it was requested."""
    evidence: Evidence
    """Every probe, and what they prove."""
    headroom: Headroom | None = None
    """What stays free at the recommended size."""
    device: DeviceInfo
    """The device that was probed."""
    fingerprint: str
    """SHA-256 of everything the recommendation depends on."""
    environment: Environment
    """Environment variables the job must run with: the probes ran with them."""
    warnings: tuple[Advice, ...] = ()
    """What the reader should know."""
    versions: dict[str, str]
    """Versions of what changes memory: Python, torch, transformers, driver."""
    timings: Timings
    """How long it took."""
    request: TuningRequest
    """The request, the spec included."""
