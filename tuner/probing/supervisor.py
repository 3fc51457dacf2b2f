"""Starts probes, bounds their time, and turns whatever happens to them into an outcome with its evidence. No torch."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tuner.errors import BatchwrightError, CheckLostError, EstimateCancelledError, ProbeCancelledError, ProbeError
from tuner.estimation.client import MEMORY_BYTES, expect
from tuner.hardware.allocator_env import allocator_environment
from tuner.probing.exit_causes import Ended, report_of_dead_check, result_of_dead_process, uncompared
from tuner.probing.fork_server_start import fork_server
from tuner.probing.protocol import CheckReport, ProbePaths, Task, TaskRequest, phase_seconds
from tuner.schemas.recommendation import CouplingCheck
from tuner.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from tuner.schemas.results import DeviceInfo, ExpectedPeaks, Outcome, ProbeResult
from tuner.schemas.workload import WorkloadSpec
from tuner.system.fork_server.client import (
    DeadlineError,
    ForkServer,
    ImportFailedError,
    ServerLostError,
    StoppedError,
)
from tuner.system.fork_server.messages import RunTask
from tuner.system.fork_server.spawn import ChildProcess, StartChild
from tuner.system.process_exit import ExitKind, classify_exit
from tuner.system.processes import propagated_environment
from tuner.units import format_bytes
from tuner.workloads.preload import late_imports

_log = logging.getLogger(__name__)

_START_TIMEOUT_SECONDS = 180.0
_CHECK_TIMEOUT_SECONDS = 300.0
_EXPECT_TIMEOUT_SECONDS = 30.0
"""An estimate that takes longer than some probes would is not worth it."""
_TRIES = 2
"""How often what is ended from outside is tried, as by the search."""


class ProbeSupervisor:
    """Runs the probes of one device, one at a time, each in a fresh process. A ``tuner.planning.session.ProbeRunner``.

    Args:
        device: the device; its kind decides the allocator's environment.
        start: starts the fork server.
    """

    def __init__(self, device: DeviceInfo, start: StartChild = ChildProcess) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._server = ForkServer(lambda: start(fork_server(device.kind)))

    def environment(self) -> dict[str, str]:
        """The environment variables that probes run with and the job must run with."""
        return allocator_environment(self.device.kind, os.environ)

    def check(self, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Build the workload without memory for its tensors.

        A check whose process is killed, or finds no memory, says nothing of the spec: it is made again.

        Raises:
            SpecError: naming the field at fault.
            CheckLostError: when the check was lost each time.
            ProbeCancelledError: when ``should_stop`` answered true; the check's process is gone by then.
            ProbeError: when the machinery failed.
        """
        lost: str | None = None
        for _ in range(_TRIES):
            report = self._checked(request.spec, should_stop)
            if (error := report.to_error()) is not None:
                raise error
            if (lost := report.lost) is None:
                return
        raise CheckLostError(
            f"the process that checks the spec was lost {_TRIES} times, the last time: {lost}. Look at the memory of "
            "the host and at the kernel's log, then submit it again"
        )

    def _checked(self, spec: WorkloadSpec, should_stop: Callable[[], bool]) -> CheckReport:
        """Report of a check in a process of its own, or the meaning of its end without a report."""
        with self._lock:
            ended = self._run_task("check", spec, _CHECK_TIMEOUT_SECONDS, should_stop)
        return ended.document(CheckReport) or report_of_dead_check(ended, _CHECK_TIMEOUT_SECONDS)

    def check_coupling(
        self, request: CouplingRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> CouplingCheck:
        """Compare the loss of a batch with that of its parts, in a process of its own; again where that was killed.

        Raises:
            ProbeCancelledError: when ``should_stop`` answered true; the check's process is gone by then.
            ProbeError: when the machinery failed.
        """
        with self._lock:
            ended = self._run_until_not_lost("couple", request, request.timeout_seconds, should_stop)
        return ended.document(CouplingCheck) or uncompared(request, ended)

    def expect(
        self, request: ExpectationRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> ExpectedPeaks | None:
        """What an estimate expects the probes to measure; none where it cannot tell, or not in time.

        Raises:
            ProbeCancelledError: when ``should_stop`` answered true; the estimate's process is gone by then.
            ProbeError: when the machinery failed.
        """
        with self._lock:
            if request.compute_capability is not None:
                self._server.import_modules(self._late_imports(request.spec))
                return self._expect_apart(request, should_stop)
            ended = self._run_until_not_lost("expect", request, _EXPECT_TIMEOUT_SECONDS, should_stop)
        expected = ended.document(ExpectedPeaks)
        if expected is None:
            _log.info("no estimate leads the search: %s", ended.output.strip() or "it took too long")
        return expected

    def _late_imports(self, spec: WorkloadSpec) -> tuple[str, ...]:
        return late_imports(spec, with_model=self.device.kind == "cpu")

    @staticmethod
    def _expect_apart(request: ExpectationRequest, should_stop: Callable[[], bool]) -> ExpectedPeaks | None:
        """In a process beside the fork server, which has to see the card."""
        try:
            return expect(request, should_stop, timeout_seconds=_EXPECT_TIMEOUT_SECONDS)
        except EstimateCancelledError as error:
            raise ProbeCancelledError(str(error)) from None
        except BatchwrightError as error:
            _log.info("no estimate leads the search: %s", error)
            return None

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Run one probe to its end.

        Raises:
            ProbeCancelledError: when ``should_stop`` answered true; the probe's process is gone by then.
            ProbeError: when the machinery failed.
        """
        with self._lock:
            result, crashed = self._attempt(request, should_stop)
            if crashed and self.device.kind == "cpu" and request.limit_bytes is not None:
                return self._explain_crash(request, result, should_stop)
            return result

    def _explain_crash(self, request: ProbeRequest, first: ProbeResult, should_stop: Callable[[], bool]) -> ProbeResult:
        """Tell a crash for want of memory from a bug: repeat it under the limit, then under a roomier one.

        Libraries below torch do not all check what malloc returns. Only a process that crashes twice under the limit
        and runs with more has shown that memory was the cause.
        """
        second, crashed_again = self._attempt(request, should_stop)
        if not crashed_again:
            return second
        roomy = control_limit(request.limit_bytes or 0)
        control, _ = self._attempt(request.model_copy(update={"limit_bytes": roomy}), should_stop)
        if control.outcome is not Outcome.FIT:
            return first
        limit = format_bytes(request.limit_bytes or 0)
        message = f"crashed with {first.error_type} twice under {limit}, and fits under {format_bytes(roomy)}"
        return first.model_copy(update={"outcome": Outcome.OOM, "message": message, "traceback": None})

    def _attempt(self, request: ProbeRequest, should_stop: Callable[[], bool]) -> tuple[ProbeResult, bool]:
        """One try in one process, and whether that process crashed."""
        ended = self._run_task("probe", request, request.timeout_seconds, should_stop)
        found = ended.document(ProbeResult)
        result = found or result_of_dead_process(request, ended)
        crashed = found is None and ended.exit is not None and ended.exit.kind is ExitKind.CRASHED
        seconds = phase_seconds(ended.entered, ended.requested, ended.ended)
        return result.model_copy(update={"seconds": seconds}), crashed

    def _run_until_not_lost(
        self, task: Task, request: TaskRequest, timeout: float, should_stop: Callable[[], bool]
    ) -> Ended:
        """Run a task that only the machinery needs, as often as a search repeats a probe that was lost."""
        for _ in range(_TRIES - 1):
            ended = self._run_task(task, request, timeout, should_stop)
            if not ended.was_lost:
                return ended
        return self._run_task(task, request, timeout, should_stop)

    def _run_task(self, task: Task, request: TaskRequest, timeout: float, should_stop: Callable[[], bool]) -> Ended:
        """Run a task in a process of its own, and read what it left."""
        with ProbePaths.temporary(request) as paths:
            command = RunTask(
                task=task,
                directory=paths.directory,
                modules=self._late_imports(request if isinstance(request, WorkloadSpec) else request.spec),
                environment=propagated_environment(),
                data_bytes=MEMORY_BYTES if task == "expect" else None,
            )
            exit_, timed_out, lost, requested = None, False, None, time.monotonic()
            try:
                self._await_server(should_stop)
                requested = time.monotonic()
                exit_ = self._server.run(command, requested + timeout, should_stop)
            except DeadlineError:
                exit_, timed_out = classify_exit(-signal.SIGKILL, 0), True
            except ServerLostError as error:
                lost = str(error)
            except StoppedError:
                raise ProbeCancelledError("the probe was ended on request") from None
            except ImportFailedError as error:
                raise ProbeError(f"what the workload needs cannot be imported: {error}") from None
            result = paths.result.read_bytes() if paths.result.exists() else None
            output = lost or paths.output_tail()
            return Ended(exit_, timed_out, requested, time.monotonic(), output, result, paths.entered())

    def _await_server(self, should_stop: Callable[[], bool]) -> None:
        """Wait until the fork server has imported torch.

        Raises:
            StoppedError: when told to stop; the server goes on by itself.
            ServerLostError: when it was killed while it started.
            ProbeError: when it did not start.
        """
        try:
            self._server.await_ready(time.monotonic() + _START_TIMEOUT_SECONDS, should_stop)
        except DeadlineError:
            output = self._server.start().output_tail()
            self._server.close()
            raise ProbeError(f"the fork server did not start:\n{output}") from None
        except ServerLostError as error:
            if error.was_killed:
                raise
            raise ProbeError(f"the fork server did not start:\n{error.output}") from None

    def warm_up(self) -> None:
        """Start the fork server now, so that the first probe does not wait for torch to be imported."""
        with self._lock, suppress(ServerLostError):  # the first probe starts another
            self._await_server(lambda: False)

    def close(self) -> None:
        """End every process. Idempotent."""
        with self._lock:
            self._server.close()

    def __enter__(self) -> ProbeSupervisor:  # noqa: PYI034 - not meant for subclassing
        """Ready to run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


_CONTROL_FACTOR = 4


def control_limit(limit_bytes: int) -> int:
    """A limit that tells whether the first one was the cause of a crash: roomier, and no danger to the host. Bytes."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(limit_bytes, min(_CONTROL_FACTOR * limit_bytes, available // 2))
