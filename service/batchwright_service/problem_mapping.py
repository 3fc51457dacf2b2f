"""Translate every error into a problem document (RFC 9457)."""

from collections.abc import Sequence
from http import HTTPStatus

from batchwright.client.documents.problems import PROBLEM_TYPE_PREFIX, FieldFault, Problem
from batchwright.errors import (
    BatchwrightError,
    CheckLostError,
    DataOutsideRootsError,
    DeviceError,
    EstimateCancelledError,
    EstimateError,
    EstimateTimedOutError,
    ExportError,
    ExportRefusal,
    FieldProblem,
    HostFailureError,
    HubUnavailableError,
    InvalidSizeError,
    OutOfMemoryError,
    PlanError,
    ProbeCancelledError,
    ProbeError,
    SearchError,
    ServingError,
    SpecError,
    StorageError,
    TrainingError,
    TuningFailedError,
    UnreadableDocumentError,
    WorkloadError,
)
from batchwright_service.errors import MAX_FAULTS, DataPathNotAllowedError, InvalidInputError, ServiceError

_TRACEBACK = "Traceback (most recent call last)"

_TUNER_ERRORS: tuple[tuple[type[BatchwrightError], int, str, str], ...] = (
    (HubUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE, "hub-unavailable", "The model hub cannot be used"),
    (SpecError, HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-spec", "The spec is invalid"),
    (DataOutsideRootsError, HTTPStatus.FORBIDDEN, DataPathNotAllowedError.code, DataPathNotAllowedError.title),
    (PlanError, HTTPStatus.UNPROCESSABLE_ENTITY, "no-plan", "No plan exists for these numbers"),
    (DeviceError, HTTPStatus.UNPROCESSABLE_ENTITY, "device-error", "The device cannot be used"),
    (WorkloadError, HTTPStatus.UNPROCESSABLE_ENTITY, "workload-error", "The workload breaks its contract"),
    (EstimateTimedOutError, HTTPStatus.GATEWAY_TIMEOUT, "estimate-timed-out", "The estimate took too long"),
    (EstimateCancelledError, HTTPStatus.SERVICE_UNAVAILABLE, "estimate-cancelled", "The estimate was cancelled"),
    (EstimateError, HTTPStatus.UNPROCESSABLE_ENTITY, "cannot-estimate", "The workload cannot be estimated"),
    (HostFailureError, HTTPStatus.SERVICE_UNAVAILABLE, "host-trouble", "The host cannot run it"),
    (CheckLostError, HTTPStatus.SERVICE_UNAVAILABLE, "check-lost", "The check of the spec was lost"),
    (StorageError, HTTPStatus.SERVICE_UNAVAILABLE, "host-trouble", "The host cannot run it"),
    (OutOfMemoryError, HTTPStatus.SERVICE_UNAVAILABLE, "out-of-memory", "The device has too little free memory"),
    (InvalidSizeError, HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-size", "The micro-batch is too large for a kernel"),
    (ProbeCancelledError, HTTPStatus.SERVICE_UNAVAILABLE, "probe-cancelled", "The probe was cancelled"),
    (ServingError, HTTPStatus.INTERNAL_SERVER_ERROR, "cannot-serve", "The service cannot be started"),
    (ProbeError, HTTPStatus.INTERNAL_SERVER_ERROR, "probe-error", "A probe could not be run"),
    (SearchError, HTTPStatus.INTERNAL_SERVER_ERROR, "search-error", "The search cannot use what was recorded"),
    (
        UnreadableDocumentError,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "unreadable-document",
        "Another version stored this",
    ),
    (TrainingError, HTTPStatus.INTERNAL_SERVER_ERROR, "training-error", "The training run cannot continue"),
)
"""The class of an error, with the status, code and title of its problem. The first class that matches is used."""

_EXPORT_STATUSES: dict[ExportRefusal, int] = {
    "unknown-format": HTTPStatus.NOT_FOUND,
    "unknown-version": HTTPStatus.UNPROCESSABLE_ENTITY,
    "wrong-option": HTTPStatus.UNPROCESSABLE_ENTITY,
    "wrong-environment": HTTPStatus.CONFLICT,
    "infeasible": HTTPStatus.CONFLICT,
    "inexact": HTTPStatus.CONFLICT,
    "not-expressible": HTTPStatus.CONFLICT,
}
"""The status of each reason of an ``ExportError``: 409 where the recommendation itself prevents the export."""


def faults_of(problems: Sequence[FieldProblem]) -> tuple[FieldFault, ...]:
    """Convert the field problems of the tuner to those of a problem document."""
    return tuple(FieldFault(field=problem.field, message=problem.message, value=problem.value) for problem in problems)


def problem_of(error: Exception) -> Problem:
    """Return the problem document of ``error``. The message of an error of an unknown class is not disclosed."""
    if isinstance(error, SpecError) and error.document == "request":
        error = InvalidInputError(str(error), faults_of(error.problems))
    if isinstance(error, ServiceError):
        problem = make_problem(error.status, error.code, error.title, str(error))
        if not isinstance(error, InvalidInputError):
            return problem
        unlisted = error.count if error.count > len(error.faults) else None
        return problem.model_copy(update={"errors": error.faults, "error_count": unlisted})
    if isinstance(error, TuningFailedError):
        return make_problem(HTTPStatus.OK, error.reason, "The tuning ended without a recommendation", str(error))
    if isinstance(error, ExportError):
        return make_problem(
            _EXPORT_STATUSES[error.reason],
            f"export-{error.reason}",
            "The recommendation cannot be exported as requested",
            str(error),
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
    """Reduce a traceback in a message that quotes a process's output to the traceback's last line, the error itself."""
    before, found, traceback = message.partition(_TRACEBACK)
    return before + traceback.strip().rpartition("\n")[2].strip() if found else message


def make_problem(status: int, code: str, title: str, detail: str, errors: tuple[FieldFault, ...] = ()) -> Problem:
    """Build a problem document with a type derived from its code. It lists the first ``MAX_FAULTS`` of ``errors``."""
    return Problem(
        type=PROBLEM_TYPE_PREFIX + code,
        title=title,
        status=int(status),
        detail=detail,
        code=code,
        errors=errors[:MAX_FAULTS],
        error_count=len(errors) if len(errors) > MAX_FAULTS else None,
    )


def stored_problem(error: Exception) -> Problem:
    """Return the problem to store with a tuning or job that failed, which has no HTTP status."""
    return problem_of(error).model_copy(update={"status": None})
