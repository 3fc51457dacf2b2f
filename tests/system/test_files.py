"""Files that appear whole, what kills leave behind, and locks of folders."""

from __future__ import annotations

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

from tuner.system.files import atomic_writer, lock_directory, tail, write_atomically

NOBODY = 2**22 + 1
"""Above the largest process id of Linux (PID_MAX_LIMIT)."""
HOLDER = """
import os, sys, time
from pathlib import Path
from tuner.system.files import lock_directory

with lock_directory(Path(sys.argv[1]), 0.0) as alone:
    if alone and os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    """The old content, and nothing beside it."""
    path = tmp_path / "file"
    write_atomically(path, "old")
    with suppress(KeyError), atomic_writer(path) as stream:
        stream.write(b"half")
        raise KeyError
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """Of the same file and of a process that is gone; what a live one writes, and other files, stay."""
    stays = [f".file[1].{os.getppid()}.part", f".other.{NOBODY}.part", ".file[1].notes.part"]
    for name in [f".file[1].{NOBODY}.part", *stays]:
        (tmp_path / name).touch()
    write_atomically(tmp_path / "file[1]", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["file[1]", *stays])


def test_a_forked_child_does_not_hold_its_parents_folder(tmp_path: Path) -> None:
    """The folder is free once the process that took it is killed, though a child of that process lives on."""
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
def test_a_folder_is_held_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nothing that would outlive a killed process stands in for a lock: the file stays and is empty."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    with lock_directory(tmp_path, 0.0) as alone:
        assert alone
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


def test_the_tail_of_a_file_is_read_alone(tmp_path: Path) -> None:
    """Its last bytes, of a file with terabytes of nothing before them."""
    with (tmp_path / "log").open("wb") as stream:
        stream.seek(2**40)
        stream.write(b"\nthe end\n")
    assert tail(tmp_path / "log", 8) == "the end"


def test_a_short_file_is_all_tail(tmp_path: Path) -> None:
    """Bytes that are no text are replaced."""
    (tmp_path / "log").write_bytes(b"a\xff\n")
    assert tail(tmp_path / "log", 100) == "a\ufffd"
