"""The process in which workloads are traced: it imports torch once, and answers each request in a fork of itself.

Started as ``tuner.estimation.worker_start`` tells, to be asked by ``tuner.estimation.client``. It runs no
operation of torch itself, and nothing of a user: what a request does ends with its fork. No
card is there for what it imports.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from tuner.errors import BatchwrightError, EstimateError, SpecError
from tuner.estimation.cuda_shim import NoCompilerError, Shim, load_shim
from tuner.estimation.protocol import Done, EstimatePaths, Failure, Order, Question
from tuner.estimation.verdict import TracedWorkload, answer, profiles
from tuner.hardware.failures import FailureKind, classify_exception
from tuner.planning.fingerprint import installed_versions
from tuner.schemas.estimates import Estimate, EstimateRequest
from tuner.schemas.gpus import KernelProfile
from tuner.schemas.requests import ExpectationRequest
from tuner.schemas.results import ExpectedPeaks
from tuner.system.files import write_atomically
from tuner.system.fork_map import worthwhile_processes
from tuner.system.processes import die_with_parent, tighten_limit
from tuner.workloads.preload import import_early, late_imports

_FILE_BYTES = 1024**3
"""The largest file that traced code may write."""
_NO_SHIM = "CUDA's decisions cannot be followed here, the CPU's are instead"
_NOT_KEPT = "the device that stands in for CUDA was compiled for this estimate alone, which takes time"


class Server:
    """Carries out one order after the other.

    Args:
        connection: where orders come from; the side that asks closes it.
        idle_seconds: how long to wait for an order.
    """

    def __init__(self, connection: socket.socket, idle_seconds: float) -> None:
        self._connection = connection
        self._orders = connection.makefile("rb")
        self._idle_seconds = idle_seconds
        self._shim: Shim | None = None
        self._notes: tuple[str, ...] | None = None

    def serve(self) -> None:
        """Until nobody asks any more, or has not for long. What estimates need is imported before the first order."""
        arrivals = select.poll()
        arrivals.register(self._connection, select.POLLIN)
        began: float | None = time.monotonic()  # what is imported for the first order counts as part of it
        with suppress(Exception):  # told by the first fork that meets it
            self.make_ready()
        while arrivals.poll(self._idle_seconds * 1000) and (line := self._orders.readline()):
            done = Done(status=self._carried_out(Order.model_validate_json(line), began or time.monotonic()))
            self._connection.sendall(done.model_dump_json().encode() + b"\n")
            began = None

    def make_ready(self) -> None:
        """Import what every estimate for a card needs; the second time at once.

        Raises:
            EstimateError: when torch is missing, or was imported too early.
        """
        if self._notes is None:
            self._shim, self._notes = _loaded_shim()
        import_early(("tuner.estimation.tracing.sized_workload",))

    def _carried_out(self, order: Order, began: float) -> int:
        """The exit code of the fork that did it."""
        paths = EstimatePaths(Path(order.directory))
        with suppress(Exception):  # the fork meets the same, and leaves it in its failure
            self._prepare(_request(order.question, paths))
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_task(order, paths, parent, began)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _prepare(self, request: EstimateRequest | ExpectationRequest) -> None:
        """Import what this request needs, for its fork and for later ones."""
        self.make_ready()
        import_early(("tuner.estimation.tracing.peak_curve", *late_imports(request.spec)))

    def _become_task(self, order: Order, paths: EstimatePaths, parent: int, began: float) -> NoReturn:
        """The rest of a fork's life, which ends without the clean-up of thousands of modules."""
        status = 1
        try:
            die_with_parent(parent)
            self._connection.close()
            _redirect_output(paths.output)
            tighten_limit(resource.RLIMIT_DATA, order.memory_bytes)
            tighten_limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
            self._answer(order.question, paths, began)
            status = 0
        except BaseException:  # noqa: BLE001 - the last line of defence: what is printed here becomes the evidence
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _answer(self, question: Question, paths: EstimatePaths, began: float) -> None:
        """Answer the request in ``paths``, and leave the answer or the failure there."""
        try:
            request = _request(question, paths)
            found = self._estimate(request, began) if isinstance(request, EstimateRequest) else self._expected(request)
            write_atomically(paths.result, found.model_dump_json())
        except BaseException as error:  # noqa: BLE001 - user code runs here and may raise anything
            write_atomically(paths.failure, _failure(error).model_dump_json())

    def _expected(self, request: ExpectationRequest) -> ExpectedPeaks:
        from tuner.estimation.tracing.peak_curve import expected_peaks  # noqa: PLC0415 - torch comes with it, after the shim

        self.make_ready()
        return expected_peaks(request, self._shim, processes=worthwhile_processes())

    def _estimate(self, request: EstimateRequest, began: float) -> Estimate:
        wanted = profiles(request)
        self.make_ready()
        traced = _traced(request, wanted, self._shim)
        estimate = answer(request, traced, versions=installed_versions(), seconds=time.monotonic() - began)
        notes = tuple(dict.fromkeys((*estimate.notes, *(self._notes or ()))))
        return estimate.model_copy(update={"seconds": time.monotonic() - began, "notes": notes})


