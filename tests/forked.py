"""Training processes that start at once: forked from a server that has torch imported, which takes seconds to import.

They are the real ones in all but their start. Their ``fsync`` takes a while longer than this disk's, as on a slow disk,
so that the moments of a save last long enough to be met by whoever looks for them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import patch

from tuner.training import rank_processes
from tuner.workloads.imports import late_imports

_FSYNC_SECONDS = 0.01


@contextmanager
def forked_starts() -> Iterator[None]:
    """Within the block a ``TrainingProcess`` starts its processes by forks of a server."""
    stand_in = SimpleNamespace(
        Popen=_ForkedProcess, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    with patch.object(rank_processes, "subprocess", stand_in):
        yield


_PRELOADED = ["tuner.training.worker", "tuner.training.launch", *late_imports()]


class _ForkedProcess:
    """What ``RankProcesses`` needs of ``subprocess.Popen``."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], stdout: BinaryIO, **_: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(target=_train, args=(command[-2], dict(env), stdout.name))
        self._process.start()
        self.pid = int(self._process.pid or 0)

    def poll(self) -> int | None:
        """The exit status, once it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, waited for."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a training process", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """As ``Popen`` does."""
        os.kill(self.pid, number)


def _train(directory: str, environment: dict[str, str], log: str) -> None:
    """In the forked process: what the interpreter's start would do, and the worker's own ``main``."""
    os.setsid()
    with Path(log).open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    real = os.fsync

    def slow_fsync(fd: Any) -> None:
        time.sleep(_FSYNC_SECONDS)
        real(fd)

    os.fsync = slow_fsync
    gc.freeze()  # what the server has imported: to look through it would copy it all into this process
    import torch  # noqa: PLC0415 - only where it is imported already

    from tuner.training import worker  # noqa: PLC0415 - likewise

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # what it reads of the environment when imported
    sys.exit(worker.main([directory, str(os.getppid())]))
