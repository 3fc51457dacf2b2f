"""Entry of worker processes for tests that freeze and kill them: a real worker around a scripted probe runner.

The one argument is JSON: settings under "settings"; "journal", a file that every probe started is noted in; "seconds"
that a probe takes; "jobs", how they run: "real" in processes, "stubborn" in this one, until there is no time left.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.training import RunOutcome, TrainingResult
from batchwright_service.entrypoints.work import work_system
from batchwright_service.settings import Settings
from batchwright_service.worker.executors.base import Executor, GraceSeconds, OnProgress, TrainingRun
from batchwright_service.worker.executors.local import LocalExecutor
from batchwright_service.worker_bootstrap import build_worker
from tests.support.factories import CPU
from tests.support.service.scripted import InlineExecutor, ScriptedRunner


def main(text: str) -> None:
    """Work until a stop signal."""
    given = json.loads(text)
    journal = Path(given["journal"])

    def take_time(size: int, should_stop: Callable[[], bool]) -> None:
        _note(journal, f"{size}")
        until = time.monotonic() + given["seconds"]
        pause = threading.Event()
        while time.monotonic() < until:
            if should_stop():
                _note(journal, "stopped")
                return
            pause.wait(0.01)

    def stubborn(_run: TrainingRun, _on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        _note(journal, "job")
        pause = threading.Event()
        while (grace := grace_seconds()) is None:
            pause.wait(0.01)
        _note(journal, f"asked with {grace:g} s")
        until = time.monotonic() + grace
        while time.monotonic() < until and grace_seconds() != 0.0:
            pause.wait(0.01)
        return TrainingResult(outcome=RunOutcome.STOPPED, message="asked to", updates=0)

    def executor(device: DeviceInfo) -> Executor:
        runner = ScriptedRunner(37, take_time)
        return LocalExecutor(device, runner) if given["jobs"] == "real" else InlineExecutor(device, runner, stubborn)

    settings = Settings(**given["settings"])
    work_system(settings, build_worker(settings, executor, [CPU], {"torch": "2.8"}))


def _note(journal: Path, line: str) -> None:
    with journal.open("a", encoding="utf-8") as stream:
        stream.write(f"{line}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
