"""Runs the service until it is told to stop. What the command line calls."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from service.bootstrap import System, app_of, build
from service.errors import ConfigurationError, ServiceError
from service.settings import Settings
from service.store.base import KeyStore

_CLOSE_SECONDS = 5
"""What open connections get to end when the service stops; event streams end at once."""


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then hand back what runs and return.

    Prints one line on standard error: where it listens.

    Raises:
        ConfigurationError: when the settings cannot be served, or the address cannot be listened on.
        DeviceTakenError: when another live process serves one of the devices.
        StoreUnavailableError: when the database cannot be reached.
    """
    serve_system(settings, check_and_build(settings))


def check_and_build(settings: Settings) -> System:
    """The service, if these settings may be served.

    Raises:
        ConfigurationError: when they cannot, or when other machines would reach it and there is no API key.
    """
    system = build(settings)
    try:
        require_keys_beyond_loopback(settings, system.store.keys)
    except ServiceError:
        system.stop()
        raise
    return system


def require_keys_beyond_loopback(settings: Settings, keys: KeyStore) -> None:
    """Refuse to be reachable from elsewhere while nobody could be told from anybody.

    Raises:
        ConfigurationError: naming the address, and the remedy.
    """
    if not settings.listens_on_loopback and not keys.exist():
        raise ConfigurationError(
            f"refusing to listen on {settings.host}: there is no API key yet. Make one with `batchwright keys create` "
            "on the same database, or listen on 127.0.0.1"
        )


def serve_system(settings: Settings, system: System) -> None:
    """Serve a service that is built; it is stopped in the end, whatever happens.

    Raises:
        ConfigurationError: when the address cannot be listened on.
        DeviceTakenError: when another live process serves one of the devices.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        with _listening(settings) as listener:
            system.start()
            _run(settings, system, listener)
    finally:
        system.stop()


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {settings.host} port {settings.port}: {error}") from None
        yield listener


def _run(settings: Settings, system: System, listener: socket.socket) -> None:
    app = app_of(system, settings)
    config = uvicorn.Config(
        app,
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        log_config=None,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    with _signals_outlived():
        _Server(config, app.state.feed.close).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Says where it listens, and ends event streams before it waits for connections to close."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where."""
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"Batchwright listens on http://{shown}:{port}", file=sys.stderr, flush=True)  # noqa: T201

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams, then everything."""
        self._end_streams()
        await super().shutdown(sockets)


@contextmanager
def _signals_outlived() -> Iterator[None]:
    """Uvicorn raises the signals it caught once more when it is done; by then there is nothing left to end."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
