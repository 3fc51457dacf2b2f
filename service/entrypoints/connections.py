"""Bounds on what peers can hold by their connections alone: their number, and the time that each may idle.

A connection costs a descriptor, and its peer need not send anything. So there are fewer of them than descriptors, and
when a new one comes while all are taken, those that wait for their peers longest are closed: peers that never finish a
request displace one another, and nobody else. What takes too long to arrive, or is not read, ends as well. A connection
is looked at once a second: requests cost nothing, and start no timers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.observability.logging import RepeatLimit
from service.problem_mapping import make_problem
from tuner.system.processes import raise_limit

_log = logging.getLogger(__name__)

_RESERVE = 160
"""Descriptors kept for work: two per connection to the database, pipes of estimates, files, and what is accepted or
closed in the same turns of the loop."""
_FEWEST = 16
_YOUNG = 16
"""The newest waiting connections are not closed for newer ones: their requests may be on the way. As many again are
accepted beyond the bound where all others are at work, for requests that are answered at once."""
_ACCEPTED_AT_ONCE = 16
"""Connections accepted in one turn of the loop; the kernel keeps the others."""
_PROGRESS_BYTES = 16_384
"""Less than this taken in `unread_seconds` is no reading."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SEVERAL = 16
"""One in so many connections is closed at once to make room, so that the search for the oldest is seldom made."""


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections there may be, and what each may take."""

    most: int
    """Connections at once."""
    head_seconds: float = 10.0
    """Until the head of a request is there, from the first byte or the beginning of the connection."""
    body_seconds: float = 60.0
    """Until the body is there, from its head."""
    unread_seconds: float = 30.0
    """Until the peer takes more of what was sent."""


def limits_here(most: int) -> ConnectionLimits:
    """Limits with at most ``most`` connections, or as many as the limit of open files leaves room for.

    The soft limit of this process is raised as far as that needs, and the hard limit allows.
    """
    descriptors = raise_limit(resource.RLIMIT_NOFILE, most + _RESERVE)
    return ConnectionLimits(min(most, max(_FEWEST, descriptors - _RESERVE)))


class Phase(Enum):
    """Phases of a connection, by the event that it waits for."""

    HEAD = "the head of a request"
    BODY = "the body of a request"
    ANSWER = "its answer"


class Connections:
    """The connections of a server. For the thread of its event loop.

    Args:
        limits: what they may take.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: dict[BoundedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def has_capacity(self) -> bool:
        """Return whether requests that last may begin: the connections beyond the bound are for short ones."""
        return len(self._open) <= self.limits.most

    def add(self, connection: BoundedProtocol) -> None:
        """Take a new connection in, in place of others when there are too many."""
        self._open[connection] = None
        if len(self._open) > self.limits.most:
            self._make_room()

    def remove(self, connection: BoundedProtocol) -> None:
        """Forget a connection that has ended."""
        self._open.pop(connection, None)

    def sweep(self, now: float) -> None:
        """End what takes too long."""
        for connection in list(self._open):
            connection.check(now)

    def _make_room(self) -> None:
        """Close those that wait for their peers longest: for a head before those that wait for a body."""
        waiting = [it for phase in (Phase.HEAD, Phase.BODY) for it in self._open if it.phase is phase]
        excess = len(self._open) - self.limits.most
        wanted = min(max(excess, self.limits.most // _SEVERAL), len(waiting) - _YOUNG)
        for connection in waiting[: max(wanted, excess - _YOUNG, 0)]:
            connection.give_way()
            self.remove(connection)


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol, one of a bounded number of connections. ``bounded`` makes the class of a server."""

    registry: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        self._seen: tuple[Phase, object] | None = None
        self._seen_since = 0.0
        self._resumed = 0
        self._unread: tuple[int, int] | None = None
        self._unread_since = 0.0

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin, in place of others when there are too many."""
        super().connection_made(transport)
        self.registry.add(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self.registry.remove(self)
        super().connection_lost(exc)

    @override
    def resume_writing(self) -> None:
        """Go on: the peer has read most of what was sent."""
        self._resumed += 1
        super().resume_writing()

    @override
    def on_response_complete(self) -> None:
        """Go on with the next request; what nobody has read of this one's body is not kept until then."""
        if self.cycle.body:
            self.cycle.body.clear()
        super().on_response_complete()

    @property
    def phase(self) -> Phase:
        """The phase of the connection."""
        if self.cycle is None or self.cycle.response_complete:
            return Phase.HEAD
        return Phase.BODY if self.cycle.more_body and not self.cycle.response_started else Phase.ANSWER

    def check(self, now: float) -> None:
        """End the connection if its peer takes too long, as of ``now``: to be called again and again."""
        phase = self.phase
        if self._seen != (phase, self.cycle):
            self._seen, self._seen_since = (phase, self.cycle), now
        elif phase is not Phase.ANSWER and now - self._seen_since > self._allowed_seconds(phase):
            self._time_out(phase)
        self._check_unread(now)

    def give_way(self) -> None:
        """End for a newer connection."""
        self.transport.abort()

    def _allowed_seconds(self, phase: Phase) -> float:
        limits = self.registry.limits
        return limits.head_seconds if phase is Phase.HEAD else limits.body_seconds

    def _check_unread(self, now: float) -> None:
        """End the connection when its peer has not read for long what was sent: closing alone waits for that, too."""
        size = self.transport.get_write_buffer_size()
        if size == 0:
            self._unread = None
        elif self._unread is None or self._resumed != self._unread[0] or size <= self._unread[1] - _PROGRESS_BYTES:
            self._unread, self._unread_since = (self._resumed, size), now
        elif now - self._unread_since > self.registry.limits.unread_seconds:
            self.transport.abort()

    def _time_out(self, phase: Phase) -> None:
        if self.transport.is_closing():
            return
        if phase is Phase.BODY or self.conn.trailing_data[0]:
            seconds = self._allowed_seconds(phase)
            self.transport.write(_too_late(f"{phase.value} was not there after {seconds:g} s"))
        self.transport.close()


def bounded(registry: Connections) -> type[BoundedProtocol]:
    """The protocol of a server's connections."""
    return type("BoundedConnection", (BoundedProtocol,), {"registry": registry})


def _too_late(detail: str) -> bytes:
    """A whole response, for a request that is not there as a whole."""
    status = HTTPStatus.REQUEST_TIMEOUT
    problem = make_problem(status, "request-timeout", "The request took too long to arrive", detail)
    body = problem.model_dump_json(exclude_none=True)
    head = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/problem+json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    return "\r\n".join([*head, "", body]).encode()


class BoundedListener(socket.socket):
    """A socket that accepts some connections in each turn of the event loop, and goes on when descriptors run out.

    The loop would accept thousands before it begins with the first, and log a traceback for each that it cannot.
    """

    def __init__(self, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self._accepted = 0
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @override
    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            BlockingIOError: when there is none, or enough was accepted in this turn.
        """
        if self._accepted >= _ACCEPTED_AT_ONCE:
            raise BlockingIOError
        if not self._accepted:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._accepted += 1
        try:
            return super().accept()
        except OSError as error:
            self._accepted = _ACCEPTED_AT_ONCE
            if error.errno not in _EXHAUSTED or self._spare < 0:
                raise
            _log.warning("a connection is refused: %s", error.strerror)
        self._refuse_one()
        raise BlockingIOError

    @override
    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        super().close()

    def _begin_turn(self) -> None:
        self._accepted = 0
        if self._spare < 0 and self.fileno() >= 0:
            self._spare = _spare_or_none()

    def _refuse_one(self) -> None:
        """Accept and close a connection with the descriptor that is kept for this: left waiting, it wakes the loop."""
        os.close(self._spare)
        try:
            super().accept()[0].close()
        except OSError:
            pass  # it was withdrawn, or another thread took the descriptor: the loop tries again
        finally:
            self._spare = _spare_or_none()


def _spare_or_none() -> int:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def limit_repeated_messages() -> None:
    """Log what any peer can provoke some times a minute, and count the rest."""
    for name, highest in (("uvicorn.error", logging.WARNING), (__name__, logging.WARNING), ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        if not any(isinstance(found, RepeatLimit) for found in logger.filters):
            logger.addFilter(RepeatLimit(highest=highest))
