"""What the SDK raises.

::

    ClientError
    |- ApiError                  the service answered with a problem; it is carried along
    |- ConnectionFailedError     the service could not be reached, or went silent
    |- NotWaitedLongEnoughError  the time given to wait ran out first
"""

from __future__ import annotations

from service.domain import Problem


class ClientError(Exception):
    """Base of every error of the SDK."""


class ApiError(ClientError):
    """The service refused a call. ``problem.code`` is the stable word to decide by."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(f"{problem.code} ({problem.status}): {problem.detail}")

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status or 0

    @property
    def code(self) -> str:
        """The stable word for this kind of problem."""
        return self.problem.code


class ConnectionFailedError(ClientError):
    """The service could not be reached, or the connection broke."""


class NotWaitedLongEnoughError(ClientError):
    """It had not ended when the time was up; it goes on."""
