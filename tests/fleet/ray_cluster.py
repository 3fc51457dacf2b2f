"""A Ray cluster on this host: a head and nodes with a CPU each. Lines on standard input kill parts of it.

Arguments: the port of the dashboard, the number of nodes, and the folder for their data.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

_NODE_MEMORY = 80 * 2**20


def main(port: int, nodes: int, folder: Path) -> None:
    """Serve until the input ends."""
    cluster = _started(port, nodes, folder)
    print("up", flush=True)  # noqa: T201 - the reader waits for it
    for line in sys.stdin:
        match line.strip():
            case "kill node":
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            case "kill head":
                _kill(cluster)
                cluster = _started(port, nodes, folder)
            case other:
                raise ValueError(other)
        print("done", flush=True)  # noqa: T201 - likewise
    _kill(cluster)


def _kill(cluster: Cluster) -> None:
    """Kill the head first; its nodes, which would end for want of it within a minute, then."""
    cluster.remove_node(cluster.head_node, allow_graceful=False)
    for node in list(cluster.worker_nodes):
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def _started(port: int, nodes: int, folder: Path) -> Cluster:
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, "object_store_memory": _NODE_MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for number in range(nodes):
        name = f"node{number}"
        environment = {"BATCHWRIGHT_NODE_NAME": name, "BATCHWRIGHT_DATA_DIR": str(folder / name)}
        cluster.add_node(
            num_cpus=1,
            resources={"batchwright_cpu": 1},
            object_store_memory=_NODE_MEMORY,
            env_vars={**environment, "PATH": os.environ["PATH"]},
        )
    return cluster


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
