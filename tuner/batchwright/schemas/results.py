"""Results of probes and estimates of peaks, and devices. Pure data, no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from batchwright.device_traits import DeviceKind, DeviceTraits, traits_of
from batchwright.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt
from batchwright.schemas.requests import DeviceId
from batchwright.schemas.residuals import EstimateCorrection

PLAN_NOT_FOLLOWED = "plan-not-followed"
"""``ProbeResult.error_type`` where a command does not train by the figures of its plan."""

NO_OPTIMIZER = "no-optimizer"
"""``ProbeResult.error_type`` where a command makes backward passes without having any optimizer of torch."""

ERRORS_OF_IMPORTS = ("ModuleNotFoundError", "ImportError", "SyntaxError", "IndentationError")
"""``ProbeResult.error_type`` where a command cannot import its own code."""

NEARLY_FULL = 0.8
"""Share of the limit from which on memory may be the cause of an error that does not name its cause. A choice."""


class Outcome(StrEnum):
    """Outcome of a probe."""

    FIT = "FIT"
    """Full optimizer updates ran within the limit."""
    OOM = "OOM"
    """The device ran out of memory, with evidence that this was the cause."""
    INVALID_SIZE = "INVALID_SIZE"
    """A kernel rejects the size for another reason than memory, which is an upper bound too."""
    ERROR = "ERROR"
    """The workload failed for a reason unrelated to the size: a bug, a crash, an exit."""
    TIMED_OUT = "TIMED_OUT"
    """The probe did not end within its time limit."""
    LOST = "LOST"
    """The probe's process was ended from outside, with no sign of memory as the cause."""


class Phase(StrEnum):
    """Phase of a probe."""

    START = "start"
    BUILD = "build"
    WARMUP = "warmup"
    MEASURE = "measure"
    DONE = "done"


class PhaseSeconds(Document):
    """Durations of the phases of a probe."""

    start: NonNegativeFloat = 0.0
    """Seconds from the request to the start of the probe's process."""
    build: NonNegativeFloat = 0.0
    """Seconds for building the model and its optimizer and moving them to the device."""
    warmup: NonNegativeFloat = 0.0
    """Seconds of the first optimizer update, which creates the optimizer's state."""
    measure: NonNegativeFloat = 0.0
    """Seconds of the second optimizer update, whose peaks are recorded."""
    total: NonNegativeFloat = 0.0
    """Seconds from the request to the end of the probe's process."""


class ModelSummary(Document):
    """Properties of the built model."""

    parameters: NonNegativeInt
    """Number of parameters."""
    trainable_parameters: NonNegativeInt
    """Number of parameters that require a gradient."""
    parameter_bytes: NonNegativeInt
    """Bytes of all parameters and buffers, tied tensors counted once."""
    batch_coupled_modules: tuple[str, ...] = ()
    """Modules such as BatchNorm, whose output depends on the other samples of the micro-batch."""
    config_notes: tuple[str, ...] = ()
    """Notes on fields of a transformers config that its class does not declare."""
    in_eval_mode: bool = False
    """True if the model is in eval mode and has dropout or BatchNorm, which training mode would change."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients, which have the type of their parameters."""
        return self.parameter_bytes * self.trainable_parameters // max(1, self.parameters)


class UpdateTiming(Document):
    """Duration of an update in the environment and under the limit of the probe, which are those of the job."""

    updates: PositiveInt
    """Updates that were timed: several by a probe that measures time, one by any other."""
    micro_batch_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Sizes of the micro-batches of each timed update, in order."""
    update_seconds: NonNegativeFloat
    """Median seconds of an update, including the optimizer's step."""
    micro_batch_seconds: NonNegativeFloat | None = None
    """Median seconds from the start of a micro-batch to the start of the next; none where an update has one
    micro-batch."""
    noise: NonNegativeFloat = 0.0
    """Relative standard error of `update_seconds`; 0 for a single update."""

    def seconds_for(self, micro_batches: float) -> float:
        """Extrapolate the seconds of an update with this many micro-batches of the timed size."""
        return self.update_seconds + (micro_batches - len(self.micro_batch_sizes)) * (self.micro_batch_seconds or 0.0)


