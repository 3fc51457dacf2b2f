"""The files of an estimate, and the report of a failed one. No torch."""

from batchwright.errors import BatchwrightError, EstimateError, FieldProblem, PlanError, SpecError, WorkloadError
from batchwright.schemas.base import Document
from batchwright.system.files import PathBelow
from batchwright.system.fork_server.tasks import TaskPaths

_ERROR_CLASSES: dict[str, type[BatchwrightError]] = {
    kind.__name__: kind for kind in (EstimateError, PlanError, WorkloadError)
}


class TraceFailure(Document):
    """The error of a failed estimate."""

    kind: str
    """The error's class."""
    message: str
    """The error's message."""
    problems: tuple[FieldProblem, ...] = ()
    """Invalid fields of the spec."""
    traceback: str | None = None
    """The traceback of user code. The error has it as a note, for a terminal and not for callers of the service."""

    def to_error(self) -> BatchwrightError:
        """Return the error to raise."""
        if self.problems:
            return SpecError(list(self.problems))
        error = _ERROR_CLASSES.get(self.kind, EstimateError)(self.message)
        if self.traceback is not None:
            error.add_note(self.traceback)
        return error


def untraceable(error: BaseException, where: str = "") -> EstimateError:
    """The error of a workload that raised ``error`` while it was traced.

    Args:
        error: of the workload or of torch.
        where: the operator, in brackets, if one raised it.
    """
    words = " ".join(str(error).split())
    return EstimateError(f"the workload cannot be traced: {type(error).__name__}: {words}{where}")


class EstimatePaths(TaskPaths):
    """The files of one estimate."""

    failure = PathBelow("failure.json")
    """The ``TraceFailure``; absent if there is an estimate, or if the process died."""