def _redirect_output(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _request(question: Question, paths: EstimatePaths) -> EstimateRequest | ExpectationRequest:
    kind = EstimateRequest if question == "estimate" else ExpectationRequest
    return kind.model_validate_json(paths.request.read_bytes())


def _loaded_shim() -> tuple[Shim | None, tuple[str, ...]]:
    """The device that stands in for CUDA, loaded before torch; without a compiler none, and why."""
    try:
        shim = load_shim()
    except NoCompilerError as error:
        return None, (f"{_NO_SHIM}: {error}",)
    return shim, () if shim.kept else (f"{_NOT_KEPT}: {shim.reason}",)


def _traced(
    request: EstimateRequest, wanted: tuple[KernelProfile, ...], shim: Shim | None
) -> dict[KernelProfile, TracedWorkload | Exception]:
    """The workload for each profile, or what stands in the way; profiles that run the same kernels share a trace.

    Raises:
        SpecError: when the spec is wrong.
    """
    from tuner.estimation.tracing.kernel_workspaces import representative  # noqa: PLC0415 - torch comes with it, after the shim
    from tuner.estimation.tracing.runs import TracedRuns  # noqa: PLC0415 - likewise
    from tuner.estimation.tracing.sized_workload import SizedWorkload, first_wanted  # noqa: PLC0415 - likewise

    runs = TracedRuns(request.spec, shim=shim, processes=worthwhile_processes())
    distinct = tuple(dict.fromkeys(map(representative, wanted)))
    runs.prepare(it for profile in distinct for it in first_wanted(profile))
    known: dict[KernelProfile, TracedWorkload | Exception] = {}
    for profile in distinct:
        try:
            known[profile] = SizedWorkload(runs, profile)
        except SpecError:
            raise
        except Exception as error:  # noqa: BLE001 - user code runs here; other cards may do without what fails
            known[profile] = error
    return {profile: known[representative(profile)] for profile in wanted}


def _failure(error: BaseException) -> Failure:
    if isinstance(error, Exception) and classify_exception(error) is FailureKind.OUT_OF_MEMORY:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        message = f"tracing took more than the {limit} bytes of host memory that it may take"
        return Failure(kind=EstimateError.__name__, message=message)
    if isinstance(error, SpecError):
        return Failure.of_spec(error)
    if isinstance(error, BatchwrightError):
        return Failure(kind=type(error).__name__, message=str(error))
    words = " ".join(str(error).split())
    message = f"the workload cannot be traced: {type(error).__name__}: {words}"
    return Failure(kind=EstimateError.__name__, message=message, traceback="".join(traceback.format_exception(error)))


def main(connection: socket.socket, _parent: int, arguments: Sequence[str]) -> None:
    """Serve until the process that started this one ends, or has nothing to ask.

    Args:
        connection: to that process.
        arguments: how long to wait for an order, in seconds.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody hears how a fork ended
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a card of this host is never touched
    warnings.simplefilter("ignore")  # of torch and the workload: nobody reads them here
    Server(connection, float(arguments[0])).serve()
    os._exit(0)
