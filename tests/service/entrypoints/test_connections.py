"""Connections that are opened and not used: they make room, time out, and fail nobody else's work."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from batchwright_service.entrypoints.connections import (
    BoundedListener,
    ConnectionLimits,
    ConnectionPhase,
    Connections,
    bounded,
    limits_here,
)
from tests.support.factories import tuning_request
from tests.support.service.processes import LISTENS, PATIENCE_SECONDS, Spoken, slow_service, spoken, wait_until

DESCRIPTORS = 256
HALF_HEAD = b"POST /v1/tunings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"
LIMITED = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv.pop(1)),) * 2); "
    "runpy.run_module('batchwright', run_name='__main__', alter_sys=True)"
)


@contextmanager
def served(data_dir: Path, *arguments: str, descriptors: int = DESCRIPTORS, **settings: str) -> Iterator[Spoken]:
    """A service as the command line serves it, with few descriptors."""
    command = ["-c", LIMITED, str(descriptors), "serve", "--port", "0", *arguments]
    environment = {f"BATCHWRIGHT_{name.upper()}": value for name, value in settings.items()}
    with spoken(command, LISTENS, {"BATCHWRIGHT_DATA_DIR": str(data_dir), **environment}) as started:
        yield started


def connected(url: str, sent: bytes = b"") -> socket.socket:
    """A connection on which something was sent."""
    address = httpx.URL(url)
    opened = socket.create_connection((address.host, address.port or 0), timeout=PATIENCE_SECONDS)
    opened.sendall(sent)
    return opened


def received(opened: socket.socket) -> bytes:
    """All that the service sends until it closes; a reset is a close, too."""
    parts = []
    try:
        while part := opened.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def answered(client: httpx.Client, path: str) -> bool:
    """Return whether a request is answered; it is sent again where its idle connection was closed as it went out."""
    try:
        return client.get(path).is_success
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return client.get(path).is_success


@pytest.fixture(scope="module")
def small(starts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spoken]:
    """A service with few descriptors, and no workers."""
    del starts
    with served(tmp_path_factory.mktemp("small"), "--no-worker") as started:
        yield started


def test_half_requests_displace_one_another_and_nobody_else(small: Spoken) -> None:
    """With more of them than descriptors a client is answered, on a new connection and on the one that it kept."""
    with ExitStack() as stack:
        kept = stack.enter_context(httpx.Client(base_url=small.url, timeout=PATIENCE_SECONDS))
        assert kept.get("/livez").is_success
        for _ in range(2 * DESCRIPTORS + 88):
            stack.enter_context(connected(small.url, HALF_HEAD))
        for _ in range(3):
            assert answered(kept, "/v1/tunings")
            assert httpx.get(f"{small.url}/livez", timeout=PATIENCE_SECONDS).is_success
        opened = len(list(Path(f"/proc/{small.process.pid}/fd").iterdir()))
    assert opened < DESCRIPTORS
    assert sum(map(len, small.lines)) < 10_000
    assert not [line for line in small.lines if "Traceback" in line]


def test_a_head_that_does_not_end_times_out(small: Spoken) -> None:
    """After ten seconds it is answered with 408; a connection on which nothing was sent is closed without a word."""
    with connected(small.url, HALF_HEAD) as half, connected(small.url) as silent:
        answer = received(half)
        assert received(silent) == b""
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b'"code":"request-timeout"' in answer


def test_a_service_without_descriptors_goes_on_when_it_has_some(small: Spoken) -> None:
    """Connections that it cannot accept leave a bounded number of lines, and the next one is answered."""
    soft, hard = resource.prlimit(small.process.pid, resource.RLIMIT_NOFILE)
    before = len(small.lines)
    resource.prlimit(small.process.pid, resource.RLIMIT_NOFILE, (1, hard))
    try:
        with ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(connected(small.url, HALF_HEAD))
            wait_until(lambda: len(small.lines) > before)
    finally:
        resource.prlimit(small.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert httpx.get(f"{small.url}/livez", timeout=PATIENCE_SECONDS).is_success
    assert len([line for line in small.lines if "Traceback" in line]) <= 5


@pytest.mark.usefixtures("starts")
def test_followers_leave_connections_to_others(tmp_path: Path) -> None:
    """With every connection following a tuning, a further one is refused by name; other requests are answered."""
    journal, few = tmp_path / "journal", {"BATCHWRIGHT_MAX_CONNECTIONS": "16"}
    with slow_service(tmp_path / "data", journal, 600.0, environment=few) as slow, ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=slow.url, timeout=PATIENCE_SECONDS))
        made = http.post("/v1/tunings", json=tuning_request().model_dump(mode="json")).raise_for_status().json()
        followed = f"/v1/tunings/{made['id']}/events"
        head = f"GET {followed} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        answers = []
        for _ in range(20):
            follower = stack.enter_context(connected(slow.url, head))
            answers.append(follower.recv(12))
        assert answers[:15] == [b"HTTP/1.1 200"] * 15
        assert answers[16:] == [b"HTTP/1.1 503"] * 4
        refused = http.get(followed)
        assert (refused.status_code, refused.json()["code"]) == (503, "too-many-followers")
        assert http.get(f"/v1/tunings/{made['id']}?wait=60").json()["state"] in {"QUEUED", "RUNNING"}
        assert httpx.get(f"{slow.url}/livez", timeout=PATIENCE_SECONDS).is_success


@pytest.mark.parametrize(("wanted", "most"), [(20, 20), (10**6, None)])
def test_connections_leave_descriptors_for_work(wanted: int, most: int | None) -> None:
    """As many as the setting says, or as the limit of open files leaves room for."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        limits = limits_here(wanted)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert limits == ConnectionLimits(limits.most)
    assert limits.most == most if most else limits.most <= soft - 100


