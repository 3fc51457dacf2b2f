"""Entry of a served process for tests that kill it: a real server, store and worker around a slow scripted runner.

Arguments: data folder, file that every probe started is noted in (and, as 0, a job that is told to stop), seconds a
probe takes, port (0 for a free one).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from factories import CPU
from scripted import ScriptedRunner
from service.bootstrap import build
from service.executor.base import OnProgress, StopWithin, TrainingRun
from service.executor.inline import InlineExecutor
from service.server import serve_system
from service.settings import Settings
from tuner.training.runs import RunOutcome, TrainingResult


def main(data_dir: str, journal: str, seconds: str, port: str) -> None:
    """Serve until told to stop."""

    def take_time(size: int, should_stop: Callable[[], bool]) -> None:
        with Path(journal).open("a", encoding="utf-8") as stream:
            stream.write(f"{size}\n")
        pause = threading.Event()
        for _ in range(int(float(seconds) / 0.01)):
            if should_stop():
                return
            pause.wait(0.01)

    def stubborn(_run: TrainingRun, _on_progress: OnProgress, stop_within: StopWithin) -> TrainingResult:
        """A job that uses all the time it is given to end itself."""
        pause = threading.Event()
        while (grace := stop_within()) != 0.0:
            if grace is not None and not told.is_set():
                told.set()
                with Path(journal).open("a", encoding="utf-8") as stream:
                    stream.write("0\n")
            pause.wait(0.01)
        return TrainingResult(outcome=RunOutcome.STOPPED, message="asked to", updates=0)

    told = threading.Event()
    settings = Settings(data_dir=Path(data_dir), port=int(port), node_name="host", shutdown_grace_seconds=600.0)
    runner = ScriptedRunner(37, take_time)
    system = build(settings, lambda device: InlineExecutor(device, runner, stubborn), [CPU], {"torch": "2.8"})
    serve_system(settings, system)


if __name__ == "__main__":
    main(*sys.argv[1:])
