"""What callers can do with estimates: ask for one, within bounds, and list the GPUs. The rules are here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from anyio import CapacityLimiter
from cachetools import LRUCache

from service.application.rules.policy import Policy
from service.domain.problems import FieldFault
from service.domain.work import GpuList
from service.errors import EstimatesBusyError, InvalidInputError
from service.observability.metrics import Metrics
from tuner.errors import EstimateCancelledError, EstimateError
from tuner.hardware.gpu_lookup import find_gpu
from tuner.hardware.gpu_table import GPUS
from tuner.planning.fingerprint import canonical_json, memory_part
from tuner.schemas.estimates import Estimate, EstimateRequest
from tuner.schemas.workload import PythonModel

ShouldStop = Callable[[], bool]
Estimator = Callable[[EstimateRequest, ShouldStop], Estimate]
"""Makes an estimate, in processes of its own; what it takes to give one up has ended when it returns."""

_POLL_SECONDS = 0.05
_AT_ONCE = 4
"""Callers who need no slot: they are answered from memory, or refused."""


@dataclass(frozen=True)
class EstimateLimits:
    """How much of the host estimates may take."""

    slots: int = 1
    """Estimates that are made at once. Each keeps a few processors busy for seconds, and may take gigabytes."""
    queue: int = 8
    """Callers that may wait for a slot; each holds a thread of the API."""
    wait_seconds: float = 10.0
    """How long a caller waits for a slot."""
    remembered: int = 128
    """Answers that are kept in memory; the one not asked for the longest goes first."""
    remembered_bytes: int = 8 * 1024**2
    """Bytes of these answers as JSON, of all together: a few kilobytes per GPU each as a rule."""


class Estimates:
    """Answers what would fit. Safe to share between threads.

    An answer depends on the question and on installed versions alone, so it is given again from memory: data, schedule,
    rates and time limits aside. Answers for `python` models are not kept, since their code may change.

    Args:
        estimator: what makes an estimate.
        policy: what the operator allows.
        versions: of what takes part.
        limits: how much of the host may be taken.
        metrics: where they are counted.
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
        self._limits = limits
        self._metrics = metrics or Metrics()
        self._slots = threading.BoundedSemaphore(limits.slots)
        self._places = threading.BoundedSemaphore(limits.slots + limits.queue)
        self._known = _KnownEstimates(limits.remembered, limits.remembered_bytes)
        self.threads = CapacityLimiter(limits.slots + limits.queue + _AT_ONCE)
        """For those who ask from a thread: other work of the API finds its own free, however many estimates wait."""

    def estimate(self, request: EstimateRequest, should_stop: ShouldStop = lambda: False) -> Estimate:
        """What the workload would take; asked for again, the same answer at once.

        Args:
            request: what is asked.
            should_stop: asked many times a second; nothing runs any more once it has said so.

        Raises:
            TargetNotAllowedError: when its code is not allow-listed.
            InvalidInputError: when a GPU's name is not known, or is that of several.
            EstimatesBusyError: when no slot became free in time.
            EstimateError: when it cannot be traced, or not in time, or was stopped.
        """
        self._policy.check_model(request.spec)
        question = self._question(request)
        if (known := self._known.get(question)) is not None:
            self._metrics.count_estimate("cached")
            return known
        with self._counted(), self._slot(should_stop):
            found = self._known.get(question) or self._estimator(request, should_stop)
        if not isinstance(request.spec.model, PythonModel):
            self._known.put(question, found)
        return found

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count how the block ends."""
        try:
            yield
        except EstimatesBusyError:
            self._metrics.count_estimate("refused")
            raise
        except Exception:
            self._metrics.count_estimate("failed")
            raise
        self._metrics.count_estimate("made")

    @staticmethod
    def gpus() -> GpuList:
        """The GPUs that can be named."""
        return GpuList(items=GPUS)

    def _question(self, request: EstimateRequest) -> str:
        """One text for requests with the same answer.

        Raises:
            InvalidInputError: naming every GPU that is not known.
        """
        asked = request.model_dump(mode="json", exclude={"spec", "timeout_seconds"})
        asked |= {"gpus": _names_of(request.gpus), "spec": memory_part(request.spec), "versions": self._versions}
        return canonical_json(asked)

    @contextmanager
    def _slot(self, should_stop: ShouldStop) -> Iterator[None]:
        """Hold a slot, as soon as there is one.

        Raises:
            EstimatesBusyError: when there was none in time, or too many wait.
            EstimateCancelledError: when the caller is gone before.
        """
        if not self._places.acquire(blocking=False):
            raise EstimatesBusyError(f"{self._limits.queue} estimates wait for {self._made_at_once}: try again later")
        try:
            self._wait_for_slot(should_stop)
            try:
                yield
            finally:
                self._slots.release()
        finally:
            self._places.release()

    def _wait_for_slot(self, should_stop: ShouldStop) -> None:
        deadline = time.monotonic() + self._limits.wait_seconds
        while not self._slots.acquire(timeout=_POLL_SECONDS):
            if should_stop():
                raise EstimateCancelledError("the estimate was given up before it began")
            if time.monotonic() > deadline:
                raise EstimatesBusyError(
                    f"no slot became free within {self._limits.wait_seconds:g} s of {self._made_at_once}: try again "
                    "later; the operator raises BATCHWRIGHT_ESTIMATE_SLOTS"
                )

    @property
    def _made_at_once(self) -> str:
        return f"the {self._limits.slots} made at once"


class _KnownEstimates:
    """The estimates that were asked for last, by question. Safe to share between threads.

    Args:
        count: the most estimates that are kept.
        nbytes: the most bytes of all estimates with their questions, as JSON.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self._lock = threading.Lock()
        self._estimates: LRUCache[str, tuple[Estimate, int]] = LRUCache(nbytes, getsizeof=lambda sized: sized[1])
        self._least_size = nbytes // count
        """An estimate counts as at least this much, which bounds their number."""

    def get(self, question: str) -> Estimate | None:
        with self._lock:
            return self._estimates.get(question, (None, 0))[0]

    def put(self, question: str, estimate: Estimate) -> None:
        nbytes = len(question) + len(estimate.model_dump_json())
        with self._lock, suppress(ValueError):  # which the cache raises for an estimate above its whole size
            self._estimates[question] = estimate, max(nbytes, self._least_size)


def _names_of(gpus: tuple[str, ...]) -> list[str]:
    """The names of the catalogue.

    Raises:
        InvalidInputError: naming every one that is not known, or is that of several.
    """
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
