"""The interface of an executor, which runs one probe or one job at a time on one device."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from batchwright.hardware.memory_in_use import MemoryInUse
from batchwright.planning.driver import ProbeRunner
from batchwright.schemas.recommendation import CouplingCheck, Recommendation
from batchwright.schemas.requests import (
    CouplingRequest,
    ExpectationRequest,
    ProbeRequest,
    TrainingRequest,
    TuningRequest,
)
from batchwright.schemas.results import DeviceInfo, ExpectedPeaks, ProbeResult
from batchwright.schemas.training import RunProgress, TrainingResult
from batchwright_service.errors import ServiceError

GraceSeconds = Callable[[], float | None]
"""Seconds left before the run must have stopped, or None if it need not stop. May fall from call to call."""

OnProgress = Callable[[Sequence[RunProgress]], None]
"""Receives the progress since the last call. Its exceptions end the run."""


class DeviceBusyError(ServiceError):
    """The executor was called twice at once, or after it was closed: a mistake of its caller."""

    code = "device-busy"


@dataclass(frozen=True)
class TrainingRun:
    """A run to start, or to resume if its directory has checkpoints. A command is started anew."""

    directory: Path
    recommendation: Recommendation
    request: TrainingRequest
    reported: int = 0
    """The newest reported update. Later ones will be reported, also those that an earlier process made; of a command,
    all since its start."""
    devices: tuple[str, ...] = ()
    """The devices of the ranks, where each has one of its own; otherwise all share the device of the executor."""


class Executor(ABC):
    """Run work on ``device``. Calls block; they may come from any thread, one at a time.

    Probes go to ``runner``, which the executor owns; subclasses implement training runs.
    """

    def __init__(self, device: DeviceInfo, runner: ProbeRunner) -> None:
        self.device = device
        self._runner = runner
        self._lock = threading.Lock()
        self._closed = False

    def check(self, request: TuningRequest, grace_seconds: GraceSeconds) -> None:
        """Check the spec before any probe.

        Raises:
            SpecError: naming the field at fault.
            ProbeCancelledError: when ``grace_seconds`` requested a stop.
            ProbeError: when the probe could not be run.
        """
        with self._one_at_a_time():
            self._runner.check(request, lambda: grace_seconds() is not None)

    def check_coupling(self, request: CouplingRequest, grace_seconds: GraceSeconds) -> CouplingCheck:
        """Compare the loss of a batch with that of its parts, before any probe.

        Raises:
            DeviceError: when the device failed.
            ProbeCancelledError: when ``grace_seconds`` requested a stop.
            ProbeError: when the probe could not be run.
        """
        with self._one_at_a_time():
            return self._runner.check_coupling(request, lambda: grace_seconds() is not None)

    def begin_estimate(self, request: ExpectationRequest) -> None:
        """Begin the estimate that ``expect`` will be asked for, where it can be made beside a check."""
        with self._one_at_a_time():
            self._runner.begin_estimate(request)

    def expect(self, request: ExpectationRequest, grace_seconds: GraceSeconds) -> ExpectedPeaks | None:
        """Estimate the peaks that probes would measure; none from a runner that makes no estimates.

        Raises:
            EstimateError: when there is no estimate, or none yet: ``late_estimate`` may have it later.
            ProbeCancelledError: when ``grace_seconds`` requested a stop.
            ProbeError: when the probe could not be run.
        """
        with self._one_at_a_time():
            return self._runner.expect(request, lambda: grace_seconds() is not None)

    def late_estimate(self) -> ExpectedPeaks | None:
        """Return the estimate that ``expect`` did not wait for, once it is made."""
        return self._runner.late_estimate()

    def end_search(self) -> None:
        """End what is kept from one probe of a tuning to the next. Idempotent."""
        self._runner.end_search()

    def probe(self, request: ProbeRequest, grace_seconds: GraceSeconds) -> ProbeResult:
        """Run one probe to its end.

        Raises:
            ProbeCancelledError: when ``grace_seconds`` requested a stop; nothing of the probe is left then.
            ProbeError: when the probe could not be run.
        """
        with self._one_at_a_time():
            return self._runner.run(request, lambda: grace_seconds() is not None)

    def train(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        """Start or resume a run. STOPPED when ``grace_seconds``, or another process, requested a stop.

        No process of the run outlives this call, whether it returns or raises (``on_progress`` may raise).
        """
        with self._one_at_a_time():
            return self._train(run, on_progress, grace_seconds)

    def close(self) -> None:
        """End every process. Idempotent."""
        if not self._closed:
            self._closed = True
            self._runner.close()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if self._closed:
            raise DeviceBusyError(f"the executor of {self.device.id} is closed")
        if not self._lock.acquire(blocking=False):
            raise DeviceBusyError(f"{self.device.id} already runs something")
        try:
            yield
        finally:
            self._lock.release()

    def lost_device(self) -> str | None:
        """Return a message when the device is lost, or None."""
        return None

    def memory_in_use(self) -> MemoryInUse | None:
        """Return the memory in use on the device, or None where it cannot be read."""
        return None

    def environment(self) -> dict[str, str]:
        """Return the environment variables of probes and jobs."""
        return self._runner.environment()

    @abstractmethod
    def _train(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        """Start or resume a run."""