# --- the bounds one by one, on a clock of the test's own ---

_LARGE = 48 * 1024**2
_SLOW_HEAD = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"


class Bounded:
    """A server with a small application, in the loop of the test, whose connections the test looks at."""

    def __init__(self, most: int) -> None:
        self.registry = Connections(ConnectionLimits(most))
        self.ended: list[str] = []
        self.released = asyncio.Event()
        self.port = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer at once, after the body, with much, or when the test says."""
        if scope["path"] == "/body":
            self.ended.append((await receive())["type"])
            self.ended.append((await receive())["type"])
        if scope["path"] == "/wait":
            await self.released.wait()
        body = b"x" * (_LARGE if scope["path"] == "/large" else 1)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def connect(self, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client that has sent something."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        return reader, writer


@asynccontextmanager
async def bounded_server(most: int = 64) -> AsyncIterator[Bounded]:
    """The server, running."""
    app = Bounded(most)
    with BoundedListener(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        app.port = listener.getsockname()[1]
        protocol = bounded(app.registry)
        config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None, timeout_keep_alive=600)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve([listener]))
        await until(lambda: server.started)
        yield app
        app.released.set()
        server.should_exit = server.force_exit = True
        await serving


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


def test_a_body_that_does_not_end_times_out() -> None:
    """After a minute it is answered with 408, and the application sees that the client is gone."""

    async def run() -> None:
        async with bounded_server() as server:
            reader, writer = await server.connect(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
            await until(lambda: server.ended == ["http.request"])
            for now in (0.0, 59.0):
                server.registry.sweep(now)
            assert len(server.registry) == 1
            server.registry.sweep(61.0)
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
            await until(lambda: server.ended == ["http.request", "http.disconnect"])
            writer.close()

    asyncio.run(run())


def test_an_answer_that_takes_long_does_not_time_out() -> None:
    """A client that has sent a whole request may wait without a limit."""

    async def run() -> None:
        async with bounded_server() as server:
            reader, writer = await server.connect(_SLOW_HEAD)
            await until(
                lambda: [connection.phase for connection in server.registry._open] == [ConnectionPhase.RESPONSE]
            )
            for now in range(0, 10**6, 10**5):
                server.registry.sweep(float(now))
            server.released.set()
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("reads", [False, True])
def test_an_answer_that_nobody_reads_is_dropped(*, reads: bool) -> None:
    """After half a minute without progress; a client that reads slowly is waited for."""

    async def run() -> None:
        async with bounded_server() as server:
            reader, writer = await server.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: len(server.registry) == 1)
            (connection,) = server.registry._open
            await until(lambda: connection.transport is not None and connection.transport.get_write_buffer_size() > 0)
            for now in range(0, 100, 20):
                server.registry.sweep(float(now))
                if reads:
                    await reader.readexactly(4 * 1024**2)
            await asyncio.sleep(0)
            assert len(server.registry) == int(reads)
            writer.close()

    asyncio.run(run())


def test_whoever_waits_makes_room_for_new_ones_and_requests_at_work_never_do() -> None:
    """With every connection at work some more are taken, of which the oldest that sent no request gives way."""

    async def run() -> None:
        async with bounded_server(most=32) as server, AsyncExitStack() as stack:
            idle = [await opened(server, stack, b"") for _ in range(16)]
            busy = [await opened(server, stack, _SLOW_HEAD) for _ in range(40)]
            assert [await reader.read() for reader in idle[:8]] == [b""] * 8
            extra = [await opened(server, stack, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(4)]
            assert [(await reader.readline())[:12] for reader in extra] == [b"HTTP/1.1 200"] * 4
            server.released.set()
            assert [(await reader.readline())[:12] for reader in busy] == [b"HTTP/1.1 200"] * 40

    asyncio.run(run())


async def opened(server: Bounded, stack: AsyncExitStack, sent: bytes) -> asyncio.StreamReader:
    """A client's end of a connection that the server knows of."""
    reader, writer = await server.connect(sent)
    stack.callback(writer.close)
    await asyncio.sleep(0.001)
    return reader
