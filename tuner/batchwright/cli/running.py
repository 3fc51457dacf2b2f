"""Drive a tuning or a training run from a terminal."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from batchwright.cli.display import ProbeBoard, TrainingBar, progress_console
from batchwright.driving.foreground import run_tuning
from batchwright.errors import DeviceError, FieldProblem, SpecError
from batchwright.hardware.inventory import devices, find_device
from batchwright.planning.accumulation import share_per_rank
from batchwright.planning.fingerprint import memory_part
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest, TuningRequest
from batchwright.schemas.training import TrainingResult
from batchwright.schemas.unfinished import UnfinishedTuning
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.data_roots import expand_glob, why_unmatched
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.workloads.required_packages import require_packages, require_trackers

_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0
"""Grace period of a stopped run, to finish its update and write a checkpoint."""


def tune(
    request: TuningRequest,
    warm_start: Recommendation | None,
    resumed: UnfinishedTuning | None,
    time_limit_seconds: float | None,
    keep: Callable[[UnfinishedTuning], object],
) -> Recommendation:
    """Show a tuning, and run it with the arguments and errors of ``run_tuning``."""
    with ProbeBoard(progress_console()) as board:
        for probe in () if resumed is None else resumed.probes:
            board.add(probe)
        return run_tuning(request, board, warm_start, resumed=resumed, time_limit_seconds=time_limit_seconds, keep=keep)


def for_spec(recommendation: Recommendation, spec: WorkloadSpec | CommandSpec) -> Recommendation:
    """Replace the spec of a recommendation by ``spec``.

    Only fields that leave memory as it is may differ: data, schedule, rates; of a command none that a job has.

    Raises:
        SpecError: when another field differs.
    """
    if isinstance(spec, CommandSpec):
        _require_tuned_command(recommendation, spec)
        return recommendation
    tuned = recommendation.request.workload
    spec = spec.with_world_size(tuned.parallelism.world_size)
    before, now = memory_part(tuned), memory_part(spec)
    problems = [
        FieldProblem(name, f"differs from the spec that was tuned ({before[name]}): tune again", str(now[name]))
        for name in before
        if before[name] != now[name]
    ]
    if problems:
        raise SpecError(problems)
    return recommendation.model_copy(update={"request": recommendation.request.model_copy(update={"spec": spec})})


_OF_JOBS = ("argv", "environment", "working_directory", "files")
"""Fields of a command that its job has."""


def _require_tuned_command(recommendation: Recommendation, spec: CommandSpec) -> None:
    tuned = recommendation.request.command
    if tuned is None:
        raise SpecError([FieldProblem("model.kind", "differs from the spec that was tuned: tune again", "'command'")])
    problems = [
        FieldProblem(f"model.{name}", "differs from the command that was tuned: tune again", str(now))
        for name in _OF_JOBS
        if (now := getattr(spec.model, name)) != getattr(tuned.model, name)
    ]
    if problems:
        raise SpecError(problems)


def check_run(tuning: TuningRequest, training: TrainingRequest, device: str | None) -> None:
    """Check before any work that a run can start on ``device``: the first GPU, else the CPU, when left out.

    Raises:
        DeviceError: when this host lacks the device, or has fewer cards than the run has processes.
        PlanError: when the run has more processes than its updates have samples.
        SpecError: when a required package is missing, or no file of the data is there.
    """
    processes = training.processes_per_node or tuning.spec.parallelism.world_size
    if find_device(device).traits.is_gpu:
        _require_cards(processes)
    share_per_rank(tuning.effective_batch_size, processes)
    if isinstance(tuning.spec, WorkloadSpec):
        require_packages(tuning.spec)
        _require_files(tuning.spec)
    require_trackers(training.trackers)


def _require_files(spec: WorkloadSpec) -> None:
    problems = [
        FieldProblem(f"{field}.{read.field}", why_unmatched(read.pattern), read.path)
        for field, data in spec.data_by_field.items()
        for read in data.paths_read()
        if not any(expand_glob(read.pattern))
    ]
    if problems:
        raise SpecError(problems)


def _require_cards(processes: int) -> None:
    cards = [device for device in devices() if device.traits.is_gpu]
    if processes > len(cards):
        listed = ", ".join(f"{card.id} ({card.name})" for card in cards)
        raise DeviceError(
            f"{processes} processes need {processes} CUDA devices, one each; this host has {listed}: train the same "
            f"effective batch with --nproc-per-node {len(cards)}, or start the ranks on several hosts with torchrun"
        )


def train(
    recommendation: Recommendation, request: TrainingRequest, directory: Path, console: Console
) -> TrainingResult:
    """Run the training process to its end and show its progress; after an interrupt it writes a checkpoint first."""
    process = TrainingProcess(directory)
    process.start(recommendation, request)
    try:
        with TrainingBar(console, request.updates) as bar:
            return _follow(process, bar)
    except KeyboardInterrupt:
        return process.stop(_STOP_SECONDS)


def _follow(process: TrainingProcess, bar: TrainingBar) -> TrainingResult:
    while True:
        result = process.poll()
        for progress in process.new_progress():
            bar.show(progress)
        if result is not None:
            return result
        time.sleep(_POLL_SECONDS)
