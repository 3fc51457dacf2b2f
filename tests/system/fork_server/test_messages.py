"""Messages between a fork server and its client: accepted and refused ones."""

from __future__ import annotations

import fcntl
import os
import resource
from multiprocessing.connection import Connection, Pipe

import pytest
from pydantic import ValidationError

from batchwright.system.fork_server.messages import COMMANDS, EVENTS, Ended, KillTask, Ready, receive, send


def test_a_connection_works_on_any_descriptor() -> None:
    """Messages arrive on descriptors above 1024, as in a service with thousands of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    ours, child_end = Pipe()
    with ours, child_end, Connection(fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, 2000)) as far:
        send(child_end, Ended(exit_code=-9))
        assert receive(far, EVENTS, 1.0) == Ended(exit_code=-9)
        assert receive(far, EVENTS, 0.0) is None
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_message_of_the_other_direction_is_refused() -> None:
    """The kind of a message decides its fields; a client sends no events."""
    ours, child_end = Pipe()
    with ours, child_end:
        send(ours, KillTask())
        assert receive(child_end, COMMANDS, 1.0) == KillTask()
        send(ours, Ready())
        with pytest.raises(ValidationError, match="ready"):
            receive(child_end, COMMANDS, 1.0)


@pytest.mark.parametrize("sent", [b"", b"\0\0\0\x20half a message"])
def test_a_closed_connection_ends_in_one_way(sent: bytes) -> None:
    """A kill of the other side at any moment, also in the middle of a message, raises EOFError."""
    ours, child_end = Pipe()
    with ours:
        os.write(child_end.fileno(), sent)
        child_end.close()
        with pytest.raises(EOFError):
            receive(ours, EVENTS, 1.0)
