"""The errors of the service: one base class and the tree below it, each with its HTTP status and code.

::

    ServiceError
    |- ConfigurationError      the settings are invalid; raised at start
    |- DeviceTakenError        another process serves this device; raised at start
    |- StaleLeaseError         a report came after the end of its lease; never reaches HTTP
    |- StoreUnavailableError   the database cannot be reached or written
    |  |- StoreBrokenError     it will not be usable again by itself: tables or its file are not what they were
    |  |- ClaimsCrowdedError   the claims of other processes went first; never reaches HTTP
    |- NewerDocumentError      a newer version of Batchwright stored a document
    |- NotReadyError           a part of the service does not work
    |- EstimatesBusyError      every slot for estimates is taken
    |- DependencyBusyError     every slot for calls of a dependency (hub, files) is taken
    |- TooManyFollowersError   every connection for long requests is taken
    |- RequestError            the caller can correct the request; each has a status and a code
       |- NotFoundError, ConflictError, NotEndedError, InvalidCursorError, InvalidInputError, MalformedJsonError
       |- IdempotencyKeyInFlightError, IdempotencyKeyReusedError, NotOnThisHostError
       |- NotResumableError
       |- TargetNotAllowedError, CommandNotAllowedError, DataPathNotAllowedError, HubModelNotAllowedError
       |- UnknownDeviceError, DeviceMismatchError, InfeasibleRecommendationError, UnsupportedJobError
       |- HostNotAllowedError, ForeignOriginError, CsrfTokenError, BodyTooLargeError, UnsupportedMediaTypeError
       |- NotAuthenticatedError, ScopeMissingError, NotOwnerError, QuotaExceededError
       |- FirstKeyError, OwnKeyError
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Self

from batchwright.client.documents.problems import FieldFault

MAX_FAULTS = 20
"""Maximum number of faults that a problem lists. A request may have as many as its body has bytes."""


class ServiceError(Exception):
    """Base of every error of the service. The class has the status, code and title of the problem document."""

    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    code: str = "internal-error"
    title: str = "The service failed"


class ConfigurationError(ServiceError):
    """The settings contradict each other or are not permitted."""

    code = "invalid-configuration"


class DeviceTakenError(ServiceError):
    """Another live process holds this device's lock file."""

    code = "device-taken"


class StaleLeaseError(ServiceError):
    """The lease has expired, or another holder has taken over the work. The report is not recorded."""

    code = "stale-lease"


class StoreUnavailableError(ServiceError):
    """The database cannot be reached or written."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "store-unavailable"
    title = "The database cannot be used"


class StoreBrokenError(StoreUnavailableError):
    """The database lacks a table or a column, is damaged, or its file was replaced. To try again is of no use."""

    code = "store-broken"
    title = "The database must be repaired"


class ClaimsCrowdedError(StoreUnavailableError):
    """Claims of other processes went first for some seconds. Nothing is wrong: the claim is repeated."""


class NewerDocumentError(ServiceError):
    """A newer version of Batchwright has stored a document in this database."""

    code = "newer-document"
    title = "A newer version of Batchwright stored this"


class NotReadyError(ServiceError):
    """A part of the service does not work; the message names it."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "not-ready"
    title = "The service is not ready"


class EstimatesBusyError(ServiceError):
    """Every slot for estimates is taken, and did not become free in time."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "estimates-busy"
    title = "Too many estimates are being made"


class DependencyBusyError(ServiceError):
    """Every slot for calls of a dependency is taken: the hub or a file system answers slowly or not at all."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "dependency-busy"
    title = "Too many requests wait for something slow"


class TooManyFollowersError(ServiceError):
    """Long requests hold nearly every connection; the others are reserved for short requests."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "too-many-followers"
    title = "Too many connections follow tunings and jobs"


class RequestError(ServiceError):
    """Base of the errors that the caller can correct."""

    status = HTTPStatus.BAD_REQUEST
    code = "bad-request"
    title = "The request cannot be served"


class NotFoundError(RequestError):
    """Nothing has this identifier."""

    status = HTTPStatus.NOT_FOUND
    code = "not-found"
    title = "Not found"

    @classmethod
    def of(cls, kind: str, identifier: str) -> Self:
        """Return the error for an unknown id of this kind of resource."""
        return cls(f"No {kind} with the id {identifier!r}. It may have been deleted.")


class ConflictError(RequestError):
    """The state of the resource does not permit the request, or the resource exists already."""

    status = HTTPStatus.CONFLICT
    code = "conflict"
    title = "The current state does not permit this"


class NotEndedError(RequestError):
    """The tuning or job has not ended, so that it cannot be deleted."""

    status = HTTPStatus.CONFLICT
    code = "not-ended"
    title = "The work has not ended"

    @classmethod
    def of(cls, work_id: str, state: str) -> Self:
        """Return the error for work in this state."""
        return cls(f"{work_id!r} is {state}: cancel it first, then delete it")


class NotConfirmableError(RequestError):
    """The recommendation cannot be confirmed, since no live worker has its kind of device."""

    status = HTTPStatus.CONFLICT
    code = "not-confirmable"
    title = "The recommendation cannot be confirmed"


class NotResumableError(RequestError):
    """The job cannot be resumed; the message gives the reason."""

    status = HTTPStatus.CONFLICT
    code = "not-resumable"
    title = "The job cannot be resumed"


class NotOnThisHostError(RequestError):
    """The files of a job are on another host; the message names the slot."""

    status = HTTPStatus.CONFLICT
    code = "not-on-this-host"
    title = "The files are on another host"


class IdempotencyKeyInFlightError(RequestError):
    """A request with the same idempotency key is in progress."""

    status = HTTPStatus.CONFLICT
    code = "idempotency-key-in-flight"
    title = "A request with this idempotency key is in flight"


class IdempotencyKeyReusedError(RequestError):
    """The idempotency key was used for another request."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "idempotency-key-reused"
    title = "This idempotency key belongs to another request"


