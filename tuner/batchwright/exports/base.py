"""Documents of exports, and the interface of targets. Pure data, no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints
from typing_extensions import override

from batchwright.schemas.base import Document, PositiveInt
from batchwright.schemas.estimates import Loop
from batchwright.schemas.plans import Plan, PlanSummary
from batchwright.schemas.recommendation import Advice, Recommendation
from batchwright.schemas.requests import PRINTED
from batchwright.schemas.workload import WorkloadSpec

TargetKind = Literal["framework", "launcher"]
"""`framework`: trains the model and takes the batch sizes. `launcher`: starts the processes and takes the topology."""

Warnings = dict[str, str]
"""Warnings of an export: messages with their remedies, by their codes."""
_Word = StringConstraints(min_length=1, max_length=1000, pattern=PRINTED)


class ExportedFile(Document):
    """A file of an export."""

    name: str
    """File name, relative to the folder where the job is started."""
    media_type: str
    """Media type, for example `application/yaml`."""
    content: str
    """Text of the file."""


class Export(Document):
    """A recommendation as the configuration of a framework or a launcher."""

    plan: PlanSummary
    """Plan of the target. A warning explains any difference from the recommended plan."""
    format: str
    """Name of the target, for example `deepspeed`."""
    title: str
    """Title of the target."""
    target_version: str
    """Version of the target."""
    recommendation_id: str
    """Identifier of the exported recommendation."""
    verification: str
    """Sentence on how to verify a run that trains with the export."""
    loop: Loop | None = None
    """Training loop of the target, as `loop` of an estimate names it: other loops than `batchwright` need other memory
    than the recommendation has measured. None for launchers, and for frameworks whose loop no estimate knows."""
    files: Annotated[tuple[ExportedFile, ...], Field(min_length=1)]
    """Files to write, the main file first."""
    command: tuple[str, ...] = ()
    """Command that starts the job in the folder of the files, program first; empty if the user's program starts it."""
    environment: dict[str, str]
    """Environment variables of the job. Files include them where the format allows."""
    warnings: tuple[Advice, ...] = ()
    """Limitations of the target, with remedies."""

    @property
    @override
    def headline(self) -> str:
        """The target and the files."""
        return f"{self.title}: {', '.join(file.name for file in self.files)}"


class ExportOptions(Document):
    """Properties of the job that a recommendation does not contain."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # options and parameters have the descriptions

    allow_inexact: bool = False
    """Allow a target that repeats one micro-batch size to change the effective batch."""
    script: Annotated[str, _Word] = "train.py"
    """Launchers: the program to start, relative to the folder of the job."""
    arguments_of: Annotated[str, _Word] | None = None
    """Launchers: pass the batch sizes as this framework's command-line arguments. Without a framework, the program
    finds them in the environment, in `BATCHWRIGHT_*`."""
    job_name: Annotated[str, _Word] = "batchwright"
    """Launchers: name of the job."""
    processes_per_node: PositiveInt | None = None
    """Launchers: devices of a node. When absent, the largest number up to 8 that divides the world size."""
    image: Annotated[str, _Word] = "pytorch/pytorch:latest"
    """Launchers of containers: name of the image."""
    updates: PositiveInt | None = None
    """Launchers, for a command with the placeholder `{updates}`: the optimizer updates that it makes."""
    queue: Annotated[str, _Word] | None = None
    """Launchers with queues: name of the queue (Slurm's partition, Kueue's local queue)."""


class ExportFormat(Document):
    """An export target, as listed."""

    format: str
    """Name of the target, for example `deepspeed`."""
    title: str
    """Title of the target."""
    kind: TargetKind
    """Kind of the target."""
    versions: Annotated[tuple[str, ...], Field(min_length=1)]
    """Supported versions of the target, the default first."""
    repeats_one_size: bool
    """True if the target repeats one micro-batch size, so that it cannot reach every effective batch."""
    gives_arguments: bool
    """Frameworks: true if a launcher can pass the batch sizes as command-line arguments (`arguments_of`)."""
    checked: str
    """Verification of exports to this target."""


class TargetPlan(Plan):
    """The plan of a target."""

    change: str = ""
    """Difference from the recommended plan, where the target cannot follow it; empty where there is none."""


@dataclass(frozen=True)
class ExportContext:
    """Input of a target's writer."""

    recommendation: Recommendation
    """The recommendation, which is feasible."""
    plan: TargetPlan
    """The plan that the target can follow."""
    version: str
    """Version of the target."""
    options: ExportOptions
    """Options of the user."""
    format: str
    """Name of the target whose plan it is: of a launcher that passes a framework's arguments, the framework."""
    arguments: tuple[str, ...] = ()
    """Launchers: arguments of the framework in ``options.arguments_of``."""

    @property
    def spec(self) -> WorkloadSpec:
        """The spec of the recommendation."""
        return self.recommendation.request.workload

    @property
    def on_cpu(self) -> bool:
        """True if the CPU was probed."""
        return not self.recommendation.device.traits.is_gpu


@dataclass(frozen=True)
class TargetOutput:
    """Output of a target's writer."""

    files: tuple[ExportedFile, ...]
    command: tuple[str, ...] = ()
    warnings: Warnings = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the target needs, in addition to those of the recommendation."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """An export target: a framework or a launcher."""

    name: str
    """Name for users: lower case, with hyphens."""
    title: str
    """Title of the target."""
    kind: TargetKind
    versions: tuple[str, ...]
    """Supported versions, the newest first, which is the default. Each names the release whose field names were read,
    for example `5.23`."""
    repeats_one_size: bool
    """True if every micro-batch of every rank has one size, so that the target takes the uniform plan."""
    write: Callable[[ExportContext], TargetOutput]
    """Function that writes the files."""
    arguments: Callable[[ExportContext], tuple[str, ...]] | None = None
    """Frameworks: function that returns the batch sizes as command-line arguments, where the framework takes them."""
    arguments_leave: str = ""
    """Frameworks: settings of the file that the arguments do not include; empty when they include all."""
    takes: frozenset[str] = frozenset()
    """Options that the target uses, besides `allow_inexact` and `arguments_of`."""
    loop: Loop | None = None
    """Frameworks: the training loop, as estimates name it."""
    checked: str
    """Verification of exports: `loaded by transformers`, `validated against the published schema` ..."""

    def described(self) -> ExportFormat:
        """Return the listed properties as a document."""
        return ExportFormat(
            format=self.name,
            title=self.title,
            kind=self.kind,
            versions=self.versions,
            repeats_one_size=self.repeats_one_size,
            gives_arguments=self.arguments is not None,
            checked=self.checked,
        )
