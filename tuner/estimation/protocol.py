"""What the process that traces and the one that asks tell each other, over a socket and on disk. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tuner.errors import BatchwrightError, EstimateError, FieldProblem, PlanError, SpecError, WorkloadError
from tuner.schemas.base import Document, PositiveInt

Question: TypeAlias = Literal["estimate", "expectation"]
"""What a process is asked."""

_KINDS: dict[str, type[BatchwrightError]] = {it.__name__: it for it in (EstimateError, PlanError, WorkloadError)}


class Order(Document):
    """What the process that traces is to do next: a line of its socket."""

    question: Question
    """What is asked."""
    directory: str
    """Where the request lies, and the answer is left: that of ``EstimatePaths``."""
    memory_bytes: PositiveInt
    """Host memory that answering may take."""


class Done(Document):
    """That an order was carried out, well or not: the line that answers it."""

    status: int
    """How the process that did it ended; below 0 by which signal."""


class Problem(Document):
    """A ``FieldProblem`` on its way between processes."""

    field: str
    """Dotted path of the field."""
    message: str
    """What is allowed."""
    value: str
    """What it says."""


class Failure(Document):
    """Why there is no estimate."""

    kind: str
    """The error's class."""
    message: str
    """Its words."""
    problems: tuple[Problem, ...] = ()
    """Fields at fault, when the spec is wrong."""
    traceback: str | None = None
    """Where user code failed. The error carries it as a note: for a terminal, not for callers of a service."""

    @classmethod
    def of_spec(cls, error: SpecError) -> Failure:
        """The report of a wrong spec."""
        problems = tuple(Problem(field=it.field, message=it.message, value=it.value) for it in error.problems)
        return cls(kind=SpecError.__name__, message=str(error), problems=problems)

    def to_error(self) -> BatchwrightError:
        """The error to raise."""
        if self.problems:
            return SpecError([FieldProblem(it.field, it.message, it.value) for it in self.problems])
        error = _KINDS.get(self.kind, EstimateError)(self.message)
        if self.traceback is not None:
            error.add_note(self.traceback)
        return error


@dataclass(frozen=True)
class EstimatePaths:
    """The files of one estimate, in a directory of its own. Nothing else builds these names."""

    directory: Path

    @property
    def request(self) -> Path:
        """The ``EstimateRequest`` or ``ExpectationRequest`` (JSON)."""
        return self.directory / "request.json"

    @property
    def result(self) -> Path:
        """The ``Estimate`` or ``ExpectedPeaks``; absent when there is none."""
        return self.directory / "result.json"

    @property
    def failure(self) -> Path:
        """The ``Failure``; absent when there is an estimate, and when the process died."""
        return self.directory / "failure.json"

    @property
    def output(self) -> Path:
        """What the process printed."""
        return self.directory / "output.txt"
