"""The deployments that ``chaos.py`` disturbs: a service, its workers or its cluster, its database and its disk."""

import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from chaos_parts import (
    MARK_VARIABLE,
    Component,
    Database,
    Found,
    SqliteDatabase,
    below,
    leases,
    marked,
    postgresql,
    tasks,
)
from chaos_workload import FOLDER_VARIABLE
from reporting import wait_until

from batchwright.client import Client
from batchwright.client.documents.work import Job, Tuning, WorkSummary
from tests.exports.test_real_launchers import free_port
from tests.fleet.ray_process import started as ray_started
from tests.support.exports.slurm_cluster import CONTROLLER, Slurm
from tests.support.paths import ROOT

TARGET = "benchmarks.chaos_workload:build"
NAMES = ("embedded", "workers", "ray", "slurm")
LEASE_SECONDS = 8.0
_RAY_NODES = 3
_RETRY_SECONDS = 600.0
_GONE_SECONDS = 5.0
"""Time in which the processes of what was killed must end. Signals take milliseconds, freeing memory longer."""
_LEFT_SECONDS = 120.0
"""Time after which nothing may be left of work that has ended: to stop a job takes Ray up to half a minute at load."""
_DISK_BYTES = 4 * 1024**3
"""Size of the disk of the runs. It takes memory only for what is written: some 25 MiB per job."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of Ray or Slurm on this machine."""

    nodes: tuple[str, ...]
    """Names of the nodes that run work."""
    head: str
    """Name of the part that holds the cluster's state. A lost head of Ray takes its nodes along."""
    options: tuple[str, ...]
    """Options of ``batchwright serve``."""
    environment: Mapping[str, str]
    """Variables of the service."""
    restart: Callable[[str], None]
    """Kills a part with all that runs there, and starts it again."""


@contextmanager
def ray_cluster(folder: Path, database: str) -> Iterator[Cluster]:
    """Run a head of Ray and nodes with a CPU each for the block."""
    names = tuple(f"node{number}" for number in range(_RAY_NODES))
    with ray_started(folder, database, _RAY_NODES) as ray:

        def restart(name: str) -> None:
            ray.do(f"kill {name}")
            if name in names:
                ray.do(f"add {name}")

        yield Cluster(names, "head", ("--ray", ray.address), {}, restart)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Run a controller and two nodes of Slurm for the block. What runs survives the loss of the controller.

    Raises:
        RuntimeError: without Slurm's programs.
    """
    root = Path(os.environ.get("BATCHWRIGHT_TEST_SLURM", "")).resolve()
    if not (root / "usr" / "sbin").is_dir():
        raise RuntimeError("BATCHWRIGHT_TEST_SLURM names no folder with Slurm: see `fleet-test` in the Makefile")
    (folder / "slurm").mkdir()
    slurm = Slurm(root, folder / "slurm")
    found = {name: slurm.environment[name] for name in ("LD_LIBRARY_PATH", "SLURM_CONF")}
    found["PATH"] = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"

    def restart(name: str) -> None:
        slurm.kill(name)
        slurm.start(name)

    with slurm.started():
        yield Cluster(slurm.nodes, CONTROLLER, ("--slurm", str(folder / "jobs")), found, restart)


@contextmanager
def mounted_disk(folder: Path) -> Iterator[bool]:
    """Mount a file system of its own at a folder for the block. Yield whether this process may (root)."""
    folder.mkdir(mode=0o700)
    mounted = _mount(folder, f"size={_DISK_BYTES},mode=700")
    try:
        yield mounted
    finally:
        if mounted:
            _succeeds("umount", "-l", str(folder))


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Leave no room on a mounted file system for the block: it becomes as large as its files."""
    is_full = False
    while not is_full:  # something may be written in between
        found = os.statvfs(folder)
        is_full = _mount(folder, f"remount,size={max(1, found.f_blocks - found.f_bfree) * found.f_frsize}")
    try:
        yield
    finally:
        _mount(folder, f"remount,size={_DISK_BYTES}")


