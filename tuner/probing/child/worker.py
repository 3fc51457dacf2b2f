"""A probe, inside its own process: build the workload, run two optimizer updates, measure the second.

A probe that measures time goes on with updates of the plan's own micro-batches, in the environment and under the limit
that a job has: its times are a job's, whatever that environment costs.

The first update makes what is made late (handles, workspaces, caches); the second shows the peak of a run: parameters,
the optimizer's state, the gradients of one micro-batch held while the next one runs, and the optimizer's temporaries.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import BatchwrightError, InvalidSizeError, OutOfMemoryError, SpecError, WorkloadError
from tuner.estimation.tracing.peak_curve import expected_peaks
from tuner.hardware.failures import shortage_in_words
from tuner.hardware.memory_devices.base import MemoryDevice, translate_by_message
from tuner.hardware.memory_devices.factory import open_device
from tuner.planning.accumulation import balanced_split
from tuner.probing.child.timing import TimedEngine, TimedUpdate, enough, timing
from tuner.probing.protocol import CheckReport, ProbePaths
from tuner.schemas.recommendation import CouplingCheck
from tuner.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest
from tuner.schemas.results import ModelSummary, Outcome, Phase, ProbeResult, UpdateTiming
from tuner.schemas.workload import WorkloadSpec
from tuner.system.files import write_atomically
from tuner.system.fork_map import default_process_count
from tuner.training.accumulation.collectives import Ranks, group_of_one
from tuner.training.coupling.admission import measure_coupling
from tuner.training.micro_batches.splitting import MicroBatch, sliced
from tuner.workloads.base import Batch, Workload
from tuner.workloads.build import build_model, build_workload, check_workload, summarize

_MESSAGE_LENGTH = 2000
_TRACEBACK_LENGTH = 8000


_MOST_SKIPPED_UPDATES = 40
"""The loss scale starts at 2**16 and is halved by every overflow: after 40 it is below anything fp16 can need."""


_TIMED_MICRO_BATCHES = 4
"""In an update that is timed: some that another one follows, and the last, which the optimizer's step follows."""


_PHASES = {
    Phase.START: "while the probe started",
    Phase.BUILD: "while the model was built",
    Phase.WARMUP: "in the warm-up",
    Phase.MEASURE: "in the measured update",
    Phase.DONE: "at the end",
}
"""The phases in words, for messages."""


@dataclass
class Seen:
    """What a probe has seen so far; still there when it fails."""

    model: ModelSummary | None = None
    resident_bytes: int | None = None
    timing: UpdateTiming | None = None
    phase: Phase = Phase.START


def run_probe(paths: ProbePaths) -> None:
    """Run the probe requested in ``paths`` and leave its result there. Never raises for what the workload does."""
    request = ProbeRequest.model_validate_json(paths.request.read_bytes())
    seen = Seen()
    device: MemoryDevice | None = None
    failure: BaseException | None = None
    try:
        _enter(paths, seen, Phase.START)
        device = open_device(request.device)
        if request.limit_bytes is not None:
            device.limit(request.limit_bytes, request.memory_margin)
        _measure(request, device, paths, seen)
    except BaseException as error:  # noqa: BLE001 - a user's SystemExit must become an outcome too
        failure = error
    write_atomically(paths.result, _result(request, device, seen, failure).model_dump_json())


def _enter(paths: ProbePaths, seen: Seen, phase: Phase) -> None:
    seen.phase = phase
    paths.enter(phase)


def _measure(request: ProbeRequest, device: MemoryDevice, paths: ProbePaths, seen: Seen) -> None:
    _enter(paths, seen, Phase.BUILD)
    workload = build_workload(request.spec)
    model = build_model(request.spec, workload).to(device.torch_device)
    seen.model = summarize(model)
    if request.spec.compile:
        model.compile()
    ranks = _ranks(request.spec, device)
    engine = TimedEngine(request.spec, workload, model, device, ranks=ranks, recovers=False)
    micro_batches, ballast = _window(request, workload)
    _enter(paths, seen, Phase.WARMUP)
    _update(engine, micro_batches)
    device.synchronize()
    seen.resident_bytes = device.used_bytes()
    device.reset_peaks()
    _enter(paths, seen, Phase.MEASURE)
    seen.timing = _timed(engine, micro_batches, several=request.measures_time)
    del ballast
    _enter(paths, seen, Phase.DONE)


