"""Starts probes, bounds their time, and turns whatever happens to them into an outcome with its evidence. No torch."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tuner.errors import BatchwrightError, CheckLostError, EstimateCancelledError, ProbeCancelledError, ProbeError
from tuner.estimation.client import expect
from tuner.hardware.allocator_env import allocator_environment
from tuner.probing.exit_causes import Ended, report_of_dead_check, result_of_dead_process, uncompared
from tuner.probing.fork_server_start import fork_server
from tuner.probing.protocol import CheckReport, ProbePaths, Task, TaskRequest, phase_seconds
from tuner.schemas.recommendation import CouplingCheck
from tuner.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from tuner.schemas.results import DeviceInfo, ExpectedPeaks, Outcome, ProbeResult
from tuner.schemas.workload import WorkloadSpec
from tuner.system.json_channel import Channel
from tuner.system.process_exit import ExitKind, classify_exit
from tuner.system.processes import handed_on, kernel_oom_kills, kill_group
from tuner.system.subprocesses import Partner, started
from tuner.units import format_bytes
from tuner.workloads.preload import late_imports

_log = logging.getLogger(__name__)

_START_TIMEOUT_SECONDS = 180.0
_CHECK_TIMEOUT_SECONDS = 300.0
_EXPECT_TIMEOUT_SECONDS = 30.0
"""An estimate that takes longer than some probes would is not worth it."""
_POLL_SECONDS = 0.05
_DUMP_SECONDS = 0.3
"""How long a hanging probe gets to write where it hangs before it is killed."""
_KILL_SECONDS = 30.0
_OUTPUT_BYTES = 4000
_TRIES = 2
"""How often what is ended from outside is tried, as by the search."""


class _ServerLostError(ProbeError):
    """The fork server was killed while it started; the message says what it printed."""


class ProbeSupervisor:
    """Runs the probes of one device, one at a time, each in a fresh process. A ``tuner.planning.session.ProbeRunner``.

    Args:
        device: the device; its kind decides the allocator's environment.
        scratch: where probes exchange files with this process; a temporary folder when none.
    """

    def __init__(self, device: DeviceInfo, scratch: Path | None = None) -> None:
        self.device = device
        self._owned_scratch = scratch is None
        self._scratch = Path(tempfile.mkdtemp(prefix="batchwright-")) if scratch is None else scratch
        self._lock = threading.Lock()
        self._server: Partner | None = None
        self._said = ""
        """What the last server printed at its end."""
        self._channel: Channel | None = None
        self._ready = False
        self._tasks = 0
        self._group: int | None = None
        """The process group of the task that runs."""

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
        try:
            return CheckReport.model_validate_json(ended.paths.result.read_bytes())
        except (FileNotFoundError, ValidationError):
            return report_of_dead_check(ended, _CHECK_TIMEOUT_SECONDS)
        finally:
            shutil.rmtree(ended.paths.directory, ignore_errors=True)

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
        try:
            return CouplingCheck.model_validate_json(ended.paths.result.read_bytes())
        except (FileNotFoundError, ValidationError):
            return uncompared(request, ended)
        finally:
            shutil.rmtree(ended.paths.directory, ignore_errors=True)

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
                self._prepare(request.spec)
                return self._expect_apart(request, should_stop)
            ended = self._run_until_not_lost("expect", request, _EXPECT_TIMEOUT_SECONDS, should_stop)
        try:
            return ExpectedPeaks.model_validate_json(ended.paths.result.read_bytes())
        except (OSError, ValidationError):
            _log.info("no estimate leads the search: %s", ended.said.strip() or "it took too long")
            return None
        finally:
            shutil.rmtree(ended.paths.directory, ignore_errors=True)

    def _prepare(self, spec: WorkloadSpec) -> None:
        """Have the fork server import what probes of ``spec`` need, without waiting for it."""
        channel = self._channel or self._start()
        self._send(channel, {"do": "prepare", "preload": self._late_imports(spec)})

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
        seconds = phase_seconds(ended.paths.entered(), ended.requested, ended.ended)
        try:
            result = ProbeResult.model_validate_json(ended.paths.result.read_bytes())
            crashed = False
        except (OSError, ValidationError):
            result = result_of_dead_process(request, ended)
            crashed = ended.exit is not None and ended.exit.kind is ExitKind.CRASHED
        shutil.rmtree(ended.paths.directory, ignore_errors=True)
        return result.model_copy(update={"seconds": seconds}), crashed

    def _run_task(self, task: Task, request: TaskRequest, timeout: float, should_stop: Callable[[], bool]) -> Ended:
        """Run a task in a process of its own. The caller removes its files; a task that is given up has none left."""
        self._tasks += 1
        paths = ProbePaths(self._scratch / f"{os.getpid()}-{self._tasks}")
        paths.write_request(request)
        try:
            return self._run_in_process(task, request, paths, timeout, should_stop)
        except BaseException:
            shutil.rmtree(paths.directory, ignore_errors=True)
            raise

    def _run_until_not_lost(
        self, task: Task, request: TaskRequest, timeout: float, should_stop: Callable[[], bool]
    ) -> Ended:
        """Run a task that only the machinery needs, as often as a search repeats a probe that was lost."""
        for _ in range(_TRIES - 1):
            ended = self._run_task(task, request, timeout, should_stop)
            if not ended.was_lost:
                return ended
            shutil.rmtree(ended.paths.directory, ignore_errors=True)
        return self._run_task(task, request, timeout, should_stop)

    def _run_in_process(
        self,
        task: Task,
        request: TaskRequest,
        paths: ProbePaths,
        timeout: float,
        should_stop: Callable[[], bool],
    ) -> Ended:
        preload = self._late_imports(request if isinstance(request, WorkloadSpec) else request.spec)
        killed_before = kernel_oom_kills()
        requested = time.monotonic()
        try:
            channel = self._started(should_stop)
        except _ServerLostError as error:
            return Ended(paths, None, timed_out=False, requested=requested, ended=time.monotonic(), said=str(error))
        requested = time.monotonic()
        told = {"task": task, "directory": str(paths.directory), "preload": preload, "environment": handed_on()}
        self._send(channel, {"do": "run", **told})
        status, timed_out = self._await_end(channel, requested + timeout, should_stop)
        ended = time.monotonic()
        exit_ = None
        if status is not None:
            exit_ = classify_exit(os.waitstatus_to_exitcode(status), kernel_oom_kills() - killed_before)
        said = paths.output_tail() if exit_ is not None else self._said
        return Ended(paths, exit_, timed_out, requested, ended, said)

    def _await_end(self, channel: Channel, deadline: float, should_stop: Callable[[], bool]) -> tuple[int | None, bool]:
        """The wait status of the task's process (none if the server was lost), and whether its time ran out."""
        while time.monotonic() < deadline:
            if should_stop():
                self._kill(channel)
                raise ProbeCancelledError("the probe was ended on request")
            try:
                message = self._receive(channel)
            except EOFError:
                self._forget_server()
                return None, False
            if message is not None and message["event"] == "failed":
                raise ProbeError(f"what the workload needs cannot be imported: {message['error']}")
            if message is not None and message["event"] == "ended":
                return int(message["status"]), False
        self._send(channel, {"do": "dump"})
        time.sleep(_DUMP_SECONDS)
        return self._kill(channel), True

    def _kill(self, channel: Channel) -> int | None:
        """Kill the running task and wait until its process is gone."""
        self._send(channel, {"do": "kill"})
        deadline = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < deadline:
            try:
                message = self._receive(channel)
            except EOFError:
                break
            if message is not None and message["event"] == "ended":
                return int(message["status"])
        self._forget_server()
        return None

    def _receive(self, channel: Channel) -> dict[str, Any] | None:
        """What the server says within a moment; the group of a task is known from its start to its end."""
        message = channel.receive(_POLL_SECONDS)
        if message is not None:
            self._group = message["pid"] if message["event"] == "started" else None
        return message

    @staticmethod
    def _send(channel: Channel, message: dict[str, Any]) -> None:
        try:
            channel.send(message)
        except OSError:
            return  # the server is gone: the next receive says so

    def _started(self, should_stop: Callable[[], bool]) -> Channel:
        """The channel to a fork server that is ready, started now if there is none."""
        if self._server is not None and self._server.process.poll() is not None:
            self._forget_server()
        channel = self._channel or self._start()
        if not self._ready:
            self._await_ready(channel, should_stop)
        return channel

    def _start(self) -> Channel:
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._server = started(fork_server(self.device.kind))
        self._channel = Channel(self._server.connection)
        return self._channel

    def _await_ready(self, channel: Channel, should_stop: Callable[[], bool]) -> None:
        """Wait until torch is imported; when told to stop, leave the server to finish that by itself."""
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        message = None
        try:
            while message is None and time.monotonic() < deadline:
                if should_stop():
                    raise ProbeCancelledError("ended on request while the fork server was starting")
                message = self._receive(channel)
        except EOFError:
            pass  # it ended: its log says why
        if message is None:
            status = self._forget_server()
            if status < 0:
                raise _ServerLostError(f"the fork server was killed by signal {-status} while it started\n{self._said}")
            raise ProbeError(f"the fork server did not start:\n{self._said}")
        self._ready = True

    def _forget_server(self) -> int:
        """End the server, and with it any task it has; how it ended, below 0 by which signal of others."""
        self._ready = False
        self._channel = None
        status = 0
        if self._server is not None:
            process = self._server.process
            self._server.connection.close()
            try:
                status = process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._said = self._server.said(_OUTPUT_BYTES)
            self._server.close()
            self._server = None
        if self._group is not None:  # a server that was killed could not end what its task had started
            kill_group(self._group)
            self._group = None
        return status

    def warm_up(self) -> None:
        """Start the fork server now, so that the first probe does not wait for torch to be imported."""
        with self._lock, suppress(_ServerLostError):  # the first probe starts another
            self._started(lambda: False)

    def close(self) -> None:
        """End every process and remove the scratch files. Idempotent."""
        with self._lock:
            self._forget_server()
            if self._owned_scratch:
                shutil.rmtree(self._scratch, ignore_errors=True)

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
