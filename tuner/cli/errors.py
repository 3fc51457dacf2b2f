"""Exit codes, and errors as JSON."""

from __future__ import annotations

import json
from enum import IntEnum

from tuner import errors


class ExitCode(IntEnum):
    """Exit codes of ``batchwright``, documented in ``batchwright --help``."""

    OK = 0
    UNEXPECTED = 1
    WRONG_INPUT = 2
    INFEASIBLE = 3
    TUNING_FAILED = 4
    DEVICE = 5
    TRAINING_FAILED = 6
    INTERRUPTED = 130


_CODES: tuple[tuple[type[errors.BatchwrightError], ExitCode], ...] = (
    (errors.SpecError, ExitCode.WRONG_INPUT),
    (errors.PlanError, ExitCode.WRONG_INPUT),
    (errors.ExportError, ExitCode.WRONG_INPUT),
    (errors.ServingError, ExitCode.WRONG_INPUT),
    (errors.DeviceError, ExitCode.DEVICE),
    (errors.EstimateError, ExitCode.TUNING_FAILED),
    (errors.TuningFailedError, ExitCode.TUNING_FAILED),
    (errors.ProbeError, ExitCode.TUNING_FAILED),
    (errors.WorkloadError, ExitCode.TUNING_FAILED),
    (errors.TrainingError, ExitCode.TRAINING_FAILED),
)


def exit_code(error: errors.BatchwrightError) -> ExitCode:
    """The exit code of an error."""
    if isinstance(error, errors.ExportError) and error.reason == "infeasible":
        return ExitCode.INFEASIBLE
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.UNEXPECTED)


def as_json(error: errors.BatchwrightError) -> str:
    """Format an error as JSON, for scripts that read standard output."""
    problems = error.problems if isinstance(error, errors.SpecError) else []
    document: dict[str, object] = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, errors.TuningFailedError | errors.ExportError):
        document["reason"] = error.reason
    if problems:
        document["problems"] = [
            {"field": problem.field, "message": problem.message, "value": problem.value} for problem in problems
        ]
    return json.dumps(document)
