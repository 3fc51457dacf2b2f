"""The composition root of workers: builds them without the HTTP side, which a process of workers never imports."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path

from batchwright.errors import SpecError
from batchwright.hardware import inventory
from batchwright.planning.fingerprint import installed_versions
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.results import DeviceInfo
from batchwright.system.data_roots import DataRoots
from batchwright.training.launching.host_agents import Hosts
from batchwright_service.errors import ConfigurationError
from batchwright_service.folders import check_temporary_folder, make_private_folder
from batchwright_service.observability.instruments import Instruments, create_spans
from batchwright_service.observability.metrics import Metrics
from batchwright_service.registry.registered_commands import RegisteredCommands
from batchwright_service.settings import Settings
from batchwright_service.store.database.transactions import CONNECTIONS
from batchwright_service.store.store import Store, open_store
from batchwright_service.worker.coordinator import Coordinator
from batchwright_service.worker.executors.base import Executor
from batchwright_service.worker.executors.local import LocalExecutor
from batchwright_service.worker.executors.registered_supervisor import RegisteredSupervisor
from batchwright_service.worker.hosting.interface import Workers
from batchwright_service.worker.worker_settings import Assignment, WorkerSettings

_MOST_CONNECTIONS = 4
"""Connections to the database that a process of workers uses at most, besides the one that listens: one claims for all
devices that are free, and the others are for milliseconds each."""

ExecutorFactory = Callable[[DeviceInfo], Executor]


@dataclass(frozen=True)
class WorkerSystem:
    """A built worker that is not started."""

    store: Store
    coordinator: Workers
    instruments: Instruments
    metrics_address: tuple[str, int] | None
    _closing: list[Callable[[], None]] = field(default_factory=list)

    def start(self) -> None:
        """Start the workers, and the metrics port if there is one. Does nothing when they run.

        Raises:
            ConfigurationError: when the metrics cannot be served on their address.
            DeviceTakenError: when another live process serves one of the devices.
        """
        if self.metrics_address is not None and not self._closing:
            self._closing.append(self.instruments.metrics.serve(*self.metrics_address))
        self.coordinator.start()

    def stop(self) -> None:
        """Stop the workers, hand running work back, and close the store. Idempotent."""
        self.coordinator.stop()
        while self._closing:
            self._closing.pop()()
        self.instruments.spans.close()
        self.store.close()


def build_worker(
    settings: Settings,
    new_executor: ExecutorFactory | None = None,
    devices: Sequence[DeviceInfo] | None = None,
    versions: dict[str, str] | None = None,
    connections: int | None = None,
) -> WorkerSystem:
    """Build the workers of this host. The optional arguments replace the parts that use devices.

    Args:
        settings: the settings of the service.
        new_executor: creates the executor of a device.
        devices: the devices of the host.
        versions: the installed versions that affect memory.
        connections: the most connections to the database; those of a process of workers by default.

    Raises:
        ConfigurationError: when the settings are invalid.
        StoreUnavailableError: when the database cannot be reached.
    """
    served = served_devices(settings, inventory.devices() if devices is None else devices)
    installed = installed_versions() if versions is None else versions
    commands = registered_commands(settings)
    executor_of = new_executor or partial(local_executor, commands=commands, data_roots=DataRoots(settings.data_roots))
    return assemble_worker(settings, [executor_of(device) for device in served], installed, connections=connections)


def assemble_worker(
    settings: Settings,
    executors: Sequence[Executor],
    versions: dict[str, str],
    assignment: Assignment | None = None,
    connections: int | None = None,
) -> WorkerSystem:
    """Assemble workers around executors, one per device; without any where this process only serves the API.

    Arguments and errors are those of ``build_worker``; ``assignment`` is the only work to run.
    """
    check_temporary_folder()
    make_private_folder(settings.data_dir)  # it has specs, logs and weights
    version = metadata.version("batchwright")
    instruments = Instruments(Metrics(version), create_spans(version))
    store = open_store(settings.url, connections or worker_connections(len(executors)))
    worker_settings = WorkerSettings(
        node_name=settings.node_name,
        runs_dir=settings.runs_dir,
        locks_dir=settings.locks_dir,
        lease_seconds=settings.lease_seconds,
        poll_seconds=settings.poll_seconds,
        shutdown_grace_seconds=settings.shutdown_grace_seconds,
        fallback_poll_seconds=settings.fallback_poll_seconds,
        instruments=instruments,
        assignment=assignment,
    )
    if executors:
        instruments.metrics.collect_disks({"runs": settings.runs_dir, "temporary": Path(tempfile.gettempdir())})
    port = settings.metrics_port
    address = None if port is None else (settings.metrics_host, port)
    coordinator = Coordinator(store, executors, versions, worker_settings)
    return WorkerSystem(store, coordinator, instruments, address)


def worker_connections(devices: int) -> int:
    """Return the most connections to the database of a process with workers, or of one without that serves others."""
    return min(_MOST_CONNECTIONS, devices + 1) if devices else CONNECTIONS


def local_executor(
    device: DeviceInfo, commands: RegisteredCommands, data_roots: DataRoots, hosts: Hosts | None = None
) -> Executor:
    """Create an executor that runs processes of this host.

    ``hosts`` are those that a cluster's engine has assigned.
    """
    return LocalExecutor(
        device,
        ProbeSupervisor(device, data_roots=data_roots),
        data_roots=data_roots,
        check_command=commands.check_current,
        hosts=hosts,
        commands=RegisteredSupervisor(device, commands.check_current),
    )


def registered_commands(settings: Settings) -> RegisteredCommands:
    """Read the commands that the operator has registered, and check that this host has them if it has workers.

    Raises:
        ConfigurationError: naming the file, and every wrong field.
    """
    try:
        commands = RegisteredCommands.read(settings.commands, settings.data_roots)
        if settings.worker:
            commands.check_programs()
    except SpecError as error:
        raise ConfigurationError(f"BATCHWRIGHT_COMMANDS: {error}") from None
    return commands


def served_devices(settings: Settings, available: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """Return the devices to serve: those of the settings, else all.

    Raises:
        ConfigurationError: when the settings name a device that this host does not have.
    """
    by_id = {device.id: device for device in available}
    unknown = [name for name in settings.devices if name not in by_id]
    if unknown:
        raise ConfigurationError(
            f"BATCHWRIGHT_DEVICES names {', '.join(unknown)}; this host has {', '.join(by_id) or 'none'}"
        )
    return [by_id[name] for name in dict.fromkeys(settings.devices)] if settings.devices else list(available)
