"""The clusters of ``fleet_chaos.py``: real ones on this machine, of which a node or the head can be killed."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

from typing_extensions import override

from tests.fleet.ray_process import Ray
from tests.fleet.ray_process import started as ray_started
from tests.support.exports.slurm_cluster import CONTROLLER, Slurm

GIB = 1024**3
LARGE_BYTES = 6 * GIB
SMALL_BYTES = 5 * GIB
"""Memory of the nodes, by which their hardware differs; none uses as much."""


class Cluster(ABC):
    """A cluster, as its operator starts, loses and restarts its parts."""

    nodes: int
    """Number of nodes that run work."""
    large_bytes: int | None
    """Memory by which some nodes are larger than others; None where all are alike."""
    options: tuple[str, ...]
    """Options of ``batchwright serve``."""
    environment: Mapping[str, str]
    """Variables of the service."""

    @abstractmethod
    def kill_node(self) -> str:
        """Kill the next node with all that runs on it, start it again, and return its name."""

    @abstractmethod
    def kill_head(self) -> str:
        """Kill what holds the cluster's state, with what ends for want of it, and start it again."""


class RayCluster(Cluster):
    """A head and three nodes, each with a CPU as its device. A lost head takes its nodes along."""

    nodes = 3

    def __init__(self, ray: Ray, *, mixed: bool) -> None:
        self.large_bytes = LARGE_BYTES if mixed else None
        self.options = ("--ray", ray.address)
        self.environment = {}
        self._ray = ray
        self._next = cycle(f"node{number}" for number in range(self.nodes))

    @override
    def kill_node(self) -> str:
        name = next(self._next)
        self._ray.do(f"kill {name}")
        self._ray.do(f"add {name}")
        return name

    @override
    def kill_head(self) -> str:
        self._ray.do("kill head")
        return "the head and its nodes"


class SlurmCluster(Cluster):
    """A controller and two nodes. What runs survives the loss of the controller."""

    nodes = 2
    large_bytes = None

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
        names = ("LD_LIBRARY_PATH", "SLURM_CONF")
        self.options = ("--slurm", str(folder / "jobs"))
        (folder / "temporary" / "slurm").mkdir(parents=True)
        own = {"PATH": path, "TMPDIR": str(folder / "temporary" / "slurm")}
        self.environment = {name: slurm.environment[name] for name in names} | own
        self._slurm = slurm
        self._next = cycle(slurm.nodes)

    @override
    def kill_node(self) -> str:
        name = next(self._next)
        self._slurm.kill(name)
        self._slurm.start(name)
        return name

    @override
    def kill_head(self) -> str:
        self._slurm.kill(CONTROLLER)
        self._slurm.start(CONTROLLER)
        return "the controller"


def has_memory_cgroups() -> bool:
    """Return whether nodes can be limited in memory here: version 1 of cgroups, as root."""
    return os.geteuid() == 0 and Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()


@contextmanager
def cluster(engine: str, folder: Path, database: str) -> Iterator[Cluster]:
    """A cluster that runs for the block.

    Args:
        engine: ``ray`` or ``slurm``.
        folder: a folder for its data.
        database: the URL of the database.

    Raises:
        RuntimeError: without Slurm's programs.
    """
    if engine == "ray":
        mixed = has_memory_cgroups()
        limits = (LARGE_BYTES, LARGE_BYTES, SMALL_BYTES) if mixed else ()
        with ray_started(folder, database, RayCluster.nodes, limits) as ray:
            yield RayCluster(ray, mixed=mixed)
        return
    root = Path(os.environ.get("BATCHWRIGHT_TEST_SLURM", "")).resolve()
    if not (root / "usr" / "sbin").is_dir():
        raise RuntimeError("BATCHWRIGHT_TEST_SLURM names no folder with Slurm: see `fleet-test` in the Makefile")
    (folder / "slurm").mkdir()
    slurm = Slurm(root, folder / "slurm")
    with slurm.started():
        yield SlurmCluster(slurm, folder)
