"""Requests for tunings, probes, checks, estimates of peaks and training runs. Pure data, no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from tuner.schemas.base import Document, PositiveInt, typed_size
from tuner.schemas.field_errors import described_pattern
from tuner.schemas.workload import WorkloadSpec
from tuner.units import LONGEST_SIZE

_DEVICE = described_pattern(r"^(cpu|cuda:\d+)$", "must be `cpu`, or `cuda:` and a number, for example `cuda:0`")

DeviceId = Annotated[str, Field(pattern=_DEVICE, examples=["cuda:0", "cpu"])]
"""A device of this host, by torch's name."""

SMALLEST_MEMORY_LIMIT_BYTES = 16 * 1024**2
"""The thread pools of a training process already take about this much."""

MemoryLimit = Annotated[
    int,
    Field(ge=SMALLEST_MEMORY_LIMIT_BYTES),
    BeforeValidator(typed_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": SMALLEST_MEMORY_LIMIT_BYTES},
                {"type": "string", "maxLength": LONGEST_SIZE, "examples": ["24GiB"]},
            ]
        }
    ),
]
"""A limit in bytes, which requests may also give as a size such as ``24GiB``."""

LARGEST_EFFECTIVE_BATCH_SIZE = 2**22
"""A recommendation lists every micro-batch of an update: this keeps the document below some megabytes."""


Objective = Literal["largest", "fewest_steps", "fastest"]
"""Objective of a tuning: see ``TuningRequest.objective``."""


class TuningRequest(Document):
    """Find the largest micro-batch that fits, or the best plan, and plan the effective batch."""

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
    memory_limit_bytes: MemoryLimit | None = None
    """Memory the run may take on the device, in bytes or as a size such as `24GiB`, which becomes a number of bytes;
    the whole device when absent (on the CPU: half of the host's memory)."""
    memory_margin: Annotated[float, Field(ge=0.0, le=0.5)] = 0.03
    """Share of the limit that probes must leave free, for differences between a probe and a long run."""
    granularity: PositiveInt = 1
    """Search only multiples of this size, for example 8. The sizes of the plan are balanced and need not be multiples.
    For `fastest` the sizes of the plan are timed."""
    max_micro_batch_size: PositiveInt | None = None
    """Upper bound of the micro-batch size."""
    uniform: bool = False
    """Also plan with one repeated micro-batch size, for frameworks that require this."""
    what_if: bool = False
    """Also estimate, without probes, which micro-batch would fit with another precision, activation checkpointing or
    another implementation of the optimizer."""
    probe_timeout_seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 300.0
    """Time limit of one probe."""
    allow_batch_coupling: bool = False
    """Plan several micro-batches, and train with them, although the loss couples the samples of a batch (BatchNorm,
    in-batch negatives), so that accumulated updates differ from full-batch ones. Otherwise such a loss has the whole
    batch in one micro-batch on one rank, or fails the tuning before any other probe."""


class CouplingRequest(Document):
    """Check whether the loss of a workload couples the samples of a batch, before any probe."""

    spec: WorkloadSpec
    """The workload to train."""
    device: DeviceId
    """Device to run on."""
    limit_bytes: Annotated[int, Field(ge=1)]
    """Memory the check may take on the device."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Time limit of the check."""


class ProbeRequest(Document):
    """One measured trial: run full optimizer updates of ``spec`` at ``micro_batch_size``.

    The micro-batches of an update are those of ``tuner.planning.accumulation.probe_window``.
    """

    spec: WorkloadSpec
    """The workload to train."""
    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    samples_per_window: PositiveInt
    """This rank's samples of one update. Above the micro-batch size, gradients stay while the next micro-batch runs."""
    device: DeviceId
    """Device to run on."""
    limit_bytes: Annotated[int, Field(ge=1)] | None = None
    """Memory the probe may take, after the margin; none for all memory of the device."""
    memory_margin: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """Share of the free memory of a card that must stay free, where that is less than the limit."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 300.0
    """Time limit of the probe."""
    measures_time: bool = False
    """True for a probe that times several updates of the plan with this largest micro-batch."""
    runs_plan: bool = False
    """True for a probe of the plan with this largest micro-batch, and not of two micro-batches of this size."""

    @property
    def accumulates(self) -> bool:
        """True if an update takes more than one micro-batch."""
        return self.samples_per_window > self.micro_batch_size


class ExpectationRequest(Document):
    """Estimate the peaks that the probes of a tuning will measure."""

    spec: WorkloadSpec
    """The workload to train."""
    samples_per_window: PositiveInt
    """This rank's samples of one update."""
    largest_micro_batch: PositiveInt
    """The largest size that is searched."""
    limit_bytes: Annotated[int, Field(ge=1)]
    """Memory a probe may take, after the margin."""
    compute_capability: tuple[int, int] | None = None
    """Compute capability of the card, as torch reports it; none for the CPU."""


class TrainingRequest(Document):
    """A training run made from a recommendation."""

    updates: PositiveInt = 100
    """Optimizer updates to make."""
    checkpoint_every: PositiveInt = 50
    """Updates between checkpoints; one is also written at the end and on SIGTERM."""
    keep_checkpoints: PositiveInt = 2
    """Number of the newest checkpoints to keep."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights and of the order of samples."""
    processes_per_node: PositiveInt | None = None
    """Processes on this host, one per device: the ranks of the run. The recommendation's world size when absent."""
    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes per rank that prefetch data; with 0, data is loaded between updates. The resulting weights are
    bit-identical unless memory runs out: micro-batches that were prefetched before are then divided one by one."""
    allow_batch_coupling: bool = False
    """Train although the loss couples the samples of a batch (BatchNorm, in-batch negatives), so that accumulated
    updates differ from full-batch ones. Not needed where the tuning's request allowed it."""
    tensorboard: bool = False
    """Also write the progress for TensorBoard."""
