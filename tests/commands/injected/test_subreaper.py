"""Tests of ``batchwright.commands.injected.subreaper``: nothing of a command outlives it. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchwright.commands.injected import subreaper

LONG = "import time; time.sleep(600)"
DAEMON = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {LONG!r}], start_new_session=True)
open("daemon", "w").write(str(child.pid))
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("daemon", "w").write("x")
time.sleep(600)
"""
MEGABYTES = "import sys; [sys.stdout.write('x' * 1000 + chr(10)) for _ in range(5000)]; print('the end')"


SUPERVISOR = """
import subprocess, sys, time
process = subprocess.Popen([sys.executable, "-I", *sys.argv[1:]], stdin=subprocess.PIPE)
time.sleep(600)
"""


def write_launch(folder: Path, argv: tuple[str, ...], working_directory: Path) -> None:
    """Write what a subreaper runs."""
    launch = {"argv": argv, "working_directory": str(working_directory), "environment": dict(os.environ)}
    (folder / "launch.json").write_text(json.dumps({**launch, "fixes_addresses": True}))


@contextmanager
def kept(folder: Path, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A subreaper that runs a command in a folder."""
    write_launch(folder, argv, folder)
    process = subprocess.Popen([sys.executable, "-I", subreaper.__file__, str(folder)], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                os.write(process.stdin.fileno(), b"e")
            process.wait(60)
            process.stdin.close()


def python(code: str) -> tuple[str, ...]:
    """A command that runs code."""
    return sys.executable, "-S", "-c", code


def ended(folder: Path) -> dict[str, object]:
    """Read the exit status of the command."""
    return dict(json.loads((folder / "exit.json").read_text()))


def await_file(path: Path) -> str:
    """Wait until a file has a text."""
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return path.read_text()


def is_running(process: int) -> bool:
    """Return whether a process still runs."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_exit_status_and_the_output_are_kept(tmp_path: Path) -> None:
    """The exit status and the output are those of the command."""
    with kept(tmp_path, *python("print('hello'); raise SystemExit(3)")) as process:
        process.wait(60)
    assert ended(tmp_path) == {"status": 3}
    assert (tmp_path / "output.txt").read_text() == "hello\n"


def test_a_signal_is_a_negative_status(tmp_path: Path) -> None:
    """A signal is distinguished from an exit."""
    with kept(tmp_path, *python("import os; os.kill(os.getpid(), 9)")) as process:
        process.wait(60)
    assert ended(tmp_path) == {"status": -9}


def test_a_command_that_cannot_be_started_is_explained(tmp_path: Path) -> None:
    """The error has the system's message."""
    with kept(tmp_path, "/no/such/program") as process:
        process.wait(60)
    assert ended(tmp_path) == {"error": "No such file or directory: /no/such/program"}


def test_a_grandchild_in_a_session_of_its_own_does_not_outlive_the_command(tmp_path: Path) -> None:
    """The subreaper adopts and ends it."""
    with kept(tmp_path, *python(DAEMON)) as process:
        process.wait(60)
    daemon = int((tmp_path / "daemon").read_text())
    assert not is_running(daemon)
    assert ended(tmp_path) == {"status": 0}


def test_the_whole_tree_ends_at_the_request_of_the_supervisor(tmp_path: Path) -> None:
    """A byte in the control pipe ends the processes, and leaves the files to the supervisor."""
    with kept(tmp_path, *python(DAEMON + LONG)):
        daemon = int(await_file(tmp_path / "daemon"))
    assert not is_running(daemon)
    assert ended(tmp_path) == {"status": None}


def test_a_killed_supervisor_leaves_neither_processes_nor_its_folder(tmp_path: Path) -> None:
    """The end of the supervisor closes the pipe, and the subreaper removes the folder."""
    probe = tmp_path / "probe"
    probe.mkdir()
    write_launch(probe, python(DAEMON + LONG), tmp_path)
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, subreaper.__file__, str(probe)])
    daemon = int(await_file(tmp_path / "daemon"))
    supervisor.kill()
    supervisor.wait()
    while is_running(daemon) or probe.exists():  # pytest's limit ends a wait in vain
        time.sleep(0.01)


def test_a_process_that_traps_sigterm_ends(tmp_path: Path) -> None:
    """A process that ignores SIGTERM is killed."""
    with kept(tmp_path, *python(DEAF)) as process:
        await_file(tmp_path / "daemon")
        command = subreaper.descendants(process.pid)
        assert command
    assert not any(is_running(child) for child in command)


def test_only_the_end_of_a_long_output_is_kept(tmp_path: Path) -> None:
    """Megabytes are read, so that the command is not held up, and not stored."""
    with kept(tmp_path, *python(MEGABYTES)) as process:
        process.wait(60)
    output = (tmp_path / "output.txt").read_text()
    assert output.endswith("the end\n")
    assert len(output) <= 256 * 1024
