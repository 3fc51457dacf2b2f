"""The fork server in which workloads are traced, started as ``tuner.estimation.worker_start`` defines.

It runs no operation of torch itself, and nothing of a user. No card is there for what it imports.
"""

from __future__ import annotations

import os
import resource
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tuner.errors import BatchwrightError, EstimateError, SpecError
from tuner.estimation.cuda_shim import NoCompilerError, Shim, load_shim
from tuner.estimation.protocol import EstimatePaths, Failure
from tuner.estimation.verdict import TracedWorkload, answer, profiles
from tuner.hardware.failures import FailureKind, classify_exception
from tuner.planning.fingerprint import installed_versions
from tuner.schemas.estimates import Estimate, EstimateRequest
from tuner.schemas.gpus import KernelProfile
from tuner.schemas.requests import ExpectationRequest
from tuner.schemas.results import ExpectedPeaks
from tuner.system.files import write_atomically
from tuner.system.fork_map import default_process_count
from tuner.system.fork_server.server import Application, serve
from tuner.workloads.preload import import_early

_NO_SHIM = "CUDA's decisions cannot be followed here, the CPU's are instead"
_NOT_KEPT = "the device that stands in for CUDA was compiled for this estimate alone, which takes time"


class _Tracer:
    """The work of the fork server. Its tasks run in forks, with what ``prepare`` has left."""

    def __init__(self) -> None:
        self._shim: Shim | None = None
        self._notes: tuple[str, ...] | None = None

    def prepare(self) -> None:
        """Import what every estimate needs; what is in the way is reported by the first task that meets it."""
        with suppress(Exception):
            self._make_ready()

    def _make_ready(self) -> None:
        """Import what every estimate for a card needs; the second time at once.

        Raises:
            EstimateError: when torch is missing, or was imported too early.
        """
        if self._notes is None:
            self._shim, self._notes = _loaded_shim()
        import_early(("tuner.estimation.tracing.sized_workload",))

    def run_task(self, task: str, directory: Path) -> None:
        """Run a task, and leave its result or its failure."""
        paths = EstimatePaths(directory)
        try:
            request = paths.request.read_bytes()
            found = self._estimate(request) if task == "estimate" else self._expect(request)
            write_atomically(paths.result, found.model_dump_json())
        except BaseException as error:  # noqa: BLE001 - user code runs here and may raise anything
            write_atomically(paths.failure, _failure(error).model_dump_json())

    def _expect(self, document: bytes) -> ExpectedPeaks:
        from tuner.estimation.tracing.peak_curve import expected_peaks  # noqa: PLC0415 - torch comes with it, after the shim

        self._make_ready()
        request = ExpectationRequest.model_validate_json(document)
        return expected_peaks(request, self._shim, processes=default_process_count())

    def _estimate(self, document: bytes) -> Estimate:
        request = EstimateRequest.model_validate_json(document)
        wanted = profiles(request)
        self._make_ready()
        traced = _traced(request, wanted, self._shim)
        # the seconds are measured where the result is awaited
        estimate = answer(request, traced, versions=installed_versions(), seconds=0.0)
        return estimate.model_copy(update={"notes": tuple(dict.fromkeys((*estimate.notes, *(self._notes or ()))))})


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

    runs = TracedRuns(request.spec, shim=shim, processes=default_process_count())
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
        return Failure(kind=SpecError.__name__, message=str(error), problems=tuple(error.problems))
    if isinstance(error, BatchwrightError):
        return Failure(kind=type(error).__name__, message=str(error))
    words = " ".join(str(error).split())
    message = f"the workload cannot be traced: {type(error).__name__}: {words}"
    return Failure(kind=EstimateError.__name__, message=message, traceback="".join(traceback.format_exception(error)))


def main(connection: Connection, parent: int, arguments: Sequence[str]) -> None:
    """Serve the process at the other end of the connection.

    Args:
        connection: to that process.
        parent: its id.
        arguments: how long to stay with nothing to do, in seconds.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a card of this host is never touched
    warnings.simplefilter("ignore")  # of torch and the workload: nobody reads them here
    tracer = _Tracer()
    serve(connection, parent, Application(tracer.prepare, import_early, tracer.run_task, float(arguments[0])))
