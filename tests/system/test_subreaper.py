"""Tests of ``batchwright.system.subreaper`` and its supervisor: nothing of a process outlives it. No torch."""

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchwright.commands.launching import FreshCommand, Launch
from batchwright.system import subreaper
from batchwright.system.kept_process import KeptProcess
from batchwright.system.subreaper import Channel
from tests.support.command import is_running

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
import json, sys, time
from pathlib import Path
from batchwright.commands.launching import FreshCommand
command = FreshCommand(json.loads(sys.argv[1]), Path(sys.argv[2]))
time.sleep(600)
"""


def launch(folder: Path, *argv: str) -> Launch:
    """Return the launch that a subreaper runs."""
    return {
        "argv": argv,
        "working_directory": str(folder),
        "environment": dict(os.environ),
        "fixes_addresses": True,
    }


@contextmanager
def kept(folder: Path, *argv: str) -> Iterator[FreshCommand]:
    """A command in a folder, below its subreaper."""
    command = FreshCommand(launch(folder, *argv), folder)
    try:
        yield command
    finally:
        command.end()


def python(code: str) -> tuple[str, ...]:
    """A command that runs code."""
    return sys.executable, "-S", "-c", code


def await_file(path: Path) -> str:
    """Wait until a file has a text."""
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return path.read_text()


def test_the_exit_status_and_the_output_are_kept(tmp_path: Path) -> None:
    """The exit status and the output are those of the command."""
    with kept(tmp_path, *python("print('hello'); raise SystemExit(3)")) as command:
        assert command.wait(60)
    assert (command.status, command.error) == (3, None)
    assert (tmp_path / "output.txt").read_text() == "hello\n"


def test_a_signal_is_a_negative_status(tmp_path: Path) -> None:
    """A signal is distinguished from an exit."""
    with kept(tmp_path, *python("import os; os.kill(os.getpid(), 9)")) as command:
        assert command.wait(60)
    assert command.status == -9


def test_a_command_that_cannot_be_started_is_explained(tmp_path: Path) -> None:
    """The error has the system's message."""
    with kept(tmp_path, "/no/such/program") as command:
        assert command.wait(60)
    assert (command.status, command.error) == (None, "No such file or directory: /no/such/program")


def test_a_grandchild_in_a_session_of_its_own_does_not_outlive_the_command(tmp_path: Path) -> None:
    """The subreaper adopts and ends it."""
    with kept(tmp_path, *python(DAEMON)) as command:
        assert command.wait(60)
        assert not is_running(int((tmp_path / "daemon").read_text()))
    assert command.status == 0


def test_the_whole_tree_ends_at_the_request_of_the_supervisor(tmp_path: Path) -> None:
    """The processes end, and the files are left to the supervisor."""
    with kept(tmp_path, *python(DAEMON + LONG)) as command:
        daemon = int(await_file(tmp_path / "daemon"))
        assert not command.wait(0.0)
    assert not is_running(daemon)
    assert (command.status, command.was_abandoned, (tmp_path / "output.txt").exists()) == (None, False, True)


def test_a_killed_subreaper_is_noticed_and_its_process_ends(tmp_path: Path) -> None:
    """The kernel ends the process."""
    with kept(tmp_path, *python(DEAF)) as command:
        await_file(tmp_path / "daemon")
        while command.subreaper is None or command.pid is None:
            command.wait(1.0)
        os.kill(command.subreaper, signal.SIGKILL)
        assert command.wait(60)
    assert (command.status, command.was_abandoned) == (None, True)
    while is_running(command.pid):  # the kernel closes the channel first; pytest's limit ends a wait in vain
        time.sleep(0.01)


def test_a_killed_supervisor_leaves_neither_processes_nor_its_folder(tmp_path: Path) -> None:
    """The end of the supervisor closes the channel, and the subreaper removes the folder."""
    probe = tmp_path / "probe"
    probe.mkdir()
    started = json.dumps(launch(tmp_path, *python(DAEMON + LONG)))
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, started, str(probe)])
    daemon = int(await_file(tmp_path / "daemon"))
    supervisor.kill()
    supervisor.wait()
    while is_running(daemon) or probe.exists():  # pytest's limit ends a wait in vain
        time.sleep(0.01)


def test_a_process_that_traps_sigterm_ends(tmp_path: Path) -> None:
    """A process that ignores SIGTERM is killed."""
    with kept(tmp_path, *python(DEAF)) as command:
        await_file(tmp_path / "daemon")
        assert not command.wait(0.0)
        assert subreaper.descendants(command.subreaper or 0) == [command.pid]
    assert not is_running(command.pid or 0)


def test_only_the_end_of_a_long_output_is_kept(tmp_path: Path) -> None:
    """Megabytes are read, so that the command is not held up, and not stored."""
    with kept(tmp_path, *python(MEGABYTES)) as command:
        assert command.wait(60)
    output = (tmp_path / "output.txt").read_text()
    assert output.endswith("the end\n")
    assert len(output) <= 256 * 1024


def test_a_channel_works_on_any_descriptor() -> None:
    """Messages arrive on descriptors above 1024, as in a service with thousands of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        ours, theirs = Channel.pair()
        with theirs:
            far = Channel(socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 2000)))
        assert ours.send(ended=-9)
        assert far.receive(60.0) == {"ended": -9}
        assert far.receive(0.0) is None
        far.close()
        ours.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_channel_carries_a_descriptor_that_no_program_inherits() -> None:
    """As the one of a probe's subreaper, which a fork server passes on by a fork alone."""
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    reading, writing = os.pipe()
    assert ours.send(writing, folder="here")
    os.close(writing)
    message = other.receive(60.0) or {}
    assert message["folder"] == "here"
    assert not os.get_inheritable(message["descriptor"])
    os.write(message["descriptor"], b"x")
    os.close(message["descriptor"])
    assert os.read(reading, 2) == b"x"
    os.close(reading)
    for channel in (ours, other):
        channel.close()


def test_a_closed_channel_ends_in_one_way() -> None:
    """The messages that were sent before arrive first; nothing can be sent any more."""
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    other.send(last=True)
    other.close()
    assert ours.receive() == {"last": True}
    with pytest.raises(EOFError):
        ours.receive()
    assert not ours.send(stacks=False)
    ours.close()


def test_the_end_of_a_process_may_come_in_two_parts() -> None:
    """Its exit code, and in a later call the end of the channel: the subreaper was not killed."""
    ours, theirs = Channel.pair()
    process, subreaper_end = KeptProcess(ours, lambda: None), Channel(theirs)
    subreaper_end.send(started=1, subreaper=2)
    subreaper_end.send(ended=3)
    assert not process.wait(0.0)
    subreaper_end.close()
    assert process.wait(60.0)
    assert (process.status, process.was_abandoned) == (3, False)
    process.end()


def test_a_subreaper_that_does_not_respond_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor ends it another way."""
    monkeypatch.setattr("batchwright.system.kept_process._ENDING_SECONDS", 0.01)
    given_up = []
    ours, theirs = Channel.pair()
    with theirs:
        process = KeptProcess(ours, lambda: given_up.append(True))
        process.end()
        process.end()
    assert given_up == [True]
