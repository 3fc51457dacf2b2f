"""The child process of ``batchwright serve`` that runs the workers of the host.

The API process controls it over a channel (see ``batchwright_service.worker.hosting.child_process``). The kernel ends
it together with the API process.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from batchwright.system.processes import die_with_parent
from batchwright_service.entrypoints.signals import handling_signals
from batchwright_service.errors import ServiceError
from batchwright_service.observability.logging import configure_logging
from batchwright_service.observability.metrics import snapshot
from batchwright_service.settings import Settings
from batchwright_service.worker.hosting.channel import Channel
from batchwright_service.worker_bootstrap import WorkerSystem, build_worker

Build = Callable[[Settings], WorkerSystem]


def main(descriptor: str, parent: str, build: Build = build_worker) -> None:
    """Run the workers until a stop request, or until the API process has ended.

    ``descriptor`` is that of the channel, ``parent`` the id of the API process.
    """
    die_with_parent(int(parent))
    channel = Channel(socket.socket(fileno=int(descriptor)))
    settings = Settings(**(channel.receive() or {})["settings"])
    try:
        system = build(settings)
    except ServiceError as error:
        channel.send(_refusal(error))
        return
    configure_logging(settings.log_level, settings.log_format)
    _work(channel, system)


def _work(channel: Channel, system: WorkerSystem) -> None:
    stopping = threading.Event()
    listener = threading.Thread(target=_listen, args=(channel, system, stopping), name="service", daemon=True)
    try:
        # A supervisor may signal all processes, and the API process sends a stop too: that is no second signal.
        with handling_signals(stopping.set, stopping.set):
            listener.start()
            try:
                system.start()
            except ServiceError as error:
                channel.send(_refusal(error))
                return
            channel.send({"started": system.coordinator.slots})
            stopping.wait()
            system.stop()
    finally:
        system.stop()


def _listen(channel: Channel, system: WorkerSystem, stopping: threading.Event) -> None:
    """Handle messages of the API process until it has ended, then stop the workers."""
    try:
        while (message := channel.receive()) is not None:
            match message:
                case {"do": "wake"}:
                    system.coordinator.notify()
                case {"do": "force_stop"}:
                    system.coordinator.force_stop()
                    stopping.set()
                case {"do": "stop"}:
                    stopping.set()
                case {"do": "measure", "number": number}:
                    families = snapshot(system.instruments.metrics.work_families())
                    channel.send({"number": number, "families": families})
    finally:
        stopping.set()


def _refusal(error: ServiceError) -> dict[str, Any]:
    return {"refused": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
