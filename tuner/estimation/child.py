"""The process in which workloads are traced: a request in, an answer or what stands in its way out.

Started by ``tuner.estimation.launch`` as ``python -P -m tuner.estimation.child QUESTION DIRECTORY PARENT BYTES``.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tuner.catalogue import KernelProfile
from tuner.documents import Document
from tuner.errors import BatchwrightError, EstimateError, SpecError
from tuner.estimates import Estimate, EstimateRequest
from tuner.estimation.answer import TracedWorkload, answer, profiles
from tuner.estimation.messages import EstimatePaths, Failure
from tuner.estimation.shim import NoCompilerError, Shim, load_shim
from tuner.estimation.side_by_side import worthwhile_processes
from tuner.files import write_atomically
from tuner.fingerprint import installed_versions
from tuner.memory.failures import FailureKind, classify_exception
from tuner.processes import die_with_parent, tighten_limit
from tuner.requests import ExpectationRequest
from tuner.results import ExpectedPeaks
from tuner.specs import WorkloadSpec
from tuner.workloads.imports import late_imports

_FILE_BYTES = 1024**3
"""The largest file that traced code may write."""
_NO_SHIM = "CUDA's decisions cannot be followed here, the CPU's are instead"
_NOT_KEPT = "the device that stands in for CUDA was compiled for this estimate alone, which takes time"


def run(question: str, paths: EstimatePaths) -> None:
    """Answer the request in ``paths``, and leave the answer or the failure there."""
    try:
        write_atomically(paths.result, _ANSWERS[question](paths.request.read_bytes()).model_dump_json())
    except BaseException as error:  # noqa: BLE001 - user code runs here and may raise anything
        write_atomically(paths.failure, _failure(error).model_dump_json())


def _expectation(asked: bytes) -> ExpectedPeaks:
    request = ExpectationRequest.model_validate_json(asked)
    shim = _shim()[0] if request.compute_capability else None
    with _importing(request.spec):
        from tuner.estimation.expectation import expected_peaks  # noqa: PLC0415 - torch comes with it, after the shim

    return expected_peaks(request, shim, processes=worthwhile_processes())


def _estimate(asked: bytes) -> Estimate:
    began = time.monotonic()
    request = EstimateRequest.model_validate_json(asked)
    wanted = profiles(request)
    shim, notes = _shim()
    traced = _traced(request, wanted, shim)
    versions = installed_versions()
    estimate = answer(request, traced, versions=versions, seconds=time.monotonic() - began)
    return estimate.model_copy(
        update={"seconds": time.monotonic() - began, "notes": tuple(dict.fromkeys((*estimate.notes, *notes)))}
    )


_ANSWERS: dict[str, Callable[[bytes], Document]] = {"estimate": _estimate, "expectation": _expectation}


def _shim() -> tuple[Shim | None, tuple[str, ...]]:
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
    with _importing(request.spec):
        from tuner.estimation.kernels import representative  # noqa: PLC0415 - torch comes with it, after the shim
        from tuner.estimation.runs import TracedRuns  # noqa: PLC0415 - likewise
        from tuner.estimation.workload import SizedWorkload, first_wanted  # noqa: PLC0415 - likewise

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


@contextmanager
def _importing(spec: WorkloadSpec) -> Iterator[None]:
    """In the block and after it what tracing needs is imported, without looking for garbage in it now or later.

    Looking takes more than a tenth of the time, and there is none.
    """
    gc.disable()
    try:
        yield
        with suppress(Exception):  # a package that is missing or broken is told when it is needed
            for module in late_imports(spec):
                importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


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


def main(arguments: list[str]) -> None:
    """Answer, within the memory given."""
    question, directory, parent, memory_bytes = arguments
    die_with_parent(int(parent))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a card of this host is never touched
    tighten_limit(resource.RLIMIT_DATA, int(memory_bytes))
    tighten_limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    warnings.simplefilter("ignore")  # of torch and the workload: nobody reads them here
    run(question, EstimatePaths(Path(directory)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the clean-up of thousands of modules


if __name__ == "__main__":
    main(sys.argv[1:])
