"""Full disks: detected before a large file is written, named with the path and the space, and survived."""

import errno
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from batchwright.errors import StorageError
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.system.disk_space import require_space, translate_full_disk
from batchwright.system.files import atomic_writer, write_atomically
from batchwright.training.checkpoints import Checkpoints, save_weights
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.trained_model import ModelWriter
from batchwright.workloads.build import build_workload
from tests.support.factories import gpt_spec, recommendation, transformers_spec
from tests.support.whole_runs import run_to_end

MIB = 1024**2


@contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond ``limit_bytes``: the kernel's own refusal, on any machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid():
        pytest.skip("mounting a small disk takes root; the limit on a file's size is tested without")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)], check=False)
    if done.returncode:
        pytest.skip("this system mounts no tmpfs; the limit on a file's size is tested without")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)  # noqa: S607


def fill(directory: Path, left_bytes: int) -> Path:
    """Fill a disk up to ``left_bytes``."""
    path = directory / "others"
    free = os.statvfs(directory)
    with path.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, free.f_bavail * free.f_frsize - left_bytes)
    return path


def tensors(mebibytes: int) -> dict[str, torch.Tensor]:
    """Weights of a size."""
    return {"weight": torch.zeros(mebibytes * MIB // 4)}


def write_transformers_model(folder: Path) -> str:
    """Write a GPT-2 with 1 MiB of weights."""
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 128, "n_positions": 498, "vocab_size": 2}
    config = {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0, **sizes}
    spec = transformers_spec("causal-lm", config, batch={"sequence_length": 8})
    weights = build_workload(spec).build_model().state_dict()
    paths = RunPaths(folder)
    return ModelWriter(spec, paths.base, "# Card\n")(weights, paths.weights, paths.pretrained)


Writer = Callable[[Path], object]
WRITERS: dict[str, tuple[str, Writer]] = {
    "a document": ("recommendation.json", lambda folder: write_atomically(folder / "recommendation.json", b"x" * MIB)),
    "the final weights": ("model.safetensors", lambda folder: save_weights(tensors(1), folder / "model.safetensors")),
    "a checkpoint": ("update-00000007", lambda folder: Checkpoints(RunPaths(folder), "run", 2).save(7, tensors(1), {})),
    "a checkpoint's state": (
        "update-00000007",
        lambda folder: Checkpoints(RunPaths(folder), "run", 2).save(7, {}, tensors(1)),
    ),
    "a model for transformers": ("pretrained", write_transformers_model),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_file_that_may_not_grow_is_named(tmp_path: Path, what: str) -> None:
    """Errors of Python, of torch (`unexpected pos`) and of safetensors (`os error 27`) become the same sentence."""
    name, write = WRITERS[what]
    with small_files(64 * 1024), pytest.raises(StorageError) as caught:
        write(tmp_path)
    assert caught.value.errno == errno.EFBIG
    message = str(caught.value)
    assert f"{name} cannot be written: the file would be larger" in message
    assert "1.00 MiB needed" in message
    assert " free)" in message
    assert [path.name for path in tmp_path.rglob("*") if path.name != "checkpoints"] == []


def test_a_disk_is_named_where_no_folder_takes_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for such a folder writes a file to each candidate, and its own error is not the one to report."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with small_files(0), pytest.raises(StorageError, match=r"file\.json cannot be written: .* choose a folder"):
        write_atomically(tmp_path / "file.json", b"text")


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_is_named_before_anything_is_written(small_disk: Path, what: str) -> None:
    """The error has the path, the space needed and the space free; existing files are not touched."""
    name, write = WRITERS[what]
    fill(small_disk, left_bytes=512 * 1024)
    with pytest.raises(StorageError) as caught:
        write(small_disk)
    assert caught.value.errno == errno.ENOSPC
    assert f"{name} cannot be written: the disk is full (1.00 MiB needed, 512.00 KiB free)" in str(caught.value)
    assert {path.name for path in small_disk.iterdir()} <= {"others", "checkpoints"}


def write_in_blocks(path: Path) -> None:
    """Write 4 MiB without stating the size beforehand."""
    with atomic_writer(path) as stream:
        for _ in range(1024):
            stream.write(b"x" * 4096)


def test_a_disk_that_fills_up_during_the_write_is_named(small_disk: Path) -> None:
    """A stream of unknown size fails when the disk is full, and leaves no partial file."""
    fill(small_disk, left_bytes=256 * 1024)
    with pytest.raises(StorageError, match=r"trace\.json cannot be written: the disk is full") as caught:
        write_in_blocks(small_disk / "trace.json")
    assert isinstance(caught.value.__cause__, OSError)
    assert [path.name for path in small_disk.iterdir()] == ["others"]


@pytest.mark.usefixtures("forked")
def test_a_run_continues_when_there_is_space_again(small_disk: Path) -> None:
    """A run that fills its disk names it, keeps its last checkpoint, and once resumed ends as an undisturbed run."""
    found = recommendation(gpt_spec(), 16, 8)
    paths = RunPaths(small_disk / "run")
    first = run_to_end(paths.directory, found, TrainingRequest(updates=2, checkpoint_every=2, keep_checkpoints=1))
    assert first.outcome is RunOutcome.SUCCEEDED, first.message
    others = fill(small_disk, left_bytes=200 * 1024)
    request = TrainingRequest(updates=4, checkpoint_every=2, keep_checkpoints=1)
    result = run_to_end(paths.directory, found, request)
    assert result.outcome is RunOutcome.FAILED
    assert result.error_type == "batchwright.errors.StorageError"
    assert "update-00000004 cannot be written: the disk is full" in result.message
    assert "KiB needed" in result.message
    assert result.traceback is None
    assert paths.checkpointed_update() == 2
    others.unlink()
    again = run_to_end(paths.directory, found, request)
    assert (again.outcome, again.resumed_from) == (RunOutcome.SUCCEEDED, 2)


@pytest.mark.usefixtures("forked")
def test_a_run_that_cannot_write_its_result_names_the_disk(small_disk: Path) -> None:
    """Neither result nor log can be written, so the process that started the run names the disk."""
    found = recommendation(gpt_spec(), 16, 8)
    paths = RunPaths(small_disk / "run")
    run_to_end(paths.directory, found, TrainingRequest(updates=2, checkpoint_every=2))
    fill(small_disk, left_bytes=16 * 1024)
    result = run_to_end(paths.directory, found, TrainingRequest(updates=4, checkpoint_every=2))
    assert result.outcome is RunOutcome.FAILED
    assert "disk" in result.message
    assert "full" in result.message
    assert paths.checkpointed_update() == 2


def test_a_path_that_does_not_exist_is_measured(tmp_path: Path) -> None:
    """The nearest existing parent folder is measured."""
    with pytest.raises(StorageError, match=r"a/b/c cannot be written: the disk is full \(1024\.00 TiB needed, .* free"):
        require_space(tmp_path / "a" / "b" / "c", 2**50)


@pytest.mark.parametrize(
    "error",
    [PermissionError(errno.EACCES, "no"), ValueError("errors of (os error 2)"), KeyError("disk")],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_not_translated(tmp_path: Path, error: Exception) -> None:
    """Only errors caused by a full disk are translated."""
    with pytest.raises(type(error)) as caught, translate_full_disk(tmp_path):
        raise error
    assert caught.value is error
