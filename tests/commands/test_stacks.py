"""Tests of ``batchwright.commands.stacks``: processes that hang, read by py-spy if it may attach, else from inside."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchwright.commands.stacks import STACKS_SIGNAL, find_py_spy, stacks_of

ARMS = f"""
import faulthandler, os, sys
faulthandler.register({STACKS_SIGNAL}, open(os.path.join(sys.argv[1], str(os.getpid()) + ".stacks"), "w"))
"""
"""The part of the injection that takes stacks."""
BLOCKS_IN_C = """
import ctypes
def collective_of_all_ranks():
    lock = ctypes.create_string_buffer(64)
    libc = ctypes.PyDLL(None)  # its functions keep the GIL
    libc.sem_init(lock, 0, 0)
    print("blocks", flush=True)
    while True:
        libc.sem_wait(lock)
collective_of_all_ranks()
"""
HOLDS_SIGNALS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
print("blocks", flush=True)
while True:
    signal.pause()
"""
FAKE = '#!/bin/sh\necho "stacks of $3 by a fake, called with $1 $2"\n'


@contextmanager
def program(code: str, folder: Path) -> Iterator[int]:
    """A process that runs a program, from its first line of output."""
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"blocks\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def without_py_spy(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Leave an empty folder as the search path, and the interpreter's own folder without py-spy."""
    empty = folder / "programs"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setattr(sys, "executable", str(empty / "python"))
    return empty


def executable(path: Path, text: str) -> Path:
    """A script that can be started."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_process_that_blocks_in_c_with_the_gil_is_shown_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line of Python runs in it, so only a handler in C can write the stack."""
    with program(ARMS + BLOCKS_IN_C, tmp_path) as process:
        without_py_spy(monkeypatch, tmp_path)
        text = stacks_of({process: "train.py"}, tmp_path)

    assert text.startswith(f"Process {process} (train.py):\n")
    assert "in collective_of_all_ranks" in text


def test_a_process_that_is_not_armed_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal would end it. The program holds signals back, so that the kernel shows what it was sent."""
    with program(HOLDS_SIGNALS, tmp_path) as process:
        without_py_spy(monkeypatch, tmp_path)

        assert stacks_of({process: "train.py"}, tmp_path) == ""
        status = Path(f"/proc/{process}/status").read_text()

    assert "ShdPnd:\t0000000000000000" in status


def test_py_spy_is_preferred_and_asked_for_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in on the search path shows the choice and the arguments; py-spy itself is tried below."""
    executable(without_py_spy(monkeypatch, tmp_path) / "py-spy", FAKE)

    text = stacks_of({11: "train.py", 12: "worker.py"}, tmp_path)

    assert text == (
        "Process 11 (train.py):\nstacks of 11 by a fake, called with dump --pid\n\n"
        "Process 12 (worker.py):\nstacks of 12 by a fake, called with dump --pid"
    )


def test_py_spy_beside_the_interpreter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is not activated is not on the search path."""
    empty = without_py_spy(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert find_py_spy() is None

    beside = executable(empty / "py-spy", FAKE)

    assert find_py_spy() == str(beside)


@pytest.mark.parametrize("text", ["#!/bin/sh\necho 'Permission denied' >&2; exit 1\n", "no program\n"])
def test_a_process_is_shown_from_inside_where_py_spy_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Containers without the permission to trace, and a file that cannot be started."""
    with program(ARMS + BLOCKS_IN_C, tmp_path) as process:
        executable(without_py_spy(monkeypatch, tmp_path) / "py-spy", text)

        assert "in collective_of_all_ranks" in stacks_of({process: "train.py"}, tmp_path)


def test_py_spy_shows_a_process_that_is_not_armed(tmp_path: Path) -> None:
    """The real program, on a process that holds the GIL in C."""
    py_spy = find_py_spy()
    if py_spy is None:
        pytest.skip("py-spy is not installed")
    with program(BLOCKS_IN_C, tmp_path) as process:
        refused = subprocess.run([py_spy, "dump", "--pid", str(process)], capture_output=True, check=False)
        if b"Permission denied" in refused.stderr:
            pytest.skip("no process may be traced here")

        text = stacks_of({process: "train.py"}, tmp_path)

    assert "collective_of_all_ranks (<string>" in text


def test_the_signal_is_a_real_time_one() -> None:
    """Such signals have no meaning of their own, and those of the C library come before."""
    assert signal.SIGRTMIN < STACKS_SIGNAL < signal.SIGRTMAX
