"""What comes back: probe results, the evidence of a search, and the recommendation. Pure data, no torch."""

from __future__ import annotations

from bisect import bisect_right
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from tuner.schemas.base import Document, Environment, NonNegativeFloat, NonNegativeInt, PositiveInt
from tuner.schemas.requests import DeviceId, TuningRequest


class Outcome(StrEnum):
    """How a probe ended."""

    FIT = "FIT"
    """Full optimizer updates ran within the limit."""
    OOM = "OOM"
    """The device could not give the memory, and there is evidence that this was the cause."""
    INVALID_SIZE = "INVALID_SIZE"
    """The size is illegal for a kernel for another reason than memory: an upper bound of another kind."""
    ERROR = "ERROR"
    """The workload failed for a reason that has nothing to do with size: a bug, a crash, an exit."""
    TIMED_OUT = "TIMED_OUT"
    """The probe did not end within its time."""
    LOST = "LOST"
    """The probe's process was ended from outside, with no sign of memory as the cause."""


class Phase(StrEnum):
    """How far a probe got."""

    START = "start"
    BUILD = "build"
    WARMUP = "warmup"
    MEASURE = "measure"
    DONE = "done"


class PhaseSeconds(Document):
    """Where the time of a probe went."""

    start: NonNegativeFloat = 0.0
    """From the request to the probe's own process running, in seconds."""
    build: NonNegativeFloat = 0.0
    """Building the model and its optimizer and moving them to the device, in seconds."""
    warmup: NonNegativeFloat = 0.0
    """The first optimizer update, which creates the optimizer's state, in seconds."""
    measure: NonNegativeFloat = 0.0
    """The second optimizer update, whose peaks are recorded, in seconds."""
    total: NonNegativeFloat = 0.0
    """From the request to the end of the probe's process, in seconds."""


class ModelSummary(Document):
    """What the probe saw in the built model."""

    parameters: NonNegativeInt
    """Number of parameters."""
    trainable_parameters: NonNegativeInt
    """Parameters that get a gradient."""
    parameter_bytes: NonNegativeInt
    """Bytes of all parameters and buffers, tied tensors counted once."""
    batch_coupled_modules: tuple[str, ...] = ()
    """Modules such as BatchNorm, whose result depends on which samples share a micro-batch."""


class UpdateTiming(Document):
    """How long an update takes, in the environment of the probe and under its limit: as in the job made from it."""

    updates: PositiveInt
    """Updates that were timed: several by a probe that measures time, one by any other."""
    micro_batch_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """The micro-batches of each of these updates, in order."""
    update_seconds: NonNegativeFloat
    """Seconds of an update, the optimizer's step included: the median."""
    micro_batch_seconds: NonNegativeFloat | None = None
    """Seconds from the start of a micro-batch to the start of the next, for all but the last of an update: the median;
    none where an update has one micro-batch."""
    noise: NonNegativeFloat = 0.0
    """Standard error of `update_seconds`, as a share of it; 0 where one update cannot tell."""

    def seconds_for(self, micro_batches: float) -> float:
        """Seconds of an update of this many such micro-batches: each further one lasts as long as the timed ones."""
        return self.update_seconds + (micro_batches - len(self.micro_batch_sizes)) * (self.micro_batch_seconds or 0.0)


class ProbeResult(Document):
    """One measured trial, with everything it saw."""

    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    accumulates: bool
    """Whether each update took several micro-batches (gradients stay while the next one runs) or one."""
    outcome: Outcome
    """How it ended."""
    phase: Phase
    """How far it got."""
    message: str = ""
    """One line: what happened."""
    details: str | None = None
    """For an OOM that an error reported: the words of the device's allocator, or of the library that raised it."""
    error_type: str | None = None
    """Class of the exception, or the signal or exit status of the process."""
    traceback: str | None = None
    """The workload's traceback, or the tail of the process's output, for failures that are not about memory."""
    peak_allocated_bytes: NonNegativeInt | None = None
    """CUDA: most bytes held by tensors during the measured update."""
    peak_reserved_bytes: NonNegativeInt | None = None
    """CUDA: most bytes held by the caching allocator during the measured update."""
    process_peak_bytes: NonNegativeInt | None = None
    """CPU: most private memory of the process, above what it had before the model was built: what the limit bounds."""
    resident_bytes: NonNegativeInt | None = None
    """Bytes held between updates: parameters and optimizer state, with no gradients and no activations."""
    limit_bytes: NonNegativeInt | None = None
    """The limit the probe ran under: on CUDA of what the allocator reserves, so without the context."""
    context_bytes: NonNegativeInt | None = None
    """CUDA: bytes of the device that the process's context took, outside the allocator, where it could be told."""
    other_processes_bytes: NonNegativeInt | None = None
    """CUDA: bytes that other processes held on the device when the probe began."""
    allocator_retries: NonNegativeInt | None = None
    """CUDA: times the allocator had to give back its cache and try again. A fit with retries is a thrashing fit."""
    seconds: PhaseSeconds = PhaseSeconds()
    """Where the time went."""
    model: ModelSummary | None = None
    """What the built model looks like, when it could be built."""
    measures_time: bool = False
    """Whether it was there to time the updates of a plan, after the search."""
    timing: UpdateTiming | None = None
    """How long the measured updates took; none for a failure."""

    @property
    def held_bytes(self) -> int | None:
        """The peak of all that was held: reserved, with the context, on CUDA; of the process on the CPU."""
        if self.peak_reserved_bytes is not None:
            return self.peak_reserved_bytes + (self.context_bytes or 0)
        return self.process_peak_bytes

    @property
    def used_bytes(self) -> int | None:
        """The peak that grows with the micro-batch: tensors on CUDA, the process on the CPU."""
        return self.peak_allocated_bytes if self.peak_allocated_bytes is not None else self.process_peak_bytes