class CountedRank(Document):
    """The updates of one optimizer on one rank of a command, as counted in its process."""

    rank: NonNegativeInt
    """Rank of the process; 0 where a command has one."""
    optimizer: str | None = None
    """Class of the optimizer whose steps ended the updates, with a number from the second of a class on."""
    backward_passes: tuple[NonNegativeInt, ...] = ()
    """Backward passes of each update, in order."""
    samples: dict[str, tuple[NonNegativeInt, ...]] = Field(default_factory=dict)
    """Samples of each update by everything that may count them: `loader 1`, the indices that the first data loader
    drew, and `dimension 0`, the first dimension of what the model was called with. Empty where nothing shows them."""
    epoch_ends: tuple[NonNegativeInt, ...] = ()
    """Places in `backward_passes` of updates in or after which a data loader began anew, and that may be smaller."""
    skipped_updates: NonNegativeInt = 0
    """Updates whose gradients were discarded before a step, as by a loss scaler."""


class CountedUpdates(Document):
    """Figures counted inside the processes of a command."""

    world_size: PositiveInt
    """Data-parallel ranks that made updates."""
    ranks: tuple[CountedRank, ...]
    """The updates of each rank and optimizer."""
    accumulation_steps: PositiveInt | None
    """Micro-batches of an update on a rank that the command was given; none where it takes no accumulation."""
    of_plan: bool
    """True if the command ran with the figures of a plan, as a job would."""
    as_planned: bool | None
    """True if the counted figures are those that the command was given; none where nothing confirms or refutes them."""
    statement: str
    """The figures in a sentence."""
    shapes: dict[str, tuple[tuple[NonNegativeInt, NonNegativeInt], ...]] = Field(default_factory=dict)
    """Smallest and largest size of each dimension of what models were called with, by the class of the model and the
    name or place of the argument."""
    unseen: dict[str, str] = Field(default_factory=dict)
    """What the updates did not show and may take memory later, by the code of its warning."""
    longest_first: str = ""
    """Items that the batches had because they are the longest, in words; empty where the program's own were drawn."""
    batch_norms: bool = False
    """True if the command trains with batch norms, whose statistics are those of a micro-batch."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of Python and torch in the processes of the command."""


class SharedImports(Document):
    """The import statements of a command's program that ran once, in the process that is forked for each probe."""

    statements: NonNegativeInt = 0
    """Number of statements."""
    torch: bool = False
    """True if they imported torch, which every probe has to import otherwise."""
    place: str = ""
    """File and line of the first statement that runs in every probe, such as `train.py:12`; empty where every
    statement was an import, and where none could run ahead."""
    reason: str = ""
    """Why they ended there, or why no process was forked."""


MOST_NAMED_FILES = 20
"""Files of each kind that a result names."""

_MOST_IN_WORDS = 3
"""Files of each kind that a sentence names."""
_KINDS_OF_FILES = {
    "replaced": "replaced or removed",
    "changed": "changed or appended to",
    "made": "made",
    "remade": "wrote again, after an earlier probe,",
}


