"""What an export is, and what one is made from. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from tuner.schemas.base import Document, PositiveInt
from tuner.schemas.field_errors import described_pattern
from tuner.schemas.plans import Plan, PlanSummary
from tuner.schemas.recommendation import Advice, Recommendation

TargetKind = Literal["framework", "launcher"]
"""`framework`: what trains, so it takes the batch figures. `launcher`: what starts it, so it takes the topology."""

PRINTED = described_pattern(r"^[^\x00-\x1f\x7f]*$", "must not contain control characters")
"""Texts on one line of a file."""
_Word = StringConstraints(min_length=1, max_length=1000, pattern=PRINTED)


class ExportedFile(Document):
    """A file of an export."""

    name: str
    """What to call it, relative to the folder where the job is started."""
    media_type: str
    """What it holds, for example `application/yaml`."""
    content: str
    """Its text."""


class Export(Document):
    """A recommendation in the words of a framework or a launcher."""

    plan: PlanSummary
    """What the target makes of these figures: it may differ from the recommended plan, and then a warning says how."""
    format: str
    """The target's name, for example `deepspeed`."""
    title: str
    """The target in words."""
    target_version: str
    """The version of the target that it is written for."""
    recommendation_id: str
    """What it was made from."""
    files: Annotated[tuple[ExportedFile, ...], Field(min_length=1)]
    """What to write; the first is the one that matters."""
    command: tuple[str, ...] = ()
    """How to start it from the folder of its files, program first; empty where that is the user's own program."""
    environment: dict[str, str]
    """Variables the job must run with. Files that can carry them, do."""
    warnings: tuple[Advice, ...] = ()
    """What the target gets wrong or does not know, and what to do about it."""


class ExportOptions(Document):
    """What a recommendation does not know of the place where its job will run."""

    allow_inexact: bool = False
    """Export to a target that repeats one size although the effective batch changes by it."""
    script: Annotated[str, _Word] = "train.py"
    """Launchers: the program to start, relative to the folder of the job."""
    arguments_of: str | None = None
    """Launchers: pass the batch figures as this framework's command-line arguments; without one, the program finds
    them in the environment, in `BATCHWRIGHT_*`."""
    job_name: Annotated[str, _Word] = "batchwright"
    """Launchers: what to call the job."""
    processes_per_node: PositiveInt | None = None
    """Launchers: devices of a node. The most, up to 8, that divide the world size, when absent."""
    image: Annotated[str, _Word] = "pytorch/pytorch:latest"
    """Launchers of containers: the image."""
    queue: Annotated[str, _Word] | None = None
    """Launchers with queues: the one to wait in (Slurm's partition, Kueue's local queue)."""


class ExportFormat(Document):
    """A target that recommendations can be exported to."""

    format: str
    """Its name, for example `deepspeed`."""
    title: str
    """The same in words."""
    kind: TargetKind
    """What it is."""
    versions: Annotated[tuple[str, ...], Field(min_length=1)]
    """The versions that it can be written for, the default first."""
    repeats_one_size: bool
    """Whether it knows one micro-batch size only, so that not every effective batch can be reached with it."""
    gives_arguments: bool
    """Frameworks: whether a launcher can pass its batch figures as command-line arguments (`arguments_of`)."""
    checked: str
    """How an export to it is known to be right."""


class Figures(Plan):
    """A plan as a target takes it."""

    change: str = ""
    """Difference from the recommended plan, where the target cannot follow it; empty where there is none."""

    @property
    def per_rank(self) -> int:
        """Samples per update of the rank with the most."""
        return sum(self.micro_batch_sizes[0])


@dataclass(frozen=True)
class Order:
    """What a target's writer is given."""

    recommendation: Recommendation
    """A feasible one."""
    figures: Figures
    """Of the plan that the target can follow."""
    version: str
    """One of the target's."""
    options: ExportOptions
    """What the user added."""
    arguments: tuple[str, ...] = ()
    """Launchers: the framework's arguments, where one was named."""


@dataclass(frozen=True)
class Written:
    """What a target's writer gives back."""

    files: tuple[ExportedFile, ...]
    command: tuple[str, ...] = ()
    warnings: tuple[Advice, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the target itself needs, on top of the recommendation's."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something a recommendation can be exported to."""

    name: str
    """What the user calls it: lower case, with hyphens."""
    title: str
    """The same in words."""
    kind: TargetKind
    versions: tuple[str, ...]
    """Versions it can be written for, the newest first: that is the default. Each names the release whose field names
    were read, for example `5.23`."""
    repeats_one_size: bool
    """Whether every micro-batch of every rank has one size, so that it takes the uniform plan."""
    divides_shares: bool = False
    """Whether it takes a rank's samples of an update at once and divides them itself, into micro-batches of one size
    and what is left: then every rank must have as many samples."""
    write: Callable[[Order], Written]
    """Makes the files."""
    arguments: Callable[[Order], tuple[str, ...]] | None = None
    """Frameworks: the batch figures as arguments of its command line, where it takes them so."""
    arguments_leave: str = ""
    """Frameworks: what of its file those arguments do not hold, in words; empty when they hold all."""
    takes: frozenset[str] = frozenset()
    """Options that it writes, beside `allow_inexact` and `arguments_of`."""
    checked: str
    """How an export is known to be right: `loaded by transformers`, `validated against the published schema` ..."""

    def described(self) -> ExportFormat:
        """It as a document."""
        return ExportFormat(
            format=self.name,
            title=self.title,
            kind=self.kind,
            versions=self.versions,
            repeats_one_size=self.repeats_one_size,
            gives_arguments=self.arguments is not None,
            checked=self.checked,
        )