class ExpectedPeak(Document):
    """What an estimate expects one micro-batch size to take."""

    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    used_bytes: PositiveInt
    """What ``ProbeResult.used_bytes`` is expected to be."""


class ExpectedPeaks(Document):
    """The memory curve of a workload as an estimate sees it: leads a search, and proves nothing."""

    points: Annotated[tuple[ExpectedPeak, ...], Field(min_length=2)]
    """By rising size; linear between them, and beyond them as between the last two."""
    resident_bytes: NonNegativeInt | None = None
    """What ``ProbeResult.resident_bytes`` is expected to be."""
    seconds: NonNegativeFloat = 0.0
    """Time the estimate took."""

    def used_bytes(self, micro_batch_size: float) -> float:
        """The bytes expected at a size."""
        places = [point.micro_batch_size for point in self.points]
        index = min(max(bisect_right(places, micro_batch_size), 1), len(places) - 1)
        low, high = self.points[index - 1], self.points[index]
        slope = (high.used_bytes - low.used_bytes) / (high.micro_batch_size - low.micro_batch_size)
        return low.used_bytes + slope * (micro_batch_size - low.micro_batch_size)


class DeviceInfo(Document):
    """A device of this host."""

    id: DeviceId
    """Its name, as torch names it."""
    kind: Literal["cpu", "cuda"]
    """What it is."""
    name: str
    """The product's name."""
    total_bytes: PositiveInt
    """Memory of the device; for the CPU, of the host or of the container's limit if that is smaller."""
    used_bytes: NonNegativeInt | None = None
    """Memory in use by all processes when this was read."""
    compute_capability: str | None = None
    """CUDA compute capability, for example `9.0`."""
    driver_version: str | None = None
    """Version of the driver."""


class Proof(Document):
    """Why the answer is the largest size: a fit, and what stops the next size."""

    fits: NonNegativeInt
    """The largest size known to fit; 0 when none does."""
    stopped_by: Literal["oom", "invalid-size", "bound", "earlier-answer", "timeout", "error", "lost"]
    """Reason for the end of the search: a measured OOM, a kernel's own limit, a bound set beforehand, or an OOM that an
    earlier tuning measured under other versions or another limit. Or a probe that was inconclusive: it did not end in
    time (`timeout`), failed for another reason than memory (`error`), or was ended from outside again and again
    (`lost`). Larger sizes than `fits` were not shown to fail by `bound`, `timeout`, `error` and `lost`."""
    next_size: PositiveInt | None = None
    """The next size on the grid, which was probed and failed, by the earlier tuning where it rests on one; none when a
    bound stops the search. For `timeout`, `error` and `lost` the size whose probe could not tell: sizes between it and
    `fits` may not have been tried."""
    statement: str
    """The same in a sentence."""

    @property
    def is_conclusive(self) -> bool:
        """Return whether the same search again would end alike; not where a probe could not tell."""
        return self.stopped_by not in {"timeout", "error", "lost"}

    @property
    def shows_larger_fail(self) -> bool:
        """Return whether the next size was measured to fail: `fits` is the largest then; else larger ones may fit."""
        return self.stopped_by in {"oom", "invalid-size", "earlier-answer"}


class EarlierAnswer(Document):
    """An earlier answer to the same question, under other versions or another limit."""

    recommendation_id: str
    """Its identifier."""
    created_at: datetime
    """When it was made (UTC)."""
    fingerprint: str
    """Its fingerprint: another than this answer's."""
    versions: dict[str, str]
    """The versions it was measured with."""
    memory_limit_bytes: PositiveInt | None = None
    """The limit it was measured under, before the margin; none where nothing fitted."""
    proof: Proof
    """What it had proven, then."""


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
    """Why the answer is the largest."""
    expected: ExpectedPeaks | None = None
    """The memory curve that led the search: an estimate's, or the one that an earlier answer had measured. None where
    no estimate could be made, and where the tuning went on from its recorded probes after a restart."""
    earlier: EarlierAnswer | None = None
    """The earlier answer to the same question that led the tuning. This one rests on it where `proof.stopped_by` is
    `earlier-answer`; else it has a proof of its own."""
    coupling: CouplingCheck | None = None
    """Check for coupled samples. None where no update can take more than one micro-batch, and in
    recommendations made before this was checked."""