class InvalidCursorError(RequestError):
    """The cursor was not made by this service for this list."""

    status = HTTPStatus.BAD_REQUEST
    code = "invalid-cursor"
    title = "The cursor is invalid"


class InvalidInputError(RequestError):
    """The request is invalid.

    Args:
        message: the faults, in words.
        faults: the fields at fault.
        count: the number of faults, where ``faults`` does not hold all of them.
    """

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "invalid-request"
    title = "The request is invalid"

    def __init__(self, message: str, faults: Sequence[FieldFault] = (), count: int = 0) -> None:
        self.faults = tuple(faults[:MAX_FAULTS])
        self.count = max(count, len(faults))
        super().__init__(message)

    @classmethod
    def listing(cls, faults: Sequence[FieldFault], count: int = 0) -> InvalidInputError:
        """Return an error whose message lists the first faults and gives the number of all."""
        shown = faults[:MAX_FAULTS]
        listed = "; ".join(f"{fault.field}: {fault.message}" for fault in shown)
        total = max(count, len(faults))
        prefix = f"{total} faults; the first {len(shown)}: " if total > len(shown) else ""
        return cls(prefix + listed, faults, count)


class MalformedJsonError(RequestError):
    """The body is not JSON."""

    code = "malformed-json"
    title = "The body is not JSON"


class TargetNotAllowedError(RequestError):
    """The operator has not allow-listed this `python` target."""

    status = HTTPStatus.FORBIDDEN
    code = "python-target-not-allowed"
    title = "This service does not run this code"


class CommandNotAllowedError(RequestError):
    """The command is not one that the operator has registered."""

    status = HTTPStatus.FORBIDDEN
    code = "command-not-allowed"
    title = "This service does not run this command"


class DataPathNotAllowedError(RequestError):
    """The path is outside the folders that jobs may read."""

    status = HTTPStatus.FORBIDDEN
    code = "data-path-not-allowed"
    title = "This service does not read this path"


class HubModelNotAllowedError(RequestError):
    """The operator has not allow-listed this model of the hub."""

    status = HTTPStatus.FORBIDDEN
    code = "hub-model-not-allowed"
    title = "This service does not fetch this model"


class UnknownDeviceError(RequestError):
    """No worker of this service serves the device."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "unknown-device"
    title = "No worker serves this device"


class DeviceMismatchError(RequestError):
    """The recommendation was measured on another device than the one that would run it."""

    status = HTTPStatus.CONFLICT
    code = "device-mismatch"
    title = "The recommendation is for another device"


class InfeasibleRecommendationError(RequestError):
    """The recommendation is that nothing fits, so that no job can run."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "infeasible-recommendation"
    title = "Nothing fits, so nothing can be trained"


class UnsupportedJobError(RequestError):
    """This service cannot run the job; the message gives the reason."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "unsupported-job"
    title = "This service cannot run this job"


class HostNotAllowedError(RequestError):
    """The Host header names another host, as after DNS rebinding."""

    status = HTTPStatus.FORBIDDEN
    code = "host-not-allowed"
    title = "The host name is not allowed"


class ForeignOriginError(RequestError):
    """A browser sent the request for a page of another origin."""

    status = HTTPStatus.FORBIDDEN
    code = "foreign-origin"
    title = "Requests from other sites are refused"


class CsrfTokenError(RequestError):
    """A request with a session cookie has no valid CSRF token."""

    status = HTTPStatus.FORBIDDEN
    code = "csrf-token-missing"
    title = "The CSRF token is missing or outdated"


class BodyTooLargeError(RequestError):
    """The body exceeds the size limit, has too many values, or is nested too deeply."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "body-too-large"
    title = "The body is too large"


class UnsupportedMediaTypeError(RequestError):
    """The media type of the body is not JSON, or not a form where a page expects one."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    code = "unsupported-media-type"
    title = "The media type is not supported"


class NotAuthenticatedError(RequestError):
    """The request has no valid API key. ``challenge`` is the value of `WWW-Authenticate`."""

    status = HTTPStatus.UNAUTHORIZED
    code = "not-authenticated"
    title = "A valid API key is required"

    def __init__(self, message: str, *, key_given: bool) -> None:
        self.challenge = 'Bearer realm="batchwright"' + (', error="invalid_token"' if key_given else "")
        super().__init__(message)


class ScopeMissingError(RequestError):
    """The API key lacks the scope that the request requires."""

    status = HTTPStatus.FORBIDDEN
    code = "scope-missing"
    title = "The API key lacks a scope"


class NotOwnerError(RequestError):
    """Another API key created the resource."""

    status = HTTPStatus.FORBIDDEN
    code = "not-owner"
    title = "The resource belongs to another API key"


class FirstKeyError(RequestError):
    """The first API key is created by a command on a host with access to the database."""

    status = HTTPStatus.FORBIDDEN
    code = "first-key"
    title = "The first API key is created by a command"


class OwnKeyError(RequestError):
    """A key cannot revoke itself: its caller could neither see the result nor undo it."""

    status = HTTPStatus.CONFLICT
    code = "own-key"
    title = "The key authenticates this request"


class QuotaExceededError(RequestError):
    """The API key has used its quota. ``retry_after_seconds`` is the delay before another request can succeed."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    code = "quota-exceeded"
    title = "The API key has used its quota"

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)
