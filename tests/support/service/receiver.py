"""A receiver of webhooks on loopback that fails, is slow, redirects, or answers without an end, as a test says."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = Callable[[BaseHTTPRequestHandler], None]


@dataclass(frozen=True)
class Received:
    """A request as it came, with the names of its headers in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Receiver:
    """A receiver that listens.

    Attributes:
        replies: how the next requests are answered, in their order; the last one stays.
        received: the requests so far.
        released: set when the test ends, for replies that wait.
    """

    port: int = 0
    replies: list[Reply] = field(default_factory=lambda: [status(204)])
    received: list[Received] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """Address of the receiver."""
        return f"http://127.0.0.1:{self.port}/told?by=batchwright"

    @property
    def host(self) -> str:
        """The receiver as an entry of ``BATCHWRIGHT_WEBHOOK_HOSTS``."""
        return f"http://127.0.0.1:{self.port}"


def status(code: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Reply:
    """Answer with a status, a body and headers."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def silent(released: threading.Event) -> Reply:
    """Answer nothing until the test ends."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        del handler
        released.wait()

    return reply


def dripping(released: threading.Event) -> Reply:
    """Send one byte of a header every few milliseconds, without an end: no single wait for data is long."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not released.wait(0.02):
            handler.wfile.write(b"x")

    return reply


def raw(text: bytes) -> Reply:
    """Answer with a text that may be no HTTP."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(text)

    return reply


def endless(handler: BaseHTTPRequestHandler) -> None:
    """Answer 200 with a body that does not end while anybody reads."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x" * 65_536)


@contextmanager
def receiving(*replies: Reply) -> Iterator[Receiver]:
    """Listen on a free port of loopback."""
    receiver = Receiver(replies=list(replies) or [status(204)])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Remember the request, and answer it."""
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.received.append(
                Received(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            )
            reply = receiver.replies.pop(0) if len(receiver.replies) > 1 else receiver.replies[0]
            self.close_connection = True
            try:
                reply(self)
            except OSError:  # the sender has gone
                return

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # closed with the server
    receiver.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