class WrittenFiles(Document):
    """What the processes of a command did to files outside of the folders of their probe and of caches.

    Writers of Python itself, of torch and of safetensors are seen; other native code and other programs are not.
    """

    replaced: tuple[str, ...] = ()
    """Files from before the tuning that were replaced, emptied, moved or removed."""
    changed: tuple[str, ...] = ()
    """Files from before the tuning that were opened to append to them or to change them."""
    remade: tuple[str, ...] = ()
    """Files of earlier probes of the tuning that this probe replaced, changed or removed."""
    made: tuple[str, ...] = ()
    """Files that did not exist."""
    counts: dict[str, PositiveInt] = Field(default_factory=dict)
    """Number of the files of each kind, of which the first are named."""

    @classmethod
    def of_all(cls, probes: Sequence[WrittenFiles]) -> WrittenFiles:
        """What the probes of a tuning did together: each file once, by the first kind that applies."""
        names: dict[str, tuple[str, ...]] = {}
        counts: dict[str, int] = {}
        for kind in _KINDS_OF_FILES:
            listed = {path for earlier in names.values() for path in earlier}
            found = [path for probe in probes for path in getattr(probe, kind) if path not in listed]
            names[kind] = tuple(dict.fromkeys(found))[:MOST_NAMED_FILES]
            if found:
                counts[kind] = max(len(names[kind]), *(probe.counts.get(kind, 0) for probe in probes))
        return cls(**names, counts=counts)

    def after(self, earlier: Iterable[WrittenFiles]) -> WrittenFiles:
        """Return these files with those of earlier probes of the tuning as such.

        A process that goes on with a tuning takes every file that it finds for the user's.
        """
        own = {path for files in earlier for path in (*files.made, *files.remade)}
        names = {"remade": self.remade}
        counts = dict(self.counts)
        for kind in ("replaced", "changed"):
            listed: tuple[str, ...] = getattr(self, kind)
            names[kind] = tuple(path for path in listed if path not in own)
            names["remade"] += tuple(path for path in listed if path in own)
            found = len(listed) - len(names[kind])
            is_whole = not names[kind] and len(listed) < MOST_NAMED_FILES  # several ranks may count one file
            counts[kind] = 0 if is_whole else counts.get(kind, 0) - found
            counts["remade"] = counts.get("remade", 0) + found
        return self.model_copy(update={**names, "counts": {kind: count for kind, count in counts.items() if count > 0}})

    @property
    def in_words(self) -> str:
        """The files of each kind in a sentence without a subject, those of the user first."""
        parts = []
        for kind, verb in _KINDS_OF_FILES.items():
            names: tuple[str, ...] = getattr(self, kind)
            more = self.counts.get(kind, 0) - len(names[:_MOST_IN_WORDS])
            if names:
                named = ", ".join(names[:_MOST_IN_WORDS])
                parts.append(f"{verb} {named}{f' and {more} more' if more > 0 else ''}")
        return "; ".join(parts)


class RankResult(Document):
    """The result of one rank of a probe that ran several."""

    rank: NonNegativeInt
    """Rank of the process."""
    outcome: Outcome
    """Outcome of the rank. LOST where it was ended after another rank had failed."""
    held_bytes: NonNegativeInt | None = None
    """Peak of all memory held, as that of the probe; none where the rank left no result."""


