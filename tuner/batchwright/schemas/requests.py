"""Requests for tunings, probes, checks, estimates of peaks and training runs. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Annotated, Literal, Self, TypeAlias, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from batchwright.arithmetic import Arithmetic, divisors
from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.base import Document, NonNegativeInt, PositiveInt, texts_schema, typed_size
from batchwright.schemas.command import FIGURES, CommandSpec, Spec
from batchwright.schemas.field_errors import described_pattern
from batchwright.schemas.workload import WorkloadSpec
from batchwright.units import LONGEST_SIZE, format_bytes

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

MOST_DEVICES_PER_NODE = 64
_NAME_PATTERN = described_pattern(r"^[ -~]*[!-~][ -~]*$", "must be printable ASCII text")


class HardwareRequest(Document):
    """Hardware that work needs, wherever it is: any worker that serves it may take the work."""

    gpu: Annotated[str, Field(max_length=60, pattern=_NAME_PATTERN, examples=["H100-80GB"])] | None = None
    """A GPU of the catalogue (`GET /v1/gpus`), in any spelling that `batchwright estimate --gpu` knows."""
    product: Annotated[str, Field(max_length=120, pattern=_NAME_PATTERN, examples=["NVIDIA A100*"])] | None = None
    """Product name of the device as its driver reports it, or a pattern of it: `*` stands for any text, `?` for one
    character; case does not matter. Processors have product names too: without this field only GPUs are meant."""
    min_memory_bytes: MemoryLimit | None = None
    """Least memory of each device, in bytes or as a size such as `40GiB`."""
    devices_per_node: Annotated[int, Field(ge=1, le=MOST_DEVICES_PER_NODE)] = 1
    """Devices that the work takes at once, all of one host and of one kind."""

    @model_validator(mode="after")
    def _names_hardware(self) -> Self:
        if self.gpu is None and self.product is None and self.min_memory_bytes is None:
            raise ValueError("give at least one of `gpu`, `product` and `min_memory_bytes`")
        return self

    @property
    def in_words(self) -> str:
        """The hardware in words, such as ``H100-80GB`` or ``2 x a GPU with at least 40 GiB on one host``."""
        text = " ".join(name for name in (self.gpu, self.product) if name is not None) or "a GPU"
        if self.min_memory_bytes is not None:
            text += f" with at least {format_bytes(self.min_memory_bytes)}"
        return text if self.devices_per_node == 1 else f"{self.devices_per_node} x {text} on one host"


# --- names ---

_PART = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DOMAIN = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_UNPRINTED = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
"""Control characters of C0 and C1, separators of lines, and those that turn the direction of the text after a name."""
_UNSEEN = _UNPRINTED + r"\x20\xa0\u200b-\u200f\u2060\u3000\ufeff"
PRINTED = described_pattern(f"^[^{_UNPRINTED}]*$", "must not contain control characters")
"""Pattern of texts on one line of a file or a terminal."""
_NAME = described_pattern(
    f"^[^{_UNSEEN}]([^{_UNPRINTED}]*[^{_UNSEEN}])?$",
    "must not contain control characters, nor begin or end with a space",
)
_LABEL_KEY = described_pattern(
    rf"^({_DOMAIN}(\.{_DOMAIN})*/)?{_PART}$",
    "must have a key as Kubernetes labels have: at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit "
    "at both ends, and optionally a domain and `/` before it",
)
_LABEL_VALUE = described_pattern(
    f"^({_PART})?$",
    "must be empty, or at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends",
)
_PROJECT = described_pattern(
    f"^{_PART}$", "must have at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends"
)
_LONGEST_NAME = 120
_LONGEST_KEY = 253 + 1 + 63
_LONGEST_VALUE = 63
_MOST_LABELS = 32

Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME, pattern=_NAME, examples=["llama-8b, seq 4096"])]
"""A name that a person gave."""
Project = Annotated[str, Field(min_length=1, max_length=_LONGEST_VALUE, pattern=_PROJECT, examples=["language-models"])]
"""A project, with the bounds of a label's value."""
Labels = Annotated[
    dict[
        Annotated[str, Field(pattern=_LABEL_KEY, max_length=_LONGEST_KEY)],
        Annotated[str, Field(pattern=_LABEL_VALUE, max_length=_LONGEST_VALUE)],
    ],
    Field(max_length=_MOST_LABELS),
    texts_schema(
        (_LABEL_KEY, _LONGEST_KEY), (_LABEL_VALUE, _LONGEST_VALUE), _MOST_LABELS, examples=[{"team": "vision"}]
    ),
]
"""Labels, by key, with the bounds of Kubernetes labels. Pydantic's own schema would leave other keys unchecked."""


