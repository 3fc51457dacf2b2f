"""Bounds on the connections of clients: their number, and the time for which each may be idle.

A connection costs a descriptor, and its peer need not send anything. So there are fewer connections than descriptors.
When a new one arrives while all are taken, the connections that wait longest for their peers are closed: peers that
never finish a request displace one another, and no other peers. A request that takes too long to arrive, and a response
that is not read, end their connection too. Each connection is checked once a second, so that requests need no timers.
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

from batchwright.system.processes import raise_limit
from batchwright_service.observability.logging import RepeatLimit
from batchwright_service.problem_mapping import make_problem

_log = logging.getLogger(__name__)

_RESERVE = 160
"""Descriptors reserved for work: two per connection to the database, pipes of estimates, files, and connections that
are accepted or closed in the same iterations of the loop."""
_MIN_CONNECTIONS = 16
_PROTECTED = 16
"""The newest waiting connections, which are not closed for newer ones: their requests may be on the way. As many again
are accepted beyond the bound while all others are in use, for short requests."""
_MAX_ACCEPTED = 16
"""Connections accepted in one iteration of the loop; the kernel keeps the others."""
_PROGRESS_BYTES = 16_384
"""A peer that takes less than this in `unread_seconds` does not read."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_EVICTED_SHARE = 16
"""One in so many connections is evicted at once, so that the search for the oldest is rare."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds on the number of connections, and on the time of each."""

    most: int
    """Connections at once."""
    head_seconds: float = 10.0
    """Seconds until the head of a request is complete, from its first byte or the start of the connection."""
    body_seconds: float = 60.0
    """Seconds from the head of a request until its body is complete."""
    unread_seconds: float = 30.0
    """Seconds until the peer must read more of a response."""


def limits_here(most: int) -> ConnectionLimits:
    """Return limits with at most ``most`` connections, or as many as the limit of open files allows.

    The soft limit of this process is raised as far as needed, within the hard limit.
    """
    descriptors = raise_limit(resource.RLIMIT_NOFILE, most + _RESERVE)
    return ConnectionLimits(min(most, max(_MIN_CONNECTIONS, descriptors - _RESERVE)))


class ConnectionPhase(Enum):
    """Phase of a connection, by the event that it waits for."""

    HEAD = "the head of a request"
    BODY = "the body of a request"
    RESPONSE = "its response"


