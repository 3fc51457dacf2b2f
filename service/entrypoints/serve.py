"""Runs the service until it is told to stop. What the command line calls."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

import uvicorn
from fastapi import FastAPI

from service.bootstrap import System, app_of, build
from service.entrypoints.connections import BoundedListener, Connections, bounded, limit_repeated_messages, limits_here
from service.entrypoints.signals import exiting_at_signals, handling_signals
from service.errors import ConfigurationError, ServiceError
from service.observability.logging import announce, configure_logging
from service.settings import Settings
from service.store.interface import KeyStore
from service.worker.hosting.child_process import ENTRY
from service.worker.hosting.interface import Workers

_CLOSE_SECONDS = 5
"""What open connections get to end when the service stops; event streams end at once."""
_TICKS_A_SECOND = 10
"""Of uvicorn's main loop."""


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then hand back what runs and return; a second signal ends it at once.

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
    system = build(settings, apart=ENTRY)
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
    configure_logging(settings.log_level, settings.log_format)
    try:
        with exiting_at_signals(), _listening(settings) as listener:
            system.begin()
            app = app_of(system, settings)
            app.openapi()  # which takes seconds, while the workers start
            system.start()
            _run(settings, system, app, listener)
    finally:
        system.stop()


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named asyncio sets TCP_NODELAY: answers on a kept connection would wait 40 ms for an ACK else.
    with BoundedListener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise _cannot_listen(settings, error) from None
        yield listener


def _cannot_listen(settings: Settings, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"cannot listen on {settings.host} port {settings.port}: {error}")


def _run(settings: Settings, system: System, app: FastAPI, listener: socket.socket) -> None:
    connections = Connections(limits_here(settings.max_connections))
    system.context.feed.has_capacity = connections.has_capacity
    limit_repeated_messages()
    config = uvicorn.Config(
        app,
        http=bounded(connections),
        ws="none",
        loop="asyncio",  # others accept by themselves, without regard to what the listener refuses
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        log_config=None,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = _Server(config, system.context.feed.close, system.coordinator, connections, settings.log_format)
    # Uvicorn raises the signals it caught once more when it is done: the first one has been obeyed by then.
    with handling_signals(stop=server.end, force=system.coordinator.force_stop):
        try:
            listener.listen(config.backlog)
        except OSError as error:  # another process has begun to, since the address was bound
            raise _cannot_listen(settings, error) from None
        server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """Says where it listens, and has event streams and workers end before it waits for connections to close."""

    def __init__(
        self,
        config: uvicorn.Config,
        end_streams: Callable[[], None],
        coordinator: Workers,
        connections: Connections,
        log_format: Literal["text", "json"],
    ) -> None:
        super().__init__(config)
        self._log_format: Literal["text", "json"] = log_format
        self._end_streams = end_streams
        self._coordinator = coordinator
        self._connections = connections

    def end(self) -> None:
        """Begin to end, for a signal that comes before uvicorn handles signals by itself."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end at the first signal; at the second, wait for nothing more."""
        if self.should_exit:
            self._coordinator.force_stop()
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where.

        What was made until then stays for good. Looking for garbage in it takes up to half a second, in which
        nobody is answered.
        """
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            announce(f"Batchwright listens on http://{shown}:{port}", self._log_format)

    async def on_tick(self, counter: int) -> bool:
        """Once a second, end connections whose peers take too long."""
        if counter % _TICKS_A_SECOND == 0:
            self._connections.sweep(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams and what workers run, then everything."""
        self._coordinator.request_stop()
        self._end_streams()
        await super().shutdown(sockets)