class Named(Document):
    """The names of a tuning, recommendation or job. Neither memory nor a fingerprint depends on them."""

    name: Name | None = None
    """Name that tells it from others in lists."""
    project: Project | None = None
    """Project that it belongs to."""
    labels: Labels = Field(default_factory=dict)
    """Labels by key, with the bounds of Kubernetes labels, by which lists can be filtered."""

    @property
    def names(self) -> Named:
        """The names alone."""
        return Named(name=self.name, project=self.project, labels=self.labels)

    @property
    def is_named(self) -> bool:
        """Return whether there is a name, a project or a label."""
        return self.name is not None or self.project is not None or bool(self.labels)


UNNAMED = Named()

# --- requests ---

LARGEST_EFFECTIVE_BATCH_SIZE = 2**22
"""A recommendation lists every micro-batch of an update: this keeps the document below some megabytes."""


_LARGEST_DIVISOR = 4097
"""Micro-batch sizes of which the multiples are tried for a division in a placeholder."""

Objective = Literal["largest", "fewest_steps", "fastest"]
"""Objective of a tuning: see ``TuningRequest.objective``."""


class Baseline(Document):
    """The plan you train with today, on one rank: the recommendation says what it gains over this plan."""

    micro_batch_size: Annotated[int, Field(ge=1, le=LARGEST_EFFECTIVE_BATCH_SIZE, examples=[8])]
    """Samples per forward and backward pass."""
    accumulation_steps: Annotated[int, Field(ge=1, le=LARGEST_EFFECTIVE_BATCH_SIZE)] | None = None
    """Micro-batches per rank and update. Default: as many as the effective batch takes. The gain says so if they do not
    give the effective batch."""


