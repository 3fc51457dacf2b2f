"""The process of `batchwright work`: workers for the devices of this host, without an API."""

import threading

from batchwright_service.entrypoints.liveness import RENEW_SECONDS, recorded, renew
from batchwright_service.entrypoints.signals import handling_signals
from batchwright_service.observability.logging import announce, configure_logging
from batchwright_service.settings import Settings, withhold_variables
from batchwright_service.worker_bootstrap import WorkerSystem, build_worker


def work(settings: Settings) -> None:
    """Work until SIGTERM or SIGINT, then hand running work back and return; a second signal forces the shutdown.

    Prints one line with the served slots on standard error.

    Raises:
        ConfigurationError: when the settings are invalid.
        DeviceTakenError: when another live process serves one of the devices.
        StoreUnavailableError: when the database cannot be reached.
    """
    withhold_variables()
    work_system(settings, build_worker(settings))


def work_system(settings: Settings, system: WorkerSystem) -> None:
    """Run built workers; they are always stopped in the end.

    Raises:
        ConfigurationError: when the metrics cannot be served on their address.
        DeviceTakenError: when another live process serves one of the devices.
    """
    configure_logging(settings.log_level, settings.log_format)
    stopping = threading.Event()
    try:
        with handling_signals(stopping.set, system.coordinator.force_stop):
            system.start()
            announce(f"Batchwright works on {', '.join(system.coordinator.slots)}", settings.log_format)
            with recorded("work") as record:
                while not stopping.wait(RENEW_SECONDS):
                    if system.coordinator.is_alive():
                        renew(record)
                system.stop()
    finally:
        system.stop()