class EffectiveBatchSize(Document):
    """The effective batch, asked and given."""

    requested: PositiveInt
    """Samples per update asked for."""
    achieved: NonNegativeInt
    """Samples per update the plan gives; 0 when no micro-batch fits."""
    exact: bool
    """Whether the two are the same."""


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


class UniformPlan(Document):
    """One micro-batch size, repeated: for frameworks that know no other way."""

    micro_batch_size: PositiveInt
    """Samples of every micro-batch."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update."""
    world_size: PositiveInt
    """Data-parallel ranks."""
    effective_batch_size: EffectiveBatchSize
    """Asked and given: a uniform plan cannot reach every number."""
    change: str
    """What this plan changes against the balanced one, in a sentence."""
    nearest: tuple[ReachableBatch, ...] = ()
    """Effective batches close by that larger micro-batches reach, when this plan's are poor or miss the target."""


class ReachableBatch(Document):
    """An effective batch that a uniform plan reaches exactly."""

    effective_batch_size: PositiveInt
    """Samples per update."""
    micro_batch_size: PositiveInt
    """Samples of every micro-batch."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update."""


class BalancedPlan(Document):
    """Micro-batch sizes that give exactly the effective batch, as even as whole samples allow."""

    effective_batch_size: PositiveInt
    """Samples per update over all ranks."""
    world_size: PositiveInt
    """Data-parallel ranks."""
    max_micro_batch_size: PositiveInt
    """The largest size allowed; no size of the plan is above it."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update (of the rank with the most)."""
    micro_batch_sizes: tuple[tuple[PositiveInt, ...], ...]
    """For each rank, the sizes of its micro-batches in order."""


class Alternative(Document):
    """A plan for the same effective batch that fits as well."""

    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update."""
    micro_batch_size: PositiveInt
    """The largest micro-batch of the plan."""
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
    """Where the figures come from: an estimate's memory curve, bent as the probes of the spec as asked bend theirs."""
    largest_micro_batch: NonNegativeInt
    """The largest size that is expected to fit; 0 when none is."""
    surely_fits: NonNegativeInt
    """The largest size that fits also if memory is as much above the estimate as `error` allows."""
    may_fit: NonNegativeInt
    """The largest size that fits if memory is as much below the estimate as `error` allows."""
    error: Annotated[float, Field(ge=0.0, lt=1.0)]
    """How far the memory may be from the estimate, as a share of it."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per rank and update at the largest size; none when none is expected to fit."""
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
    """The durable answer of a tuning: decision, plan and evidence."""

    schema_version: Literal[1] = 1
    """Version of this document's layout."""
    id: str
    """Identifier, unique to this answer."""
    created_at: datetime
    """When it was made (UTC)."""
    feasible: bool
    """Whether any micro-batch fits."""
    infeasible_reason: str | None = None
    """Why none fits, with the numbers and what to change."""
    micro_batch_size: PositiveInt | None = None
    """The micro-batch that fits, proven by a run: the largest, or the one that the request's objective asks for. No
    micro-batch of the plan is above it."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per rank and optimizer update."""
    choice: str = ""
    """Why this plan and no other, in a sentence."""
    alternatives: tuple[Alternative, ...] = ()
    """Plans that fit, from the fewest steps upward, and what they take; the recommended one is among them."""
    what_ifs: tuple[WhatIf, ...] = ()
    """When asked for: changes of the spec with which a larger micro-batch is expected to fit, the largest first. They
    are estimated, not run."""
    world_size: PositiveInt
    """Data-parallel ranks."""
    micro_batch_sizes: tuple[tuple[PositiveInt, ...], ...] = ()
    """For each rank, the sizes of its micro-batches; together exactly the effective batch."""
    effective_batch_size: EffectiveBatchSize
    """Asked and given."""
    uniform: UniformPlan | None = None
    """The plan with one size repeated, when it was asked for."""
    evidence: Evidence
    """Every probe, and what they prove."""
    headroom: Headroom | None = None
    """What stays free at the recommended size."""
    device: DeviceInfo
    """The device that was probed."""
    fingerprint: str
    """SHA-256 of everything the answer depends on."""
    environment: Environment
    """Environment variables the job must run with: the probes ran with them."""
    warnings: tuple[Advice, ...] = ()
    """What the reader should know."""
    versions: dict[str, str]
    """Versions of what changes memory: Python, torch, transformers, driver."""
    timings: Timings
    """How long it took."""
    request: TuningRequest
    """What was asked, the spec included."""


UniformPlan.model_rebuild()
