"""Run a probe in its own process: build the workload, run two optimizer updates, measure the second.

A probe that brackets ends after the first update, which shows nearly the same peak (``benchmarks/probe_passes.py``).

The first update makes the late allocations (handles, workspaces, caches). The second shows the peak of a run:
parameters, optimizer state, the gradients of one micro-batch held while the next one runs, and the optimizer's
temporaries.

A probe of a size runs whole micro-batches of it, and a probe of a plan the plan's own, in the environment and under the
limit of a job (``batchwright.planning.accumulation.probe_window``). A probe that measures time repeats updates of a
plan, so that its times are those of a job.
"""

import os
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from batchwright.device_traits import traits_of
from batchwright.errors import (
    BatchwrightError,
    DeviceError,
    InvalidSizeError,
    OutOfMemoryError,
    SpecError,
    WorkloadError,
)
from batchwright.estimation.tracing.peak_curve import expected_peaks
from batchwright.hardware.failures import oom_in_words
from batchwright.hardware.memory_devices.base import MemoryDevice, translate_by_message
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.planning.accumulation import probe_window
from batchwright.probing.child.data_reading import run_data_reading
from batchwright.probing.child.ranks import run_ranks
from batchwright.probing.child.timing import TimedEngine, TimedUpdate, has_enough_updates, timing
from batchwright.probing.protocol import CheckReport, CouplingOutcome, ProbePaths
from batchwright.schemas.recommendation import CouplingCheck
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest
from batchwright.schemas.results import ModelSummary, Outcome, Phase, ProbeResult, UpdateTiming
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.files import write_atomically
from batchwright.system.fork_map import default_process_count
from batchwright.training.accumulation.collectives import (
    Ranks,
    SimulatedRanks,
    join_ranks,
    simulated_ranks,
    single_rank_group,
)
from batchwright.training.assembly import is_sharded
from batchwright.training.coupling.admission import measure_coupling
from batchwright.training.fsdp import shard, simulate_other_ranks
from batchwright.training.micro_batches.splitting import MicroBatch, sliced
from batchwright.workloads.base import Batch, Workload
from batchwright.workloads.build import build_model, build_workload, check_workload, summarize
from batchwright.workloads.hugging_face import config_notes

_MESSAGE_LENGTH = 2000
_TRACEBACK_LENGTH = 8000
_MAX_SKIPPED_UPDATES = 40
"""The loss scale starts at 2**16 and is halved by every overflow: after 40 it is below any scale that fp16 needs."""
_PHASES = {
    Phase.START: "while the probe started",
    Phase.BUILD: "while the model was built",
    Phase.WARMUP: "in the warm-up",
    Phase.MEASURE: "in the measured update",
    Phase.DONE: "at the end",
}
"""Phases in messages."""


@dataclass
class Progress:
    """Figures that a probe has gathered so far, kept when it fails."""

    model: ModelSummary | None = None
    resident_bytes: int | None = None
    timing: UpdateTiming | None = None
    simulated_ranks: int | None = None
    phase: Phase = Phase.START
    failed_micro_batch: int | None = None


def run_probe(paths: ProbePaths) -> None:
    """Run the probe requested in ``paths``, and write its result there. Errors of the workload are not raised."""
    request = ProbeRequest.model_validate_json(paths.request.read_bytes())
    if request.rank_devices:
        run_ranks(paths, request, _run_rank)
    else:
        _run_rank(paths, request)


def _run_rank(paths: ProbePaths, request: ProbeRequest) -> None:
    """Run one rank of a probe, which may be the only one, and write its result."""
    progress = Progress()
    device: MemoryDevice | None = None
    failure: BaseException | None = None
    try:
        _enter(paths, progress, Phase.START)
        ranks_here = request.workload.parallelism.world_size
        if ranks_here > 1 and "OMP_NUM_THREADS" not in os.environ:  # as many threads as a rank of a job has
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
        device = open_device(request.device)
        ranks = _ranks(request, device)
        if request.limit_bytes is not None:
            device.limit(request.limit_bytes, request.memory_margin)
        _measure(request, device, ranks, paths, progress)
    except BaseException as error:  # noqa: BLE001 - a SystemExit of user code must become an outcome too
        failure = error
    paths.write_result(_result(request, device, progress, failure))


def _enter(paths: ProbePaths, progress: Progress, phase: Phase) -> None:
    progress.phase = phase
    paths.record_phase(phase)


