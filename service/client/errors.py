"""What the SDK raises.

::

    ClientError
    |- ApiError                    the service answered with a problem; it is carried along
    |  |- InvalidRequestError      400, 413, 415, 422
    |  |- NotAuthenticatedError    401
    |  |- NotAllowedError          403
    |  |- NotFoundError            404
    |  |- ConflictError            409
    |  |- QuotaExceededError       429
    |  |- ServiceUnavailableError  502, 503, 504
    |- ConnectionFailedError       the service could not be reached, or went silent
    |- UnexpectedAnswerError       what came is no answer of this service
    |- NotWaitedLongEnoughError    the time given to wait ran out first
    |- TuningFailedError           a tuning ended without an answer
"""

from __future__ import annotations

from http import HTTPStatus

from service.domain.problems import PROBLEM_TYPE_PREFIX, Problem
from service.domain.work import Tuning

NOT_A_PROBLEM = "not-a-problem-document"
"""The code of a refusal that did not come from the service itself: a proxy's page."""

_PASSING_STATUSES = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_PASSING_CODES = frozenset({"idempotency-key-in-flight"})
_GATEWAY_STATUSES = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT})


class ClientError(Exception):
    """Base of every error of the SDK."""

    @property
    def may_pass(self) -> bool:
        """Whether the same call may be answered a little later."""
        return False

    @property
    def retry_after_seconds(self) -> float | None:
        """Seconds that the service asked to wait before the next try; none when it named none."""
        return None


class ApiError(ClientError):
    """The service refused a call. ``problem.code`` is the stable word to decide by.

    ``request_id``, where the service named one, is what its log has the details under.
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
        """The stable word for this kind of problem."""
        return self.problem.code

    @property
    def may_pass(self) -> bool:
        """True for 429 and 503, for a key whose first request is in flight, and where a proxy misses the service."""
        away = self.status in _GATEWAY_STATUSES and self.code == NOT_A_PROBLEM
        return away or self.status in _PASSING_STATUSES or self.code in _PASSING_CODES

    @property
    def retry_after_seconds(self) -> float | None:
        """What `Retry-After` said."""
        return self._retry_after_seconds


class InvalidRequestError(ApiError):
    """The request is wrong; ``problem.errors`` names every field at fault."""


class NotAuthenticatedError(ApiError):
    """The service wants an API key, or knows no such key, or it has ended."""


class NotAllowedError(ApiError):
    """The API key may not do that, or the operator does not allow it to anyone."""


class NotFoundError(ApiError):
    """There is nothing with this identifier."""


class ConflictError(ApiError):
    """The state of the resource does not allow it."""


class QuotaExceededError(ApiError):
    """The API key has used what it may; ``retry_after_seconds`` says when to ask again."""


class ServiceUnavailableError(ApiError):
    """The service, or a part of it that this needs, is away."""


class ConnectionFailedError(ClientError):
    """The service could not be reached, or the connection broke: it may have seen the request, or not."""

    @property
    def may_pass(self) -> bool:
        """It may be starting anew."""
        return True


class UnexpectedAnswerError(ClientError):
    """An answer that is none of this service's: something else listens there, or one much older or newer."""


class NotWaitedLongEnoughError(ClientError):
    """It had not ended when the time was up; it goes on."""


class TuningFailedError(ClientError):
    """A tuning ended without an answer. ``problem.code`` is the stable word for why, `cancelled` included."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.problem = tuning.problem or Problem(
            type=f"{PROBLEM_TYPE_PREFIX}cancelled",
            title="The tuning was cancelled",
            detail="it was cancelled before it had an answer",
            code="cancelled",
        )
        super().__init__(f"{tuning.id} ended as {tuning.state}: {self.problem.detail}")


_KINDS: dict[int, type[ApiError]] = {
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
    """The error for a problem, of the class that its status names."""
    return _KINDS.get(problem.status or 0, ApiError)(problem, retry_after_seconds, request_id)
