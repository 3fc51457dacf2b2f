"""Make estimates in separate processes with limits, so that the caller needs no torch."""

import time
from collections.abc import Callable
from contextlib import closing, suppress

from batchwright.device_traits import CPU_THREADS
from batchwright.errors import EstimateCancelledError, EstimateError, EstimateTimedOutError
from batchwright.estimation.protocol import EstimatePaths, TraceFailure
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.schemas.estimates import Estimate, EstimateRequest
from batchwright.schemas.requests import ExpectationRequest
from batchwright.schemas.results import ExpectedPeaks
from batchwright.system.fork_server.client import DeadlineError, ForkServer, ServerLostError, StoppedError
from batchwright.system.fork_server.spawn import ChildProcess, StartChild
from batchwright.system.fork_server.tasks import RunTask
from batchwright.system.process_exit import ProcessExit
from batchwright.workloads.preload import late_imports

MEMORY_BYTES = 8 * 1024**3
"""Limit of the private host memory of tracing: torch, the workload's code and a few samples. Fake tensors need none."""
_MAX_FILE_BYTES = 1024**3
"""Limit of the size of files that traced code writes."""
_OUTPUT_BYTES = 2000
_Request = EstimateRequest | ExpectationRequest


def estimate(
    request: EstimateRequest,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    memory_bytes: int = MEMORY_BYTES,
    start: StartChild = ChildProcess,
) -> Estimate:
    """Estimate the memory of the workload on each GPU. Needs no GPU, and touches none.

    Args:
        request: the workload and the GPUs.
        should_stop: polled many times a second; the estimate is cancelled once it returns true.
        memory_bytes: limit of the host memory of tracing.
        start: function that starts the tracing process.

    Raises:
        SpecError: when a field of the spec is invalid in a way that only building the model shows.
        WorkloadError: when the workload breaks its contract.
        PlanError: when the effective batch leaves a rank without samples.
        EstimateTimedOutError: when tracing takes too long.
        EstimateCancelledError: when ``should_stop`` returned true.
        EstimateError: when a GPU is not known, the workload cannot be traced, or the memory is not sufficient.
    """
    check_gpus(request)
    with closing(tracing_server(start)) as server:
        return estimate_on(server, request, should_stop, memory_bytes=memory_bytes)


def estimate_on(
    server: ForkServer, request: EstimateRequest, should_stop: Callable[[], bool], *, memory_bytes: int = MEMORY_BYTES
) -> Estimate:
    """Estimate as ``estimate`` does, on a running server.

    Raises:
        BatchwrightError: as ``estimate``.
    """
    began = time.monotonic()
    document = _run_task(server, request, request.timeout_seconds, should_stop, memory_bytes)
    return Estimate.model_validate_json(document).model_copy(update={"seconds": time.monotonic() - began})


def check_gpus(request: EstimateRequest) -> None:
    """Check that all GPUs are known, before a process is started.

    Raises:
        EstimateError: when a name is not known, or is that of several GPUs.
    """
    for name in request.gpus:
        find_gpu(name)


def expect(
    request: ExpectationRequest,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    timeout_seconds: float = 60.0,
    start: StartChild = ChildProcess,
) -> ExpectedPeaks:
    """Estimate the memory curve that probes are expected to measure. Does not touch a card.

    Raises:
        BatchwrightError: as ``estimate``.
    """
    with closing(tracing_server(start)) as server:
        document = _run_task(server, request, timeout_seconds, should_stop, MEMORY_BYTES)
    return ExpectedPeaks.model_validate_json(document)


def tracing_server(start: StartChild, idle_seconds: float = 60.0) -> ForkServer:
    """Return a fork server that traces workloads, and sees no GPU. Only its first task waits for torch to be imported.

    Args:
        start: function that starts the process.
        idle_seconds: how long the process waits for the next task.
    """
    environment = {"CUDA_VISIBLE_DEVICES": "", **CPU_THREADS}
    return ForkServer(lambda: start("batchwright.estimation.tracing.worker", (str(idle_seconds),), environment))


def _run_task(
    server: ForkServer,
    request: _Request,
    timeout_seconds: float,
    should_stop: Callable[[], bool],
    memory_bytes: int,
) -> bytes:
    """Run a task, repeat it once if the server was lost, and return its result document.

    Raises:
        BatchwrightError: as ``estimate``.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        with EstimatePaths.temporary(request) as paths:
            command = RunTask(
                task="estimate" if isinstance(request, EstimateRequest) else "expect",
                directory=str(paths.directory),
                data_bytes=memory_bytes,
                file_bytes=_MAX_FILE_BYTES,
            )
            modules = ("batchwright.estimation.tracing.peak_curve", *late_imports(request.spec))
            with suppress(ServerLostError):
                return _read_result(paths, _run_once(server, modules, command, deadline, should_stop))
            return _read_result(paths, _run_once(server, modules, command, deadline, should_stop))
    except DeadlineError:
        raise EstimateTimedOutError(
            f"tracing took longer than {timeout_seconds:g} s: raise `timeout_seconds`, or measure instead"
        ) from None
    except StoppedError:
        raise EstimateCancelledError("the estimate was stopped") from None
    except ServerLostError as error:
        raise EstimateError(_no_result_message(error.exit, error.output)) from None
    except OSError as error:
        raise EstimateError(f"the tracing process cannot be started: {error}") from error


def _run_once(
    server: ForkServer, modules: tuple[str, ...], command: RunTask, deadline: float, should_stop: Callable[[], bool]
) -> ProcessExit:
    server.import_modules(modules)
    server.await_ready(deadline, should_stop)
    return server.run(command, deadline, should_stop)


def _read_result(paths: EstimatePaths, exit_: ProcessExit) -> bytes:
    """Read the result document of a task.

    Raises:
        BatchwrightError: the error with which the task failed.
    """
    if paths.result.exists():
        return paths.result.read_bytes()
    if paths.failure.exists():
        raise TraceFailure.model_validate_json(paths.failure.read_bytes()).to_error()
    raise EstimateError(_no_result_message(exit_, paths.output_tail(_OUTPUT_BYTES)))


def _no_result_message(exit_: ProcessExit, output: str) -> str:
    return f"the tracing process ended with {exit_.cause} and no result: {output or 'no output'}"
