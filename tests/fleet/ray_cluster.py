"""A Ray cluster on this host: a head and nodes with a CPU each.

Lines on standard input change it: `kill node0`, `add node0`, `kill head`.

Arguments: the port of the dashboard, the number of nodes, and the folder for their data.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ray.cluster_utils import Cluster

from tests.support.service.processes import children_of, processes_with

T = TypeVar("T")

_NODE_MEMORY = 80 * 2**20
_ATTEMPTS = 10


def _persistently(start: Callable[[], T]) -> T:
    """Start a node again when Ray gives up, after 30 s, which a machine with other work exceeds."""
    for attempts_left in reversed(range(_ATTEMPTS)):
        before = children_of(os.getpid())
        try:
            return start()
        except Exception:
            for process in children_of(os.getpid()) - before:
                os.kill(process, signal.SIGKILL)
            if not attempts_left:
                raise
    raise AssertionError


class Nodes:
    """A head, and nodes that are known by name.

    Args:
        port: the port of the dashboard.
        folder: the folder for the data of the nodes.
    """

    def __init__(self, port: int, folder: Path) -> None:
        head = {
            "num_cpus": 0,
            "include_dashboard": True,
            "dashboard_port": port,
            "dashboard_agent_listen_port": 0,  # the fixed one is in use for a minute by the agent of a killed head
            "object_store_memory": _NODE_MEMORY,
        }
        self._cluster = _persistently(lambda: Cluster(initialize_head=True, head_node_args=head))
        self._folder = folder
        self._by_name: dict[str, Any] = {}

    def add(self, name: str) -> None:
        """Add a node, and wait for it."""
        temporary = self._temporary(name)
        shutil.rmtree(temporary, ignore_errors=True)  # another machine takes the name of a killed one
        temporary.mkdir(parents=True)
        environment = {
            "BATCHWRIGHT_NODE_NAME": name,
            "BATCHWRIGHT_DATA_DIR": str(self._folder / name),
            "TMPDIR": str(temporary),
        }
        self._by_name[name] = _persistently(
            lambda: self._cluster.add_node(
                num_cpus=1,
                resources={"batchwright_cpu": 1},
                object_store_memory=_NODE_MEMORY,
                env_vars={**environment, "PATH": os.environ["PATH"]},
            )
        )

    def _temporary(self, name: str) -> Path:
        return self._folder / "temporary" / name

    def kill(self, name: str) -> None:
        """Kill a node with all of its processes."""
        self._cluster.remove_node(self._by_name.pop(name), allow_graceful=False)
        for process in processes_with(f"TMPDIR={self._temporary(name)}\0"):  # which outlive Ray's by a moment
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill the head first; its nodes, which would end for want of it within a minute, then."""
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)
        for node in self._by_name.values():
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def main(port: int, nodes: int, folder: Path) -> None:
    """Serve until the input ends."""
    cluster = _started(port, nodes, folder)
    print("up", flush=True)  # noqa: T201 - the reader waits for it
    for line in sys.stdin:
        match line.split():
            case ["kill", "head"]:
                cluster.kill_all()
                cluster = _started(port, nodes, folder)
            case ["kill", name]:
                cluster.kill(name)
            case ["add", name]:
                cluster.add(name)
            case other:
                raise ValueError(other)
        print("done", flush=True)  # noqa: T201 - as above
    cluster.kill_all()


def _started(port: int, nodes: int, folder: Path) -> Nodes:
    cluster = Nodes(port, folder)
    for number in range(nodes):
        cluster.add(f"node{number}")
    return cluster


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
