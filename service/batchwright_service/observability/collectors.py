"""Metric families that are read at each scrape: from the store, and from the disks of a worker."""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from batchwright_service.errors import StoreUnavailableError
from batchwright_service.store.models import AnnouncedDevice, ReportedFleet
from batchwright_service.store.outbox.deliveries import Backlog
from batchwright_service.store.scheduling import QueueDepth

_log = logging.getLogger(__name__)
_NO_BACKLOG = Backlog(0, 0, 0.0)


class ReadFamilies(Collector):
    """Collect families of a value that is read at each scrape; no family when the store is unavailable.

    Args:
        name: name of the value in the log.
        read: reads the value; may raise StoreUnavailableError.
        families: converts a value to its families; without one it describes them.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], object],
        families: Callable[..., Iterable[Metric]],
    ) -> None:
        self._name = name
        self._read = read
        self._families = families

    def describe(self) -> Iterator[Metric]:
        """Describe the families without a read of the store."""
        yield from self._families()

    @override
    def collect(self) -> Iterator[Metric]:
        """Collect every family."""
        try:
            found = self._read()
        except StoreUnavailableError as error:
            _log.warning("the metrics omit %s: %s", self._name, error)
            return
        yield from self._families(found)


def queue_families(found: Sequence[QueueDepth] = ()) -> Iterator[Metric]:
    """Yield the families of the waiting work."""
    waiting = GaugeMetricFamily(
        "batchwright_queue_items",
        "Queued tunings and jobs by device or hardware; every API process reports the same value.",
        labels=["device"],
    )
    oldest = GaugeMetricFamily(
        "batchwright_queue_oldest_age_seconds", "Waiting time of the oldest queued tuning or job.", labels=["device"]
    )
    for depth in found:
        waiting.add_metric([depth.name], depth.waiting)
        oldest.add_metric([depth.name], depth.oldest_age_seconds)
    yield waiting
    yield oldest


def device_families(found: Sequence[AnnouncedDevice] = (), *, lease_seconds: float) -> Iterator[Metric]:
    """Yield the number of announced devices in each state."""
    devices = GaugeMetricFamily(
        "batchwright_devices",
        "Announced devices: ready, unready, or silent, whose worker has vanished; every API process reports the same.",
        labels=["state"],
    )
    states = Counter(_state_of(device, lease_seconds) for device in found)
    for state in ("ready", "unready", "silent"):
        devices.add_metric([state], states[state])
    yield devices


def _state_of(device: AnnouncedDevice, lease_seconds: float) -> str:
    if device.age_seconds > lease_seconds:
        return "silent"
    return "unready" if device.served.unready else "ready"


def readiness_families(is_ready: bool = False) -> Iterator[Metric]:  # noqa: FBT001, FBT002 - the value that is read
    """Yield the readiness of the service."""
    yield GaugeMetricFamily("batchwright_ready", "1 while `/readyz` finds the service ready.", value=float(is_ready))


def fleet_families(found: Sequence[ReportedFleet] = ()) -> Iterator[Metric]:
    """Yield the families of the dispatchers' reports."""
    names = ["engine", "address"]
    up = GaugeMetricFamily("batchwright_fleet_up", "1 while the dispatcher can use the cluster.", labels=names)
    age = GaugeMetricFamily("batchwright_fleet_report_age_seconds", "Age of the dispatcher's report.", labels=names)
    nodes = GaugeMetricFamily("batchwright_fleet_nodes", "Nodes on which jobs can run.", labels=names)
    jobs = GaugeMetricFamily("batchwright_fleet_jobs", "Jobs in the cluster, by state.", labels=[*names, "state"])
    for reported in found:
        report = reported.report
        cluster = [report.engine, report.address]
        up.add_metric(cluster, 0.0 if report.error else 1.0)
        age.add_metric(cluster, reported.age_seconds)
        nodes.add_metric(cluster, sum(node.alive for node in report.nodes))
        jobs.add_metric([*cluster, "pending"], report.pending_jobs)
        jobs.add_metric([*cluster, "running"], report.running_jobs)
    yield from (up, age, nodes, jobs)


def backlog_families(found: Backlog = _NO_BACKLOG) -> Iterator[Metric]:
    """Yield the families of the messages that are not delivered."""
    deliveries = GaugeMetricFamily(
        "batchwright_webhook_backlog",
        "Messages to webhooks that are pending or dead; every API process reports the same value.",
        labels=["state"],
    )
    deliveries.add_metric(["pending"], found.pending)
    deliveries.add_metric(["dead"], found.dead)
    yield deliveries
    yield GaugeMetricFamily(
        "batchwright_webhook_oldest_due_seconds",
        "Time for which the oldest due message to a webhook waits.",
        value=found.oldest_due_seconds,
    )


def disk_families(folders: Mapping[str, Path] = MappingProxyType({})) -> Iterator[Metric]:
    """Yield the size and the free bytes of the disk of each folder; folders that cannot be read are left out."""
    size = GaugeMetricFamily("batchwright_disk_size_bytes", "Size of the disk of a folder.", labels=["folder"])
    free = GaugeMetricFamily(
        "batchwright_disk_free_bytes", "Bytes of that disk that the worker can still write.", labels=["folder"]
    )
    for name, folder in folders.items():
        try:
            usage = shutil.disk_usage(folder)
        except OSError:  # the worker's own check names the trouble of its host
            continue
        size.add_metric([name], usage.total)
        free.add_metric([name], usage.free)
    yield from (size, free)
