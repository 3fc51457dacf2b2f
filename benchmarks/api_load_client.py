"""The load of ``api_load.py``, in a process of its own: reads over kept connections, and idle followers.

python benchmarks/api_load_client.py read PORT CONNECTIONS SECONDS FILE   (FILE: one request path a line)
python benchmarks/api_load_client.py follow PORT FILE                     (one follower a line, until stdin ends)

Both print one line of JSON. The reader is a closed loop: a connection sends its next request when it has the answer to
the one before. BATCHWRIGHT_API_KEY, when set, is sent along.
"""

import json
import os
import re
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNK_BYTES = 1 << 20
_PATIENCE_SECONDS = 30.0


def request_of(path: str, port: int) -> bytes:
    """A GET as it is sent."""
    key = os.environ.get("BATCHWRIGHT_API_KEY")
    more = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: */*\r\n{more}\r\n".encode()


@dataclass
class Connection:
    """A kept connection with at most one request under way."""

    socket: socket.socket
    sent_at: float = 0.0
    received: bytearray = field(default_factory=bytearray)
    missing: int | None = None
    """Bytes of the answer still to come; none before its head is there."""

    def send(self, request: bytes) -> None:
        """Send the next request."""
        self.received.clear()
        self.missing = None
        self.sent_at = time.perf_counter()
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Take what has come, and whether the answer is whole.

        Raises:
            ConnectionError: when the server has closed it.
        """
        chunk = self.socket.recv(_CHUNK_BYTES)
        if not chunk:
            raise ConnectionError("the server closed a connection")
        self.received += chunk
        if self.missing is not None:
            self.missing -= len(chunk)
        elif (end := self.received.find(_HEAD_END)) >= 0:
            length = _LENGTH.search(self.received, 0, end + 2)
            whole = end + len(_HEAD_END) + (int(length[1]) if length else 0)
            self.missing = whole - len(self.received)
        return self.missing == 0


def read(port: int, connections: int, seconds: float, paths: list[str]) -> dict[str, float]:
    """Read for a while; latencies in milliseconds."""
    requests = cycle([request_of(path, port) for path in paths])
    opened = [Connection(socket.create_connection(("127.0.0.1", port))) for _ in range(connections)]
    poll = select.epoll()
    by_descriptor = {it.socket.fileno(): it for it in opened}
    for connection in opened:
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(connection.socket, select.EPOLLIN)
    latencies: list[float] = []
    refused = 0
    began = time.perf_counter()
    for connection in opened:
        connection.send(next(requests))
    while (now := time.perf_counter()) < began + seconds:
        for descriptor, _ in poll.poll(began + seconds - now):
            connection = by_descriptor[descriptor]
            if connection.receive():
                latencies.append(time.perf_counter() - connection.sent_at)
                refused += not connection.received.startswith(b"HTTP/1.1 200 ")
                connection.send(next(requests))
    return _figures(latencies, time.perf_counter() - began) | {"refused": refused}


def _figures(latencies: list[float], seconds: float) -> dict[str, float]:
    ordered = sorted(latencies)

    def percentile(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else 0.0

    return {
        "requests": len(ordered),
        "requests_per_second": round(len(ordered) / seconds, 1),
        "p50_ms": percentile(0.5),
        "p99_ms": percentile(0.99),
    }


def follow(port: int, paths: list[str]) -> dict[str, int]:
    """Hold a stream open on each path until standard input ends; says on it when all are open."""
    streams = {}
    poll = select.poll()
    for path in paths:
        opened = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_SECONDS)
        opened.sendall(request_of(path, port))
        if not opened.recv(_CHUNK_BYTES).startswith(b"HTTP/1.1 200 "):
            raise ConnectionError(f"{path} was refused")
        streams[opened.fileno()] = opened
        poll.register(opened, select.POLLIN)
    sys.stdout.write("following\n")
    sys.stdout.flush()
    poll.register(sys.stdin, select.POLLIN | select.POLLHUP)
    lost, heard = 0, 0
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == sys.stdin.fileno():
                return {"followers": len(paths), "still_open": len(paths) - lost, "messages": heard}
            heard += 1
            if not streams[descriptor].recv(_CHUNK_BYTES):
                lost += 1
                poll.unregister(descriptor)


def main(arguments: list[str]) -> None:
    """Read or follow."""
    paths = Path(arguments[-1]).read_text(encoding="utf-8").split()
    if arguments[0] == "read":
        found: dict[str, float] | dict[str, int] = read(
            int(arguments[1]), int(arguments[2]), float(arguments[3]), paths
        )
    else:
        found = follow(int(arguments[1]), paths)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
