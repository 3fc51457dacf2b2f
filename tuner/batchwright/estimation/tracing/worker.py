"""The fork server in which workloads are traced, started by ``batchwright.estimation.client``.

The server itself runs no operation of torch and no user code. It sees no GPU.
"""

import os
import resource
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from batchwright.errors import BatchwrightError, EstimateError, SpecError
from batchwright.estimation.cuda_shim import NoCompilerError, Shim, load_shim
from batchwright.estimation.protocol import EstimatePaths, TraceFailure, untraceable
from batchwright.estimation.verdict import TracedWorkload, accumulates_at_first, make_estimate, profiles, share_of
from batchwright.hardware.failures import FailureKind, classify_exception
from batchwright.planning.fingerprint import installed_versions
from batchwright.schemas.estimates import Estimate, EstimateRequest
from batchwright.schemas.gpus import KernelProfile
from batchwright.schemas.requests import ExpectationRequest
from batchwright.schemas.results import ExpectedPeaks
from batchwright.system.files import write_atomically
from batchwright.system.fork_map import default_process_count
from batchwright.system.fork_server.server import Application, serve
from batchwright.system.subreaper import Channel
from batchwright.units import format_bytes
from batchwright.workloads.preload import import_early

_NO_SHIM = "CUDA's decisions cannot be traced here, the CPU's are traced instead"
_NOT_CACHED = "the stand-in for CUDA was compiled for this estimate alone, which takes time"


class _TracingWorker:
    """The functions of the fork server. Tasks run in forks, with the modules that ``prepare`` has imported."""

    def __init__(self) -> None:
        self._shim: Shim | None = None
        self._notes: tuple[str, ...] | None = None

    def prepare(self) -> None:
        """Import the modules that every estimate needs; errors are reported by the first task."""
        with suppress(Exception):
            self._import_tracing()

    def _import_tracing(self) -> None:
        """Import the modules that every estimate for a GPU needs, unless they are imported.

        Raises:
            EstimateError: when torch is missing, or was imported too early.
        """
        if self._notes is None:
            self._shim, self._notes = _load_shim()
        import_early(("batchwright.estimation.tracing.sized_workload",))

    def run_task(self, task: str, directory: Path) -> None:
        """Run a task, and write its result or its failure."""
        paths = EstimatePaths(directory)
        try:
            request = paths.request.read_bytes()
            found = self._estimate(request) if task == "estimate" else self._expect(request)
            write_atomically(paths.result, found.model_dump_json())
        except BaseException as error:  # noqa: BLE001 - user code runs here and may raise anything
            write_atomically(paths.failure, _failure_of(error).model_dump_json())

    def _expect(self, document: bytes) -> ExpectedPeaks:
        from batchwright.estimation.tracing.peak_curve import expected_peaks  # noqa: PLC0415 - imports torch, after the shim

        self._import_tracing()
        request = ExpectationRequest.model_validate_json(document)
        return expected_peaks(request, self._shim, processes=default_process_count())

    def _estimate(self, document: bytes) -> Estimate:
        request = EstimateRequest.model_validate_json(document)
        wanted = profiles(request)
        self._import_tracing()
        from batchwright.workloads.hugging_face import config_notes  # noqa: PLC0415 - imports torch, after the shim

        config = config_notes(request.spec)
        traced = _trace_profiles(request, wanted, self._shim)
        # the seconds are measured by the process that waits for the result
        estimate = make_estimate(request, traced, versions=installed_versions(), seconds=0.0)
        notes = (*estimate.notes, *config, *(self._notes or ()))
        return estimate.model_copy(update={"notes": tuple(dict.fromkeys(notes))})


def _load_shim() -> tuple[Shim | None, tuple[str, ...]]:
    """Load the stand-in for CUDA before torch; without a compiler return None, with notes that say why."""
    try:
        shim = load_shim()
    except NoCompilerError as error:
        return None, (f"{_NO_SHIM}: {error}",)
    return shim, () if shim.is_cached else (f"{_NOT_CACHED}: {shim.uncached_reason}",)


def _trace_profiles(
    request: EstimateRequest, wanted: tuple[KernelProfile, ...], shim: Shim | None
) -> dict[KernelProfile, TracedWorkload]:
    """Trace the workload for each profile; profiles whose kernels decide alike share a trace."""
    from batchwright.estimation.tracing.kernel_workspaces.device_kernels import (  # noqa: PLC0415 - imports torch
        representative,
    )
    from batchwright.estimation.tracing.runs import TracedRuns  # noqa: PLC0415 - as above
    from batchwright.estimation.tracing.sized_workload import (  # noqa: PLC0415 - as above
        TRACED_SIZES,
        SizedWorkload,
        traced_profile,
    )

    distinct = tuple(dict.fromkeys(map(representative, wanted)))
    traced = tuple(dict.fromkeys(map(traced_profile, distinct)))
    share, processes = share_of(request), default_process_count()
    runs = TracedRuns(request.spec, traced, shim=shim, processes=processes, loop=request.loop, share=share)
    runs.prepare(traced, TRACED_SIZES, accumulates=accumulates_at_first(request))
    known = {profile: SizedWorkload(runs, profile) for profile in distinct}
    return {profile: known[representative(profile)] for profile in wanted}


def _failure_of(error: BaseException) -> TraceFailure:
    if isinstance(error, Exception) and classify_exception(error) is FailureKind.OUT_OF_MEMORY:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        message = f"tracing needed more host memory than its limit of {format_bytes(limit)}"
        return TraceFailure(kind=EstimateError.__name__, message=message)
    if isinstance(error, SpecError):
        return TraceFailure(kind=SpecError.__name__, message=str(error), problems=tuple(error.problems))
    if isinstance(error, BatchwrightError):
        cause = error.__cause__ if isinstance(error, EstimateError) else None
        return TraceFailure(kind=type(error).__name__, message=str(error), traceback=_traceback_of(cause))
    return TraceFailure(kind=EstimateError.__name__, message=str(untraceable(error)), traceback=_traceback_of(error))


def _traceback_of(error: BaseException | None) -> str | None:
    return None if error is None else "".join(traceback.format_exception(error))


def main(channel: Channel, arguments: Sequence[str]) -> None:
    """Serve the parent process until it closes the channel.

    Args:
        channel: to the parent process.
        arguments: the idle time after which the server ends, in seconds.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU of this host is never touched
    warnings.simplefilter("ignore")  # warnings of torch and the workload, which are not shown anywhere
    tracer = _TracingWorker()
    serve(channel, Application(tracer.prepare, import_early, tracer.run_task, float(arguments[0])))
