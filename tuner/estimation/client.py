"""Estimates, asked for from a process that has no torch: each is made in a bounded process of its own."""

from __future__ import annotations

import select
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from tuner.errors import EstimateCancelledError, EstimateError, EstimateTimedOutError
from tuner.estimation.protocol import Done, EstimatePaths, Failure, Order, Question
from tuner.estimation.worker_start import tracing
from tuner.hardware.gpu_lookup import find_gpu
from tuner.schemas.estimates import Estimate, EstimateRequest
from tuner.schemas.requests import ExpectationRequest
from tuner.schemas.results import ExpectedPeaks
from tuner.system.files import tail, write_atomically
from tuner.system.processes import kill_group
from tuner.system.subprocesses import started

MEMORY_BYTES = 8 * 1024**3
"""Private host memory that tracing may take: torch, the workload's code and a few samples. Tensors take none."""
_POLL_SECONDS = 0.02
_OUTPUT_BYTES = 2000
_LINE_BYTES = 4096
_Request = EstimateRequest | ExpectationRequest
_Answer = TypeVar("_Answer", Estimate, ExpectedPeaks)


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
    check_gpus(request)
    return _asked_again_if_killed(lambda process: process.estimate(request, should_stop, memory_bytes=memory_bytes))


def check_gpus(request: EstimateRequest) -> None:
    """See that all GPUs are known, before a process is asked.

    Raises:
        EstimateError: when one is not known, or is that of several.
    """
    for name in request.gpus:
        find_gpu(name)


def expect(
    request: ExpectationRequest, should_stop: Callable[[], bool] = lambda: False, *, timeout_seconds: float = 60.0
) -> ExpectedPeaks:
    """The memory curve that probes on a card are expected to measure. Does not touch the card.

    Raises:
        BatchwrightError: as ``estimate``.
    """
    return _asked_again_if_killed(lambda process: process.expect(request, should_stop, timeout_seconds=timeout_seconds))


class LostError(EstimateError):
    """The process ended before it had carried out its order; the message says how.

    Args:
        message: says so.
        killed: whether a signal ended it, so that the order is not to blame.
    """

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


def _asked_again_if_killed(ask: Callable[[TracingProcess], _Answer]) -> _Answer:
    """Answer of a process; of another one where the first was ended from outside."""
    try:
        with TracingProcess() as process:
            return ask(process)
    except LostError as error:
        if not error.killed:
            raise
    with TracingProcess() as process:
        return ask(process)


class TracingProcess:
    """A process that traces what it is asked, each time in a fork of itself. It ends with the thread that starts it.

    The first answer waits for torch to be imported, later ones do not. Not for several threads at once.

    Args:
        idle_seconds: how long it stays with nothing to do.

    Raises:
        EstimateError: when it cannot be started.
    """

    def __init__(self, *, idle_seconds: float = 60.0) -> None:
        self._files = ExitStack()
        try:
            folder = self._files.enter_context(tempfile.TemporaryDirectory(prefix="batchwright-estimate-"))
            self._partner = started(tracing(idle_seconds))
        except OSError as error:
            self._files.close()
            raise EstimateError(f"the process that traces cannot be started: {error}") from error
        self._files.callback(self._partner.close)
        self._folder = Path(folder)
        self._arrivals = select.poll()  # not select(), which knows no descriptor above 1023
        self._arrivals.register(self._partner.connection, select.POLLIN)
        self._asked = 0
        self.is_free = True
        """Whether it waits for a question, as far as is known: not while it has one, or after one was given up."""

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._partner.process.pid

    def estimate(
        self, request: EstimateRequest, should_stop: Callable[[], bool], *, memory_bytes: int = MEMORY_BYTES
    ) -> Estimate:
        """As the function ``estimate``.

        Raises:
            LostError: when the process itself ended.
            BatchwrightError: as the function.
        """
        answer = self._ask("estimate", request, request.timeout_seconds, should_stop, memory_bytes)
        return Estimate.model_validate_json(answer)

    def expect(
        self, request: ExpectationRequest, should_stop: Callable[[], bool], *, timeout_seconds: float
    ) -> ExpectedPeaks:
        """As the function ``expect``.

        Raises:
            LostError: when the process itself ended.
            BatchwrightError: as the function.
        """
        answer = self._ask("expectation", request, timeout_seconds, should_stop, MEMORY_BYTES)
        return ExpectedPeaks.model_validate_json(answer)

    def _ask(
        self,
        question: Question,
        request: _Request,
        timeout_seconds: float,
        should_stop: Callable[[], bool],
        memory_bytes: int,
    ) -> bytes:
        """What is answered, as JSON."""
        self.is_free = False
        self._asked += 1
        paths = EstimatePaths(self._folder / str(self._asked))
        order = Order(question=question, directory=str(paths.directory), memory_bytes=memory_bytes)
        try:
            write_atomically(paths.request, request.model_dump_json())
            done = self._carried_out(order, timeout_seconds, should_stop)
            self.is_free = True
            return _answer(paths, done.status)
        except OSError as error:
            raise EstimateError(f"the process that traces cannot be asked: {error}") from error
        finally:
            shutil.rmtree(paths.directory, ignore_errors=True)

    def _carried_out(self, order: Order, timeout_seconds: float, should_stop: Callable[[], bool]) -> Done:
        """Wait until the order is carried out.

        Raises:
            EstimateTimedOutError: when it takes too long.
            EstimateCancelledError: when it was stopped.
            LostError: when the process ended.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            self._partner.connection.sendall(order.model_dump_json().encode() + b"\n")
            while not self._arrivals.poll(_POLL_SECONDS * 1000):
                if should_stop():
                    raise EstimateCancelledError("the estimate was stopped")
                if time.monotonic() > deadline:
                    raise EstimateTimedOutError(
                        f"tracing took longer than {timeout_seconds:g} s: allow more by `timeout_seconds`, or measure "
                        "instead"
                    )
            told = self._partner.connection.recv(_LINE_BYTES)
        except (BrokenPipeError, ConnectionResetError):
            told = b""
        if not told:
            status = self._end()
            raise LostError(_no_answer(status, self._partner.said(_OUTPUT_BYTES)), killed=status < 0)
        return Done.model_validate_json(told)

    def _end(self) -> int:
        """Kill the group, whose id is its own until the process is waited for; how the process ended."""
        process = self._partner.process
        if process.returncode is None:
            kill_group(process.pid)
        return process.wait()

    def close(self) -> None:
        """End the process and all that it has started. Idempotent."""
        self._end()
        self._files.close()

    def __enter__(self) -> TracingProcess:  # noqa: PYI034 - not meant for subclassing
        """Ready to be asked."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def _answer(paths: EstimatePaths, status: int) -> bytes:
    """What was left in ``paths``.

    Raises:
        BatchwrightError: what answering failed with.
    """
    if paths.result.exists():
        return paths.result.read_bytes()
    if paths.failure.exists():
        raise Failure.model_validate_json(paths.failure.read_bytes()).to_error()
    said = tail(paths.output, _OUTPUT_BYTES).strip() if paths.output.exists() else ""
    raise EstimateError(_no_answer(status, said))


def _no_answer(status: int, said: str) -> str:
    return f"the process that traces ended with status {status} and no answer: {said or 'it said nothing'}"
