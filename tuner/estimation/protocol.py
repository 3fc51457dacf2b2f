"""The report of a failed estimate, and where it lies. No torch."""

from __future__ import annotations

from pathlib import Path

from tuner.errors import BatchwrightError, EstimateError, FieldProblem, PlanError, SpecError, WorkloadError
from tuner.schemas.base import Document
from tuner.system.fork_server.task_paths import TaskPaths

_KINDS: dict[str, type[BatchwrightError]] = {it.__name__: it for it in (EstimateError, PlanError, WorkloadError)}


class Failure(Document):
    """Why there is no estimate."""

    kind: str
    """The error's class."""
    message: str
    """Its words."""
    problems: tuple[FieldProblem, ...] = ()
    """Fields at fault, when the spec is wrong."""
    traceback: str | None = None
    """Where user code failed. The error carries it as a note: for a terminal, not for callers of a service."""

    def to_error(self) -> BatchwrightError:
        """The error to raise."""
        if self.problems:
            return SpecError(list(self.problems))
        error = _KINDS.get(self.kind, EstimateError)(self.message)
        if self.traceback is not None:
            error.add_note(self.traceback)
        return error


class EstimatePaths(TaskPaths):
    """The files of one estimate."""

    @property
    def failure(self) -> Path:
        """The ``Failure``; absent when there is an estimate, and when the process died."""
        return self.directory / "failure.json"
