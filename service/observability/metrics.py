"""What Prometheus reads: names with base units (`_seconds`, `_bytes`, `_total`), and never an identifier as a label.

The API serves them at `/metrics`, to whoever may read tunings (scope `tunings:read`; on loopback nobody needs a key
while there is none): they tell less than `/v1/devices` does, and a scraper should not hold a key that can do more. A
process can also serve them without a key on a port of its own (`--metrics-port`), on loopback unless the operator names
another address: that is how workers, which have no API, are scraped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

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

from service.domain.states import State, WorkKind
from service.errors import ConfigurationError, StoreUnavailableError
from service.store.models import QueueDepth

_log = logging.getLogger(__name__)

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format, which `exposition` returns."""

_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_WORK_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)

QueueDepths = Callable[[], Sequence[QueueDepth]]
Families = Callable[[], Iterable[Metric]]
Snapshot = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]
"""Families as JSON: name, help, type, and samples with their names, labels and values."""


class Metrics:
    """The measurements of one process. Safe to share between threads; each call takes about a microsecond.

    Args:
        version: of this service.
    """

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
        self._probes = Counter(
            "batchwright_probes", "Probes run, by outcome.", ["device", "outcome"], registry=self._work_registry
        )
        self._unready = Gauge(
            "batchwright_device_unready",
            "1 while trouble of the host keeps a device from taking work.",
            ["device"],
            registry=self._work_registry,
        )
        self._troubles = Counter(
            "batchwright_host_troubles",
            "Times that trouble of the host was met, each check that met it included, by cause.",
            ["device", "cause"],
            registry=self._work_registry,
        )
        self._work = {
            kind: Histogram(
                f"batchwright_{kind}_seconds",
                f"From the first start of a {kind} to its end, interruptions included.",
                ["state"],
                buckets=_WORK_SECONDS,
                registry=self._work_registry,
            )
            for kind in WorkKind
        }

    def _make_request_families(self, version: str) -> None:
        build = Gauge(
            "batchwright_build_info",
            "Always 1; the label tells which version runs.",
            ["version"],
            registry=self.registry,
        )
        build.labels(version).set(1)
        self._answers = Counter(
            "batchwright_recommendation_hits",
            "Tunings submitted: `hit` were served a stored recommendation, `miss` were queued.",
            ["result"],
            registry=self.registry,
        )
        self._estimates = Counter(
            "batchwright_estimates",
            "Estimates requested: made, cached, refused or failed.",
            ["result"],
            registry=self.registry,
        )
        self._requests = Histogram(
            "batchwright_http_request_seconds",
            "From a request to the start of its response. Requests that ask to wait have a route of their own.",
            ["method", "route", "status"],
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self._request_series: dict[tuple[str, str, int], Histogram] = {}

    # --- of workers ---

    @contextmanager
    def device_busy(self, device: str) -> Iterator[None]:
        """Count the block as time in which a device runs something."""
        self._busy.begin(device)
        try:
            yield
        finally:
            self._busy.end(device)

    def device_served(self, device: str) -> None:
        """Tell of a device before it runs anything."""
        self._busy.know(device)
        self._unready.labels(device)  # there from the start, at 0

    def device_troubled(self, device: str, cause: str | None) -> None:
        """Tell that trouble of the host keeps a device from work; no cause when that is over."""
        self._unready.labels(device).set(0 if cause is None else 1)
        if cause is not None:
            self._troubles.labels(device, cause).inc()

    def probed(self, device: str, outcome: str) -> None:
        """Count a probe that was run to its end."""
        self._probes.labels(device, outcome).inc()

    def ended(self, kind: WorkKind, state: State, seconds: float) -> None:
        """Count work that ended, and how long that took."""
        self._work[kind].labels(state.value).observe(seconds)

    # --- of the API ---

    def answered(self, *, hit: bool) -> None:
        """Count a tuning that was submitted, and whether a stored answer spared it."""
        self._answers.labels("hit" if hit else "miss").inc()

    def estimated(self, result: str) -> None:
        """Count an estimate: `made`, `cached`, `refused` for want of a slot, or `failed`."""
        self._estimates.labels(result).inc()

    def requested(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a response, and how long it took to begin. ``route`` is a template, never a path."""
        series = self._request_series.get((method, route, status))
        if series is None:
            series = self._requests.labels(method, route, str(status))
            self._request_series[method, route, status] = series
        series.observe(seconds)

    def watch_queue(self, depths: QueueDepths) -> None:
        """Ask for what waits whenever somebody reads the metrics. For one process of a service: the queue is shared."""
        self.registry.register(_QueueCollector(depths))

    def watch_workers(self, families: Families) -> None:
        """Ask for the workers' measurements whenever somebody reads the metrics: they run in another process."""
        self._work_families.source = families

    # --- for readers ---

    def work_families(self) -> list[Metric]:
        """The measurements of workers, of this process or of the one that is asked for them."""
        return list(self._work_families.collect())

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Serve them over HTTP, without keys, from a thread; call what is returned to end that.

        Raises:
            ConfigurationError: when the address cannot be listened on.
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
    """Which devices run something, and for how long they have in all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._since: dict[str, float] = {}

    def know(self, device: str) -> None:
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
        """Both families, what runs now included."""
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
    """Measurements of workers, wherever they run."""

    def __init__(self, source: Families) -> None:
        self.source = source

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names are those of another registry."""
        yield from ()

    @override
    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self.source()


def snapshot(families: Iterable[Metric]) -> Snapshot:
    """Families as they are sent to another process."""
    return [
        (it.name, it.documentation, it.type, [(found.name, dict(found.labels), found.value) for found in it.samples])
        for it in families
    ]


def families_in(sent: Snapshot) -> list[Metric]:
    """Families that another process has sent."""
    families = []
    for name, documentation, kind, samples in sent:
        family = Metric(name, documentation, kind)
        for sample, labels, value in samples:
            family.add_sample(sample, labels, value)
        families.append(family)
    return families


class _QueueCollector(Collector):
    """What waits, as the store has it when somebody reads the metrics; nothing when it cannot be asked."""

    def __init__(self, depths: QueueDepths) -> None:
        self._depths = depths

    def describe(self) -> Iterator[Metric]:
        """The families' names, without asking the store."""
        yield from _queue_families(())

    @override
    def collect(self) -> Iterator[Metric]:
        """Both families."""
        try:
            found = self._depths()
        except StoreUnavailableError as error:
            _log.warning("the metrics are without the queue: %s", error)
            return
        yield from _queue_families(found)


def _queue_families(found: Sequence[QueueDepth]) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        "batchwright_queue_items",
        "Tunings and jobs that wait for a device; every API process tells the same.",
        labels=["device"],
    )
    oldest = GaugeMetricFamily(
        "batchwright_queue_oldest_age_seconds", "How long the oldest of them has waited.", labels=["device"]
    )
    for depth in found:
        waiting.add_metric([depth.device], depth.waiting)
        oldest.add_metric([depth.device], depth.oldest_age_seconds)
    yield waiting
    yield oldest
