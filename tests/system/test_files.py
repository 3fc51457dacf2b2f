"""Atomic writes, leftovers of killed writers, and locks of folders."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from batchwright.system.files import atomic_writer, lock_directory, tail, write_atomically

NOBODY = 2**22 + 1
"""Above the largest process id of Linux (PID_MAX_LIMIT)."""
HOLDER = """
import os, sys, time
from pathlib import Path
from batchwright.system.files import lock_directory

with lock_directory(Path(sys.argv[1]), 0.0) as alone:
    if alone and os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    """The old content stays, and no temporary file is left."""
    path = tmp_path / "file"
    write_atomically(path, "old")
    with suppress(KeyError), atomic_writer(path) as stream:
        stream.write(b"half")
        raise KeyError
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """Replaced by a file, as a device was of a process with every right, it would be lost to all others."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert pipe.is_fifo()
    assert [*tmp_path.iterdir()] == [pipe]


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    """Temporary files of the same path and of a dead process are removed; those of a live process stay."""
    stays = [f".file[1].{os.getppid()}.part", f".other.{NOBODY}.part", ".file[1].notes.part"]
    for name in [f".file[1].{NOBODY}.part", *stays]:
        (tmp_path / name).touch()
    write_atomically(tmp_path / "file[1]", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["file[1]", *stays])


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    """The lock is free once its process is killed, although a child of that process is alive."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with lock_directory(tmp_path, 0.0) as alone:
                assert not alone
            holder.kill()
            holder.wait()
            with lock_directory(tmp_path, 0.0) as alone:
                assert alone
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_locking_succeeds_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """No stale lock can remain after a kill: the lock file stays and is empty."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    with lock_directory(tmp_path, 0.0) as alone:
        assert alone
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


def test_only_the_tail_of_a_file_is_read(tmp_path: Path) -> None:
    """The last bytes of a sparse file of terabytes are read."""
    with (tmp_path / "log").open("wb") as stream:
        stream.seek(2**40)
        stream.write(b"\nthe end\n")
    assert tail(tmp_path / "log", 8) == "the end"


def test_a_progress_bar_is_left_in_its_last_state(tmp_path: Path) -> None:
    """Every state of tqdm begins with a carriage return. One before the end of a line belongs to that."""
    (tmp_path / "log").write_bytes(b"a\r\n 0%|\r50%|\r99%|Traceback\n  line\r\nValueError: x\n")
    assert tail(tmp_path / "log", 100) == "a\r\n99%|Traceback\n  line\r\nValueError: x"


def test_lines_may_be_long_and_end_with_several_carriage_returns(tmp_path: Path) -> None:
    """A terminal in a terminal adds one. The time to read a line grows with its length alone."""
    line = "x" * 2**21
    (tmp_path / "log").write_text(f"{line}\nValueError: y\r\r\n--", newline="")
    assert tail(tmp_path / "log", 2**22) == f"{line}\nValueError: y\r\r\n--"


def test_a_short_file_is_all_tail(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are replaced."""
    (tmp_path / "log").write_bytes(b"a\xff\n")
    assert tail(tmp_path / "log", 100) == "a\ufffd"
