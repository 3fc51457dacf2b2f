"""Exit codes, and errors as JSON."""

import json
from enum import IntEnum

from batchwright import errors


class ExitCode(IntEnum):
    """Exit codes of ``batchwright``, documented in ``batchwright --help``."""

    OK = 0
    UNEXPECTED = 1
    WRONG_INPUT = 2
    INFEASIBLE = 3
    TUNING_FAILED = 4
    DEVICE = 5
    """No such device, or the host lacks a resource: the same command may succeed on another machine."""
    TRAINING_FAILED = 6
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143
    """Ended by SIGTERM: the code with which a shell reports a process that the signal killed (128 and 15)."""


_CODES: tuple[tuple[type[errors.BatchwrightError], ExitCode], ...] = (
    (errors.ProbeCancelledError, ExitCode.INTERRUPTED),
    (errors.EstimateCancelledError, ExitCode.INTERRUPTED),
    (errors.HubUnavailableError, ExitCode.DEVICE),
    (errors.SpecError, ExitCode.WRONG_INPUT),
    (errors.DataOutsideRootsError, ExitCode.WRONG_INPUT),
    (errors.PlanError, ExitCode.WRONG_INPUT),
    (errors.ExportError, ExitCode.WRONG_INPUT),
    (errors.ServingError, ExitCode.WRONG_INPUT),
    (errors.DeviceError, ExitCode.DEVICE),
    (errors.HostFailureError, ExitCode.DEVICE),
    (errors.StorageError, ExitCode.DEVICE),
    (errors.EstimateError, ExitCode.TUNING_FAILED),
    (errors.TuningFailedError, ExitCode.TUNING_FAILED),
    (errors.ProbeError, ExitCode.TUNING_FAILED),
    (errors.WorkloadError, ExitCode.TUNING_FAILED),
    (errors.OutOfMemoryError, ExitCode.TUNING_FAILED),
    (errors.InvalidSizeError, ExitCode.TUNING_FAILED),
    (errors.TrainingError, ExitCode.TRAINING_FAILED),
    (errors.SearchError, ExitCode.UNEXPECTED),
)
"""The code of each class and of the classes below it; the first that matches counts. A test has every class."""


class CommandError(errors.BatchwrightError):
    """The end of a command with an exit code of its own. ``details`` are further fields of its JSON."""

    def __init__(self, message: str, code: ExitCode, **details: object) -> None:
        self.code = code
        self.details = details
        super().__init__(message)


class EndedBySignalError(CommandError):
    """Ctrl-C or SIGTERM ended a command."""


def exit_code(error: errors.BatchwrightError) -> ExitCode:
    """The exit code of an error."""
    if isinstance(error, CommandError):
        return error.code
    if isinstance(error, errors.ExportError) and error.reason == "infeasible":
        return ExitCode.INFEASIBLE
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.UNEXPECTED)


def as_json(error: BaseException) -> str:
    """Format an error as JSON, for scripts that read standard output."""
    problems = error.problems if isinstance(error, errors.SpecError) else []
    message = error.format_message() if hasattr(error, "format_message") else str(error)  # typer's name the option
    document: dict[str, object] = {"error": type(error).__name__, "message": message or type(error).__name__}
    if notes := getattr(error, "__notes__", None):
        document["notes"] = notes
    if isinstance(error, errors.TuningFailedError | errors.ExportError):
        document["reason"] = error.reason
    if isinstance(error, CommandError):
        document |= error.details
    if problems:
        document["problems"] = [
            {"field": problem.field, "message": problem.message, "value": problem.value} for problem in problems
        ]
    return json.dumps(document)
