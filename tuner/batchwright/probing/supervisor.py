"""Run probes with deadlines, and turn each end of a probe into an outcome with its evidence. No torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from batchwright.errors import (
    CheckLostError,
    EstimateError,
    EstimateTimedOutError,
    HostFailureError,
    ProbeCancelledError,
    ProbeError,
)
from batchwright.estimation.client import MEMORY_BYTES
from batchwright.hardware.crashes import run_explaining_crashes
from batchwright.probing.background_estimate import BackgroundEstimate
from batchwright.probing.data_reader import DataReader
from batchwright.probing.exit_causes import (
    EndedTask,
    check_report_of_dead_process,
    coupling_check_of_dead_process,
    probe_result_of_dead_process,
)
from batchwright.probing.protocol import CheckReport, CouplingOutcome, ProbePaths, Task, TaskRequest, phase_seconds
from batchwright.schemas.recommendation import CouplingCheck, DataReading
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo, ExpectedPeaks, ProbeResult
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.data_roots import ANY_FILE, DataRoots
from batchwright.system.disk_space import require_space
from batchwright.system.fork_server.client import (
    DeadlineError,
    ForkServer,
    ImportFailedError,
    ServerLostError,
    StoppedError,
)
from batchwright.system.fork_server.spawn import ChildProcess, StartChild
from batchwright.system.fork_server.tasks import RunTask
from batchwright.system.host_failures import Cause
from batchwright.system.process_exit import ExitKind, ProcessExit, classify_exit
from batchwright.system.processes import propagated_environment
from batchwright.system.reading_progress import ReadingProgress
from batchwright.workloads.preload import late_imports

_START_TIMEOUT_SECONDS = 180.0
_CHECK_TIMEOUT_SECONDS = 300.0
_ESTIMATE_WAIT_SECONDS = 30.0
"""Time that the first probe waits for an estimate: about as long as a few probes take."""
_MAX_ATTEMPTS = 2
"""Attempts at a task that is killed from outside, as in the search."""
_RESULT_BYTES = 64 * 1024
"""Free disk space without which a process that ended without a result may have failed to write it."""


class ProbeSupervisor:
    """Runs the probes of one device, one at a time, each in a fresh process.

    A ``batchwright.driving.probe_runner.WorkloadRunner``.

    Each task may raise a StorageError: when the disk for temporary files has no space for its request or its result.

    Args:
        device: the device; its kind decides the allocator's environment.
        start: function that starts the fork server.
        estimate_wait_seconds: how long ``expect`` waits for an estimate.
        data_roots: the folders from which data may be read.
    """

    def __init__(
        self,
        device: DeviceInfo,
        start: StartChild = ChildProcess,
        *,
        estimate_wait_seconds: float = _ESTIMATE_WAIT_SECONDS,
        data_roots: DataRoots = ANY_FILE,
    ) -> None:
        self.device = device
        self._data_roots = data_roots
        self._estimate_wait_seconds = estimate_wait_seconds
        self._estimate: BackgroundEstimate | None = None
        self._lock = threading.Lock()
        environment = {**self.environment(), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # finds GPUs without `cuInit`
        self._server = ForkServer(lambda: start("batchwright.probing.child.fork_server", (), environment))

    def environment(self) -> dict[str, str]:
        """Return the environment variables that probes run with, and that the job must run with."""
        return self.device.traits.environment_from(os.environ)

    def start(self, spec: WorkloadSpec, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Start the fork server, and wait until it has imported torch and what the spec needs.

        Raises:
            ProbeCancelledError: when ``should_stop`` returned true.
            ProbeError: when the fork server did not start.
        """
        with self._lock, suppress(ServerLostError):  # the first task starts a new one
            self._server.import_modules(self._late_imports(spec))
            try:
                self._await_server(should_stop)
            except StoppedError:
                raise ProbeCancelledError("the tuning was stopped") from None

    def check(self, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Build the workload without allocating its tensors.

        A check whose process is killed, or runs out of host memory, says nothing about the spec and is repeated.

        Raises:
            SpecError: naming the invalid field.
            CheckLostError: when every attempt was lost.
            ProbeCancelledError: when ``should_stop`` returned true; the check's process is gone by then.
            ProbeError: when the fork server failed.
        """
        lost: str | None = None
        for _ in range(_MAX_ATTEMPTS):
            with self._lock:
                ended = self._run_task("check", request.workload, _CHECK_TIMEOUT_SECONDS, should_stop)
            report = ended.document(CheckReport) or check_report_of_dead_process(ended, _CHECK_TIMEOUT_SECONDS)
            if (error := report.to_error()) is not None:
                raise error
            if (lost := report.lost) is None:
                return
        raise CheckLostError(
            f"the process that checks the spec was lost {_MAX_ATTEMPTS} times, most recently: {lost}. "
            "Check the memory of the host and the kernel's log, then submit it again"
        )

    def check_coupling(
        self, request: CouplingRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> CouplingCheck:
        """Compare the loss of a batch with that of its parts in a separate process, repeated if it was killed.

        Raises:
            DeviceError: when the device failed.
            ProbeCancelledError: when ``should_stop`` returned true; the check's process is gone by then.
            ProbeError: when the fork server failed.
        """
        with self._lock:
            ended = self._run_unless_lost("couple", request, request.timeout_seconds, should_stop)
        outcome = ended.document(CouplingOutcome)
        return coupling_check_of_dead_process(request, ended) if outcome is None else outcome.require_device()

    def read_data(
        self,
        spec: WorkloadSpec,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[int, int], None] = lambda _read, _total: None,
    ) -> DataReading:
        """Read the data of a spec, as ``WorkloadRunner``. A sample that crashes its parser or never ends is named.

        Raises:
            SpecError, HubUnavailableError, HostFailureError, ProbeCancelledError, ProbeError: as there.
            CheckLostError: when every attempt was lost.
        """
        with self._lock:
            return DataReader(spec, partial(self._run_task, "read"), should_stop, on_progress).read()

    def begin_estimate(self, request: ExpectationRequest) -> None:
        """Begin the estimate of a GPU's peaks in its own process; that of the CPU needs the fork server."""
        if request.compute_capability is not None:
            self.end_search()
            self._estimate = BackgroundEstimate(request)

    def expect(self, request: ExpectationRequest, should_stop: Callable[[], bool] = lambda: False) -> ExpectedPeaks:
        """Estimate the peaks that probes are expected to measure.

        For a GPU the estimate is made in a process beside the fork server, because that server sees the GPU and tracing
        must not. On the CPU the fork server makes it; one that takes too long is begun again beside it.

        Raises:
            EstimateTimedOutError: when it takes too long to wait for; it goes on, for ``late_estimate``.
            EstimateError: when the workload cannot be estimated.
            ProbeCancelledError: when ``should_stop`` returned true; the estimate's process is gone by then.
            ProbeError: when the fork server failed.
        """
        if self._estimate is not None and self._estimate.request != request:
            self.end_search()
        with self._lock:
            if request.compute_capability is None:
                return self._expect_on_fork_server(request, should_stop)
        estimate, self._estimate = self._estimate or BackgroundEstimate(request), None
        if not estimate.wait(self._estimate_wait_seconds, should_stop):
            raise self._timed_out(estimate)
        return estimate.result()

    def _expect_on_fork_server(self, request: ExpectationRequest, should_stop: Callable[[], bool]) -> ExpectedPeaks:
        """Estimate in a fork of the server, as ``expect``."""
        ended = self._run_unless_lost("expect", request, self._estimate_wait_seconds, should_stop)
        if (expected := ended.document(ExpectedPeaks)) is not None:
            return expected
        if ended.timed_out:
            raise self._timed_out(BackgroundEstimate(request))
        raise EstimateError(ended.output.strip().rpartition("\n")[2] or "the tracing process left no result")

    def _timed_out(self, estimate: BackgroundEstimate) -> EstimateTimedOutError:
        """Keep an estimate that goes on, and return the error that says so."""
        self._estimate = estimate
        return EstimateTimedOutError(f"it was not ready within {self._estimate_wait_seconds:g} s")

    def late_estimate(self) -> ExpectedPeaks | None:
        """Return the estimate that ``expect`` did not wait for, once it is made; None before, and if it failed."""
        return None if self._estimate is None else self._estimate.peaks()

    def end_search(self) -> None:
        """End the estimate that ``expect`` did not wait for. Idempotent."""
        if self._estimate is not None:
            self._estimate.stop()
            self._estimate = None

    def _late_imports(self, spec: WorkloadSpec) -> tuple[str, ...]:
        return late_imports(spec, with_model=self.device.traits.counts_host_memory)

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Run one probe to its end.

        Raises:
            ProbeCancelledError: when ``should_stop`` returned true; the probe's process is gone by then.
            ProbeError: when the fork server failed.
            HostFailureError, StorageError: when it left no result because its folder is gone, or its disk is full.
        """
        if request.measures_time:
            self.end_search()  # an estimate would take a part of the processor
        with self._lock:
            return run_explaining_crashes(
                lambda repeated: self._attempt(repeated, should_stop), request, self.device.kind
            )

    def _attempt(self, request: ProbeRequest, should_stop: Callable[[], bool]) -> tuple[ProbeResult, bool]:
        """Run a probe once, and return its result and whether its process crashed."""
        ended = self._run_task("probe", request, request.timeout_seconds, should_stop)
        found = ended.document(ProbeResult)
        result = found or probe_result_of_dead_process(request, ended)
        crashed = found is None and ended.exit is not None and ended.exit.kind is ExitKind.CRASHED
        seconds = phase_seconds(ended.phases, ended.requested_at, ended.ended_at)
        return result.model_copy(update={"seconds": seconds}), crashed

    def _run_unless_lost(
        self, task: Task, request: TaskRequest, timeout: float, should_stop: Callable[[], bool]
    ) -> EndedTask:
        """Run a task other than a probe, and repeat it if it was lost, as the search repeats a lost probe."""
        for _ in range(_MAX_ATTEMPTS - 1):
            ended = self._run_task(task, request, timeout, should_stop)
            if not ended.was_lost:
                return ended
        return self._run_task(task, request, timeout, should_stop)

    def _run_task(
        self,
        task: Task,
        request: TaskRequest,
        timeout: float,
        should_stop: Callable[[], bool],
        is_stuck: Callable[[ProbePaths], bool] = lambda _paths: False,
    ) -> EndedTask:
        """Run a task in its own process, and read the files that it left. One that is stuck has timed out."""
        with ProbePaths.temporary(request) as paths:
            command = RunTask(
                task=task,
                directory=str(paths.directory),
                modules=self._late_imports(_workload(request)),
                environment=propagated_environment() | (self._data_roots.to_environment() if task == "read" else {}),
                data_bytes=MEMORY_BYTES if task == "expect" else None,
            )
            exit_, timed_out, lost, requested_at = None, False, None, time.monotonic()
            try:
                self._await_server(should_stop)
                requested_at = time.monotonic()
                exit_ = self._server.run(command, requested_at + timeout, lambda: should_stop() or is_stuck(paths))
            except DeadlineError:
                exit_, timed_out = classify_exit(-signal.SIGKILL, 0), True
            except ServerLostError as error:
                lost = str(error)
            except StoppedError:
                if not is_stuck(paths):
                    raise ProbeCancelledError("the probe was cancelled") from None
                exit_, timed_out = classify_exit(-signal.SIGKILL, 0), True
            except ImportFailedError as error:
                raise ProbeError(f"a module that the workload needs cannot be imported: {error}") from None
            result = paths.result.read_bytes() if paths.result.exists() else None
            if result is None:
                _check_disk(paths, exit_)
            output = lost or paths.output_tail()
            phases, progress = paths.recorded_phases(), ReadingProgress.of(paths.progress)
            return EndedTask(exit_, timed_out, requested_at, time.monotonic(), output, result, phases, progress)

    def _await_server(self, should_stop: Callable[[], bool]) -> None:
        """Wait until the fork server has imported torch, and the modules that were asked for.

        Raises:
            StoppedError: when ``should_stop`` returned true; the server continues to import.
            ServerLostError: when the server was killed while it started.
            ProbeError: when the server did not start.
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

    def close(self) -> None:
        """End every process. Idempotent."""
        self.end_search()
        with self._lock:
            self._server.close()

    def __enter__(self) -> ProbeSupervisor:  # noqa: PYI034 - not meant for subclassing
        """Return the supervisor."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the supervisor."""
        self.close()


def _check_disk(paths: ProbePaths, exit_: ProcessExit | None) -> None:
    """Check that a task without a result could have written one.

    Raises:
        HostFailureError: when its folder is gone.
        StorageError: when it ended by itself, and its disk is full.
    """
    if not paths.directory.is_dir():
        message = f"the temporary folder {paths.directory} was removed while a probe ran in it"
        raise HostFailureError(Cause.MISSING, message)
    if exit_ is not None and exit_.kind is ExitKind.EXITED:
        require_space(paths.result, _RESULT_BYTES)


def _workload(request: TaskRequest) -> WorkloadSpec:
    """The workload of a task."""
    if isinstance(request, WorkloadSpec):
        return request
    return request.workload if isinstance(request, ProbeRequest) else request.spec
