"""Damaged checkpoints are named and skipped, in favour of an older one that is intact."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchwright.errors import CheckpointError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.training.assembly import build_run
from batchwright.training.checkpoints import Checkpoints
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from batchwright.training.trainer import Trainer
from tests.support.factories import gpt_spec, recommendation
from tests.support.whole_runs import run_to_end

pytestmark = pytest.mark.usefixtures("forked")

NEWEST = "update-00000004"
OLDER = "update-00000002"


def loop_for(directory: Path, updates: int = 6) -> Trainer:
    """A loop of the same run in this process."""
    request = TrainingRequest(updates=updates, checkpoint_every=2)
    return Trainer(build_run(small_recommendation(), request, RunPaths(directory), open_device("cpu")))


def small_recommendation() -> Recommendation:
    """A small model with an optimizer that has a state."""
    return recommendation(gpt_spec(), 16, 8)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints of updates 2 and 4, for tests that copy it."""
    directory = tmp_path_factory.mktemp("finished")
    loop_for(directory, updates=4).run(lambda _: None)
    return directory


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to damage."""
    return shutil.copytree(finished, tmp_path / "run")


def flip_a_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    """Cut the second half off a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def grow(path: Path) -> None:
    """Append a byte to a file."""
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    """Leave nothing of a file but its name."""
    path.write_bytes(b"")


