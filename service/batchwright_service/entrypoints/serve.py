"""The process of `batchwright serve`: the API, with workers for the devices of this host."""

import gc
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Literal

import uvicorn
from fastapi import FastAPI

from batchwright_service.application.api_keys import KeyCases
from batchwright_service.bootstrap import System, app_of, build
from batchwright_service.entrypoints.connections import (
    BoundedListener,
    Connections,
    bounded,
    limit_repeated_messages,
    limits_here,
)
from batchwright_service.entrypoints.liveness import api_url, recorded
from batchwright_service.entrypoints.signals import exiting_at_signals, handling_signals
from batchwright_service.errors import ConfigurationError, ServiceError
from batchwright_service.observability.logging import announce, configure_logging
from batchwright_service.settings import Settings, withhold_variables
from batchwright_service.worker.hosting.child_process import DISPATCHER, ENTRY
from batchwright_service.worker.hosting.interface import Workers

_CLOSE_SECONDS = 5
"""Time for open connections to end when the service stops; event streams end at once."""
_TICKS_PER_SECOND = 10
"""Ticks of uvicorn's main loop."""


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then hand running work back and return; a second signal forces the shutdown.

    Prints one line with the address on standard error.

    Raises:
        ConfigurationError: when the settings are invalid, or the service cannot listen on the address.
        DeviceTakenError: when another live process serves one of the devices.
        StoreUnavailableError: when the database cannot be reached.
    """
    withhold_variables()
    serve_system(settings, check_and_build(settings))


def check_and_build(settings: Settings) -> System:
    """Build the service, if its settings are safe.

    Raises:
        ConfigurationError: when they are invalid, or when other machines could reach a service without an API key, or
            when the file of the admin key has none.
    """
    has_cluster = settings.ray is not None or settings.slurm is not None
    system = build(settings, worker_module=DISPATCHER if has_cluster else ENTRY)
    try:
        if settings.admin_key_file is not None:
            KeyCases(system.store.keys).store_admin_key(settings.admin_key_file)
        if not settings.listens_on_loopback and not system.store.keys.exist():
            raise ConfigurationError(
                f"refusing to listen on {settings.host}: there is no API key yet. Create one with "
                "`batchwright admin keys create` on the same database, or name a file with one in "
                "BATCHWRIGHT_ADMIN_KEY_FILE, or listen on 127.0.0.1"
            )
    except ServiceError:
        system.stop()
        raise
    return system


def serve_system(settings: Settings, system: System) -> None:
    """Serve a built service; it is always stopped in the end.

    Raises:
        ConfigurationError: when the service cannot listen on the address.
        DeviceTakenError: when another live process serves one of the devices.
    """
    configure_logging(settings.log_level, settings.log_format)
    try:
        with exiting_at_signals(), _listening(settings) as listener:
            system.start_worker_process()
            app = app_of(system, settings)
            app.openapi()  # takes seconds, while the workers start
            system.start()
            _run(settings, system, app, listener)
    finally:
        system.stop()


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol given, asyncio sets TCP_NODELAY: responses on a kept connection would wait 40 ms for an ACK.
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
        loop="asyncio",  # other loops bypass ``BoundedListener.accept``
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        log_config=None,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = _ApiServer(config, system.context.feed.close, system.coordinator, connections, settings.log_format)
    # Uvicorn raises the caught signals again when it is done; the first one has been handled by then.
    with handling_signals(stop=server.end, force=system.coordinator.force_stop):
        try:
            listener.listen(config.backlog)
        except OSError as error:  # another process began to listen after the address was bound
            raise _cannot_listen(settings, error) from None
        with server.records:
            server.run(sockets=[listener])


class _ApiServer(uvicorn.Server):
    """Uvicorn's server, which prints its address, and ends event streams and workers before connections."""

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
        self.records = ExitStack()
        """Ends with the server."""

    def end(self) -> None:
        """Begin to stop, for a signal that arrives before uvicorn handles signals itself."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop at the first signal; force the shutdown at the second."""
        if self.should_exit:
            self._coordinator.force_stop()
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and print the address.

        Objects of the start live as long as the process, and are excluded from garbage collection: a full collection
        would take up to half a second, during which no request is served.
        """
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            self.records.enter_context(recorded("serve", api_url(host, port)))
            shown = f"[{host}]" if ":" in host else host
            announce(f"Batchwright listens on http://{shown}:{port}", self._log_format)

    async def on_tick(self, counter: int) -> bool:
        """End connections whose peers take too long, once a second."""
        if counter % _TICKS_PER_SECOND == 0:
            self._connections.sweep(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop workers and event streams, then the server."""
        self._coordinator.request_stop()
        self._end_streams()
        await super().shutdown(sockets)
