"""A worker without an API: serves devices out of a store that others share, until it is asked to stop."""

from __future__ import annotations

import threading

from service.bootstrap import WorkerSystem, build_worker
from service.entrypoints.signals import handling_signals
from service.observability.logging import announce, configure_logging
from service.settings import Settings


def work(settings: Settings) -> None:
    """Work until SIGTERM or SIGINT, then hand back what runs and return; a second signal ends it at once.

    Prints one line on standard error: what it serves.

    Raises:
        ConfigurationError: when the settings cannot be served.
        DeviceTakenError: when another live process serves one of the devices.
        StoreUnavailableError: when the database cannot be reached.
    """
    work_system(settings, build_worker(settings))


def work_system(settings: Settings, system: WorkerSystem) -> None:
    """Work with what is built; it is stopped in the end, whatever happens.

    Raises:
        ConfigurationError: when the metrics' address cannot be listened on.
        DeviceTakenError: when another live process serves one of the devices.
    """
    configure_logging(settings.log_level, settings.log_format)
    stopping = threading.Event()
    try:
        with handling_signals(stopping.set, system.coordinator.force_stop):
            system.start()
            announce(f"Batchwright works on {', '.join(system.coordinator.slots)}", settings.log_format)
            stopping.wait()
            system.stop()
    finally:
        system.stop()
