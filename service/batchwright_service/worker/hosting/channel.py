"""JSON messages over a socket pair, between the API process and the worker process."""

from __future__ import annotations

import json
import socket
from typing import Any

_MAX_BYTES = 1024**2
"""Larger than any message; the kernel's buffers hold about 200 KiB of each direction."""


class Channel:
    """One end of the pair. Messages arrive completely or not at all; ``send`` is safe to share between threads.

    Args:
        end: a ``SOCK_SEQPACKET`` socket of a pair, which the channel owns.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Create a channel, and the socket of its other end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def send(self, message: dict[str, Any]) -> bool:
        """Send without waiting; false when the other end is closed, or its buffer is full."""
        try:
            self._end.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None when the other end is closed."""
        try:
            read = self._end.recv(_MAX_BYTES)
        except OSError:
            return None
        if not read:
            return None
        message: dict[str, Any] = json.loads(read)
        return message

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._end.close()
