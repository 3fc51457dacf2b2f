"""The only place that chooses implementations and builds objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata

from fastapi import FastAPI

from service.api.app import AppOptions, make_app
from service.api.authentication import Authenticators
from service.api.context import ApiContext
from service.api.events.change_feed import ChangeFeed
from service.api.reads.coalesced import Reads
from service.application.api_keys import KeyCases
from service.application.context import ApplicationContext
from service.application.estimates import EstimateLimits, Estimates
from service.application.exports import ExportCases
from service.application.hit_counter import HitCounter
from service.application.jobs import JobCases
from service.application.queue import FleetCases
from service.application.readiness import Readiness
from service.application.rules.policy import Policy
from service.application.statistics import SummaryCases
from service.application.tunings import TuningCases
from service.auth.api_keys import KeyAuthenticator
from service.auth.sessions import Sessions
from service.dashboard import routes as dashboard
from service.errors import ConfigurationError
from service.fast_path.queue_positions import QueuePositions
from service.folders import make_own
from service.observability.instruments import Instruments, create_spans
from service.observability.metrics import Metrics
from service.settings import Settings
from service.store.models import Quota
from service.store.store import Store, open_store
from service.worker.coordinator import Coordinator
from service.worker.executors.base import Executor
from service.worker.executors.local import LocalExecutor
from service.worker.hosting.child_process import WorkerProcess
from service.worker.hosting.interface import Workers
from service.worker.settings import WorkerSettings
from tuner.estimation.pool import EstimatePool
from tuner.hardware import inventory
from tuner.planning.fingerprint import installed_versions
from tuner.probing.supervisor import ProbeSupervisor
from tuner.schemas.results import DeviceInfo
from tuner.system.data_roots import DataRoots

ExecutorFactory = Callable[[DeviceInfo], Executor]


@dataclass(frozen=True)
class WorkerSystem:
    """A worker: built, not started."""

    store: Store
    coordinator: Workers
    instruments: Instruments
    metrics_address: tuple[str, int] | None
    _closing: list[Callable[[], None]] = field(default_factory=list)

    def start(self) -> None:
        """Start the workers, and the metrics' own port where there is one. Does nothing when they run.

        Raises:
            ConfigurationError: when the metrics' address cannot be listened on.
            DeviceTakenError: when another live process serves one of the devices.
        """
        if self.metrics_address is not None and not self._closing:
            self._closing.append(self.instruments.metrics.serve(*self.metrics_address))
        self.coordinator.start()

    def stop(self) -> None:
        """Stop the workers, handing back what runs, and close the store. Idempotent."""
        self.coordinator.stop()
        while self._closing:
            self._closing.pop()()
        self.instruments.spans.close()
        self.store.close()


@dataclass(frozen=True, kw_only=True)
class System(WorkerSystem):
    """A whole service: built, not started."""

    context: ApiContext
    estimator: EstimatePool
    hit_counter: HitCounter

    def begin(self) -> None:
        """Start the process of the workers, where they have one, without waiting for it. ``start`` does."""
        if isinstance(self.coordinator, WorkerProcess):
            self.coordinator.begin()

    def stop(self) -> None:
        """Stop the workers, handing back what runs, write what is counted, and close the store. Idempotent."""
        self.estimator.close()
        self.hit_counter.flush()
        super().stop()


def app_of(system: System, settings: Settings) -> FastAPI:
    """The application over a built service; it starts and stops the service's workers with itself."""
    options = AppOptions(
        version=metadata.version("batchwright"),
        allowed_hosts=settings.allowed_hosts,
        max_body_bytes=settings.max_body_bytes,
        pages=dashboard.PATHS,
    )
    app = make_app(system.context, options, on_start=system.start, on_stop=system.stop)
    dashboard.install(app, system.context.authenticators, options.version)
    return app


def build(
    settings: Settings,
    new_executor: ExecutorFactory | None = None,
    devices: Sequence[DeviceInfo] | None = None,
    versions: dict[str, str] | None = None,
    *,
    apart: str | None = None,
) -> System:
    """Everything a service consists of. The optional arguments replace what touches devices.

    Args:
        settings: of the service.
        new_executor: makes what runs probes and jobs on a device.
        devices: those of the host.
        versions: of what changes memory.
        apart: the module of a process that workers run in (``worker_process.ENTRY``); in this process when left out,
            which the other arguments are for.

    Raises:
        ConfigurationError: when the settings cannot be served.
        StoreUnavailableError: when the database cannot be reached.
    """
    here = installed_versions() if versions is None else versions
    inside = settings.worker and apart is None
    worker = build_worker(settings, new_executor, devices, here) if inside else _worker(settings, [], {})
    if settings.worker and apart is not None:
        worker = _with_process(worker, WorkerProcess(settings, apart))
    store, coordinator, watch = worker.store, worker.coordinator, worker.instruments
    watch.metrics.collect_queue(store.queue.depths)
    policy = Policy(settings.python_targets, settings.data_roots, _quota(settings))
    shared = ApplicationContext(store, policy, settings.runs_dir, settings.lease_seconds, coordinator.notify)
    estimator = EstimatePool()
    limits = EstimateLimits(slots=settings.estimate_slots)
    estimates = Estimates(estimator.estimate, policy, here, limits, watch.metrics)
    return System(
        context=_context(settings, shared, estimates, watch),
        estimator=estimator,
        hit_counter=shared.hit_counter,
        store=store,
        coordinator=coordinator,
        instruments=watch,
        metrics_address=worker.metrics_address,
    )