class ProbeResult(Document):
    """The result of one probe."""

    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    accumulates: bool
    """True if each update took several micro-batches, so that gradients stay while the next one runs."""
    micro_batch_sizes: tuple[PositiveInt, ...] = ()
    """Sizes of the micro-batches of each update, in order: `micro_batch_size` repeated, or those of a plan, of which it
    is the largest. Empty in results of versions that did not record it."""
    outcome: Outcome
    """Outcome of the probe."""
    phase: Phase
    """Last phase that the probe reached."""
    failed_micro_batch: PositiveInt | None = None
    """Micro-batch of the first update that failed, counted from 1. None for a fit, for a failure at another time, and
    where it is not known."""
    message: str = ""
    """Explanation of the outcome, one line."""
    details: str | None = None
    """Message of the allocator or library that raised an OOM error."""
    error_type: str | None = None
    """Class of the exception, or the signal or exit status of the process."""
    traceback: str | None = None
    """The workload's traceback, or the end of the process's output, for failures unrelated to memory."""
    peak_allocated_bytes: NonNegativeInt | None = None
    """CUDA: most bytes held by tensors during the measured update."""
    peak_reserved_bytes: NonNegativeInt | None = None
    """CUDA: most bytes held by the caching allocator during the measured update."""
    process_peak_bytes: NonNegativeInt | None = None
    """CPU: peak of the private memory of the process, less its memory before the model was built. The limit applies to
    this."""
    resident_bytes: NonNegativeInt | None = None
    """Bytes held between updates: parameters and optimizer state, with no gradients and no activations. Of a command,
    those held between two micro-batches of an update, with the gradients and all else that the program keeps."""
    limit_bytes: NonNegativeInt | None = None
    """Limit of the probe: on CUDA, of the memory reserved by the allocator, so without the context."""
    context_bytes: NonNegativeInt | None = None
    """CUDA: bytes of the process's context, outside the allocator; none where not known."""
    other_processes_bytes: NonNegativeInt | None = None
    """CUDA: bytes that other processes held on the device when the probe began."""
    allocator_retries: NonNegativeInt | None = None
    """CUDA: times the allocator released its cache and retried. A fit with retries is a thrashing fit."""
    seconds: PhaseSeconds = PhaseSeconds()
    """Durations of the phases."""
    model: ModelSummary | None = None
    """Properties of the model; none when it could not be built."""
    ranks: tuple[RankResult, ...] = ()
    """Results of the ranks, where several ran: the other figures are those of the worst. Empty where one ran."""
    simulated_ranks: PositiveInt | None = None
    """Ranks of the process group in which one rank ran without the others: its shards and buffers were as large as with
    all of them. None where all ranks of the workload ran."""
    measures_time: bool = False
    """True for a probe that timed the updates of a plan after the search."""
    brackets: bool = False
    """True for a probe that made one update instead of two: it narrowed the search, and its fit proves no size."""
    timing: UpdateTiming | None = None
    """Duration of the measured updates; none for a failure, and after one update."""
    verifies_plan: bool = False
    """True for the run of a command with the figures of its plan, after the search."""
    forked: bool = False
    """True for a command whose own process was forked after the imports of its program. Ranks that a launcher starts
    are always new processes."""
    shared_imports: SharedImports | None = None
    """The imports that this probe of a command shared with others, or why it shared none. None for a process that was
    started to repeat a forked one, or to run the plan."""
    counted: CountedUpdates | None = None
    """Figures counted inside the processes of a command; none for other probes, and before a first update."""
    files: WrittenFiles | None = None
    """What a command did to files outside of the probe's folders; none where it did nothing, and for other probes."""

    @property
    def runs_plan(self) -> bool:
        """Return whether the probe ran the micro-batches of a plan: to time or verify it, or since sizes differ."""
        return self.measures_time or self.verifies_plan or len(set(self.micro_batch_sizes)) > 1

    @property
    def shows_size(self) -> bool:
        """Return whether the probe shows if its size fits.

        A plan that begins with two micro-batches of the size shows it by a fit, or by a failure in one of these two.
        """
        if not self.runs_plan:
            return True
        if self.measures_time or self.verifies_plan or self.micro_batch_sizes[:2] != (self.micro_batch_size,) * 2:
            return False
        failed_early = self.failed_micro_batch is not None and self.failed_micro_batch <= 2  # noqa: PLR2004
        return self.outcome is Outcome.FIT or (self.outcome in {Outcome.OOM, Outcome.INVALID_SIZE} and failed_early)

    @property
    def is_device_error(self) -> bool:
        """Return whether the device failed, or could not be used, whatever the size."""
        return self.error_type == "batchwright.errors.DeviceError"

    @property
    def fails_at_any_size(self) -> bool:
        """Return whether an error would occur at every other size too."""
        return self.is_device_error or self.error_type in {NO_OPTIMIZER, *ERRORS_OF_IMPORTS}

    @property
    def held_bytes(self) -> int | None:
        """Peak of all memory held: reserved, with the context, on CUDA; of the process on the CPU."""
        if self.peak_reserved_bytes is not None:
            return self.peak_reserved_bytes + (self.context_bytes or 0)
        return self.process_peak_bytes

    @property
    def share_of_limit(self) -> float | None:
        """Peak of the memory that the limit bounds, as a share of the limit; none where either is not known."""
        peak = self.process_peak_bytes if self.peak_reserved_bytes is None else self.peak_reserved_bytes
        return None if peak is None or not self.limit_bytes else peak / self.limit_bytes

    @property
    def used_bytes(self) -> int | None:
        """Peak of the memory that grows with the micro-batch: tensors on CUDA, the process on the CPU."""
        return self.peak_allocated_bytes if self.peak_allocated_bytes is not None else self.process_peak_bytes


