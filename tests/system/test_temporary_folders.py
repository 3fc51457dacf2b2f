"""Temporary folders: nothing is left of a process that was killed, and nothing of anyone else's is touched."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import AF_UNIX, socket

import pytest

from batchwright.system.temporary_folders import LONGEST_WITH_SOCKETS, TemporaryFolder, room_for_sockets
from tests.support.factories import mlp_spec
from tests.support.paths import ROOT
from tests.support.service.processes import wait_until

_OWNER = """
import time
from batchwright.system.temporary_folders import TemporaryFolder
with TemporaryFolder() as folder:
    (folder / "request.json").write_text("{}")
    print(folder, flush=True)
    time.sleep(600)
"""
_RIVAL = """
import sys
from batchwright.system.temporary_folders import TemporaryFolder
for turn in range(100):
    with TemporaryFolder() as folder:
        (folder / "own").write_text(str(turn))
        assert [path.name for path in folder.iterdir()] == ["own"]
    assert not folder.exists()
"""


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that owns a folder, and the folder."""
    command = [sys.executable, "-c", _OWNER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_short_path_has_room_for_sockets() -> None:
    """It is yielded as it is, and need not exist."""
    with room_for_sockets(Path("/short")) as found:
        assert found == Path("/short")


def test_a_long_path_gets_a_link_that_has_room_for_sockets(scratch: Path) -> None:
    """Files go into the folder itself, and the link is gone afterwards."""
    folder = scratch / ("long-" * 20)
    folder.mkdir()
    with room_for_sockets(folder) as found, socket(AF_UNIX) as listener:
        assert len(str(found)) <= LONGEST_WITH_SOCKETS < len(str(folder))
        listener.bind(str(found / "pymp-12345678-listener-12345678"))
        assert [path.name for path in folder.iterdir()] == ["pymp-12345678-listener-12345678"]
    assert not found.parent.exists()
    assert list(folder.iterdir())


def test_a_folder_ends_with_its_block(scratch: Path) -> None:
    """Private to the user; removed with its files also after an error."""
    with suppress(ZeroDivisionError), TemporaryFolder() as folder:
        assert folder.parent == scratch
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("text")
        raise ZeroDivisionError
    assert not list(scratch.iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next_folder(scratch: Path) -> None:
    """A living owner's folder is left alone."""
    with owner() as (living, kept), owner() as (killed, abandoned):
        killed.kill()
        killed.wait()
        assert abandoned.is_dir()
        with TemporaryFolder() as own:
            assert set(scratch.iterdir()) == {kept, own}
            assert (kept / "request.json").is_file()
        assert living.poll() is None


def test_a_fork_keeps_the_folder_of_its_killed_parent() -> None:
    """Its files stay as long as a process lives that may use them."""
    read, write = os.pipe()
    owning = os.fork()
    if owning == 0:  # pragma: no cover - in the child
        folder = TemporaryFolder()
        if os.fork() == 0:
            os.write(write, os.fsencode(folder.path))
            os.close(write)
            time.sleep(600)
        signal.pause()
    os.close(write)
    path = Path(os.fsdecode(os.read(read, 4096)))
    fork = int(Path(f"/proc/{owning}/task/{owning}/children").read_text())
    os.kill(owning, signal.SIGKILL)
    os.waitpid(owning, 0)
    try:
        with TemporaryFolder():
            assert path.is_dir()
    finally:
        os.kill(fork, signal.SIGKILL)


def test_what_is_not_a_folder_of_ours_is_not_removed(scratch: Path) -> None:
    """Nor what a link leads to that bears such a name."""
    (scratch / "mine").mkdir()
    (scratch / "mine" / "file").write_text("text")
    (scratch / "batchwright-tmp-aaaaaaaa").symlink_to("mine")
    (scratch / "batchwright-tmp-bbbbbbbb").write_text("a file")
    for name in ("batchwright-0", "batchwright-tmp-notes", "batchwright-tmp-cccccccc-old", "tmpcccccccc"):
        (scratch / name).mkdir()
    before = set(scratch.iterdir())
    with TemporaryFolder():
        pass
    assert set(scratch.iterdir()) == before
    assert (scratch / "mine" / "file").read_text() == "text"


def test_processes_beside_each_other_take_no_folder_from_another(scratch: Path) -> None:
    """Each looks for abandoned folders while the others make and remove theirs."""
    command = [sys.executable, "-c", _RIVAL]
    rivals = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    errors = [rival.communicate(timeout=300)[1] for rival in rivals]
    assert errors == [""] * 4
    assert not list(scratch.iterdir())


def test_nothing_is_left_of_a_tuning_that_was_killed_while_it_started(scratch: Path) -> None:
    """Its fork server, still importing torch, cannot remove the folder of the task that it was never sent."""
    spec = scratch / "spec.json"
    spec.write_text(mlp_spec().model_dump_json())
    command = [sys.executable, "-m", "batchwright", "tune", str(spec), "--effective-batch-size", "8", "--device", "cpu"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=quiet, stderr=quiet) as tuning:
        while not list(scratch.glob("batchwright-*/request.json")):
            assert tuning.poll() is None
            time.sleep(0.01)
        os.killpg(tuning.pid, signal.SIGKILL)

    def next_folder_finds_nothing() -> bool:
        TemporaryFolder().remove()
        return not list(scratch.glob("batchwright-*"))

    wait_until(next_folder_finds_nothing)  # a fork of the tuning may still be ending, and share its lock
