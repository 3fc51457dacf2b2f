"""The processes that ``chaos.py`` starts, finds and kills, with a mark in the environment that children inherit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

MARK_VARIABLE = "CHAOS_MARK"
_START_SECONDS = 180.0
_STOP_SECONDS = 30.0
_ROLES = {
    "batchwright.probing.child.fork_server": "fork server",
    "batchwright.training.worker": "training",
    "batchwright work": "worker",
    "batchwright node run": "worker",
    "batchwright_service.entrypoints.hosted_worker": "worker",
    "batchwright_service.entrypoints.hosted_dispatcher": "dispatcher",
}


@dataclass(frozen=True)
class Found:
    """A process with the mark."""

    pid: int
    parent: int
    command: str
    role: str
    """Role by its command, which a forked process shares with its parent; empty if none is known."""

    def __str__(self) -> str:
        return f"{self.pid} {self.role or self.command[:200]}"


def marked(mark: str) -> list[Found]:
    """Return every live process that was started, however indirectly, with ``mark`` in its environment."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    processes = (_read(path, wanted) for path in Path("/proc").glob("[0-9]*"))
    return [found for found in processes if found is not None and found.pid != os.getpid()]


def _read(path: Path, wanted: bytes) -> Found | None:
    """Return a process, or None if it lacks the mark or has ended."""
    try:
        if wanted not in (path / "environ").read_bytes().split(b"\0"):
            return None
        state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        is_python = "python" in (path / "exe").readlink().name  # and no shell that starts one
    except OSError:
        return None
    role = next((role for words, role in _ROLES.items() if words in command and is_python), "")
    return None if state in "ZX" else Found(int(path.name), int(parent), command, role)


def below(pid: int, processes: list[Found]) -> list[Found]:
    """Return the processes that descend from ``pid``."""
    known = {pid}
    while new := {process.pid for process in processes if process.parent in known} - known:
        known |= new
    return [process for process in processes if process.pid in known - {pid}]


def of_role(role: str, processes: list[Found]) -> list[Found]:
    """Return the processes of a role that were not forked from one of the same role."""
    found = {process.pid: process for process in processes if process.role == role}
    return [process for process in found.values() if process.parent not in found]


def probes(processes: list[Found]) -> list[Found]:
    """Return what the fork servers have forked."""
    servers = [process.pid for process in of_role("fork server", processes)]
    return [process for process in processes if process.role == "fork server" and process.parent in servers]


def tasks(processes: list[Found]) -> list[Found]:
    """Return the processes that work on a device now."""
    return probes(processes) + of_role("training", processes)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal. Return False if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float, poll_seconds: float = 0.005) -> bool:
    """Wait for a condition. Return False if it was not met within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_seconds)
    return True


@dataclass
class Component:
    """A process of a deployment that can be killed and started again: the service, the API or a worker."""

    name: str
    """Its name; several workers share one."""
    command: list[str]
    environment: Mapping[str, str]
    """Variables in addition to those of this process."""
    log: Path
    """File of its output, over all of its lives."""
    ready: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = None
    """Its present or last life."""

    @property
    def pid(self) -> int:
        """Its process id, or that of its last life."""
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        """True while it lives."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it, and wait until it is ready.

        Raises:
            RuntimeError: with the end of its log, when it ends or does not become ready.
        """
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own command line
                self.command, env={**os.environ, **self.environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(lambda: self.ready() or not self.running, _START_SECONDS, 0.02)
        if not self.running or not self.ready():
            self.kill()
            raise RuntimeError(f"{' '.join(self.command)} did not start:\n{self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        """Send SIGKILL, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL when that takes too long."""
        if self.running:
            kill(self.pid, signal.SIGTERM)
            wait_until(lambda: not self.running, _STOP_SECONDS)
        self.kill()
