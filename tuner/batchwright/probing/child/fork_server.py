"""The fork server of probes, started by ``batchwright.probing.supervisor``.

No model's module is imported here for GPUs, because that might initialise CUDA.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

from batchwright.system.fork_server.server import Application, serve
from batchwright.system.subreaper import Channel
from batchwright.workloads.preload import import_early, late_imports


def main(channel: Channel, _arguments: Sequence[str]) -> None:
    """Serve the parent process until it closes the channel."""
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
    serve(channel, Application(_prepare, import_early, _run_task))


def _prepare() -> None:
    import_early(("batchwright.probing.child.worker", *late_imports()))


def _run_task(task: str, directory: Path) -> None:
    from batchwright.probing.child.worker import run_task  # noqa: PLC0415 - imports torch, which was imported before the fork

    run_task(task, directory)
