"""Processes of the service that tests start, read, freeze and kill, and what they ask them over HTTP."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.paths import ROOT, SUPPORT

PATIENCE_SECONDS = 120.0
LISTENS = r"listens on (http://\S+)"
WORKS = r"works on (\S+)"
NOWHERE = Path(os.devnull)


class Spoken:
    """A process of ours and what it says on standard error.

    Args:
        process: just started.
        pattern: what it says once it is ready; ``said`` is the group in it.
    """

    def __init__(self, process: subprocess.Popen[str], pattern: str) -> None:
        self.process = process
        self.lines: list[str] = []
        self.said = ""
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line)
            if found := re.search(pattern, line):
                self.said = found[1]
                break
        self._drain = threading.Thread(target=self._read_rest, daemon=True)
        self._drain.start()

    @property
    def url(self) -> str:
        """Address of the process."""
        return self.said

    def _read_rest(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal, if one is given; the exit status."""
        if number is not None:
            self.process.send_signal(number)
        status = self.process.wait(PATIENCE_SECONDS)
        self._drain.join(PATIENCE_SECONDS)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@contextmanager
def spoken(
    command: list[str], pattern: str, environment: Mapping[str, str] | None = None, output: Path = NOWHERE
) -> Iterator[Spoken]:
    """Start a Python process, its standard output in a file; whatever the test leaves of it is killed."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    with output.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *command], env=whole, stdout=stream, stderr=subprocess.PIPE, text=True
        )
    started = Spoken(process, pattern)
    try:
        yield started
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            started.end(signal.SIGKILL)


@contextmanager
def slow_service(  # noqa: PLR0913, PLR0917 - what a test may choose
    data_dir: Path,
    journal: Path,
    probe_seconds: float,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
    output: Path = NOWHERE,
) -> Iterator[Spoken]:
    """A service around a slow scripted runner."""
    slow = {
        "JOURNAL": str(journal),
        "PROBE_SECONDS": str(probe_seconds),
    }
    command = [str(SUPPORT / "service" / "slow_service.py"), str(data_dir), str(port)]
    with spoken(command, LISTENS, {**slow, **(environment or {})}, output) as started:
        yield started


class Api:
    """Plain HTTP requests of a test to a served process."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, verify=False, timeout=PATIENCE_SECONDS)  # noqa: S501 - plain HTTP

    def get(self, path: str) -> dict[str, Any]:
        """A document."""
        found: dict[str, Any] = self.http.get(path).raise_for_status().json()
        return found

    def submit(self, path: str, document: dict[str, Any]) -> str:
        """Queue something; its path."""
        answer = self.http.post(path, json=document)
        assert answer.status_code == 202, answer.text
        return f"{path}/{answer.json()['id']}"

    def ended(self, path: str) -> dict[str, Any]:
        """A tuning or job once it has ended."""
        return self.when(path, lambda found: found["state"] in {"SUCCEEDED", "FAILED", "CANCELLED"})

    def when(self, path: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """A document once a condition holds."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [self.get(path)]
            return condition(found[0])

        wait_until(look, lambda: json.dumps(found)[:2000])
        return found[0]

    def sizes(self, path: str) -> list[int]:
        """The micro-batch sizes of a tuning's recorded probes."""
        return [probe["result"]["micro_batch_size"] for probe in self.get(f"{path}/probes")["items"]]


def wait_until(condition: Callable[[], bool], seen: Callable[[], str] = lambda: "") -> float:
    """Look again and again; the seconds until it held."""
    began = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() - began < PATIENCE_SECONDS, seen()
        pause.wait(0.01)
    return time.monotonic() - began


def processes_with(text: str) -> set[int]:
    """Ids of the processes whose command line or environment holds a text, zombies and this one aside."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if text.encode() in texts and state != "Z" and int(folder.name) != os.getpid():
            found.add(int(folder.name))
    return found


def children_of(process: int) -> set[int]:
    """Ids of every process that descends from one, zombies and standbys of ``forked_processes`` aside."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if state != "Z" and not name.endswith("(standby"):
            parents[int(name.split()[0])] = int(parent)
    found: set[int] = set()
    level = {process}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found |= level
    return found


def are_gone(processes: set[int]) -> bool:
    """Return whether none of the processes lives, zombies aside."""
    return not any(_lives(process) for process in processes)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False
