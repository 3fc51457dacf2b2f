"""Prometheus metrics: names have base units (`_seconds`, `_bytes`, `_total`), and no label is an identifier.

The API serves them at `/metrics` to callers with the scope `tunings:read`. The metrics disclose less than `/v1/devices`
does, and a scraper needs no key with more scopes. A process can also serve them without a key on a separate port
(`--metrics-port`), on loopback unless the operator names another address. Workers are scraped there.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from batchwright.client.documents.states import TERMINAL_STATES, State, WorkKind, WorkOutcome, outcome_of
from batchwright_service.errors import ConfigurationError
from batchwright_service.observability.collectors import ReadFamilies, disk_families

_log = logging.getLogger(__name__)

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of Prometheus' text format, which `exposition` returns."""

_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_DELIVERY_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 43_200.0, 86_400.0)
_WORK_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)

OUT_OF_MEMORY_CODE = "training-out-of-memory"
"""Code of jobs that ran out of memory: its series exists before the first of them, for alerts."""

NOT_FINITE_CODE = "training-not-finite"
"""Code of jobs whose loss, gradient or weights were infinite or NaN, with a series as above."""

Families = Callable[[], Iterable[Metric]]
Snapshot = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]
"""Metric families as JSON: name, help, type, and samples with their names, labels and values."""


