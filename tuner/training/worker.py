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

from tuner.errors import BatchwrightError, WorkloadError
from tuner.files import write_atomically
from tuner.processes import die_with_parent
from tuner.requests import TrainingRequest
from tuner.results import Recommendation
from tuner.training.loop import TrainingLoop
from tuner.training.runs import ProgressLog, RunOutcome, RunPaths, TrainingResult


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


def train(paths: RunPaths, stop: StopRequest) -> TrainingResult:
    """Make the run, or go on with it. Every failure becomes a result."""
    began = time.monotonic()
    loop: TrainingLoop | None = None
    resumed: int | None = None
    failure: BaseException | None = None
    outcome, message, digest = RunOutcome.FAILED, "", None
    try:
        recommendation = Recommendation.model_validate_json(paths.recommendation.read_bytes())
        request = TrainingRequest.model_validate_json(paths.request.read_bytes())
        loop = TrainingLoop(recommendation, request, paths)
        resumed = loop.resume()
        log = ProgressLog(paths.progress)
        log.forget_after(resumed or 0)
        outcome = loop.run(log.append, stop)
        digest = loop.save_weights() if outcome is RunOutcome.SUCCEEDED else None
        message = f"{loop.position.update} of {request.updates} updates made"
    except BaseException as error:  # noqa: BLE001 - a user's SystemExit must become a result too
        failure = error
        message = _message(error)
    position = loop.position if loop else None
    return TrainingResult(
        outcome=outcome,
        message=message,
        error_type=f"{type(failure).__module__}.{type(failure).__qualname__}" if failure else None,
        traceback=_traceback(failure),
        updates=position.update if position else 0,
        resumed_from=resumed,
        loss=position.loss if position else None,
        samples_seen=position.seen if position else 0,
        weights_sha256=digest,
        seconds=time.monotonic() - began,
    )


def _message(error: BaseException) -> str:
    text = str(error).strip()
    return text if isinstance(error, BatchwrightError) else f"{type(error).__name__}: {text}"


def _traceback(error: BaseException | None) -> str | None:
    """Only for what is not ours to explain."""
    if error is None or (isinstance(error, BatchwrightError) and not isinstance(error, WorkloadError)):
        return None
    return "".join(traceback.format_exception(error))[-8000:]


def main(arguments: list[str]) -> int:
    """Run; the exit status is 0 unless the run failed."""
    if len(arguments) > 1:
        die_with_parent(int(arguments[1]))
    paths = RunPaths(Path(arguments[0]))
    paths.result.unlink(missing_ok=True)
    stop = StopRequest()
    stop.install()
    result = train(paths, stop)
    write_atomically(paths.result, result.model_dump_json())
    if result.outcome is RunOutcome.FAILED:
        print(result.traceback or result.message, file=sys.stderr)  # noqa: T201 - this is the run's log
    return int(result.outcome is RunOutcome.FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
