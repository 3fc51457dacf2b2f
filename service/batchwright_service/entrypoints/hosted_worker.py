"""The child process of ``batchwright serve`` that runs the workers of the host.

The API process controls it over a channel (see ``batchwright_service.worker.hosting.child_process``). The kernel ends
it together with the API process.
"""

import threading
from collections.abc import Callable, Sequence

from batchwright.system.subreaper import Channel
from batchwright_service.entrypoints.signals import handling_signals
from batchwright_service.errors import ServiceError
from batchwright_service.observability.logging import configure_logging
from batchwright_service.observability.metrics import snapshot
from batchwright_service.settings import Settings
from batchwright_service.worker_bootstrap import WorkerSystem, build_worker

Build = Callable[[Settings], WorkerSystem]


def main(channel: Channel, _arguments: Sequence[str], build: Build = build_worker) -> None:
    """Run the workers until a stop request, or until the API process has ended.

    ``channel`` leads to the API process.
    """
    settings = Settings(**(channel.receive() or {})["settings"])
    try:
        system = build(settings)
    except ServiceError as error:
        _refuse(channel, error)
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
                _refuse(channel, error)
                return
            channel.send(started=system.coordinator.slots)
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
                    channel.send(number=number, families=families)
    except EOFError:  # the API process has ended
        pass
    finally:
        stopping.set()


def _refuse(channel: Channel, error: ServiceError) -> None:
    channel.send(refused=type(error).__name__, message=str(error))
