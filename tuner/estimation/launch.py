"""Estimates, asked for from a process that has no torch: each in a bounded process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tuner.errors import EstimateCancelledError, EstimateError, EstimateTimedOutError
from tuner.estimates import Estimate, EstimateRequest
from tuner.estimation.messages import EstimatePaths, Failure, Question
from tuner.files import tail, write_atomically
from tuner.processes import kill_group
from tuner.requests import ExpectationRequest
from tuner.results import ExpectedPeaks

MEMORY_BYTES = 8 * 1024**3
"""Private host memory that tracing may take: torch, the workload's code and a few samples. Tensors take none."""
_POLL_SECONDS = 0.02
_OUTPUT_BYTES = 2000


def estimate(
    request: EstimateRequest, should_stop: Callable[[], bool] = lambda: False, *, memory_bytes: int = MEMORY_BYTES
) -> Estimate:
    """What the workload would take on each GPU. Needs no GPU, and touches none.

    Args:
        request: what is asked.
        should_stop: asked many times a second; the estimate is given up once it says so.
        memory_bytes: host memory that tracing may take.

    Raises:
        SpecError: when a field of the spec is wrong in a way that only building the model shows.
        WorkloadError: when the workload breaks its contract.
        PlanError: when the effective batch leaves a rank without samples.
        EstimateTimedOutError: when tracing takes too long.
        EstimateCancelledError: when ``should_stop`` said so.
        EstimateError: when a GPU is not known, the workload cannot be traced, or the memory does not suffice.
    """
    answer = _ask("estimate", request, request.timeout_seconds, should_stop, memory_bytes)
    return Estimate.model_validate_json(answer)


def expect(
    request: ExpectationRequest, should_stop: Callable[[], bool] = lambda: False, *, timeout_seconds: float = 60.0
) -> ExpectedPeaks:
    """The memory curve that probes on a card are expected to measure. Does not touch the card.

    Raises:
        BatchwrightError: as ``estimate``.
    """
    answer = _ask("expectation", request, timeout_seconds, should_stop, MEMORY_BYTES)
    return ExpectedPeaks.model_validate_json(answer)


def _ask(
    question: Question,
    request: EstimateRequest | ExpectationRequest,
    timeout_seconds: float,
    should_stop: Callable[[], bool],
    memory_bytes: int,
) -> bytes:
    """What a process of its own answers, as JSON."""
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="batchwright-estimate-"))
            paths = EstimatePaths(Path(directory))
            write_atomically(paths.request, request.model_dump_json())
            process = _start(question, paths, memory_bytes)
        except OSError as error:
            raise EstimateError(f"the process that traces cannot be started: {error}") from error
        try:
            _wait(process, timeout_seconds, should_stop)
        finally:
            kill_group(process.pid)
            process.wait()
        return _answer(paths, process.returncode)


def _start(question: Question, paths: EstimatePaths, memory_bytes: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "tuner.estimation.child"]
    with paths.output.open("wb") as output:
        return subprocess.Popen(  # noqa: S603 - our own module, in the interpreter that runs this
            [*command, question, str(paths.directory), str(os.getpid()), str(memory_bytes)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"},
        )


def _wait(process: subprocess.Popen[bytes], timeout_seconds: float, should_stop: Callable[[], bool]) -> None:
    """Until the process ends.

    Raises:
        EstimateTimedOutError: when it takes too long.
        EstimateCancelledError: when it was stopped.
    """
    deadline = time.monotonic() + timeout_seconds
    while not _has_ended(process.pid):
        if should_stop():
            raise EstimateCancelledError("the estimate was stopped")
        if time.monotonic() > deadline:
            raise EstimateTimedOutError(
                f"tracing took longer than {timeout_seconds:g} s: allow more by `timeout_seconds`, or measure instead"
            )
        time.sleep(_POLL_SECONDS)


def _has_ended(child: int) -> bool:
    """Whether a child has ended. It is left unreaped: until then no other process can get its id, or its group's."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # where SIGCHLD is ignored, nobody has to wait
        return True


def _answer(paths: EstimatePaths, status: int) -> bytes:
    """What the process has left.

    Raises:
        BatchwrightError: what it failed with.
    """
    if paths.result.exists():
        return paths.result.read_bytes()
    if paths.failure.exists():
        raise Failure.model_validate_json(paths.failure.read_bytes()).to_error()
    said = tail(paths.output, _OUTPUT_BYTES).strip()
    raise EstimateError(
        f"the process that traces ended with status {status} and no answer: {said or 'it said nothing'}"
    )