def _measure(request: ProbeRequest, device: MemoryDevice, ranks: Ranks, paths: ProbePaths, progress: Progress) -> None:
    _enter(paths, progress, Phase.BUILD)
    spec, workload = request.workload, build_workload(request.workload)
    model, sharded = build_model(spec, workload, worst_case=True), is_sharded(spec, ranks)
    progress.model = summarize(model, config_notes(spec))
    if sharded:
        shard(model, device.torch_device, ranks.size)
    if isinstance(ranks, SimulatedRanks):
        progress.simulated_ranks = ranks.size
        simulate_other_ranks(model)
    model.to(device.torch_device)
    if spec.compile:
        model.compile()
    engine = TimedEngine(spec, workload, model, device, ranks=ranks, recovers=False, sharded=sharded)
    micro_batches, waiting_batches = _micro_batches(request, workload)
    _enter(paths, progress, Phase.WARMUP)
    try:
        _update(engine, micro_batches)
    except BaseException:
        if 1 <= engine.micro_batches <= len(micro_batches):  # more where the scaler has skipped an update
            progress.failed_micro_batch = engine.micro_batches
        raise
    device.synchronize()
    progress.resident_bytes = device.used_bytes()
    if request.brackets:
        _enter(paths, progress, Phase.DONE)
        return
    device.reset_peaks()
    _enter(paths, progress, Phase.MEASURE)
    updates: list[TimedUpdate] = []
    while not updates or (request.measures_time and not ranks.gather(has_enough_updates(updates))[0]):
        _update(engine, micro_batches)
        updates.append(engine.timed)
    progress.timing = timing(updates)
    # The other samples of the window had to be in memory during the measured update, as they are in a run.
    del waiting_batches
    _enter(paths, progress, Phase.DONE)


def _ranks(request: ProbeRequest, device: MemoryDevice) -> Ranks:
    """Join the other ranks, or stand for them where they do not run.

    A real group of one rank has DDP's buckets as large as with many. The shards of FSDP need a group of all ranks.
    """
    parallelism = request.workload.parallelism
    if request.rank_devices:
        return join_ranks(device.torch_device)
    if parallelism.world_size == 1:
        return Ranks()
    if parallelism.strategy == "fsdp":
        return simulated_ranks(parallelism.world_size)
    return single_rank_group(device.torch_device)


def _update(engine: TimedEngine, micro_batches: list[MicroBatch]) -> None:
    """Run updates until the optimizer steps: the loss scaler skips updates while it searches for its scale.

    Raises:
        WorkloadError: when no update steps, since the peak would then not be that of a run.
    """
    for _ in range(_MAX_SKIPPED_UPDATES):
        report = engine.update(micro_batches)
        if not report.skipped:
            return
        if not engine.scaler.is_enabled():
            raise WorkloadError("the batches of make_batch() have no weight (no token or sample counts in the loss)")
    raise WorkloadError(f"no optimizer step in {_MAX_SKIPPED_UPDATES} updates: the gradients in fp16 are never finite")


def _micro_batches(request: ProbeRequest, workload: Workload) -> tuple[list[MicroBatch], list[Batch]]:
    """Return the micro-batches of the measured update, and the other samples of a run's accumulation window.

    Together they have at least as many samples as the window. The other samples only take host memory.
    """
    sizes = probe_window(request)
    micro_batches = [sliced(workload.make_batch(size), size) for size in sizes]
    rest = request.samples_per_window - sum(sizes)
    counts = traits_of(request.device).counts_host_memory
    return micro_batches, [workload.make_batch(rest)] if counts and rest > 0 else []


def _result(
    request: ProbeRequest, device: MemoryDevice | None, progress: Progress, failure: BaseException | None
) -> ProbeResult:
    """Build the result of a probe; called outside of ``except``, so that the frames of the error can be freed."""
    translate = device.translate if device is not None else translate_by_message
    translated = translate(failure) if isinstance(failure, Exception) else None
    outcome, message, details = _outcome(request, progress, failure, translated)
    cause = translated if isinstance(translated, DeviceError) else failure
    error_type = None if cause is None else f"{type(cause).__module__}.{type(cause).__qualname__}"
    trace = _traceback(failure) if outcome is Outcome.ERROR else None
    del failure, cause
    limit_bytes = device.limit_bytes if device is not None else request.limit_bytes
    if device is not None:
        device.lift_limit()
    peaks = device.peaks() if device is not None else None
    return ProbeResult(
        micro_batch_size=request.micro_batch_size,
        accumulates=request.accumulates,
        micro_batch_sizes=probe_window(request),
        outcome=outcome,
        phase=progress.phase,
        failed_micro_batch=progress.failed_micro_batch,
        message=message[:_MESSAGE_LENGTH],
        details=details[:_MESSAGE_LENGTH] if details else None,
        error_type=error_type,
        traceback=trace,
        peak_allocated_bytes=peaks.allocated_bytes if peaks else None,
        peak_reserved_bytes=peaks.reserved_bytes if peaks else None,
        process_peak_bytes=peaks.process_bytes if peaks else None,
        resident_bytes=progress.resident_bytes,
        limit_bytes=limit_bytes,
        context_bytes=device.context_bytes() if device else None,
        other_processes_bytes=device.other_processes_bytes() if device else None,
        allocator_retries=peaks.allocator_retries if peaks else None,
        model=progress.model,
        simulated_ranks=progress.simulated_ranks,
        measures_time=request.measures_time,
        brackets=request.brackets,
        timing=progress.timing,
    )


