"""The one place that turns any error into a problem document (RFC 9457)."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from service.domain.problems import PROBLEM_TYPE_PREFIX, FieldFault, Problem
from service.errors import MOST_FAULTS, InvalidInputError, ServiceError
from tuner.errors import (
    BatchwrightError,
    CheckLostError,
    DeviceError,
    EstimateCancelledError,
    EstimateError,
    EstimateTimedOutError,
    ExportError,
    ExportRefusal,
    FieldProblem,
    HostFailureError,
    PlanError,
    ProbeError,
    SearchError,
    SpecError,
    TrainingError,
    TuningFailedError,
    WorkloadError,
)

_TRACEBACK = "Traceback (most recent call last)"


_TUNER_ERRORS: tuple[tuple[type[BatchwrightError], int, str, str], ...] = (
    (SpecError, HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-spec", "The spec is invalid"),
    (PlanError, HTTPStatus.UNPROCESSABLE_ENTITY, "no-plan", "No plan exists for these numbers"),
    (DeviceError, HTTPStatus.UNPROCESSABLE_ENTITY, "device-error", "The device cannot be used"),
    (WorkloadError, HTTPStatus.UNPROCESSABLE_ENTITY, "workload-error", "The workload breaks its contract"),
    (EstimateTimedOutError, HTTPStatus.GATEWAY_TIMEOUT, "estimate-timed-out", "The estimate took too long"),
    (EstimateCancelledError, HTTPStatus.SERVICE_UNAVAILABLE, "estimate-cancelled", "The estimate was given up"),
    (EstimateError, HTTPStatus.UNPROCESSABLE_ENTITY, "cannot-estimate", "The workload cannot be estimated"),
    (HostFailureError, HTTPStatus.SERVICE_UNAVAILABLE, "host-trouble", "The host cannot run it"),
    (CheckLostError, HTTPStatus.SERVICE_UNAVAILABLE, "check-lost", "The check of the spec was lost"),
    (ProbeError, HTTPStatus.INTERNAL_SERVER_ERROR, "probe-error", "A probe could not be run"),
    (SearchError, HTTPStatus.INTERNAL_SERVER_ERROR, "search-error", "The search cannot use what was recorded"),
    (TrainingError, HTTPStatus.INTERNAL_SERVER_ERROR, "training-error", "The training run cannot go on"),
)


_EXPORT_STATUSES: dict[ExportRefusal, int] = {
    "unknown-format": HTTPStatus.NOT_FOUND,
    "unknown-version": HTTPStatus.UNPROCESSABLE_ENTITY,
    "wrong-option": HTTPStatus.UNPROCESSABLE_ENTITY,
    "wrong-environment": HTTPStatus.CONFLICT,
    "infeasible": HTTPStatus.CONFLICT,
    "inexact": HTTPStatus.CONFLICT,
    "not-expressible": HTTPStatus.CONFLICT,
}
"""By the reason of an ``ExportError``: 409 where the recommendation itself stands in the way."""


def faults_of(problems: Sequence[FieldProblem]) -> tuple[FieldFault, ...]:
    """The tuner's field problems as they go over HTTP."""
    return tuple(FieldFault(field=item.field, message=item.message, value=item.value) for item in problems)


def problem_of(error: Exception) -> Problem:
    """The problem document of ``error``. An error we did not foresee tells nothing of its insides."""
    if isinstance(error, SpecError) and error.document == "request":
        error = InvalidInputError(str(error), faults_of(error.problems))
    if isinstance(error, ServiceError):
        problem = make_problem(error.status, error.code, error.title, str(error))
        if not isinstance(error, InvalidInputError):
            return problem
        unlisted = error.count if error.count > len(error.faults) else None
        return problem.model_copy(update={"errors": error.faults, "error_count": unlisted})
    if isinstance(error, TuningFailedError):
        return make_problem(HTTPStatus.OK, error.reason, "The tuning ended without an answer", str(error))
    if isinstance(error, ExportError):
        return make_problem(
            _EXPORT_STATUSES[error.reason], f"export-{error.reason}", "It cannot be exported like that", str(error)
        )
    for kind, status, code, title in _TUNER_ERRORS:
        if isinstance(error, kind):
            faults = faults_of(error.problems) if isinstance(error, SpecError) else ()
            return make_problem(status, code, title, _without_traceback(str(error)), faults)
    return make_problem(
        ServiceError.status,
        ServiceError.code,
        ServiceError.title,
        f"an unexpected {type(error).__name__}; the service's log has the details",
    )


def _without_traceback(message: str) -> str:
    """A message that quotes what a process printed: of a traceback only its last line, which is the error's own."""
    said, found, traceback = message.partition(_TRACEBACK)
    return said + traceback.strip().rpartition("\n")[2].strip() if found else message


def make_problem(status: int, code: str, title: str, detail: str, errors: tuple[FieldFault, ...] = ()) -> Problem:
    """A problem document; its type follows from its code, and it lists the first ``MOST_FAULTS`` of ``errors``."""
    return Problem(
        type=PROBLEM_TYPE_PREFIX + code,
        title=title,
        status=int(status),
        detail=detail,
        code=code,
        errors=errors[:MOST_FAULTS],
        error_count=len(errors) if len(errors) > MOST_FAULTS else None,
    )


def stored_problem(error: Exception) -> Problem:
    """The problem of a tuning or job that ended: the same, without an HTTP status."""
    return problem_of(error).model_copy(update={"status": None})