class Metrics:
    """The metrics of one process. Instances are safe to share between threads. Each call takes about a microsecond."""

    def __init__(self, version: str = "") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        self._work_registry = CollectorRegistry(auto_describe=True)
        self._work_families = _WorkFamilies(self._work_registry.collect)
        self.registry.register(self._work_families)
        self._busy = _BusyDevices()
        self._work_registry.register(self._busy)
        self._make_work_families()
        self._make_request_families(version)

    def _make_work_families(self) -> None:
        self.probes = Counter(
            "batchwright_probes", "Probes run, by outcome.", ["device", "outcome"], registry=self._work_registry
        )
        self._unready = Gauge(
            "batchwright_device_unready",
            "1 while a host problem prevents a device from taking work.",
            ["device"],
            registry=self._work_registry,
        )
        self._troubles = Counter(
            "batchwright_host_troubles",
            "Occurrences of host problems, each failed check included, by cause.",
            ["device", "cause"],
            registry=self._work_registry,
        )
        self.takeovers = Counter(
            "batchwright_takeovers",
            "Work claimed after its worker had vanished: died, or cut off for longer than a lease.",
            ["device"],
            registry=self._work_registry,
        )
        self.failures = Counter(
            "batchwright_failures",
            "Tunings and jobs that failed, by the code of their problem.",
            ["kind", "code"],
            registry=self._work_registry,
        )
        self.splits = Counter(
            "batchwright_job_splits",
            "Micro-batches of jobs that ran out of memory and were run in smaller parts.",
            ["device"],
            registry=self._work_registry,
        )
        self.work = {
            kind: Histogram(
                f"batchwright_{kind}_seconds",
                f"From the first start of a {kind} to its end, interruptions included.",
                ["state", "outcome"],
                buckets=_WORK_SECONDS,
                registry=self._work_registry,
            )
            for kind in WorkKind
        }

    def _make_request_families(self, version: str) -> None:
        build = Gauge(
            "batchwright_build_info",
            "Always 1; the label is the running version.",
            ["version"],
            registry=self.registry,
        )
        build.labels(version).set(1)
        self._hits = Counter(
            "batchwright_recommendation_hits",
            "Submitted tunings, without `fresh` ones: `hit` were served a stored recommendation, `miss` were queued.",
            ["result"],
            registry=self.registry,
        )
        self.estimates = Counter(
            "batchwright_estimates",
            "Estimates requested: made, cached, refused or failed.",
            ["result"],
            registry=self.registry,
        )
        self._requests = Histogram(
            "batchwright_http_request_seconds",
            "From a request to the start of its response. Long polls have a route label of their own.",
            ["method", "route", "status"],
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self._request_series: dict[tuple[str, str, int], Histogram] = {}
        self._deliveries = Histogram(
            "batchwright_webhook_delivery_seconds",
            "From an event to the end of an attempt to deliver its message to a webhook: delivered, retried or dead.",
            ["result"],
            buckets=_DELIVERY_SECONDS,
            registry=self.registry,
        )
        for result in ("delivered", "retried", "dead"):
            self._deliveries.labels(result)  # present from the start, at 0

    # --- metrics of workers ---

    @contextmanager
    def device_busy(self, device: str) -> Iterator[None]:
        """Count the time of the block as busy time of a device."""
        self._busy.begin(device)
        try:
            yield
        finally:
            self._busy.end(device)

    def register_device(self, device: str) -> None:
        """Report a device, with metrics of 0, before it runs anything.

        Prometheus sees no increase where a series begins at 1.
        """
        self._busy.register(device)
        for family in (self._unready, self.takeovers, self.splits):
            family.labels(device)
        for code in (OUT_OF_MEMORY_CODE, NOT_FINITE_CODE):
            self.failures.labels(WorkKind.JOB.value, code)
        for durations in self.work.values():
            for state in TERMINAL_STATES:
                durations.labels(state.value, outcome_of(state, feasible=None))
        self.work[WorkKind.TUNING].labels(State.SUCCEEDED.value, WorkOutcome.INFEASIBLE.value)

    def set_device_trouble(self, device: str, cause: str | None) -> None:
        """Record the cause of the host problem that prevents a device from working; None when the problem is solved."""
        self._unready.labels(device).set(0 if cause is None else 1)
        if cause is not None:
            self._troubles.labels(device, cause).inc()

    def collect_disks(self, folders: Mapping[str, Path]) -> None:
        """Include the disks of a worker's folders in each scrape, by the folders' names."""
        self._work_registry.register(ReadFamilies("the disks", lambda: folders, disk_families))

    # --- metrics of the API ---

    def count_lookup(self, hit: bool) -> None:  # noqa: FBT001 - the parameter of a callback
        """Count a submitted tuning as a hit or miss of the stored recommendations; a `fresh` one looks up none."""
        self._hits.labels("hit" if hit else "miss").inc()

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Observe the seconds until a response started. ``route`` is a template, never a path."""
        series = self._request_series.get((method, route, status))
        if series is None:
            series = self._requests.labels(method, route, str(status))
            self._request_series[method, route, status] = series
        series.observe(seconds)

    def observe_delivery(self, result: str, seconds: float) -> None:
        """Observe an attempt to deliver to a webhook, by its result; ``seconds`` since the event."""
        self._deliveries.labels(result).observe(seconds)

    def collect(self, name: str, read: Callable[[], object], families: Callable[..., Iterable[Metric]]) -> None:
        """Include families that are read at each scrape; see ``ReadFamilies``."""
        self.registry.register(ReadFamilies(name, read, families))

    def collect_workers(self, families: Families) -> None:
        """Include the metrics of workers in another process in each scrape."""
        self._work_families.source = families

    # --- exposition ---

    def work_families(self) -> list[Metric]:
        """Return the metrics of the workers, in this process or in another one."""
        return list(self._work_families.collect())

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Serve the metrics over HTTP, without authentication, from a thread. Return a function that stops the server.

        Raises:
            ConfigurationError: when the server cannot listen on the address.
        """
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise ConfigurationError(f"cannot serve metrics on {host} port {port}: {error}") from None

        _log.info("metrics on port %d of %s", server.server_port, host)

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close


class _BusyDevices(Collector):
    """Collect which devices are busy, and their total busy time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._since: dict[str, float] = {}

    def register(self, device: str) -> None:
        with self._lock:
            self._seconds.setdefault(device, 0.0)

    def begin(self, device: str) -> None:
        with self._lock:
            self._seconds.setdefault(device, 0.0)
            self._since[device] = time.monotonic()

    def end(self, device: str) -> None:
        with self._lock:
            self._seconds[device] += time.monotonic() - self._since.pop(device)

    @override
    def collect(self) -> Iterator[Metric]:
        """Collect both families, including the time of running work."""
        busy = GaugeMetricFamily(
            "batchwright_device_busy", "1 while a tuning or job holds the device.", labels=["device"]
        )
        total = CounterMetricFamily(
            "batchwright_device_busy_seconds", "Time in which tunings and jobs held the device.", labels=["device"]
        )
        with self._lock:
            now = time.monotonic()
            for device, seconds in self._seconds.items():
                since = self._since.get(device)
                busy.add_metric([device], 0.0 if since is None else 1.0)
                total.add_metric([device], seconds + (0.0 if since is None else now - since))
        yield busy
        yield total


class _WorkFamilies(Collector):
    """Collect the metrics of the workers, in this process or another one."""

    def __init__(self, source: Families) -> None:
        self.source = source

    def describe(self) -> Iterator[Metric]:
        """Describe nothing, because the names are registered in another registry."""
        yield from ()

    @override
    def collect(self) -> Iterator[Metric]:
        """Collect all families."""
        yield from self.source()


def snapshot(families: Iterable[Metric]) -> Snapshot:
    """Convert families to JSON values for another process."""
    return [
        (
            family.name,
            family.documentation,
            family.type,
            [(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
        )
        for family in families
    ]


def families_from(sent: Snapshot) -> list[Metric]:
    """Convert the JSON values of ``snapshot`` back to families."""
    families = []
    for name, documentation, kind, samples in sent:
        family = Metric(name, documentation, kind)
        for sample, labels, value in samples:
            family.add_sample(sample, labels, value)
        families.append(family)
    return families
