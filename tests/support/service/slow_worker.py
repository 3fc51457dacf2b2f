"""Workers around a slow scripted runner: of `slow_service.py`, or the process of its workers.

JOURNAL names the file that every probe started is noted in (and, as 0, a job that is asked to stop), PROBE_SECONDS what
a probe takes. POLL_SECONDS may be longer than a service allows.
"""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.training import RunOutcome, TrainingResult
from batchwright.system.subreaper import Channel
from batchwright_service.entrypoints import hosted_worker
from batchwright_service.settings import Settings
from batchwright_service.worker.executors.base import Executor, GraceSeconds, OnProgress, TrainingRun
from batchwright_service.worker_bootstrap import WorkerSystem, build_worker
from tests.support.factories import CPU
from tests.support.service.scripted import InlineExecutor, ScriptedRunner


def executor(device: DeviceInfo) -> Executor:
    """Slow probes; jobs that use all the time they are given to end themselves."""
    stopping = threading.Event()

    def take_time(size: int, should_stop: Callable[[], bool]) -> None:
        _note(size)
        pause = threading.Event()
        for _ in range(int(float(os.environ["PROBE_SECONDS"]) / 0.01)):
            if should_stop():
                return
            pause.wait(0.01)

    def stubborn(_run: TrainingRun, _on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        pause = threading.Event()
        while (grace := grace_seconds()) != 0.0:
            if grace is not None and not stopping.is_set():
                stopping.set()
                _note(0)
            pause.wait(0.01)
        return TrainingResult(outcome=RunOutcome.STOPPED, message="asked to", updates=0)

    return InlineExecutor(device, ScriptedRunner(37, take_time), stubborn)


def build(settings: Settings) -> WorkerSystem:
    """The workers."""
    poll_seconds = float(os.environ.get("POLL_SECONDS", settings.poll_seconds))
    rarely = settings.model_copy(update={"poll_seconds": poll_seconds})
    return build_worker(rarely, executor, [CPU], {"torch": "2.8"})


def _note(size: int) -> None:
    with Path(os.environ["JOURNAL"]).open("a", encoding="utf-8") as stream:
        stream.write(f"{size}\n")


def main(channel: Channel, arguments: Sequence[str]) -> None:
    """Run the workers as a child process of the service."""
    hosted_worker.main(channel, arguments, build)