class ExpectedPeak(Document):
    """Estimated peak of one micro-batch size."""

    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    used_bytes: PositiveInt
    """Expected ``ProbeResult.used_bytes``."""


class ExpectedPeaks(Document):
    """Estimated memory curve of a workload. It seeds a search, and is not a proof."""

    points: Annotated[tuple[ExpectedPeak, ...], Field(min_length=2)]
    """Peaks by rising size. Between them the curve is linear; beyond them it is extrapolated."""
    resident_bytes: NonNegativeInt | None = None
    """Expected ``ProbeResult.resident_bytes``."""
    usable_bytes: PositiveInt | None = None
    """CUDA: expected ``ProbeResult.used_bytes`` at which memory runs out, by replays in a simulation of torch's caching
    allocator: the limit less the context and what is lost to fragmentation. None where the limit itself is expected."""
    reservable_bytes: PositiveInt | None = None
    """CUDA: bytes that the allocator could reserve in those replays: expected ``ProbeResult.limit_bytes``."""
    seconds: NonNegativeFloat = 0.0
    """Duration of the estimate."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of torch, transformers, Batchwright and Python with which the workload was traced, or measured by the
    tuning of a warm start: other versions may take other memory."""
    correction: EstimateCorrection | None = None
    """Correction that a service has learned from earlier tunings on such a device. The points are without it."""

    def usable_of(self, reservable_bytes: int | None) -> int | None:
        """Expected bytes at which memory runs out, where the allocator may really reserve ``reservable_bytes``.

        The share that is lost to fragmentation is taken to be that of the replays.
        """
        if self.usable_bytes is None or self.reservable_bytes is None or not reservable_bytes:
            return self.usable_bytes
        return max(1, round(self.usable_bytes * (reservable_bytes / self.reservable_bytes)))

    def used_bytes(self, micro_batch_size: float) -> float:
        """Expected bytes at a size."""
        sizes = [point.micro_batch_size for point in self.points]
        index = min(max(bisect_right(sizes, micro_batch_size), 1), len(sizes) - 1)
        low, high = self.points[index - 1], self.points[index]
        slope = (high.used_bytes - low.used_bytes) / (high.micro_batch_size - low.micro_batch_size)
        return low.used_bytes + slope * (micro_batch_size - low.micro_batch_size)


class DeviceInfo(Document):
    """A device of this host."""

    id: DeviceId
    """Torch's name of the device."""
    kind: DeviceKind
    """Kind of the device."""
    name: str
    """Product name."""
    total_bytes: PositiveInt
    """Memory of the device; for the CPU, of the host, or the container's limit if that is smaller."""
    used_bytes: NonNegativeInt | None = None
    """Memory in use by all processes at the time of reading."""
    compute_capability: str | None = None
    """CUDA compute capability, for example `9.0`."""
    driver_version: str | None = None
    """Version of the driver."""
    least_context_bytes: NonNegativeInt | None = None
    """CUDA: fewest bytes that the context of a process takes on this kind of card (`gpus.toml`), so that a memory limit
    must be above it; none on the CPU."""
    expected_context_bytes: NonNegativeInt | None = None
    """CUDA: bytes that the context of a process is expected to take on this kind of card (`gpus.toml`)."""
    allocatable_bytes: PositiveInt | None = None
    """CUDA: memory of this kind of card as torch counts it (`gpus.toml`), which is `total_bytes` less what the driver
    reserves; none for a card that is not listed."""

    @property
    def traits(self) -> DeviceTraits:
        """What differs between this kind of device and others."""
        return traits_of(self.kind)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability as two numbers, to compare; None on the CPU."""
        major, _, minor = (self.compute_capability or "").partition(".")
        return (int(major), int(minor or 0)) if major else None
