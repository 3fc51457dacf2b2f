"""Process of a training run, or of a rank: ``python -P -m batchwright.training.worker DIRECTORY [PARENT_PID]``.

The process reads the recommendation and the request from the directory, resumes from the newest checkpoint there,
appends its progress, and writes a result. On SIGTERM it finishes the current update, writes a checkpoint and stops.

The processes are started by ``torchrun`` (on one host or on several that share the directory) or by
``TrainingProcess``. Rank 0 writes the run's files.
"""

import os
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from batchwright.errors import BatchwrightError, NotFiniteError, OutOfMemoryError, PeerError, WorkloadError
from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, SystemTrouble, TrainingProgress, TrainingResult
from batchwright.system.files import lock_directory, write_atomically
from batchwright.system.host_failures import Cause, host_failure_of
from batchwright.system.subreaper import die_with_parent
from batchwright.training.accumulation.collectives import (
    Ranks,
    is_lost_peer_error,
    join_ranks,
    local_rank,
    own_rank,
    world_size,
)
from batchwright.training.accumulation.recovery import Action, decide
from batchwright.training.assembly import RunParts, build_run
from batchwright.training.batch_schedule import Position
from batchwright.training.data.build import prepare_reading
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from batchwright.training.launching.run_log import events, log
from batchwright.training.trackers.base import TrackedRun
from batchwright.training.trackers.figures import figures_of, settings_of
from batchwright.training.trackers.requested_trackers import Trackers
from batchwright.training.trainer import Trainer
from batchwright.units import counted
from batchwright.workloads.preload import import_early, late_imports

_TRACEBACK_LENGTH = 8000
_LOCK_WAIT_SECONDS = 10.0
"""Longest wait for the lock of the folder, which the run's previous process may still hold."""


@dataclass
class StopRequest:
    """Record of SIGTERM."""

    received: bool = False

    def __call__(self) -> bool:
        """Return whether SIGTERM was received: for ``should_stop``."""
        return self.received

    def install(self) -> None:
        """Handle SIGTERM from now on."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "received", True))


@dataclass
class RunState:
    """State of a run in this process, available after a failure too."""

    ranks: Ranks = field(default_factory=Ranks)
    device: MemoryDevice | None = None
    trainer: Trainer | None = None
    resumed_from: int | None = None
    outcome: RunOutcome = RunOutcome.FAILED
    weights_sha256: str | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Note trouble that does not end the run, and write it to the log at once."""
        self.notes.append(text)
        _log_notes([text])

    @property
    def position(self) -> Position:
        """Progress of the run."""
        return self.trainer.position if self.trainer else Position()


def train(paths: RunPaths, stop: StopRequest) -> TrainingResult:
    """Start or resume the run. Every failure becomes a result."""
    began = time.monotonic()
    state = RunState()
    failure: BaseException | None = None
    try:
        _train(paths, stop, state)
    except BaseException as error:  # noqa: BLE001 - a user's SystemExit must become a result too
        failure = error
    if failure is not None and state.ranks.size > 1 and is_lost_peer_error(failure):
        failure = PeerError(f"lost contact with another rank: {failure}")
    oom_error = _as_out_of_memory(failure, state)
    smaller = _restart_micro_batch_size(state) if oom_error else None
    evaluation = (
        None if state.trainer is None or state.trainer.evaluation is None else state.trainer.evaluation.summary()
    )
    message = (
        f"{counted(state.position.update, 'update')} made" if failure is None else _explain(failure, oom_error, state)
    )
    if evaluation is not None and evaluation.stopped_early and failure is None:
        message += ", ended early"
    if state.device is not None:
        state.device.lift_limit()
    return TrainingResult(
        outcome=state.outcome,
        message=message,
        error_type=f"{type(failure).__module__}.{type(failure).__qualname__}" if failure else None,
        traceback=None if oom_error else _traceback(failure),
        updates=state.position.update,
        resumed_from=state.resumed_from,
        loss=state.position.loss,
        samples_seen=state.position.seen,
        notes=(*(state.trainer.notes if state.trainer else ()), *state.notes),
        smaller_micro_batch=smaller,
        out_of_memory=oom_error is not None,
        not_finite_since=state.trainer.finite.since if state.trainer and isinstance(failure, NotFiniteError) else None,
        trouble=_trouble(failure),
        weights_sha256=state.weights_sha256,
        noise_scale=state.trainer.noise_scale.estimate() if state.trainer and state.position.update else None,
        evaluation=evaluation,
        seconds=time.monotonic() - began,
    )