def _context(
    settings: Settings, shared: ApplicationContext, estimates: Estimates, instruments: Instruments
) -> ApiContext:
    store = shared.store
    fleet = FleetCases(shared)
    places = QueuePositions(fleet.queue)
    tunings, jobs = TuningCases(shared, places), JobCases(shared, places)
    access = KeyAuthenticator(store.keys, allow_keyless_local=settings.listens_on_loopback)
    return ApiContext(
        tunings=tunings,
        jobs=jobs,
        fleet=fleet,
        exports=ExportCases(store.recommendations),
        keys=KeyCases(store.keys),
        summary=SummaryCases(store.statistics, shared.hit_counter),
        estimates=estimates,
        readiness=Readiness(store.queue, store.devices, settings.lease_seconds, settings.ready_queue_seconds),
        instruments=instruments,
        authenticators=Authenticators(access, Sessions(store.sessions, access)),
        feed=ChangeFeed(store.evidence.event_counts),
        reads=Reads(tunings, jobs, store.evidence.events),
    )


def build_worker(
    settings: Settings,
    new_executor: ExecutorFactory | None = None,
    devices: Sequence[DeviceInfo] | None = None,
    versions: dict[str, str] | None = None,
) -> WorkerSystem:
    """A worker for the devices of this host, over the store. The optional arguments are as for ``build``.

    Raises:
        ConfigurationError: when the settings cannot be served.
        StoreUnavailableError: when the database cannot be reached.
    """
    chosen = served_devices(settings, inventory.devices() if devices is None else devices)
    here = installed_versions() if versions is None else versions
    executor_of = new_executor or partial(local_executor, data_roots=DataRoots(settings.data_roots))
    return _worker(settings, [executor_of(device) for device in chosen], here)


def _with_process(system: WorkerSystem, process: WorkerProcess) -> WorkerSystem:
    """A system whose workers run in a process of their own."""
    system.instruments.metrics.collect_workers(process.families)
    return replace(system, coordinator=process)


def _worker(settings: Settings, executors: Sequence[Executor], versions: dict[str, str]) -> WorkerSystem:
    version = metadata.version("batchwright")
    instruments = Instruments(Metrics(version), create_spans(version))
    make_own(settings.data_dir)  # specs, logs and weights
    store = open_store(settings.url)
    shared = WorkerSettings(
        node_name=settings.node_name,
        runs_dir=settings.runs_dir,
        locks_dir=settings.locks_dir,
        lease_seconds=settings.lease_seconds,
        poll_seconds=settings.poll_seconds,
        shutdown_grace_seconds=settings.shutdown_grace_seconds,
        instruments=instruments,
    )
    port = settings.metrics_port
    address = None if port is None else (settings.metrics_host, port)
    return WorkerSystem(store, Coordinator(store, executors, versions, shared), instruments, address)


def local_executor(device: DeviceInfo, data_roots: DataRoots) -> Executor:
    """Probes and jobs as processes of this host; jobs read their data below ``data_roots``."""
    return LocalExecutor(device, ProbeSupervisor(device), data_roots=data_roots)


def served_devices(settings: Settings, available: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """The devices to serve: those the settings name, else all.

    Raises:
        ConfigurationError: when the settings name one that this host does not have.
    """
    by_id = {device.id: device for device in available}
    unknown = [name for name in settings.devices if name not in by_id]
    if unknown:
        raise ConfigurationError(
            f"BATCHWRIGHT_DEVICES names {', '.join(unknown)}; this host has {', '.join(by_id) or 'none'}"
        )
    return [by_id[name] for name in dict.fromkeys(settings.devices)] if settings.devices else list(available)


def _quota(settings: Settings) -> Quota:
    return Quota(
        queued=settings.max_queued_per_key,
        device_seconds=settings.max_device_seconds_per_key,
        window_seconds=settings.quota_window_seconds,
    )
