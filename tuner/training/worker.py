"""The process of a training run: ``python -P -m tuner.training.worker DIRECTORY [PARENT_PID]``.

It reads the recommendation and the request from the directory, goes on from the newest checkpoint there, appends its
progress, and leaves a result. SIGTERM makes it finish the update it is in, write a checkpoint and stop.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tuner.errors import BatchwrightError, OutOfMemoryError, WorkloadError
from tuner.files import holding, write_atomically
from tuner.memory.devices import MemoryDevice, open_device
from tuner.processes import die_with_parent
from tuner.requests import TrainingRequest
from tuner.results import Recommendation
from tuner.training.loop import Position, TrainingLoop
from tuner.training.runs import ProgressLog, RunOutcome, RunPaths, TrainingResult
from tuner.workloads.imports import import_early, late_imports

_TRACEBACK_LENGTH = 8000
_HELD_SECONDS = 10.0
"""How long the run's process before this one may take to be gone."""


@dataclass
class StopRequest:
    """Whether SIGTERM has come."""

    received: bool = False

    def __call__(self) -> bool:
        """For ``should_stop``."""
        return self.received

    def install(self) -> None:
        """Listen for SIGTERM."""
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True


@dataclass
class Course:
    """How far a run has come in this process; still there when it fails."""

    device: MemoryDevice | None = None
    loop: TrainingLoop | None = None
    resumed_from: int | None = None
    outcome: RunOutcome = RunOutcome.FAILED
    weights_sha256: str | None = None


def train(paths: RunPaths, stop: StopRequest) -> TrainingResult:
    """Make the run, or go on with it. Every failure becomes a result."""
    began = time.monotonic()
    course = Course()
    failure: BaseException | None = None
    try:
        _train(paths, stop, course)
    except BaseException as error:  # noqa: BLE001 - a user's SystemExit must become a result too
        failure = error
    explained = _explain(failure, course) if failure is not None else None
    if course.device is not None:
        course.device.lift_limit()
    position = course.loop.position if course.loop else Position()
    return TrainingResult(
        outcome=course.outcome,
        message=explained or f"{position.update} updates made",
        error_type=f"{type(failure).__module__}.{type(failure).__qualname__}" if failure else None,
        traceback=_traceback(failure),
        updates=position.update,
        resumed_from=course.resumed_from,
        loss=position.loss,
        samples_seen=position.seen,
        weights_sha256=course.weights_sha256,
        seconds=time.monotonic() - began,
    )


def _train(paths: RunPaths, stop: StopRequest, course: Course) -> None:
    recommendation = Recommendation.model_validate_json(paths.recommendation.read_bytes())
    request = TrainingRequest.model_validate_json(paths.request.read_bytes())
    import_early(late_imports(recommendation.request.spec))
    course.device = open_device(recommendation.device.id)
    loop = course.loop = TrainingLoop(recommendation, request, paths, course.device)
    course.resumed_from = loop.resume()
    log = ProgressLog(paths.progress)
    log.forget_after(course.resumed_from or 0)
    outcome = loop.run(log.append, stop)
    if outcome is RunOutcome.SUCCEEDED:
        course.weights_sha256 = loop.save_weights()
    course.outcome = outcome


def _explain(failure: BaseException, course: Course) -> str:
    """What ended the run, in a line; for a lack of memory, where it was and what to do."""
    translated = course.device.translate(failure) if course.device and isinstance(failure, Exception) else None
    if isinstance(translated, OutOfMemoryError):
        place = "while building the model"
        if course.loop is not None:
            place = f"in update {course.loop.position.update + 1}, micro-batches up to {course.loop.micro_batch_size}"
        return (
            f"out of memory {place}: {translated}. The last checkpoint stays; go on with a recommendation for a larger "
            "memory_margin or a smaller max_micro_batch_size."
        )
    text = str(failure).strip()
    return text if isinstance(failure, BatchwrightError) else f"{type(failure).__name__}: {text}"


def _traceback(error: BaseException | None) -> str | None:
    """Only for what is not ours to explain."""
    if error is None or (isinstance(error, BatchwrightError) and not isinstance(error, WorkloadError)):
        return None
    return "".join(traceback.format_exception(error))[-_TRACEBACK_LENGTH:]


def main(arguments: list[str]) -> int:
    """Run; the exit status is 0 unless the run failed."""
    if len(arguments) > 1:
        die_with_parent(int(arguments[1]))
    paths = RunPaths(Path(arguments[0]))
    stop = StopRequest()
    stop.install()
    with holding(paths.directory, _HELD_SECONDS) as alone:
        if not alone:  # the files are another process's to write: nothing but the log may be touched
            print(f"another process trains in {paths.directory}", file=sys.stderr)  # noqa: T201 - the run's log
            return 1
        return _train_alone(paths, stop)


def _train_alone(paths: RunPaths, stop: StopRequest) -> int:
    paths.result.unlink(missing_ok=True)
    result = train(paths, stop)
    write_atomically(paths.result, result.model_dump_json())
    if result.outcome is RunOutcome.FAILED:
        print(result.traceback or result.message, file=sys.stderr)  # noqa: T201 - this is the run's log
    return int(result.outcome is RunOutcome.FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