class TuningRequest(Document):
    """Find the largest micro-batch that fits, or the best plan, and plan the effective batch."""

    spec: Spec
    """The workload to train, or the command that trains it."""
    effective_batch_size: Annotated[int, Field(ge=1, le=LARGEST_EFFECTIVE_BATCH_SIZE)]
    """Samples per optimizer update over all ranks: the plan gives exactly this many."""
    objective: Objective = "largest"
    """`largest`: the largest micro-batch that fits. `fewest_steps`: the fewest accumulation steps, which takes fewer
    probes, since few sizes change their number. `fastest`: the plan with the most samples per second, measured among
    those with few steps; of equally fast ones, the one with the least memory."""
    device: DeviceId | None = None
    """The device to probe. Default: the first GPU, or the CPU if there is none."""
    hardware: HardwareRequest | None = None
    """The hardware to probe, instead of a device: on a service with several hosts, any worker that has it takes the
    tuning; on one host, the first device that has it."""
    memory_limit_bytes: MemoryLimit | None = None
    """Memory the run may take on the device, in bytes or as a size such as `24GiB`, which becomes a number of bytes.
    Default: the whole device; on the CPU, half of the host's memory."""
    memory_margin: Annotated[float, Field(ge=0.0, le=0.5)] = 0.03
    """Share of the limit that probes must leave free, for differences between a probe and a long run."""
    granularity: PositiveInt = 1
    """Search only multiples of this size, for example 8. The sizes of the plan are balanced and need not be multiples.
    For `fastest` the sizes of the plan are timed."""
    max_micro_batch_size: PositiveInt | None = None
    """Upper bound of the micro-batch size."""
    uniform: bool = False
    """Also plan with one repeated micro-batch size, for frameworks that require this."""
    uniform_only: bool | None = None
    """Search only sizes that a plan of one repeated size can use: divisors of a rank's samples. For a command this is
    the default. With `false` the largest size is searched, and the plan has its largest divisor."""
    what_if: bool = False
    """Also estimate, without probes, which micro-batch would fit with another precision, activation checkpointing or
    another implementation of the optimizer."""
    quick: bool = False
    """Run one plan that an estimate (or a warm start) is sure of, and recommend it: larger sizes are not tried. Where
    nothing can be estimated, the tuning is a whole one. A warm start from the result completes it later."""
    probe_timeout_seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 300.0
    """Time limit of one probe."""
    allow_batch_coupling: bool = False
    """Plan several micro-batches, and train with them, although the loss couples the samples of a batch (BatchNorm,
    in-batch negatives), so that accumulated updates differ from full-batch ones. Otherwise such a loss has the whole
    batch in one micro-batch on one rank, or fails the tuning before any other probe."""
    baseline: Baseline | None = None
    """The plan you train with today. One more probe measures its time and memory, and the recommendation says what it
    gains. None if it is not known."""

    @model_validator(mode="after")
    def _names_a_device_or_hardware(self) -> Self:
        if self.device is not None and self.hardware is not None:
            raise ValueError(
                "give either `device` (one device of a host) or `hardware` (any device that matches), not both"
            )
        return self

    @model_validator(mode="after")
    def _is_possible_for_its_kind(self) -> Self:
        if self.quick and self.objective == "fastest":
            raise ValueError(
                "`quick` runs one plan, but the objective `fastest` compares several: choose another objective"
            )
        if isinstance(self.spec, CommandSpec):
            if self.quick:
                raise ValueError("`quick` is not possible for a command, which cannot be estimated without a run")
            if not self.spec.model.is_only_named and not self.spec.model.takes_size:
                raise ValueError(
                    "the command has no placeholder `{micro_batch_size}`: write it where the program takes its batch "
                    "size, in an argument (`--batch-size {micro_batch_size}`), in an environment variable "
                    "(`--env BATCH_SIZE={micro_batch_size}`) or in a template of its configuration file"
                )
            if (fault := self.division_fault) is not None:
                raise ValueError(fault)
            if self.what_if:
                raise ValueError("`what_if` is not possible for a command, which cannot be estimated without a run")
            if self.allow_batch_coupling:
                raise ValueError("`allow_batch_coupling` does not apply to a command, whose loss is not checked")
        elif self.uniform_only is not None:
            raise ValueError("`uniform_only` is for commands: set `uniform` to plan with one repeated size as well")
        return self

    @property
    def workload(self) -> WorkloadSpec:
        """The spec, for code that has no meaning for a command.

        Raises:
            SpecError: when the spec is a command.
        """
        if isinstance(self.spec, CommandSpec):
            message = "is a command: this is possible only for a workload that is described (transformers, python)"
            raise SpecError([FieldProblem("model.kind", message, "'command'")])
        return self.spec

    @property
    def command(self) -> CommandSpec | None:
        """The command; none for a workload that is described."""
        return self.spec if isinstance(self.spec, CommandSpec) else None

    @property
    def division_fault(self) -> str | None:
        """Why a division in a placeholder of the command is not exact; none where each is, for all sizes searched."""
        for text, expression in self.command.model.divisions if self.command is not None else ():
            if (fault := self._fault_of_division(text, expression)) is not None:
                return fault
        return None

    def _fault_of_division(self, text: str, expression: Arithmetic) -> str | None:
        ranks = self.spec.parallelism.world_size
        searched = self._divisors() if self.searches_divisors else []
        if searched and _is_whole(expression, searched, ranks):
            return None
        multiples = ((step, 2 * step, 3 * step) for step in range(1, _LARGEST_DIVISOR))
        step = next((sizes[0] for sizes in multiples if _is_whole(expression, sizes, ranks)), None)
        if step is None or (searched and self.granularity % step == 0):
            return f"`{{{text}}}` is a fraction for some updates: leave the division out"
        only = f"`{{{text}}}` is a whole number only for micro-batches that are multiples of {step}"
        batch = self.effective_batch_size
        below, beyond = divmod(batch, step * ranks)
        if beyond:
            near = " and ".join(str(step * ranks * count) for count in (below, below + 1) if count)
            return f"{only}, none of which divides an effective batch of {batch} (nearest: {near})"
        return f"{only}: set `granularity` to {step}" if self.granularity % step else None

    def _divisors(self) -> list[int]:
        """Return the multiples of the granularity that divide a rank's samples; none where ranks differ in samples."""
        share, rest = divmod(self.effective_batch_size, self.spec.parallelism.world_size)
        return [] if rest else [size for size in divisors(share) if size % self.granularity == 0]

    @property
    def searches_divisors(self) -> bool:
        """True if only sizes that divide a rank's samples are searched."""
        return self.command is not None and self.uniform_only is not False