DAMAGES: tuple[Callable[[Path], None], ...] = (flip_a_bit, truncate, grow, empty, Path.unlink)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_skipped(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    """For any damage to any of its files, the run resumes from the intact checkpoint before it, and notes that."""
    damage(run / "checkpoints" / NEWEST / name)
    loop = loop_for(run)
    assert loop.resume() == 2
    note = " ".join(loop.notes)
    assert NEWEST in note
    assert name in note
    assert "resumes from the older checkpoint of update 2" in note


def test_a_run_resumed_from_the_older_checkpoint_ends_bit_equal(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A flipped bit costs the updates since, and no bit of the final weights."""
    whole = loop_for(tmp_path_factory.mktemp("whole"))
    whole.run(lambda _: None)
    flip_a_bit(run / "checkpoints" / NEWEST / "model.safetensors")
    loop = loop_for(run)
    loop.resume()
    assert loop.run(lambda _: None) is RunOutcome.SUCCEEDED
    for ours, theirs in zip(loop.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert loop_for(run, updates=8).resume() == 6


@pytest.mark.parametrize("content", ["", "{", "[]", '{"folder": "update-00000004"}', '{"update": "4"}', "\0" * 40])
def test_a_pointer_that_cannot_be_read_hides_no_checkpoint(run: Path, content: str) -> None:
    """A file damaged by a power failure is no reason to stop: the newest intact checkpoint is taken."""
    paths = RunPaths(run)
    paths.newest_checkpoint.write_text(content)
    assert paths.checkpointed_update() == 4
    loop = loop_for(run)
    assert loop.resume() == 4
    assert "newest.json cannot be read" in " ".join(loop.notes)


def test_a_missing_checkpoint_is_skipped(run: Path) -> None:
    """The pointer names a folder that was removed."""
    shutil.rmtree(run / "checkpoints" / NEWEST)
    assert RunPaths(run).checkpointed_update() == 2
    loop = loop_for(run)
    assert loop.resume() == 2
    assert "the folder is missing" in " ".join(loop.notes)


def test_a_checkpoint_that_was_never_committed_is_not_taken(run: Path) -> None:
    """A kill between the folder's rename and the pointer leaves the run where the pointer says."""
    (run / "checkpoints" / "newest.json").write_text(json.dumps({"update": 2, "folder": OLDER}))
    loop = loop_for(run)
    assert (loop.resume(), loop.notes) == (2, [])


def test_a_checkpoint_of_another_update_is_not_taken(run: Path) -> None:
    """A copy under a newer one's name is damaged, though each file of it is intact."""
    newest = run / "checkpoints" / NEWEST
    shutil.rmtree(newest)
    shutil.copytree(run / "checkpoints" / OLDER, newest)
    assert loop_for(run).resume() == 2


def test_a_run_without_an_intact_checkpoint_does_not_start_again(run: Path) -> None:
    """Hours of training are not overwritten in silence: each checkpoint is named with what is wrong."""
    for name in (NEWEST, OLDER):
        flip_a_bit(run / "checkpoints" / name / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"no checkpoint .* is intact: .*{NEWEST} .*SHA-256.*{OLDER} .*SHA-256"):
        loop_for(run).resume()


def test_a_checkpoint_of_another_layout_is_named(run: Path) -> None:
    """One of a later version is not taken for a damaged one, which would be replaced."""
    path = run / "checkpoints" / NEWEST / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layout": 99}))
    with pytest.raises(CheckpointError, match=rf"{NEWEST} has layout 99"):
        loop_for(run).resume()


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    """Tensors of every kind, and plain values, survive with their types."""
    weights = {"a": torch.randn(3, 2), "half": torch.ones(4, dtype=torch.bfloat16), "count": torch.tensor(7)}
    state = {"optimizer": {"state": {0: {"step": torch.tensor(2.0)}}}, "position": {"update": 2, "loss": None}}
    checkpoints = Checkpoints(RunPaths(tmp_path), "run", keep=1)
    checkpoints.save(2, weights, state)
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.update, newest.notes) == (2, ())
    read, plain = checkpoints.load(2)
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert plain == state


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """However old it is, until another one is the best; its weights are loaded alone."""
    checkpoints = Checkpoints(RunPaths(tmp_path), "run", keep=1)
    for update in range(1, 7):
        checkpoints.save(update, {"weight": torch.tensor(float(update))}, {}, best=2 if update < 6 else 5)
        kept = sorted(int(path.name.rpartition("-")[2]) for path in checkpoints.directory.glob("update-*"))
        assert kept == {1: [1], 2: [2], 6: [5, 6]}.get(update, [2, update])
    assert checkpoints.load_weights(5) == {"weight": torch.tensor(5.0)}
    with pytest.raises(CheckpointError, match="the folder is missing"):
        checkpoints.load_weights(2)


def test_a_process_reports_the_checkpoint_that_it_resumes_from(run: Path) -> None:
    """The note is in the result, and in the log at once; the progress has every update once."""
    flip_a_bit(run / "checkpoints" / NEWEST / "state.pt")
    result = run_to_end(run, small_recommendation(), TrainingRequest(updates=6, checkpoint_every=2))
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    assert result.resumed_from == 2
    assert any(NEWEST in note and "state.pt" in note for note in result.notes)
    assert f"note: checkpoint {run / 'checkpoints' / NEWEST} is damaged" in (run / "log.txt").read_text()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_ranks_resume_from_the_same_older_checkpoint(tmp_path: Path, strategy: str) -> None:
    """Rank 0 chooses the checkpoint for all ranks, with sharded models too."""
    spec = gpt_spec(parallelism={"world_size": 2, "strategy": strategy})
    two = recommendation(spec, 16, 4, world_size=2)
    request = TrainingRequest(updates=4, checkpoint_every=2, processes_per_node=2)
    assert run_to_end(tmp_path / "run", two, request).outcome is RunOutcome.SUCCEEDED
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    flip_a_bit(tmp_path / "run" / "checkpoints" / NEWEST / "model.safetensors")
    result = run_to_end(tmp_path / "run", two, request)
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    assert (result.resumed_from, result.updates) == (2, 4)
    assert any(NEWEST in note for note in result.notes)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights


def test_a_follower_reads_updates_that_are_made_again(run: Path) -> None:
    """Lines that are dropped and replaced by others, longer or shorter, confuse no reader in the middle of the file."""
    lines = ProgressLog(run / "written.jsonl")
    loop = loop_for(run / "other")
    loop.run(lines.append)
    follower = ProgressLog(lines.path)
    updates = follower.new_lines()
    assert [progress.update for progress in updates] == [1, 2, 3, 4, 5, 6]
    lines.truncate_after(4)
    lines.append(updates[4].model_copy(update={"loss": 1.0}))
    assert [(progress.update, progress.loss) for progress in follower.new_lines()] == [(5, 1.0)]
    lines.append(updates[5].model_copy(update={"seconds": 123456.789}))
    lines.truncate_after(5)
    assert follower.new_lines() == []
    lines.append(updates[5])
    assert [progress.update for progress in follower.new_lines()] == [6]