def _ranks(spec: WorkloadSpec, device: MemoryDevice) -> Ranks:
    """With several ranks gradients are reduced, in buckets that are as large with one rank as with many."""
    return group_of_one(device.torch_device) if spec.parallelism.world_size > 1 else Ranks()


def _update(engine: TimedEngine, micro_batches: list[MicroBatch]) -> None:
    """One update that really steps: while the loss scaler looks for its scale, updates that it skips are repeated.

    Raises:
        WorkloadError: when no update ever steps: what was measured would not be what a run takes.
    """
    for _ in range(_MOST_SKIPPED_UPDATES):
        report = engine.update(micro_batches)
        if not report.skipped:
            return
        if not engine.scaler.is_enabled():
            raise WorkloadError("the batches of make_batch() weigh nothing (no token or sample counts in the loss)")
    raise WorkloadError(f"no optimizer step in {_MOST_SKIPPED_UPDATES} updates: the gradients in fp16 are never finite")


def _timed(engine: TimedEngine, micro_batches: list[MicroBatch], *, several: bool) -> UpdateTiming:
    """Make one update, or as many as it takes to tell how long one takes."""
    updates: list[TimedUpdate] = []
    while not updates or (several and not enough(updates)):
        _update(engine, micro_batches)
        updates.append(engine.timed)
    return timing(updates)


def _window(request: ProbeRequest, workload: Workload) -> tuple[list[MicroBatch], list[Batch]]:
    """The micro-batches of a measured update, and the rest of a run's window, which only takes host memory.

    Together they hold as many samples as a run's window.
    """
    window, sizes = request.samples_per_window, _sizes(request)
    micro_batches = [sliced(workload.make_batch(part), part) for part in sizes]
    rest = window - sum(sizes)
    return micro_batches, [workload.make_batch(rest)] if request.device == "cpu" and rest > 0 else []