def _is_whole(expression: Arithmetic, sizes: Sequence[int], ranks: int) -> bool:
    """Return whether an expression is whole for some micro-batch sizes, and a few steps each."""
    for size, steps, updates in product(sizes, (1, 2, 3), (2, 3)):
        effective = size * steps * ranks
        figures = dict(zip(FIGURES, (size, steps, effective, updates), strict=True))
        with suppress(ZeroDivisionError):
            if expression.value(figures).denominator > 1:
                return False
    return True


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

    The micro-batches of an update are those of ``batchwright.planning.accumulation.probe_window``.
    """

    spec: Spec
    """The workload to train, or the command that trains it."""
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
    counts_plan: bool = False
    """True for a probe of a command with all micro-batches of the plan's updates, which ends within the last of these
    once the memory of every later one was held. A probe of the search that fits is then a proof of the plan too."""
    brackets: bool = False
    """True for a probe that makes one update instead of two: it narrows the search, and its fit proves no size."""
    rank_devices: tuple[DeviceId, ...] = ()
    """Device of each rank, where all ranks of the workload run, each under the limit. Without any, one rank runs."""

    @property
    def workload(self) -> WorkloadSpec:
        """The spec of a probe that is no command.

        Raises:
            SpecError: when the spec is a command.
        """
        if isinstance(self.spec, CommandSpec):
            raise SpecError([FieldProblem("model.kind", "is a command, which needs a supervisor of commands")])
        return self.spec

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
    context_bytes: NonNegativeInt = 0
    """CUDA: bytes of the limit that a process's context is expected to take, outside of torch's allocator."""
    compute_capability: tuple[int, int] | None = None
    """Compute capability of the card, as torch reports it; none for the CPU."""


MOST_NODES = 64
"""Hosts of a job: each has a process on the leading one."""


TrackerName: TypeAlias = Literal["mlflow", "tensorboard", "wandb"]
"""A tracker of experiments, by the name of its package."""


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
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] = 1
    """Hosts that the run takes at once, each with `processes_per_node` processes: more than one on a cluster only."""
    processes_per_node: PositiveInt | None = None
    """Processes on each host, one per device: the ranks of the run. Default: the recommendation's world size divided
    by `nodes`, rounded up."""
    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes per rank that prefetch data; with 0, data is loaded between updates. The resulting weights are
    bit-identical unless memory runs out: micro-batches that were prefetched before are then divided one by one."""
    allow_batch_coupling: bool = False
    """Train although the loss couples the samples of a batch (BatchNorm, in-batch negatives), so that accumulated
    updates differ from full-batch ones. Not needed where the tuning's request allowed it."""
    trackers: Annotated[tuple[TrackerName, ...], Field(max_length=len(get_args(TrackerName)))] = ()
    """Also write the figures of each update there: `tensorboard` and `mlflow` into the run's folder, `wandb` offline
    too, or to the servers that the variables of these libraries name where the run is."""
    noise_scale_every: NonNegativeInt | None = None
    """Updates between two that are measured for the gradient noise scale, which says which effective batch is worth
    having; 0 for none. By default every update of a short run, and every tenth of 2,000 or more. No weight changes."""

    def ranks_per_node(self, world_size: int) -> int:
        """Return the number of processes on each host, of a recommendation for ``world_size`` ranks."""
        return self.processes_per_node or -(-world_size // self.nodes)
