"""Entry of a served process for tests that kill it: a real server, store and worker around a slow scripted runner.

Arguments: data folder, file that every probe started is noted in, seconds a probe takes, port (0 for a free one).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from factories import CPU
from scripted import ScriptedRunner, Trainer
from service.bootstrap import build
from service.executor.inline import InlineExecutor
from service.server import serve_system
from service.settings import Settings


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

    settings = Settings(data_dir=Path(data_dir), port=int(port), node_name="host")
    runner = ScriptedRunner(37, take_time)
    system = build(settings, lambda device: InlineExecutor(device, runner, Trainer()), [CPU], {"torch": "2.8"})
    serve_system(settings, system)


if __name__ == "__main__":
    main(*sys.argv[1:])