def _sizes(request: ProbeRequest) -> list[int]:
    """The sizes of the measured micro-batches: the larger ones come last, when gradients are held."""
    size, window = request.micro_batch_size, request.samples_per_window
    if request.measures_time:
        return _typical(sorted(balanced_split(window, -(-window // size))))
    first = max(window - size, min(2, size))  # never a lone sample, which BatchNorm may refuse: no plan has one here
    return [min(size, first), size] if request.accumulates else [size]


def _typical(sizes: list[int]) -> list[int]:
    """A few of a plan's sizes, evenly from the smallest to the largest."""
    count = min(_TIMED_MICRO_BATCHES, len(sizes))
    return [sizes[place * (len(sizes) - 1) // max(1, count - 1)] for place in range(count)]


def _result(
    request: ProbeRequest, device: MemoryDevice | None, seen: Seen, failure: BaseException | None
) -> ProbeResult:
    """The result of a probe that ended by itself; called outside ``except``, so that failed frames can be freed."""
    translate = device.translate if device is not None else translate_by_message
    translated = translate(failure) if isinstance(failure, Exception) else None
    outcome, message, details = _judge(seen, failure, translated)
    error_type = None if failure is None else _qualified_name(failure)
    trace = _traceback(failure) if outcome is Outcome.ERROR else None
    del failure
    limit_bytes = device.limit_bytes if device is not None else request.limit_bytes
    if device is not None:
        device.lift_limit()
    peaks = device.peaks() if device is not None else None
    return ProbeResult(
        micro_batch_size=request.micro_batch_size,
        accumulates=request.accumulates,
        outcome=outcome,
        phase=seen.phase,
        message=message[:_MESSAGE_LENGTH],
        details=details[:_MESSAGE_LENGTH] if details else None,
        error_type=error_type,
        traceback=trace,
        peak_allocated_bytes=peaks.allocated_bytes if peaks else None,
        peak_reserved_bytes=peaks.reserved_bytes if peaks else None,
        process_peak_bytes=peaks.process_bytes if peaks else None,
        resident_bytes=seen.resident_bytes,
        limit_bytes=limit_bytes,
        context_bytes=device.context_bytes() if device else None,
        other_processes_bytes=device.other_processes_bytes() if device else None,
        allocator_retries=peaks.allocator_retries if peaks else None,
        model=seen.model,
        measures_time=request.measures_time,
        timing=seen.timing,
    )


def _judge(
    seen: Seen, failure: BaseException | None, translated: BatchwrightError | None
) -> tuple[Outcome, str, str | None]:
    """The outcome, what happened in a line, and the words of the device where the line says them in short."""
    where = _PHASES[seen.phase]
    if failure is None:
        return Outcome.FIT, "two optimizer updates ran within the limit", None
    if isinstance(translated, OutOfMemoryError):
        return Outcome.OOM, f"{shortage_in_words(str(translated))} {where}", str(translated)
    if isinstance(translated, InvalidSizeError):
        return Outcome.INVALID_SIZE, f"the size is illegal for a kernel, {where}: {translated}", None
    if isinstance(failure, SystemExit):
        return Outcome.ERROR, f"the workload called sys.exit({failure.code!r}) {where}", None
    text = " ".join(str(failure).split())
    return Outcome.ERROR, f"{type(failure).__name__} {where}: {text}", None


def _qualified_name(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"


def _traceback(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return "".join(traceback.format_exception(error))[-_TRACEBACK_LENGTH:]


def run_check(paths: ProbePaths) -> None:
    """Build the workload of the spec in ``paths`` without memory, and leave a ``CheckReport`` there."""
    spec = WorkloadSpec.model_validate_json(paths.request.read_bytes())
    write_atomically(paths.result, _check(spec).model_dump_json())


def _check(spec: WorkloadSpec) -> CheckReport:
    try:
        check_workload(spec)
    except SpecError as error:
        return CheckReport(problems=tuple(error.problems))
    except MemoryError as error:  # a check allocates no tensors: the host has no memory left
        return CheckReport(lost=f"out of memory: {error}")
    except BaseException as error:  # noqa: BLE001 - user code is imported here and may raise anything
        return CheckReport(error=_traceback(error))
    return CheckReport()


def run_couple(paths: ProbePaths) -> None:
    """Compare the loss of a batch with that of its parts, as requested in ``paths``, and leave the outcome there."""
    request = CouplingRequest.model_validate_json(paths.request.read_bytes())
    write_atomically(paths.result, _coupling(request).model_dump_json())


def _coupling(request: CouplingRequest) -> CouplingCheck:
    """The outcome; a workload that fails here fails in a probe as well, which says so with its traceback."""
    try:
        device = open_device(request.device)
        device.limit(request.limit_bytes)
        return measure_coupling(request.spec, build_workload(request.spec), device)
    except BaseException as error:  # noqa: BLE001 - user code runs here and may raise anything
        said = " ".join(str(error).split())[:_MESSAGE_LENGTH]
        return CouplingCheck(verdict="not-compared", message=f"the check ended with {type(error).__name__}: {said}.")


def run_expect(paths: ProbePaths) -> None:
    """Estimate the memory curve that the request in ``paths`` asks for, and leave it there."""
    request = ExpectationRequest.model_validate_json(paths.request.read_bytes())
    write_atomically(paths.result, expected_peaks(request, processes=default_process_count()).model_dump_json())


TASKS = {"probe": run_probe, "check": run_check, "couple": run_couple, "expect": run_expect}


def run_task(task: str, directory: Path) -> None:
    """Run a task by name, in this process."""
    TASKS[task](ProbePaths(directory))