def _train(paths: RunPaths, stop: StopRequest, state: RunState) -> None:
    recommendation = Recommendation.model_validate_json(paths.recommendation.read_bytes())
    request = TrainingRequest.model_validate_json(paths.request.read_bytes())
    import_early(late_imports(recommendation.request.workload))
    prepare_reading(recommendation.request.workload)
    run = TrackedRun(paths, recommendation.name or recommendation.id, settings_of(recommendation, request))
    trackers = Trackers(() if own_rank() else request.trackers, run, state.note)  # before memory is counted
    with ExitStack() as last:
        last.callback(lambda: trackers.close(state.outcome))
        identifier = recommendation.device.id
        if recommendation.device.traits.is_gpu and world_size() > 1:
            identifier = (
                f"{recommendation.device.kind}:{local_rank()}"  # the GPU with the number of this rank on its host
            )
        state.device = open_device(identifier)
        state.ranks = join_ranks(state.device.torch_device)
        parts = build_run(recommendation, request, paths, state.device, state.ranks)
        trainer = state.trainer = Trainer(parts)
        state.resumed_from = trainer.resume()
        if not state.ranks.rank:
            log(_beginning(parts, state.resumed_from))
            _log_notes(trainer.notes)
        limit = recommendation.headroom.limit_bytes if recommendation.headroom is not None else None
        written = None if state.ranks.rank else ProgressWriter(paths, state.resumed_from or 0, trackers, limit)
        outcome = trainer.run((lambda _: None) if written is None else written.append, stop)  # rank 0 alone reports
        if outcome is RunOutcome.SUCCEEDED:
            state.weights_sha256 = trainer.save_weights()
        state.outcome = outcome
        state.ranks.close()


def _beginning(parts: RunParts, resumed_from: int | None) -> str:
    begun = "begun" if resumed_from is None else f"resumed after update {resumed_from}"
    schedule, ranks = parts.batch_schedule, parts.ranks.size
    return (
        f"{begun}: {parts.request.updates} updates of {schedule.effective_batch_size} of {len(parts.data)} samples, in "
        f"micro-batches of at most {parts.micro_batch_size}, on {parts.device.torch_device}"
        f"{f' and {ranks - 1} more ranks' if ranks > 1 else ''}"
    )


def _log_notes(notes: list[str]) -> None:
    """Write the notes on the run to its log at once: the result is written only at the end."""
    for note in notes:
        log(f"note: {note}")


def _as_out_of_memory(failure: BaseException | None, state: RunState) -> BatchwrightError | None:
    """``failure`` as an out-of-memory error; None if it is another error."""
    if state.device is None or not isinstance(failure, Exception):
        return None
    translated = failure if isinstance(failure, OutOfMemoryError) else state.device.translate(failure)
    return translated if isinstance(translated, OutOfMemoryError) else None


