"""The exceptions of the SDK.

::

    ClientError
    |- ApiError                    the service responded with a problem, which the error carries
    |  |- InvalidRequestError      400, 413, 415, 422
    |  |- NotAuthenticatedError    401
    |  |- NotAllowedError          403
    |  |- NotFoundError            404
    |  |- ConflictError            409
    |  |- QuotaExceededError       429
    |  |- ServiceUnavailableError  502, 503, 504
    |- ConnectionFailedError       the service could not be reached, or went silent
    |- UnexpectedResponseError     the response is not one of this service
    |- WaitTimeoutError            the work had not ended when the time to wait was up
    |- TuningFailedError           a tuning ended without a recommendation
"""

from http import HTTPStatus

from batchwright.client.documents.problems import PROBLEM_TYPE_PREFIX, Problem
from batchwright.client.sdk_documents import Tuning

NOT_A_PROBLEM = "not-a-problem-document"
"""Code of an error that did not come from the service itself, such as a proxy's page."""

_TRANSIENT_STATUSES = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_TRANSIENT_CODES = frozenset({"idempotency-key-in-flight"})
_GATEWAY_STATUSES = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT})


class ClientError(Exception):
    """Base of every error of the SDK."""

    @property
    def is_transient(self) -> bool:
        """Whether the same call may succeed a little later."""
        return False

    @property
    def retry_after_seconds(self) -> float | None:
        """Seconds that the service asked to wait before the next try, or None."""
        return None


class ApiError(ClientError):
    """The service refused a call. Programs decide by ``problem.code``, which is stable.

    ``request_id``, where the service sent one, finds the details in the service's log.
    """

    def __init__(
        self, problem: Problem, retry_after_seconds: float | None = None, request_id: str | None = None
    ) -> None:
        self.problem = problem
        self.request_id = request_id
        self._retry_after_seconds = retry_after_seconds
        super().__init__(f"{problem.code} ({problem.status}): {problem.detail}")

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status or 0

    @property
    def code(self) -> str:
        """The stable code of this kind of problem."""
        return self.problem.code

    @property
    def is_transient(self) -> bool:
        """True for 429, 503, an idempotency key whose first request is in flight, and a gateway error of a proxy."""
        gateway = self.status in _GATEWAY_STATUSES and self.code == NOT_A_PROBLEM
        return gateway or self.status in _TRANSIENT_STATUSES or self.code in _TRANSIENT_CODES

    @property
    def retry_after_seconds(self) -> float | None:
        """The value of `Retry-After` in seconds, or None."""
        return self._retry_after_seconds


class InvalidRequestError(ApiError):
    """The request is invalid; ``problem.errors`` names every invalid field."""


class NotAuthenticatedError(ApiError):
    """The API key is missing, unknown, expired or revoked."""


class NotAllowedError(ApiError):
    """The API key lacks the permission, or the operator allows the operation to nobody."""


class NotFoundError(ApiError):
    """There is no resource with this identifier."""


class ConflictError(ApiError):
    """The state of the resource does not allow the operation."""


class QuotaExceededError(ApiError):
    """The API key has used up its quota; ``retry_after_seconds`` says when to try again."""


class ServiceUnavailableError(ApiError):
    """The service, or a part of it that the call needs, is unavailable."""


class ConnectionFailedError(ClientError):
    """The service could not be reached, or the connection broke. The service may have received the request."""

    @property
    def is_transient(self) -> bool:
        """True: the service may be restarting."""
        return True


class UnexpectedResponseError(ClientError):
    """A response that this service does not send: another program listens there, or a very different version."""


class WaitTimeoutError(ClientError):
    """The work had not ended when the time to wait was up. The work continues."""


class TuningFailedError(ClientError):
    """A tuning ended without a recommendation. ``problem.code`` is the stable code of the cause, or `cancelled`."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.problem = tuning.problem or Problem(
            type=f"{PROBLEM_TYPE_PREFIX}cancelled",
            title="The tuning was cancelled",
            detail="the tuning was cancelled before it had a recommendation",
            code="cancelled",
        )
        super().__init__(f"{tuning.id} ended as {tuning.state}: {self.problem.detail}")


_ERROR_CLASSES: dict[int, type[ApiError]] = {
    HTTPStatus.BAD_REQUEST: InvalidRequestError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: InvalidRequestError,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: InvalidRequestError,
    HTTPStatus.UNPROCESSABLE_ENTITY: InvalidRequestError,
    HTTPStatus.UNAUTHORIZED: NotAuthenticatedError,
    HTTPStatus.FORBIDDEN: NotAllowedError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.TOO_MANY_REQUESTS: QuotaExceededError,
    HTTPStatus.BAD_GATEWAY: ServiceUnavailableError,
    HTTPStatus.SERVICE_UNAVAILABLE: ServiceUnavailableError,
    HTTPStatus.GATEWAY_TIMEOUT: ServiceUnavailableError,
}


def api_error(problem: Problem, retry_after_seconds: float | None, request_id: str | None) -> ApiError:
    """Make the error for a problem, of the class that belongs to its status."""
    return _ERROR_CLASSES.get(problem.status or 0, ApiError)(problem, retry_after_seconds, request_id)
