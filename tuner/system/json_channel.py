"""How a supervisor and its fork server talk: JSON lines over a socket pair. No torch."""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any


class Channel:
    """JSON objects, one a line, over a stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""
        self._readable = select.poll()  # not select(), which knows no descriptor above 1023
        self._readable.register(connection, select.POLLIN)

    def send(self, message: dict[str, Any]) -> None:
        """Send one object."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None) -> dict[str, Any] | None:
        """The next object, or none when ``timeout`` seconds pass first.

        Raises:
            EOFError: when the other side has closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._received:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._readable.poll(None if left is None else left * 1000):
                return None
            try:
                data = self.connection.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError("the other side closed the connection")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