def _restart_micro_batch_size(state: RunState) -> int | None:
    """The micro-batch size to restart with, by the decision table of ``recovery``; None if the run must not restart."""
    trainer = state.trainer
    failed = trainer.failed_micro_batch if trainer else None
    if trainer is None or failed is None or failed == 1:
        return None
    in_place = trainer.engine.accumulation.gradients.in_place
    action = decide(lock_step=trainer.sharded, sums_in_place=in_place)
    return -(-failed // 2) if action is Action.RESTART else None


def _trouble(failure: BaseException | None) -> SystemTrouble | None:
    """The trouble of a disk or the hub. Other trouble is this process's own, or its parent finds it too."""
    found = host_failure_of(failure)
    if found is None or not (found.is_disk_failure or found.cause is Cause.HUB):
        return None
    return SystemTrouble(cause=found.cause, message=found.message, needed_bytes=found.needed_bytes)


def _explain(failure: BaseException, oom_error: BatchwrightError | None, state: RunState) -> str:
    """The reason why the run ended, in a line; for an out-of-memory error, when it happened and the remedy."""
    if oom_error is not None:
        phase = "while building the model"
        if state.trainer is not None:
            largest = state.trainer.largest_micro_batch()
            phase = f"in update {state.position.update + 1}, micro-batches up to {largest}"
        return (
            f"out of memory {phase}: {oom_error}. The last checkpoint is kept; resume with a recommendation for a "
            "larger memory_margin or a smaller max_micro_batch_size."
        )
    text = str(failure).strip()
    return text if isinstance(failure, BatchwrightError) else f"{type(failure).__name__}: {text}"


def _traceback(error: BaseException | None) -> str | None:
    """The traceback of an error, unless its message explains it, as those of this package's errors do."""
    if error is None or (isinstance(error, BatchwrightError) and not isinstance(error, WorkloadError)):
        return None
    return "".join(traceback.format_exception(error))[-_TRACEBACK_LENGTH:]


def main(arguments: list[str]) -> int:
    """Run. Return the exit status: 0 unless the run failed."""
    if len(arguments) > 1:
        die_with_parent(int(arguments[1]))
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun leaves its ranks alive when it is killed
        die_with_parent(os.getppid())
    paths = RunPaths(Path(arguments[0]))
    for name, value in paths.cache_variables().items():  # before their readers are imported; set variables are kept
        os.environ.setdefault(name, value)
    stop = StopRequest()
    stop.install()
    if rank := own_rank():
        return _train_as(rank, paths, stop)
    with lock_directory(paths.directory, _LOCK_WAIT_SECONDS) as locked:
        if not locked:  # another process writes the files: this one may only append to the log
            log(f"another process trains in {paths.directory}")
            return 1
        return _train_as(0, paths, stop)


def _train_as(rank: int, paths: RunPaths, stop: StopRequest) -> int:
    """Train. Return the exit status: EX_IOERR if the result cannot be written.

    A rank other than 0 writes a result only of its own failure.
    """
    if not rank:
        paths.result.unlink(missing_ok=True)
    result = train(paths, stop)
    has_failed = result.outcome is RunOutcome.FAILED
    if result.smaller_micro_batch is not None:
        paths.write_micro_batch_bound(result.smaller_micro_batch)
    if not rank and not has_failed:
        log(f"{result.outcome.value.lower()}: {result.message}")
    if not rank or has_failed:
        try:
            write_atomically(paths.failure(rank) if rank else paths.result, result.model_dump_json())
        except OSError:
            log(traceback.format_exc())
            return os.EX_IOERR
    if has_failed:
        log(result.traceback or result.message)
    return int(has_failed)


class ProgressWriter:
    """Writer of the progress of one process of a run.

    Args:
        paths: the run's files.
        resumed_from: the update that this process resumes from; lines of later updates are dropped.
        trackers: get the figures too.
        limit_bytes: the memory limit of a rank; none where there is none.
    """

    def __init__(self, paths: RunPaths, resumed_from: int, trackers: Trackers, limit_bytes: int | None) -> None:
        self._log = ProgressLog(paths.progress)
        self._log.truncate_after(resumed_from)
        self._trackers = trackers
        self._limit_bytes = limit_bytes
        self._told: tuple[str, ...] = ()
        newest = self._log.last()
        is_logged = newest is not None and newest.update == resumed_from
        self._tracked = self._names(newest) if newest is not None and is_logged else set()
        trackers.begin(resumed_from if is_logged or not resumed_from else resumed_from - 1)

    def append(self, progress: TrainingProgress) -> None:
        """Write an update to the disk before returning: a kill must not lose an update that a checkpoint has.

        An update that is there already is replaced, and trackers get the figures that are new.
        """
        for update, figures in figures_of(progress, self._limit_bytes).items():
            new = {name: value for name, value in figures.items() if (update, name) not in self._tracked}
            if new:
                self._trackers.log(update, new)
        self._log.append(progress)
        texts = tuple(events(progress))
        for text in texts:
            if text not in self._told:
                log(text)
        self._told = texts
        self._tracked = self._names(progress)

    def _names(self, progress: TrainingProgress) -> set[tuple[int, str]]:
        figures = figures_of(progress, self._limit_bytes)
        return {(update, name) for update, of_update in figures.items() for name in of_update}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
