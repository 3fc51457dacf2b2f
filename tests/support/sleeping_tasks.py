"""A fork server without torch: its tasks sleep, and may leave a child that sleeps."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from batchwright.system.fork_server.server import Application, serve
from batchwright.system.fork_server.tasks import TaskPaths
from batchwright.system.subreaper import Channel


def main(channel: Channel, _arguments: Sequence[str]) -> None:
    """Serve."""
    serve(channel, Application(lambda: None, _import_modules, _run_task))


def _import_modules(modules: tuple[str, ...]) -> None:
    if modules:
        raise ImportError(f"no module named {modules[0]}")


def _run_task(task: str, directory: Path) -> None:
    if task == "leave a child":
        child = subprocess.Popen(["/bin/sleep", "600"])
        TaskPaths(directory).result.write_text(str(child.pid))
    if task != "end":
        time.sleep(600)
