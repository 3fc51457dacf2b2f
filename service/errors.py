"""The errors of the service: one base class and the tree below it, each with its status and its code.

::

    ServiceError
    |- ConfigurationError      the settings cannot be served; raised at start
    |- DeviceTakenError        another process serves this device; raised at start
    |- StaleLeaseError         a report came after its lease had ended; never reaches HTTP
    |- StoreUnavailableError   the database cannot be reached or written
    |- NotReadyError           a part of the service does not work
    |- EstimatesBusyError      every slot for estimates is taken
    |- TooManyFollowersError   every connection for requests that last is taken
    |- RequestError            the caller can mend it; each has a status and a code
       |- NotFoundError, ConflictError, NotEndedError, InvalidCursorError, InvalidInputError
       |- IdempotencyKeyInFlightError, IdempotencyKeyReusedError, NotOnThisHostError
       |- NotResumableError
       |- TargetNotAllowedError, DataPathNotAllowedError
       |- UnknownDeviceError, DeviceMismatchError, InfeasibleRecommendationError, UnsupportedJobError
       |- HostNotAllowedError, ForeignOriginError, CsrfTokenError, BodyTooLargeError, UnsupportedMediaTypeError
       |- NotAuthenticatedError, ScopeMissingError, NotOwnerError, QuotaExceededError
       |- FirstKeyError, OwnKeyError
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Self

from service.domain.problems import FieldFault

MAX_FAULTS = 20
"""Faults that a problem lists: nobody reads more, and a request may have as many as its body has bytes."""


class ServiceError(Exception):
    """Base of every error of the service. Its class carries what the problem document says."""

    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    code: str = "internal-error"
    title: str = "The service failed"


class ConfigurationError(ServiceError):
    """The settings contradict each other or ask for what may not be."""

    code = "invalid-configuration"


class DeviceTakenError(ServiceError):
    """Another live process holds this device's lock file."""

    code = "device-taken"


class StaleLeaseError(ServiceError):
    """The lease has expired, or another owner has taken the work over: what was reported is not recorded."""

    code = "stale-lease"


class StoreUnavailableError(ServiceError):
    """The database cannot be reached or written now."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "store-unavailable"
    title = "The database cannot be used"


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


class TooManyFollowersError(ServiceError):
    """Nearly every connection is held by requests that last; the others are kept for those that do not."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "too-many-followers"
    title = "Too many connections follow tunings and jobs"


class RequestError(ServiceError):
    """Base of what the caller can mend."""

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
        """Return the error for an id of this kind that names nothing."""
        return cls(f"No {kind} with the id {identifier!r}. It may have been deleted.")


class ConflictError(RequestError):
    """The state of the resource does not allow it, or it exists already."""

    status = HTTPStatus.CONFLICT
    code = "conflict"
    title = "The current state does not allow it"


class NotEndedError(RequestError):
    """Only what has ended can be deleted."""

    status = HTTPStatus.CONFLICT
    code = "not-ended"
    title = "It has not ended"


class NotResumableError(RequestError):
    """The job cannot go on; the message says why."""

    status = HTTPStatus.CONFLICT
    code = "not-resumable"
    title = "The job cannot go on"


class NotOnThisHostError(RequestError):
    """The files of a job are on another host; the message names the slot."""

    status = HTTPStatus.CONFLICT
    code = "not-on-this-host"
    title = "The files are on another host"


class IdempotencyKeyInFlightError(RequestError):
    """A request with the same idempotency key is being answered right now."""

    status = HTTPStatus.CONFLICT
    code = "idempotency-key-in-flight"
    title = "A request with this idempotency key is in flight"


class IdempotencyKeyReusedError(RequestError):
    """Another request was answered under the same idempotency key."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "idempotency-key-reused"
    title = "This idempotency key belongs to another request"


class InvalidCursorError(RequestError):
    """The cursor was not made by this service for this list."""

    status = HTTPStatus.BAD_REQUEST
    code = "invalid-cursor"
    title = "The cursor is not one of ours"


class InvalidInputError(RequestError):
    """The request does not have the shape it needs.

    Args:
        message: what is wrong.
        faults: the fields at fault.
        count: how many there are, when ``faults`` does not hold them all.
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
        """An error whose message lists the first faults, and tells how many there are."""
        shown = faults[:MAX_FAULTS]
        listed = "; ".join(f"{fault.field}: {fault.message}" for fault in shown)
        total = max(count, len(faults))
        begin = f"{total} faults, of which the first {len(shown)}: " if total > len(shown) else ""
        return cls(begin + listed, faults, count)


