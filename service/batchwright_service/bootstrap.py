"""The composition root of a service: builds the API around the use cases, and the workers of the host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from fastapi import FastAPI
from typing_extensions import override

from batchwright.estimation.pool import EstimatePool
from batchwright.planning.fingerprint import installed_versions
from batchwright.schemas.results import DeviceInfo
from batchwright_service.api.app import make_app
from batchwright_service.api.authentication import Authenticators
from batchwright_service.api.context import ApiContext
from batchwright_service.api.events.change_feed import ChangeFeed
from batchwright_service.api.reads.coalesced import Reads
from batchwright_service.application.api_keys import KeyCases
from batchwright_service.application.application_context import ApplicationContext
from batchwright_service.application.estimates import EstimateCases, EstimateLimits
from batchwright_service.application.exports import ExportCases
from batchwright_service.application.hit_counter import HitCounter
from batchwright_service.application.jobs import JobCases
from batchwright_service.application.queue import DeviceCases, QueueCases
from batchwright_service.application.readiness import Readiness
from batchwright_service.application.rules.policy import Policy
from batchwright_service.application.statistics import OccupancyCases, SummaryCases
from batchwright_service.application.tunings import TuningCases
from batchwright_service.auth.api_keys import KeyAuthenticator
from batchwright_service.auth.audit_trail import AuditRetention, AuditTrail
from batchwright_service.auth.sessions import Sessions
from batchwright_service.dashboard import routes as dashboard
from batchwright_service.fast_path.queue_positions import QueuePositions
from batchwright_service.observability.collectors import (
    backlog_families,
    device_families,
    fleet_families,
    queue_families,
    readiness_families,
)
from batchwright_service.observability.instruments import Instruments
from batchwright_service.settings import Settings
from batchwright_service.store.database.transactions import CONNECTIONS
from batchwright_service.store.models import Quota
from batchwright_service.store.store import Store
from batchwright_service.webhooks.deliverer import Deliverer, Schedule
from batchwright_service.webhooks.management import WebhookCases
from batchwright_service.webhooks.receivers import AllowedReceivers
from batchwright_service.webhooks.sending import Sender
from batchwright_service.worker.hosting.child_process import WorkerProcess
from batchwright_service.worker_bootstrap import (
    ExecutorFactory,
    WorkerSystem,
    assemble_worker,
    build_worker,
    registered_commands,
)


@dataclass(frozen=True, kw_only=True)
class System(WorkerSystem):
    """A built service that is not started."""

    context: ApiContext
    estimator: EstimatePool
    hit_counter: HitCounter
    audit_retention: AuditRetention
    deliverer: Deliverer | None
    """None where the operator allows no host for webhooks."""

    def start_worker_process(self) -> None:
        """Start the process of the workers, if they have one, without waiting for it; ``start`` waits."""
        if isinstance(self.coordinator, WorkerProcess):
            self.coordinator.begin()

    def stop(self) -> None:
        """Stop the workers, hand running work back, flush the counters, and close the store. Idempotent."""
        self.estimator.close()
        self.audit_retention.stop()
        if self.deliverer is not None:
            self.deliverer.stop()
        self.hit_counter.flush()
        super().stop()

    @override
    def start(self) -> None:
        super().start()
        self.audit_retention.start()
        if self.deliverer is not None:
            self.deliverer.start()


def app_of(system: System, settings: Settings) -> FastAPI:
    """Create the FastAPI application of a built service; it starts and stops the workers with itself."""
    app = make_app(system.context, settings, dashboard.PATHS, on_start=system.start, on_stop=system.stop)
    dashboard.install(app, system.context.authenticators)
    return app


def build(
    settings: Settings,
    new_executor: ExecutorFactory | None = None,
    devices: Sequence[DeviceInfo] | None = None,
    versions: dict[str, str] | None = None,
    *,
    worker_module: str | None = None,
) -> System:
    """Build a service, with arguments and errors as those of ``build_worker``.

    The workers run in a child process with ``worker_module``, such as ``child_process.ENTRY``; without it in this one.
    """
    installed = installed_versions() if versions is None else versions
    if settings.worker and worker_module is None:
        worker = build_worker(settings, new_executor, devices, installed, CONNECTIONS)
    else:
        worker = assemble_worker(settings, [], {})
    if settings.worker and worker_module is not None:
        process = WorkerProcess(settings, worker_module)
        worker.instruments.metrics.collect_workers(process.families)
        worker = replace(worker, coordinator=process)
    store, coordinator, instruments = worker.store, worker.coordinator, worker.instruments
    receivers = AllowedReceivers(settings.webhook_hosts, settings.webhook_networks)
    hit_counter = HitCounter(store.statistics.count_hits, observe=instruments.metrics.count_lookup)
    application = _application(settings, store, hit_counter)
    estimator = EstimatePool()
    limits = EstimateLimits(slots=settings.estimate_slots)
    estimates = EstimateCases(estimator.estimate, application.policy, installed, limits, instruments.metrics)
    context = _context(settings, application, estimates, worker, receivers)
    collect = instruments.metrics.collect
    collect("the queue", store.queue.depths, queue_families)
    collect("the devices", store.devices.list, partial(device_families, lease_seconds=settings.lease_seconds))
    collect("the fleet", store.fleet.reports, fleet_families)
    collect("webhooks", store.deliveries.backlog, backlog_families)
    collect("the readiness", context.readiness.is_ready, readiness_families)
    return System(
        context=context,
        estimator=estimator,
        hit_counter=hit_counter,
        audit_retention=AuditRetention(store.audit, settings.audit_retention_days),
        deliverer=_deliverer(settings, receivers, store, instruments) if receivers.hosts else None,
        store=store,
        coordinator=coordinator,
        instruments=instruments,
        metrics_address=worker.metrics_address,
    )


@contextmanager
def tuning_cases(settings: Settings, store: Store) -> Iterator[TuningCases]:
    """Create the use cases of tunings on a store, without a service around them; workers find queued work by polling.

    Raises:
        ConfigurationError: when the file of registered commands is invalid.
    """
    hit_counter = HitCounter(store.statistics.count_hits)
    application = _application(settings, store, hit_counter)
    try:
        yield TuningCases(application, QueuePositions(QueueCases(application).read))
    finally:
        hit_counter.flush()


def _application(settings: Settings, store: Store, hit_counter: HitCounter) -> ApplicationContext:
    quota = Quota(
        queued=settings.max_queued_per_key,
        device_seconds=settings.max_device_seconds_per_key,
        window_seconds=settings.quota_window_seconds,
    )
    return ApplicationContext(
        store,
        Policy(settings.python_targets, settings.data_roots, quota, settings.hub_models),
        settings.runs_dir,
        settings.lease_seconds,
        commands=registered_commands(settings.model_copy(update={"worker": False})),
        hit_counter=hit_counter,
    )


def _deliverer(settings: Settings, receivers: AllowedReceivers, store: Store, instruments: Instruments) -> Deliverer:
    schedule = Schedule(
        settings.webhook_attempts, settings.webhook_first_pause_seconds, settings.webhook_timeout_seconds
    )
    sender = Sender(receivers, settings.webhook_timeout_seconds)
    return Deliverer(store.deliveries, sender.send, schedule, instruments.metrics.observe_delivery)


def _context(
    settings: Settings,
    application: ApplicationContext,
    estimates: EstimateCases,
    worker: WorkerSystem,
    receivers: AllowedReceivers,
) -> ApiContext:
    store = application.store
    queue = QueueCases(application)
    positions = QueuePositions(queue.read)
    tunings, jobs = TuningCases(application, positions), JobCases(application, positions)
    access = KeyAuthenticator(store.keys, allow_keyless_local=settings.listens_on_loopback)
    return ApiContext(
        tunings=tunings,
        jobs=jobs,
        devices=DeviceCases(application),
        queue=queue,
        exports=ExportCases(store.recommendations),
        keys=KeyCases(store.keys),
        audit=AuditTrail(store.audit),
        webhooks=WebhookCases(store.webhooks, store.deliveries, receivers),
        summary=SummaryCases(store.statistics, application.hit_counter),
        occupancy=OccupancyCases(store.statistics),
        estimates=estimates,
        commands=application.commands,
        readiness=Readiness(
            store.queue,
            store.devices,
            settings.lease_seconds,
            settings.ready_queue_seconds,
            commands=application.commands.state,
        ),
        instruments=worker.instruments,
        authenticators=Authenticators(access, Sessions(store.sessions, access)),
        feed=ChangeFeed(store.evidence.event_counts),
        reads=Reads(tunings, jobs, store.evidence.events),
        wake_workers=worker.coordinator.notify,
    )
