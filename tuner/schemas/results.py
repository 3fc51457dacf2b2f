"""What comes back: probe results, the evidence of a search, and the recommendation. Pure data, no torch."""

from __future__ import annotations

from bisect import bisect_right
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from tuner.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt
from tuner.schemas.requests import DeviceId


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