class MalformedJsonError(RequestError):
    """The body is not JSON."""

    code = "malformed-json"
    title = "The body is not JSON"


class TargetNotAllowedError(RequestError):
    """A `python` target that the operator has not allow-listed."""

    status = HTTPStatus.FORBIDDEN
    code = "python-target-not-allowed"
    title = "This service does not run that code"


class DataPathNotAllowedError(RequestError):
    """A path outside the folders that jobs may read."""

    status = HTTPStatus.FORBIDDEN
    code = "data-path-not-allowed"
    title = "This service does not read that path"


class UnknownDeviceError(RequestError):
    """No worker of this service serves the device."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "unknown-device"
    title = "No worker serves that device"


class DeviceMismatchError(RequestError):
    """The recommendation was measured on another device than the one that would run it."""

    status = HTTPStatus.CONFLICT
    code = "device-mismatch"
    title = "The recommendation is for another device"


class InfeasibleRecommendationError(RequestError):
    """A job cannot be made from an answer that says that nothing fits."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "infeasible-recommendation"
    title = "Nothing fits, so nothing can be trained"


class UnsupportedJobError(RequestError):
    """The job needs something that this service cannot run."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "unsupported-job"
    title = "This service cannot run that job"


class HostNotAllowedError(RequestError):
    """The Host header names another machine: the request was led here by a forged name."""

    status = HTTPStatus.FORBIDDEN
    code = "host-not-allowed"
    title = "The service does not answer to that name"


class ForeignOriginError(RequestError):
    """A page of another origin made a browser send it."""

    status = HTTPStatus.FORBIDDEN
    code = "foreign-origin"
    title = "Requests from other sites are refused"


class CsrfTokenError(RequestError):
    """A browser that is signed in sent it without showing the page's token."""

    status = HTTPStatus.FORBIDDEN
    code = "csrf-token-missing"
    title = "The page's token is missing or old"


class BodyTooLargeError(RequestError):
    """The body is above the cap, holds too many values, or is nested too deep."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "body-too-large"
    title = "The body is too large"


class UnsupportedMediaTypeError(RequestError):
    """The body is not declared as what it must be: JSON, but for the forms of pages."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    code = "unsupported-media-type"
    title = "The body is of another kind"


class NotAuthenticatedError(RequestError):
    """The request carries no API key that is good. ``challenge`` is what `WWW-Authenticate` says."""

    status = HTTPStatus.UNAUTHORIZED
    code = "not-authenticated"
    title = "A good API key is needed"

    def __init__(self, message: str, *, key_given: bool) -> None:
        self.challenge = 'Bearer realm="batchwright"' + (', error="invalid_token"' if key_given else "")
        super().__init__(message)


class ScopeMissingError(RequestError):
    """The API key was not given the scope that this needs."""

    status = HTTPStatus.FORBIDDEN
    code = "scope-missing"
    title = "The API key may not do that"


class NotOwnerError(RequestError):
    """Another API key made it."""

    status = HTTPStatus.FORBIDDEN
    code = "not-owner"
    title = "It belongs to another API key"


class FirstKeyError(RequestError):
    """The first key is made by who can write to the database."""

    status = HTTPStatus.FORBIDDEN
    code = "first-key"
    title = "The first API key is made by the command"


class OwnKeyError(RequestError):
    """Nobody revokes the key that they call with: they could not see what they did, nor undo it."""

    status = HTTPStatus.CONFLICT
    code = "own-key"
    title = "It is the key of this call"


class QuotaExceededError(RequestError):
    """The API key has used what it may. ``retry_after_seconds`` is when to ask again."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    code = "quota-exceeded"
    title = "The API key has used its quota"

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)