def _mount(folder: Path, options: str) -> bool:
    return _succeeds("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603 - mount and umount


@dataclass
class Deployment:
    """A service on the CPU as an operator runs it."""

    name: str
    """One of ``NAMES``."""
    folder: Path
    """Folder for everything that it writes."""
    database: Database
    cluster: Cluster | None
    """The cluster that it dispatches to, if it has one."""
    deadline: float
    """Time (monotonic) at which every wait ends."""
    generator: random.Random
    """Source of the random choices."""
    has_disk: bool = False
    """True if the runs have a file system of their own."""
    in_flight: set[str] = field(default_factory=set)
    """Ids of the work that faults disturb now."""
    gone_seconds: list[float | None] = field(default_factory=list)
    """Seconds of each wait in ``await_gone``; None if a process remained."""

    def __post_init__(self) -> None:
        """Describe its processes; none is started."""
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self.client = Client(self._url, retry_seconds=_RETRY_SECONDS)
        serve, device = ["serve", "--port", str(port)], {"BATCHWRIGHT_DEVICES": "cpu"}
        if self.cluster is not None:
            self.components = [self._component("API", [*serve, *self.cluster.options], self.cluster.environment)]
        elif self.name == "embedded":
            self.components = [self._component("service", serve, device)]
        else:
            nodes = [{**device, "BATCHWRIGHT_NODE_NAME": name} for name in ("node0", "node1")]
            workers = [self._component("worker", ["work"], own) for own in nodes]
            self.components = [self._component("API", [*serve, "--no-worker"], {}), *workers]

    @property
    def runs(self) -> Path:
        """The folder of the runs of all of its nodes."""
        return self.folder / "runs"

    def _component(self, name: str, command: list[str], own: Mapping[str, str]) -> Component:
        label = own.get("BATCHWRIGHT_NODE_NAME", name)
        temporary = self.folder / "temporary" / label
        temporary.mkdir(parents=True)
        environment = {
            "BATCHWRIGHT_DATABASE_URL": self.database.url,
            "BATCHWRIGHT_DATA_DIR": str(self.folder / label),
            "TMPDIR": str(temporary),
            **own,
        }
        whole = [sys.executable, "-m", "batchwright", *command]
        return Component(name, whole, environment, self.folder / f"{label}.log", self._answers)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self._url}/livez", timeout=2.0).is_success
        except httpx.HTTPError:
            return False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start it, wait for its devices, and stop it after the block."""
        workers = [component for component in self.components if component.name != "API"]
        devices = len(self.cluster.nodes if self.cluster else workers)
        with mounted_disk(self.runs) as self.has_disk, self.client:
            try:
                for component in self.components:
                    component.start()
                wait_until(lambda: self._living_devices() >= devices, self.seconds_left, 0.1)
                yield
            finally:
                for component in reversed(self.components):
                    component.stop()

    def _living_devices(self) -> int:
        if dead := [component.name for component in self.components if not component.running]:
            raise RuntimeError(f"{dead} ended at the start: see the logs in {self.folder}")
        return sum(device.alive for device in self.client.devices.list())

    @property
    def seconds_left(self) -> float:
        """Seconds until the limit of the run."""
        return self.deadline - time.monotonic()

    # --- its work ---

    def rows(self) -> dict[str, WorkSummary]:
        """Return all of its work by id."""
        return {row.id: row for kind in (self.client.tunings, self.client.jobs) for row in kind.list()}

    def get(self, work_id: str) -> Tuning | Job:
        """Return a tuning or a job."""
        return (self.client.tunings if work_id.startswith("tun_") else self.client.jobs).get(work_id)

    def unended(self) -> list[WorkSummary]:
        """Return the work in flight that has not ended."""
        return [row for row in self.rows().values() if row.id in self.in_flight and not row.state.terminal]

    def journal(self, since: float) -> list[dict[str, Any]]:
        """Return what its processes have recorded since a time (see ``chaos_workload``)."""
        path = self.folder / "journal.jsonl"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [entry for entry in entries if entry["at"] >= since]

    # --- its processes ---

    def processes(self) -> list[Found]:
        """Return every process that comes from it or from its cluster."""
        return marked(os.environ[MARK_VARIABLE])

    def strays(self) -> list[Found]:
        """Return the processes that belong to none of its living components; none with a cluster, whose they may be."""
        found = self.processes() if self.cluster is None else []
        roots = [component.pid for component in self.components if component.running]
        owned = {*roots, *(process.pid for root in roots for process in below(root, found))}
        return [process for process in found if process.pid not in owned]

    def await_gone(self) -> None:
        """Wait until there are no strays."""
        began = time.monotonic()
        are_gone = wait_until(lambda: not self.strays(), _GONE_SECONDS)
        self.gone_seconds.append(round(time.monotonic() - began, 3) if are_gone else None)

    def left(self) -> dict[str, list[str]]:
        """Wait until nothing is left of work that has ended. Return what stays."""
        found: dict[str, list[str]] = {}

        def nothing_is_left() -> bool:
            clusters = self.client.fleet().items if self.cluster else ()
            found["tasks"] = list(map(str, tasks(self.processes())))
            found["strays"] = list(map(str, self.strays()))
            found["dead"] = [component.name for component in self.components if not component.running]
            found["leases"] = leases(self.database)
            found["cluster jobs"] = [str(item) for item in clusters if item.running_jobs or item.pending_jobs]
            return not any(found.values())

        return {} if wait_until(nothing_is_left, _LEFT_SECONDS if self.cluster else _GONE_SECONDS, 0.2) else found


def left_after_the_end(folder: Path) -> dict[str, list[str]]:
    """Return what a deployment has left: processes and temporary files, except empty folders of liveness files."""
    mark = os.environ[MARK_VARIABLE]
    wait_until(lambda: not marked(mark), _LEFT_SECONDS, 0.5)
    files = [path for path in folder.glob("temporary/*/batchwright-*") if not path.is_dir() or any(path.iterdir())]
    found = {"processes": list(map(str, marked(mark))), "files": [str(path.relative_to(folder)) for path in files]}
    return {name: sorted(values) for name, values in found.items() if values}


@contextmanager
def started(name: str, folder: Path, deadline: float, generator: random.Random) -> Iterator[Deployment]:
    """Run a deployment for the block, with its variables in the environment. Arguments are those of ``Deployment``.

    Raises:
        RuntimeError: without Slurm's programs.
    """
    folder.mkdir(mode=0o700, parents=True)
    os.environ |= {
        MARK_VARIABLE: uuid.uuid4().hex,
        FOLDER_VARIABLE: str(folder),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "BATCHWRIGHT_RUNS_DIR": str(folder / "runs"),
        "BATCHWRIGHT_LEASE_SECONDS": str(LEASE_SECONDS),
        "BATCHWRIGHT_POLL_SECONDS": "0.2",
        "BATCHWRIGHT_PYTHON_TARGETS": TARGET,
    }
    with ExitStack() as stack:
        database = SqliteDatabase(folder / "chaos.db") if name == "embedded" else stack.enter_context(postgresql())
        cluster = None
        if name == "ray":
            cluster = stack.enter_context(ray_cluster(folder, database.url))
        elif name == "slurm":
            cluster = stack.enter_context(slurm_cluster(folder))
        deployment = Deployment(name, folder, database, cluster, deadline, generator)
        stack.enter_context(deployment.running())
        yield deployment
