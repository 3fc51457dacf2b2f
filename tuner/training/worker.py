"""Process of a training run, or of one of its ranks: ``python -P -m tuner.training.worker DIRECTORY [PARENT_PID]``.

The process reads the recommendation and the request from the directory, goes on from the newest checkpoint there,
appends its progress, and writes a result. On SIGTERM it finishes the current update, writes a checkpoint and stops.

Started by ``torchrun`` (on one host or several that share the directory), or by ``TrainingProcess``, the ranks find
each other by themselves. Rank 0 writes the run's files.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tuner.errors import BatchwrightError, OutOfMemoryError, PeerError, WorkloadError
from tuner.hardware.memory_devices.base import MemoryDevice
from tuner.hardware.memory_devices.factory import open_device
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import TrainingRequest
from tuner.schemas.training import RunOutcome, SystemTrouble, TrainingResult
from tuner.system.files import lock_directory, write_atomically
from tuner.system.host_failures import host_failure_of
from tuner.system.processes import die_with_parent
from tuner.training.accumulation.collectives import (
    Ranks,
    join_ranks,
    local_rank,
    own_rank,
    tells_of_lost_peer,
    world_size,
)
from tuner.training.accumulation.recovery import Action, Place, decide
from tuner.training.assembly import build_run
from tuner.training.batch_schedule import Position
from tuner.training.launching.run_directory import RunPaths
from tuner.training.progress import ProgressWriter, import_tensorboard
from tuner.training.trainer import Trainer
from tuner.workloads.preload import import_early, late_imports

_TRACEBACK_LENGTH = 8000
_HELD_SECONDS = 10.0
"""Longest wait for the previous process of the run to be gone."""


@dataclass
class StopRequest:
    """Record of SIGTERM."""

    received: bool = False

    def __call__(self) -> bool:
        """Return whether SIGTERM was received: for ``should_stop``."""
        return self.received

    def install(self) -> None:
        """Handle SIGTERM from now on."""
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True


@dataclass
class Course:
    """State of a run in this process, available after a failure too."""

    ranks: Ranks = field(default_factory=Ranks)
    device: MemoryDevice | None = None
    trainer: Trainer | None = None
    resumed_from: int | None = None
    outcome: RunOutcome = RunOutcome.FAILED
    weights_sha256: str | None = None

    @property
    def position(self) -> Position:
        """Progress of the run."""
        return self.trainer.position if self.trainer else Position()


def train(paths: RunPaths, stop: StopRequest) -> TrainingResult:
    """Start the run, or go on with it. Every failure becomes a result."""
    began = time.monotonic()
    course = Course()
    failure: BaseException | None = None
    try:
        _train(paths, stop, course)
    except BaseException as error:  # noqa: BLE001 - a user's SystemExit must become a result too
        failure = error
    if failure is not None and course.ranks.size > 1 and tells_of_lost_peer(failure):
        failure = PeerError(f"another rank is gone: {failure}")
    shortage = _shortage(failure, course)
    smaller = _smaller(course) if shortage else None
    message = f"{course.position.update} updates made" if failure is None else _explain(failure, shortage, course)
    if course.device is not None:
        course.device.lift_limit()
    return TrainingResult(
        outcome=course.outcome,
        message=message,
        error_type=f"{type(failure).__module__}.{type(failure).__qualname__}" if failure else None,
        traceback=None if shortage else _traceback(failure),
        updates=course.position.update,
        resumed_from=course.resumed_from,
        loss=course.position.loss,
        samples_seen=course.position.seen,
        notes=tuple(course.trainer.notes) if course.trainer else (),
        smaller_micro_batch=smaller,
        trouble=_trouble(failure),
        weights_sha256=course.weights_sha256,
        seconds=time.monotonic() - began,
    )


def _train(paths: RunPaths, stop: StopRequest, course: Course) -> None:
    recommendation = Recommendation.model_validate_json(paths.recommendation.read_bytes())
    request = TrainingRequest.model_validate_json(paths.request.read_bytes())
    import_early(late_imports(recommendation.request.spec))
    if request.tensorboard:
        import_tensorboard()  # before memory is counted
    course.device = open_device(_own_device(recommendation.device.id))
    course.ranks = join_ranks(course.device.torch_device)
    trainer = course.trainer = Trainer(build_run(recommendation, request, paths, course.device, course.ranks))
    course.resumed_from = trainer.resume()
    if not course.ranks.rank:
        _log_notes(trainer.notes)
    outcome = _run(trainer, paths, stop, course.resumed_from or 0)
    if outcome is RunOutcome.SUCCEEDED:
        course.weights_sha256 = trainer.save_weights()
    course.outcome = outcome
    course.ranks.close()


def _log(text: str) -> None:
    """Write to the run's log. Where its disk is full, the text is in the result alone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the run's log


