"""Messages between the process that serves the API and the process that works: JSON over a pair of sockets."""

from __future__ import annotations

import json
import socket
from typing import Any

_LARGEST_BYTES = 1024**2
"""More than any message has; the kernel's buffers hold about 200 KiB of each direction."""


class Channel:
    """One end. Messages are whole or not at all; ``send`` is safe to share between threads.

    Args:
        end: a socket of a pair, of the kind ``SOCK_SEQPACKET``; owned from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A channel, and the socket of its other end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def send(self, message: dict[str, Any]) -> bool:
        """Send without waiting; false when the other end is gone, or has not read for long."""
        try:
            self._end.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; none when the other end is gone."""
        try:
            read = self._end.recv(_LARGEST_BYTES)
        except OSError:
            return None
        if not read:
            return None
        message: dict[str, Any] = json.loads(read)
        return message

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._end.close()
