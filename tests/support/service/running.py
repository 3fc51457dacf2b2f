"""A service that runs in the test's own process, behind a real port."""

import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import uvicorn
from fastapi import FastAPI
from typing_extensions import override

from batchwright.client import Client
from batchwright.hardware.memory_in_use import MemoryInUse
from batchwright.schemas.results import DeviceInfo
from batchwright_service.bootstrap import System, app_of, build
from batchwright_service.folders import make_private_folder
from batchwright_service.settings import Settings
from batchwright_service.store.store import open_store
from tests.support.factories import CPU
from tests.support.paths import OPENAPI
from tests.support.service.processes import PATIENCE_SECONDS
from tests.support.service.scripted import InlineExecutor, ScriptedRunner, Trainer


@dataclass
class Running:
    """A service that listens on a port of this machine, with what the test put into it."""

    url: str
    http: httpx.Client
    runner: ScriptedRunner
    trainer: Trainer
    system: System
    settings: Settings

    @property
    def client(self) -> Client:
        """A new client; the test closes it."""
        return Client(self.url)


StartService = Callable[..., Running]


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve an application from a thread, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `serve`: else a response may take 40 ms
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        pause = threading.Event()
        while not server.started and thread.is_alive():
            pause.wait(0.01)
        assert server.started
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.state.context.feed.close()
            server.should_exit = True
            thread.join()


@cache
def document() -> dict[str, Any]:
    """Return the exported OpenAPI document, which a test compares with the service: making it takes a second."""
    found: dict[str, Any] = json.loads(OPENAPI.read_text(encoding="utf-8"))
    return found


@cache
def migrated() -> bytes:
    """An SQLite database with our tables and nothing in them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        open_store(f"sqlite:///{path}").close()
        return path.read_bytes()


def application(system: System, settings: Settings) -> FastAPI:
    """Return the application of a built service, with a document that is not made anew."""
    app = app_of(system, settings)
    app.openapi_schema = document()
    return app


class _Executor(InlineExecutor):
    """An executor on a device whose memory in use the runner has."""

    def __init__(self, device: DeviceInfo, runner: ScriptedRunner, trainer: Trainer) -> None:
        super().__init__(device, runner, trainer)
        self._scripted = runner

    @override
    def memory_in_use(self) -> MemoryInUse | None:
        return self._scripted.memory


@contextmanager
def running(
    data_dir: Path,
    runner: ScriptedRunner,
    trainer: Trainer,
    device: DeviceInfo = CPU,
    torch: str = "2.8",
    **given: Any,
) -> Iterator[Running]:
    """A whole service: real store, coordinator and HTTP around a scripted runner; settings may be given."""
    settings = Settings(**{"data_dir": data_dir, "node_name": "host", "poll_seconds": 0.05, **given})
    if not settings.database_url and not (database := Path(settings.url.removeprefix("sqlite:///"))).exists():
        make_private_folder(settings.data_dir)
        database.write_bytes(migrated())
    prepared = nullcontext() if settings.database_url else patch("batchwright_service.store.store.upgrade")
    with prepared:  # a copy of a migrated file has the newest tables: to find that out takes Alembic 20 ms
        system = build(settings, lambda device: _Executor(device, runner, trainer), [device], {"torch": torch})
    with (
        listening(application(system, settings)) as url,
        httpx.Client(base_url=url, verify=False, timeout=PATIENCE_SECONDS) as http,  # noqa: S501
    ):
        yield Running(url, http, runner, trainer, system, settings)
