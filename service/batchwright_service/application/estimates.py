"""Use cases of estimates: compute one, within the bounds of this host, and list the GPUs."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from anyio import CapacityLimiter
from cachetools import LRUCache

from batchwright.client.documents.problems import FieldFault
from batchwright.client.documents.work import GpuList
from batchwright.errors import EstimateCancelledError, EstimateError
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.hardware.gpu_table import GPUS
from batchwright.planning.fingerprint import canonical_json, memory_part
from batchwright.schemas.estimates import Estimate, EstimateRequest
from batchwright.schemas.workload import PythonModel
from batchwright_service.application.rules.bulkhead import Bulkhead
from batchwright_service.application.rules.policy import Policy
from batchwright_service.errors import EstimatesBusyError, InvalidInputError
from batchwright_service.observability.metrics import Metrics

ShouldStop = Callable[[], bool]
Estimator = Callable[[EstimateRequest, ShouldStop], Estimate]
"""Computes an estimate in child processes. Blocks; after a stop the processes have ended when it returns."""

_THREADS_WITHOUT_SLOT = 4
"""Threads for callers that need no slot, since they are served from the cache or refused."""


@dataclass(frozen=True)
class EstimateLimits:
    """Bounds of what estimates take of the host."""

    slots: int = 1
    """Estimates that are computed at once. Each uses a few processors for seconds, and may take gigabytes."""
    queue: int = 8
    """Callers that may wait for a slot; each holds a thread of the API."""
    wait_seconds: float = 10.0
    """The time for which a caller waits for a slot."""
    cache_entries: int = 128
    """Estimates in the LRU cache."""
    cache_bytes: int = 8 * 1024**2
    """Total size of the cached estimates as JSON; most take a few kilobytes per GPU."""


class EstimateCases:
    """Compute and cache estimates. Safe to share between threads.

    An estimate depends on the request and on installed versions alone, so that it can be cached. The data, the
    schedule, rates and time limits do not matter. Estimates of `python` models are not cached: their code may change.

    Args:
        estimator: computes an estimate.
        policy: the code that the operator allows.
        versions: installed versions that affect estimates.
        limits: bounds of slots, queue and cache.
        metrics: counts estimates.
    """

    def __init__(
        self,
        estimator: Estimator,
        policy: Policy,
        versions: Mapping[str, str],
        limits: EstimateLimits = EstimateLimits(),
        metrics: Metrics | None = None,
    ) -> None:
        self._estimator = estimator
        self._policy = policy
        self._versions = dict(versions)
        self._metrics = metrics or Metrics()
        self._bulkhead = Bulkhead(
            f"the {limits.slots} slots of estimates",
            limits.slots,
            limits.queue,
            limits.wait_seconds,
            EstimatesBusyError,
            "try again later; the operator raises BATCHWRIGHT_ESTIMATE_SLOTS",
        )
        self._cache = _EstimateCache(limits.cache_entries, limits.cache_bytes)
        self.threads = CapacityLimiter(limits.slots + limits.queue + _THREADS_WITHOUT_SLOT)
        """Threads of callers, separate from the API's others, which waiting estimates must not use up."""

    def estimate(self, request: EstimateRequest, should_stop: ShouldStop = lambda: False) -> Estimate:
        """Estimate the memory of a workload, or return the cached estimate.

        Args:
            request: the workload and the GPUs.
            should_stop: polled many times a second; when it returns true, the estimate is stopped.

        Raises:
            TargetNotAllowedError, DataPathNotAllowedError: when the model is not allowed here.
            SpecError: when a pretrained model has no usable config.
            InvalidInputError: when the name of a GPU is unknown or ambiguous.
            EstimatesBusyError: when no slot became free in time.
            EstimateError: when the workload cannot be traced, or not in time, or the estimate was stopped.
        """
        request = request.model_copy(update={"spec": self._policy.complete(request.spec)})
        key = self._cache_key(request)
        if (cached := self._cache.get(key)) is not None:
            self._metrics.estimates.labels("cached").inc()
            return cached

        def require_caller() -> None:
            if should_stop():
                raise EstimateCancelledError("the estimate was cancelled before it began")

        with self._counted(), self._bulkhead.slot(require_caller):
            estimate = self._cache.get(key) or self._estimator(request, should_stop)
        if not isinstance(request.spec.model, PythonModel):
            self._cache.put(key, estimate)
        return estimate

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the outcome of the block."""
        try:
            yield
        except EstimatesBusyError:
            self._metrics.estimates.labels("refused").inc()
            raise
        except Exception:
            self._metrics.estimates.labels("failed").inc()
            raise
        self._metrics.estimates.labels("made").inc()

    @staticmethod
    def gpus() -> GpuList:
        """Return the supported GPUs."""
        return GpuList(items=GPUS)

    def _cache_key(self, request: EstimateRequest) -> str:
        """Return a text that is equal for requests with the same estimate.

        Raises:
            InvalidInputError: naming every GPU that is unknown.
        """
        parts = request.model_dump(mode="json", exclude={"spec", "timeout_seconds"})
        parts |= {"gpus": _gpu_names(request.gpus), "spec": memory_part(request.spec), "versions": self._versions}
        return canonical_json(parts)


class _EstimateCache:
    """LRU cache of estimates. Safe to share between threads.

    Args:
        count: the most estimates.
        nbytes: the most bytes of all estimates with their keys, as JSON.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self._lock = threading.Lock()
        self._estimates: LRUCache[str, tuple[Estimate, int]] = LRUCache(nbytes, getsizeof=lambda sized: sized[1])
        self._min_size = nbytes // count
        """The least size that an estimate counts as, which bounds the number of estimates."""

    def get(self, key: str) -> Estimate | None:
        with self._lock:
            return self._estimates.get(key, (None, 0))[0]

    def put(self, key: str, estimate: Estimate) -> None:
        nbytes = len(key) + len(estimate.model_dump_json())
        with self._lock, suppress(ValueError):  # which the cache raises for an estimate above its whole size
            self._estimates[key] = estimate, max(nbytes, self._min_size)


def _gpu_names(gpus: tuple[str, ...]) -> list[str]:
    """Return the names of the GPUs in the catalogue."""
    names: list[str] = []
    faults: list[FieldFault] = []
    for index, name in enumerate(gpus):
        try:
            names.append(find_gpu(name).name)
        except EstimateError as error:
            faults.append(FieldFault(field=f"gpus.{index}", message=str(error)))
    if faults:
        raise InvalidInputError.listing(faults)
    return names