class Connections:
    """The connections of a server, for use in the thread of its event loop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: dict[BoundedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def has_capacity(self) -> bool:
        """Return whether long requests may begin: the connections beyond the bound are for short ones."""
        return len(self._open) <= self.limits.most

    def add(self, connection: BoundedProtocol) -> None:
        """Register a new connection, and evict others when there are too many."""
        self._open[connection] = None
        if len(self._open) > self.limits.most:
            self._evict()

    def remove(self, connection: BoundedProtocol) -> None:
        """Remove a connection that has ended."""
        self._open.pop(connection, None)

    def sweep(self, now: float) -> None:
        """End the connections that take too long."""
        for connection in list(self._open):
            connection.check(now)

    def _evict(self) -> None:
        """Close the connections that wait longest for their peers: for a head first, then for a body."""
        phases = (ConnectionPhase.HEAD, ConnectionPhase.BODY)
        waiting = [connection for phase in phases for connection in self._open if connection.phase is phase]
        excess = len(self._open) - self.limits.most
        wanted = min(max(excess, self.limits.most // _EVICTED_SHARE), len(waiting) - _PROTECTED)
        for connection in waiting[: max(wanted, excess - _PROTECTED, 0)]:
            connection.abort()
            self.remove(connection)


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol with bounds. ``bounded`` creates the class for a server."""

    registry: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        self._seen: tuple[ConnectionPhase, object] | None = None
        self._seen_since = 0.0
        self._resumed = 0
        self._unread: tuple[int, int] | None = None
        self._unread_since = 0.0

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Register the connection, which may evict others."""
        super().connection_made(transport)
        self.registry.add(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self.registry.remove(self)
        super().connection_lost(exc)

    @override
    def resume_writing(self) -> None:
        """Resume writing: the peer has read most of the response."""
        self._resumed += 1
        super().resume_writing()

    @override
    def on_response_complete(self) -> None:
        """Continue with the next request, and free the unread body of this one."""
        if self.cycle.body:
            self.cycle.body.clear()
        super().on_response_complete()

    @property
    def phase(self) -> ConnectionPhase:
        """The phase of the connection."""
        if self.cycle is None or self.cycle.response_complete:
            return ConnectionPhase.HEAD
        return (
            ConnectionPhase.BODY
            if self.cycle.more_body and not self.cycle.response_started
            else ConnectionPhase.RESPONSE
        )

    def check(self, now: float) -> None:
        """End the connection if its peer takes too long as of ``now``; to be called repeatedly."""
        phase = self.phase
        if self._seen != (phase, self.cycle):
            self._seen, self._seen_since = (phase, self.cycle), now
        elif phase is not ConnectionPhase.RESPONSE and now - self._seen_since > self._allowed_seconds(phase):
            self._time_out(phase)
        # A peer that does not read would be waited for when the connection is closed.
        size = self.transport.get_write_buffer_size()
        if size == 0:
            self._unread = None
        elif self._unread is None or self._resumed != self._unread[0] or size <= self._unread[1] - _PROGRESS_BYTES:
            self._unread, self._unread_since = (self._resumed, size), now
        elif now - self._unread_since > self.registry.limits.unread_seconds:
            self.transport.abort()

    def abort(self) -> None:
        """Close the connection at once, in favour of a newer one."""
        self.transport.abort()

    def _allowed_seconds(self, phase: ConnectionPhase) -> float:
        limits = self.registry.limits
        return limits.head_seconds if phase is ConnectionPhase.HEAD else limits.body_seconds

    def _time_out(self, phase: ConnectionPhase) -> None:
        if self.transport.is_closing():
            return
        if phase is ConnectionPhase.BODY or self.conn.trailing_data[0]:
            seconds = self._allowed_seconds(phase)
            self.transport.write(_timeout_response(f"{phase.value} was not complete after {seconds:g} s"))
        self.transport.close()


def bounded(registry: Connections) -> type[BoundedProtocol]:
    """Create the protocol class of a server's connections."""
    return type("BoundedConnection", (BoundedProtocol,), {"registry": registry})


def _timeout_response(detail: str) -> bytes:
    """Return the response to an incomplete request."""
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
    """A socket that accepts a few connections per iteration of the event loop, and survives a lack of descriptors.

    The loop would accept thousands before it serves the first, and log a traceback for each that it cannot accept.
    """

    def __init__(self, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self._accepted = 0
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @override
    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            BlockingIOError: when none waits, or enough were accepted in this iteration.
        """
        if self._accepted >= _MAX_ACCEPTED:
            raise BlockingIOError
        if not self._accepted:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        self._accepted += 1
        try:
            return super().accept()
        except OSError as error:
            self._accepted = _MAX_ACCEPTED
            if error.errno not in _EXHAUSTED or self._spare < 0:
                raise
            _log.warning("refused a connection: %s", error.strerror)
        # Left waiting, the connection would wake the loop again.
        os.close(self._spare)
        try:
            super().accept()[0].close()
        except OSError:
            pass  # the peer closed it, or another thread took the descriptor: the loop tries again
        finally:
            self._spare = _spare_or_none()
        raise BlockingIOError

    @override
    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        super().close()

    def _begin_iteration(self) -> None:
        self._accepted = 0
        if self._spare < 0 and self.fileno() >= 0:
            self._spare = _spare_or_none()


def _spare_or_none() -> int:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def limit_repeated_messages() -> None:
    """Limit the log messages that any peer can provoke to a few a minute, and count the rest."""
    for name, highest in (("uvicorn.error", logging.WARNING), (__name__, logging.WARNING), ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        if not any(isinstance(found, RepeatLimit) for found in logger.filters):
            logger.addFilter(RepeatLimit(highest=highest))
