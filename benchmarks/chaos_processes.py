"""The processes that ``chaos.py`` starts, finds and counts: by a mark in their environment, which no child can lose."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARK_VARIABLE = "CHAOS_MARK"
_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Found:
    """A process with the mark."""

    pid: int
    parent: int
    command: str

    @property
    def role(self) -> str:
        """What it is, by its command: a child of the fork server has that one's."""
        for words, role in (
            ("batchwright.probing.child.fork_server", "fork server"),
            ("batchwright.training.worker", "training"),
            ("batchwright.cli work", "worker"),
            ("batchwright_service.entrypoints.hosted_worker", "worker"),
            ("batchwright.cli serve", "service"),
        ):
            if words in self.command:
                return role
        return "other"


def marked(mark: str) -> list[Found]:
    """Every live process that was started, however indirectly, with ``mark`` in its environment."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    return [found for path in Path("/proc").glob("[0-9]*") if (found := _read(path, wanted)) is not None]


def _read(path: Path, wanted: bytes) -> Found | None:
    """A process; none when it has not the mark, or has ended."""
    try:
        if wanted not in (path / "environ").read_bytes().split(b"\0"):
            return None
        state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    return None if state in "ZX" else Found(int(path.name), int(parent), command)


def below(pid: int, processes: list[Found]) -> list[Found]:
    """The processes among them that descend from ``pid``."""
    known, rest = {pid}, list(processes)
    grew = True
    while grew:
        new = {it.pid for it in rest if it.parent in known} - known
        grew = bool(new)
        known |= new
    return [it for it in rest if it.pid in known and it.pid != pid]


def tasks(processes: list[Found]) -> list[Found]:
    """Those that work on a device now: what a fork server has forked, and training processes."""
    servers = {it.pid for it in processes if it.role == "fork server"}
    forked = [it for it in processes if it.role == "fork server" and it.parent in servers]
    return forked + [it for it in processes if it.role == "training"]


def wait_until(condition: Callable[[], bool], seconds: float, poll_seconds: float = _POLL_SECONDS) -> bool:
    """Whether it came true within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_seconds)
    return True


class Component:
    """A process of the deployment that can be killed and started again: the service, or a worker.

    Args:
        command: how to start it.
        environment: all of its environment.
        log: where it prints, appended over its lives.
        ready: asked until it is true; a component without it is ready once it runs.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, ready: Callable[[], bool] = lambda: True
    ) -> None:
        self._command = command
        self._environment = environment
        self._log = log
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of its present or last life."""
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        """Whether it lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, patience_seconds: float = 180.0) -> None:
        """Start it, and wait until it is ready.

        Raises:
            RuntimeError: with the end of its log, when it ends or does not become ready.
        """
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        up = wait_until(lambda: self._ready() or not self.running, patience_seconds, 0.02)
        if not up or not self.running:
            self.kill()
            raise RuntimeError(f"{' '.join(self._command)} did not start:\n{self._log.read_text()[-2000:]}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, patience_seconds: float = 30.0) -> None:
        """SIGTERM, and SIGKILL when that takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