def _outcome(
    request: ProbeRequest, progress: Progress, failure: BaseException | None, translated: BatchwrightError | None
) -> tuple[Outcome, str, str | None]:
    """Return the outcome, a one-line message, and the original error message where the line abbreviates it."""
    where = _PHASES[progress.phase]
    if failure is None:
        count = "one optimizer update" if request.brackets else "two optimizer updates"
        return Outcome.FIT, f"{count} ran within the limit", None
    if isinstance(translated, OutOfMemoryError):
        return Outcome.OOM, f"{oom_in_words(str(translated))} {where}", str(translated)
    if isinstance(translated, InvalidSizeError):
        return Outcome.INVALID_SIZE, f"the size is illegal for a kernel, {where}: {translated}", None
    if isinstance(failure, SystemExit):
        return Outcome.ERROR, f"the workload called sys.exit({failure.code!r}) {where}", None
    text = " ".join(str(failure).split())
    return Outcome.ERROR, f"{type(failure).__name__} {where}: {text}", None


def _traceback(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return "".join(traceback.format_exception(error))[-_TRACEBACK_LENGTH:]


def run_check(paths: ProbePaths) -> None:
    """Build the workload of the spec in ``paths`` without its tensors, and write a ``CheckReport`` there."""
    spec = WorkloadSpec.model_validate_json(paths.request.read_bytes())
    write_atomically(paths.result, _check(spec).model_dump_json())


def _check(spec: WorkloadSpec) -> CheckReport:
    try:
        check_workload(spec)
    except SpecError as error:
        return CheckReport(problems=tuple(error.problems))
    except MemoryError as error:  # a check allocates no tensors, so the host has no memory left
        return CheckReport(lost=f"out of memory: {error}")
    except BaseException as error:  # noqa: BLE001 - user code is imported here and may raise anything
        return CheckReport(error=_traceback(error))
    return CheckReport()


def run_coupling_check(paths: ProbePaths) -> None:
    """Compare the loss of a batch with that of its parts, as requested in ``paths``, and write the outcome there."""
    request = CouplingRequest.model_validate_json(paths.request.read_bytes())
    write_atomically(paths.result, _coupling(request).model_dump_json())


def _coupling(request: CouplingRequest) -> CouplingOutcome:
    """Return the outcome. A workload that fails here also fails in a probe, which reports the traceback."""
    try:
        device = open_device(request.device)
        device.limit(request.limit_bytes)
        return CouplingOutcome(check=measure_coupling(request.spec, build_workload(request.spec), device))
    except BaseException as error:  # noqa: BLE001 - user code runs here and may raise anything
        message = " ".join(str(error).split())[:_MESSAGE_LENGTH]
        ended = f"the check ended with {type(error).__name__}: {message}."
        return CouplingOutcome(
            check=CouplingCheck(verdict="not-compared", message=ended), device_error=_device_error(error)
        )


def _device_error(error: BaseException) -> str | None:
    """How the device failed; None for an error that is not of the device."""
    found = error
    if isinstance(error, Exception) and not isinstance(error, DeviceError):
        found = translate_by_message(error) or error
    return str(found)[:_MESSAGE_LENGTH] if isinstance(found, DeviceError) else None


def run_expectation(paths: ProbePaths) -> None:
    """Estimate the memory curve that is requested in ``paths``, and write it there."""
    request = ExpectationRequest.model_validate_json(paths.request.read_bytes())
    write_atomically(paths.result, expected_peaks(request, processes=default_process_count()).model_dump_json())


TASKS = {
    "probe": run_probe,
    "check": run_check,
    "couple": run_coupling_check,
    "expect": run_expectation,
    "read": run_data_reading,
}


def run_task(task: str, directory: Path) -> None:
    """Run a task by name in this process."""
    TASKS[task](ProbePaths(directory))
