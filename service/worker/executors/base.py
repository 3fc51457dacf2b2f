"""The interface of an executor, which runs one probe or one job at a time on one device."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.errors import ServiceError
from tuner.planning.session import ProbeRunner
from tuner.schemas.recommendation import CouplingCheck, Recommendation
from tuner.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TrainingRequest, TuningRequest
from tuner.schemas.results import DeviceInfo, ExpectedPeaks, ProbeResult
from tuner.schemas.training import TrainingProgress, TrainingResult

GraceSeconds = Callable[[], float | None]
"""Seconds left before the run must have stopped, or None if it need not stop. May fall from call to call."""

OnProgress = Callable[[Sequence[TrainingProgress]], None]
"""Takes the updates that were finished since the last call. What it raises ends the run."""


class DeviceBusyError(ServiceError):
    """The executor was asked to run two things at once, or after it was closed: a mistake of its caller."""

    code = "device-busy"


@dataclass(frozen=True)
class TrainingRun:
    """A run to make, or to go on with if its directory holds checkpoints."""

    directory: Path
    recommendation: Recommendation
    request: TrainingRequest
    reported: int = 0
    """The newest update that was reported; later ones are, also those that an earlier process has made."""


class Executor(ABC):
    """Runs work on ``device``. Calls block; they may come from any thread, one at a time.

    Probes go to ``runner``, which the executor owns; how a run is made is what kinds of executor differ in.
    """

    def __init__(self, device: DeviceInfo, runner: ProbeRunner) -> None:
        self.device = device
        self._runner = runner
        self._turn = threading.Lock()
        self._closed = False

    def check(self, request: TuningRequest, grace_seconds: GraceSeconds) -> None:
        """Find a wrong spec before any probe.

        Raises:
            SpecError: naming the field at fault.
            ProbeCancelledError: when ``grace_seconds`` asked it to stop.
            ProbeError: when the machinery failed.
        """
        with self._one_at_a_time():
            self._runner.check(request, lambda: grace_seconds() is not None)

    def check_coupling(self, request: CouplingRequest, grace_seconds: GraceSeconds) -> CouplingCheck:
        """Compare the loss of a batch with that of its parts, before any probe.

        Raises:
            ProbeCancelledError: when ``grace_seconds`` asked it to stop.
            ProbeError: when the machinery failed.
        """
        with self._one_at_a_time():
            return self._runner.check_coupling(request, lambda: grace_seconds() is not None)

    def expect(self, request: ExpectationRequest, grace_seconds: GraceSeconds) -> ExpectedPeaks | None:
        """Estimate the peaks that probes would measure; none where no estimate can be made.

        Raises:
            ProbeCancelledError: when ``grace_seconds`` asked it to stop.
            ProbeError: when the machinery failed.
        """
        with self._one_at_a_time():
            return self._runner.expect(request, lambda: grace_seconds() is not None)

    def probe(self, request: ProbeRequest, grace_seconds: GraceSeconds) -> ProbeResult:
        """Run one probe to its end.

        Raises:
            ProbeCancelledError: when ``grace_seconds`` asked it to stop; nothing of the probe is left then.
            ProbeError: when the machinery failed.
        """
        with self._one_at_a_time():
            return self._runner.run(request, lambda: grace_seconds() is not None)

    def train(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        """Make a run, or go on with it. STOPPED when ``grace_seconds`` asked it to stop, or someone else did.

        Whatever ends this call, an exception of ``on_progress`` included, nothing of the run goes on after it.
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
        if not self._turn.acquire(blocking=False):
            raise DeviceBusyError(f"{self.device.id} already runs something")
        try:
            yield
        finally:
            self._turn.release()

    def lost_device(self) -> str | None:
        """Look for the device, and say in words that it is gone; none while it is there."""
        return None

    def environment(self) -> dict[str, str]:
        """The variables that probes and jobs run with."""
        return self._runner.environment()

    @abstractmethod
    def _train(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        """Make a run."""