def _log_notes(notes: list[str]) -> None:
    """Write the notes on the run to its log at once: the result has them only at the end."""
    for note in notes:
        _log(f"note: {note}")


def _run(trainer: Trainer, paths: RunPaths, stop: StopRequest, resumed_from: int) -> RunOutcome:
    if trainer.ranks.rank:
        return trainer.run(lambda _: None, stop)
    with ProgressWriter(paths, resumed_from, tensorboard=trainer.request.tensorboard) as progress:
        return trainer.run(progress.append, stop)


def _own_device(identifier: str) -> str:
    """The recommendation's device; with several ranks, the card with the number of this one."""
    return f"cuda:{local_rank()}" if identifier != "cpu" and world_size() > 1 else identifier


def _shortage(failure: BaseException | None, course: Course) -> BatchwrightError | None:
    """``failure`` as a lack of memory; None where it is something else."""
    if course.device is None or not isinstance(failure, Exception):
        return None
    translated = failure if isinstance(failure, OutOfMemoryError) else course.device.translate(failure)
    return translated if isinstance(translated, OutOfMemoryError) else None


def _smaller(course: Course) -> int | None:
    """The micro-batch size to restart with, by the decision table of ``recovery``; None where the run must not."""
    trainer = course.trainer
    failed = trainer.engine.accumulation.failed_micro_batch if trainer else None
    if trainer is None or failed is None or failed == 1:
        return None
    action = decide(Place.PASS, lock_step=trainer.sharded, sums_in_place=trainer.engine.accumulation.gradients.in_place)
    return -(-failed // 2) if action is Action.RESTART else None


def _trouble(failure: BaseException | None) -> SystemTrouble | None:
    """Trouble with a disk. Other trouble is this process's own, or its parent finds it too."""
    found = host_failure_of(failure)
    if found is None or not found.is_disk_failure:
        return None
    return SystemTrouble(cause=found.cause, message=found.message, needed_bytes=found.needed_bytes)


def _explain(failure: BaseException, shortage: BatchwrightError | None, course: Course) -> str:
    """The reason why the run ended, in a line; for a lack of memory, its place and the remedy."""
    if shortage is not None:
        place = "while building the model"
        if course.trainer is not None:
            largest = course.trainer.largest_micro_batch()
            place = f"in update {course.position.update + 1}, micro-batches up to {largest}"
        return (
            f"out of memory {place}: {shortage}. The last checkpoint stays; go on with a recommendation for a larger "
            "memory_margin or a smaller max_micro_batch_size."
        )
    text = str(failure).strip()
    return text if isinstance(failure, BatchwrightError) else f"{type(failure).__name__}: {text}"


def _traceback(error: BaseException | None) -> str | None:
    """The traceback of an error whose message alone does not explain it: not one of this package's own."""
    if error is None or (isinstance(error, BatchwrightError) and not isinstance(error, WorkloadError)):
        return None
    return "".join(traceback.format_exception(error))[-_TRACEBACK_LENGTH:]


def main(arguments: list[str]) -> int:
    """Run. Return the exit status: 0 unless the run failed."""
    if len(arguments) > 1:
        die_with_parent(int(arguments[1]))
    paths = RunPaths(Path(arguments[0]))
    for name, value in paths.cache_variables().items():  # before their readers are imported; the operator's own stay
        os.environ.setdefault(name, value)
    stop = StopRequest()
    stop.install()
    if own_rank():
        return _train_beside(paths, stop)
    with lock_directory(paths.directory, _HELD_SECONDS) as alone:
        if not alone:  # the files are another process's to write: nothing but the log may be touched
            _log(f"another process trains in {paths.directory}")
            return 1
        return _train_alone(paths, stop)


def _train_alone(paths: RunPaths, stop: StopRequest) -> int:
    paths.result.unlink(missing_ok=True)
    result = train(paths, stop)
    if result.smaller_micro_batch is not None:
        paths.lower_bound(result.smaller_micro_batch)
    return _left(result, paths.result)


def _train_beside(paths: RunPaths, stop: StopRequest) -> int:
    """Train as a rank other than 0, which writes a result only of its own failure."""
    result = train(paths, stop)
    if result.smaller_micro_batch is not None:
        paths.lower_bound(result.smaller_micro_batch)
    return _left(result, paths.failure(own_rank())) if result.outcome is RunOutcome.FAILED else _exit_status(result)


def _left(result: TrainingResult, path: Path) -> int:
    """Write a result. Return the exit status, which tells when the result cannot be written."""
    try:
        write_atomically(path, result.model_dump_json())
    except OSError:
        _log(traceback.format_exc())
        return os.EX_IOERR
    return _exit_status(result)


def _exit_status(result: TrainingResult) -> int:
    if result.outcome is RunOutcome.FAILED:
        _log(result.traceback or result.message)
    return int(result.outcome is RunOutcome.FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
