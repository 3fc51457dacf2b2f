"""What a user asks for: a tuning, and a training run made from its recommendation. Pure data, no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tuner.schemas.base import Document, PositiveInt
from tuner.schemas.field_errors import described_pattern
from tuner.schemas.workload import WorkloadSpec

_DEVICE = described_pattern(r"^(cpu|cuda:\d+)$", "must be `cpu`, or `cuda:` and a number, for example `cuda:0`")

DeviceId = Annotated[str, Field(pattern=_DEVICE, examples=["cuda:0", "cpu"])]
"""A device of this host, named as torch names it."""

SMALLEST_MEMORY_LIMIT_BYTES = 16 * 1024**2
"""Below this not even the thread pools of a training process find room."""


LARGEST_EFFECTIVE_BATCH_SIZE = 2**22
"""A recommendation lists every micro-batch of an update: this keeps the document below some megabytes."""


Objective = Literal["largest", "fewest_steps", "fastest"]
"""What a tuning is for: see ``TuningRequest.objective``."""


class TuningRequest(Document):
    """Find the largest micro-batch that fits, or the best plan, and plan this effective batch around it."""

    spec: WorkloadSpec
    """The workload to train."""
    effective_batch_size: Annotated[int, Field(ge=1, le=LARGEST_EFFECTIVE_BATCH_SIZE)]
    """Samples per optimizer update over all ranks: the plan gives exactly this many."""
    objective: Objective = "largest"
    """`largest`: the largest micro-batch that fits. `fewest_steps`: the fewest accumulation steps, which takes fewer
    probes, since few sizes change their number. `fastest`: the plan with the most samples per second, measured among
    those with few steps; of equally fast ones, the one with the least memory."""
    device: DeviceId | None = None
    """The device to probe; the first GPU, or the CPU where there is none, when absent."""
    memory_limit_bytes: Annotated[int, Field(ge=SMALLEST_MEMORY_LIMIT_BYTES)] | None = None
    """Memory the run may take on the device; the whole device when absent (on the CPU: half of the host's memory)."""
    memory_margin: Annotated[float, Field(ge=0.0, le=0.5)] = 0.03
    """Share of the limit that probes must leave free, for what differs between a probe and a run of days."""
    granularity: PositiveInt = 1
    """Search only multiples of this size, for example 8. The plan below it is balanced, so its sizes need not be; for
    `fastest` the plan's own sizes are timed."""
    max_micro_batch_size: PositiveInt | None = None
    """Never go above this size, whatever fits."""
    uniform: bool = False
    """Also plan with one micro-batch size repeated, for frameworks that know no other way."""
    what_if: bool = False
    """Also estimate, without probes, with which changes of precision, activation checkpointing or the optimizer's
    implementation a larger micro-batch would fit."""
    probe_timeout_seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 300.0
    """Time after which one probe is given up as hanging."""
    allow_batch_coupling: bool = False
    """Plan several micro-batches, and train with them, although the loss couples the samples of a batch (BatchNorm,
    in-batch negatives), so that accumulated updates differ from full-batch ones. Otherwise such a loss has the whole
    batch in one micro-batch on one rank, or fails the tuning before any other probe."""


class CouplingRequest(Document):
    """Check whether the loss of a workload couples the samples of a batch, before any probe."""

    spec: WorkloadSpec
    """The workload to train."""
    device: DeviceId
    """Where to run."""
    limit_bytes: Annotated[int, Field(ge=1)]
    """Memory the check may take on the device."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Time after which the check is given up."""


class ProbeRequest(Document):
    """One measured trial: run full optimizer updates of ``spec`` at ``micro_batch_size``."""

    spec: WorkloadSpec
    """The workload to train."""
    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    samples_per_window: PositiveInt
    """This rank's samples of one update. Above the micro-batch size, gradients stay while the next micro-batch runs."""
    device: DeviceId
    """Where to run."""
    limit_bytes: Annotated[int, Field(ge=1)] | None = None
    """Memory the probe may take, margin already taken off; none to take what the device has."""
    memory_margin: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """Share of what is really free on a card that must stay so, where that is less than the limit."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 300.0
    """Time after which the probe is given up as hanging."""
    measures_time: bool = False
    """Whether it is there to time updates of the plan with this largest micro-batch, several of them: each takes up to
    four of the plan's micro-batches."""

    @property
    def accumulates(self) -> bool:
        """Whether an update takes more than one micro-batch."""
        return self.samples_per_window > self.micro_batch_size


class ExpectationRequest(Document):
    """Estimate what the probes of a tuning will measure."""

    spec: WorkloadSpec
    """The workload to train."""
    samples_per_window: PositiveInt
    """This rank's samples of one update."""
    largest_micro_batch: PositiveInt
    """The largest size that is searched."""
    limit_bytes: Annotated[int, Field(ge=1)]
    """Memory a probe may take, margin already taken off."""
    compute_capability: tuple[int, int] | None = None
    """Of the card, as torch reports it; none for the CPU."""


class TrainingRequest(Document):
    """A training run made from a recommendation."""

    updates: PositiveInt = 100
    """Optimizer updates to make."""
    checkpoint_every: PositiveInt = 50
    """Updates between checkpoints; one is also written at the end and on SIGTERM."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints to keep."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights and of the order of samples."""
    processes_per_node: PositiveInt | None = None
    """Processes on this host, one per device: the ranks of the run. The recommendation's world size when absent."""
    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes per rank that load data ahead of use; 0 loads between updates. The same weights come out either way,
    to the last bit unless memory runs out: micro-batches that were loaded before that are divided one by one."""
    allow_batch_coupling: bool = False
    """Train although the loss couples the samples of a batch (BatchNorm, in-batch negatives), so that accumulated
    updates differ from full-batch ones. Not needed where the tuning's request allowed it."""
    tensorboard: bool = False
    """Also write the progress for TensorBoard."""
