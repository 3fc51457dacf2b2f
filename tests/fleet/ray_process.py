"""A Ray cluster in a process of its own, since nothing else of the tests may import Ray."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.exports.test_real_launchers import free_port
from tests.support.paths import ROOT


class Ray:
    """A cluster in a process of its own, which is restarted with the head."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address
        self.read("up")

    def read(self, word: str) -> None:
        """Wait for a word on a line of its own."""
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()).strip() != word:
            assert line, "the cluster has ended"

    def do(self, line: str) -> None:
        """Kill a part."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        self.read("done")


@contextmanager
def started(folder: Path, database: str, nodes: int) -> Iterator[Ray]:
    """A cluster whose nodes have the database in their environment.

    Args:
        folder: a folder for the data of the nodes.
        database: the URL of the database.
        nodes: number of nodes beside the head.
    """
    port = free_port()
    environment = {
        **os.environ,
        "BATCHWRIGHT_DATABASE_URL": database,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "tests.fleet.ray_cluster", str(port), str(nodes), str(folder)]
    with (
        (folder / "ray.log").open("w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
        ) as process,
    ):
        yield Ray(process, f"http://127.0.0.1:{port}")
