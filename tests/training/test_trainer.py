"""Training runs: data order, exact windows, checkpoints that survive a kill, and what a run reports."""

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchwright.cli.errors import ExitCode
from batchwright.errors import CheckpointError, NotFiniteError, TrainingError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.optimizer import ScheduleSpec
from batchwright.schemas.recommendation import CouplingCheck, Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, TrainingProgress, TrainingResult
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.files import lock_directory
from batchwright.training import worker
from batchwright.training.assembly import build_run
from batchwright.training.checkpoints import Checkpoints
from batchwright.training.finite_updates import FiniteUpdates
from batchwright.training.launching import launcher
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from batchwright.training.optimizers import learning_rate_factor
from batchwright.training.trainer import Trainer
from tests.support.command import called
from tests.support.factories import gpt_spec, mlp_spec, recommendation, resnet_spec, transformers_spec
from tests.support.faults import relative_distance
from tests.support.forked import real_starts
from tests.support.whole_runs import ENVIRONMENT, MIB, run_to_end, wait_for

pytestmark = pytest.mark.usefixtures("forked")


def loop_for(directory: Path, found: Recommendation, request: TrainingRequest) -> Trainer:
    """A loop in this process."""
    return Trainer(build_run(found, request, RunPaths(directory), open_device("cpu")))


def trained(
    directory: Path, found: Recommendation, updates: int, every: int = 50
) -> tuple[Trainer, list[TrainingProgress]]:
    """A loop that has made its updates, and the progress that it reported."""
    loop = loop_for(directory, found, TrainingRequest(updates=updates, checkpoint_every=every))
    made: list[TrainingProgress] = []
    loop.run(made.append)
    return loop, made


def text_spec(directory: Path, text: bytes = b"some text to learn, " * 40) -> WorkloadSpec:
    """A GPT over a file of text."""
    (directory / "corpus.txt").write_bytes(text)
    return gpt_spec(data={"kind": "text", "paths": [str(directory / "*.txt")]})


def test_windows_are_the_effective_batch_and_the_tail_of_an_epoch(tmp_path: Path) -> None:
    """50 samples at 16: three full windows and one of 2, each in balanced micro-batches, then the next epoch."""
    _, made = trained(tmp_path, recommendation(effective_batch_size=16, largest_micro_batch_size=5), updates=5)
    assert [progress.samples for progress in made] == [16, 16, 16, 2, 16]
    assert [progress.micro_batch_sizes for progress in made[:1]] == [(4, 4, 4, 4)]
    assert made[3].micro_batch_sizes == (2,)
    assert [progress.epoch for progress in made] == [0, 0, 0, 0, 1]
    assert made[-1].samples_seen == 66


def test_the_split_changes_no_weight(tmp_path: Path) -> None:
    """A run in micro-batches of 3 ends where a run with whole windows ends."""
    weights = []
    spec = gpt_spec(optimizer={"name": "sgd", "learning_rate": 0.1})
    for size in (16, 3):
        loop, _ = trained(tmp_path / str(size), recommendation(spec, 16, size), updates=4)
        weights.append(dict(loop.model.state_dict()))
    assert relative_distance(weights[1], weights[0]) < 1e-6


def test_the_loss_falls(tmp_path: Path) -> None:
    """Training learns."""
    (tmp_path / "data").mkdir()
    spec = text_spec(tmp_path / "data")
    _, made = trained(tmp_path, recommendation(spec, 16, 8), updates=40)
    assert made[0].loss is not None
    assert made[-1].loss is not None
    assert made[-1].loss < 0.8 * made[0].loss


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (ScheduleSpec(), [1.0, 1.0, 1.0, 1.0]),
        (ScheduleSpec(name="linear", warmup_updates=2), [0.5, 1.0, 1.0, 0.5]),
        (ScheduleSpec(name="cosine"), [1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_schedule_moves_once_per_update(schedule: ScheduleSpec, factors: list[float]) -> None:
    """Warm-up rises to one and the decay reaches zero after the last update, whatever the accumulation."""
    assert [learning_rate_factor(schedule, update, 4) for update in range(4)] == pytest.approx(factors, abs=1e-6)


def test_a_run_reports_the_rate_of_each_update(tmp_path: Path) -> None:
    """The reported rate is the one the update used."""
    spec = mlp_spec(schedule={"name": "linear", "warmup_updates": 2}, optimizer={"learning_rate": 0.1})
    _, made = trained(tmp_path, recommendation(spec, 16, 4), updates=4)
    assert [progress.learning_rate for progress in made] == pytest.approx([0.05, 0.1, 0.1, 0.05])


def test_a_stopped_run_resumes_bit_equal(tmp_path: Path) -> None:
    """Stop after 3 of 7 updates, in the middle of an epoch, and resume: the weights are equal to the last bit."""
    spec = gpt_spec(
        model={
            "kind": "reference",
            "architecture": {"name": "gpt", "layers": 1, "heads": 2, "width": 16, "dropout": 0.2},
        },
        schedule={"name": "cosine", "warmup_updates": 2},
    )
    found, request = recommendation(spec, 16, 5), TrainingRequest(updates=7)
    whole, _ = trained(tmp_path / "whole", found, updates=7)
    first = loop_for(tmp_path / "cut", found, request)
    assert first.run(lambda _: None, lambda: first.position.update >= 3) is RunOutcome.STOPPED
    second = loop_for(tmp_path / "cut", found, request)
    assert second.resume() == 3
    assert second.run(lambda _: None) is RunOutcome.SUCCEEDED
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    """Two by default, and the pointer names the newest."""
    trained(tmp_path, recommendation(), updates=5, every=1)
    paths = RunPaths(tmp_path)
    assert sorted(path.name for path in paths.checkpoints.glob("u*")) == ["update-00000004", "update-00000005"]
    assert paths.checkpointed_update() == 5


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Another effective batch is another run: the message says what to do."""
    trained(tmp_path, recommendation(), updates=1)
    other = loop_for(tmp_path, recommendation(effective_batch_size=12), TrainingRequest())
    with pytest.raises(CheckpointError, match="another run"):
        other.resume()


@pytest.mark.parametrize("keep", [1, 2])
def test_the_checkpoint_just_written_is_never_removed(tmp_path: Path, keep: int) -> None:
    """A file of a later update, left by a kill before the pointer named it, gives way instead."""
    paths = RunPaths(tmp_path)
    paths.checkpoints.mkdir()
    for left in ("update-00000009", ".update-00000009.part"):
        (paths.checkpoints / left).mkdir()
    Checkpoints(paths, "run", keep).save(3, {}, {})
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["newest.json", "update-00000003"]


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    """Not a traceback from deep inside a reader."""
    trained(tmp_path, recommendation(), updates=1)
    (tmp_path / "checkpoints" / "update-00000001" / "state.pt").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match=r"update-00000001 is damaged: state.pt"):
        loop_for(tmp_path, recommendation(), TrainingRequest()).resume()


@pytest.fixture(scope="module")
def started_run(forked: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, TrainingResult]:
    """A run in an interpreter of its own, which takes seconds to import torch."""
    del forked
    directory = tmp_path_factory.mktemp("started")
    found = recommendation(gpt_spec(), 16, 5, limit_bytes=400 * MIB, environment=ENVIRONMENT)
    with real_starts():
        return RunPaths(directory), run_to_end(directory, found, TrainingRequest(updates=3, checkpoint_every=2))


def test_a_process_trains_and_leaves_everything(started_run: tuple[RunPaths, TrainingResult]) -> None:
    """Result, progress, checkpoint and weights, under the memory limit and the recommended environment."""
    paths, result = started_run
    assert result.outcome is RunOutcome.SUCCEEDED, result.traceback
    assert result.updates == 3
    lines = paths.progress.read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2, 3]
    assert paths.weights.exists()
    assert result.weights_sha256 is not None
    assert len(result.weights_sha256) == 64


def test_a_run_that_reaches_its_limit_fails_with_a_remedy(tmp_path: Path) -> None:
    """Out of memory in training is a clear failure with the update, the size and the remedy."""
    spec = mlp_spec(
        model={
            "kind": "reference",
            "architecture": {"name": "mlp", "input_features": 32, "hidden_features": 4096, "classes": 4},
        },
    )
    found = recommendation(spec, 1, 1, limit_bytes=64 * MIB, environment=ENVIRONMENT)
    result = run_to_end(tmp_path, found, TrainingRequest(updates=1))
    assert result.outcome is RunOutcome.FAILED
    assert result.message.startswith("out of memory while building the model")
    assert "memory_margin" in result.message


def test_a_killed_run_loses_only_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    """SIGKILL in the middle, then a restart: the hash is that of an undisturbed run, and updates are reported once."""
    spec = gpt_spec(schedule={"name": "cosine"})
    found, request = (
        recommendation(spec, 40, 2, environment=ENVIRONMENT),
        TrainingRequest(updates=12, checkpoint_every=3),
    )
    undisturbed = run_to_end(tmp_path / "whole", found, request)
    process = TrainingProcess(tmp_path / "killed")
    process.start(found, request)
    told: list[TrainingProgress] = []
    while len(told) < 5 and process.poll() is None:
        told += process.new_progress()
        time.sleep(0.005)
    assert process.pids
    os.kill(process.pids[0], signal.SIGKILL)
    ended = wait_for(process)
    assert ended.outcome is RunOutcome.FAILED
    assert "SIGKILL" in ended.message
    again = TrainingProcess(tmp_path / "killed")
    again.start(found, request)
    result = wait_for(again)
    assert result.outcome is RunOutcome.SUCCEEDED
    assert result.resumed_from is not None
    assert result.resumed_from >= 3
    assert [progress.update for progress in again.new_progress()] == list(range(result.resumed_from + 1, 13))
    assert result.weights_sha256 == undisturbed.weights_sha256


def test_sigterm_leaves_a_checkpoint(tmp_path: Path) -> None:
    """A stopped run ends as STOPPED with its last update on the disk."""
    process = TrainingProcess(tmp_path)
    process.start(recommendation(gpt_spec(), 40, 2, environment=ENVIRONMENT), TrainingRequest(updates=100_000))
    while not process.new_progress():
        assert process.poll() is None
        time.sleep(0.01)
    result = process.stop()
    assert result.outcome is RunOutcome.STOPPED
    assert result.updates == RunPaths(tmp_path).checkpointed_update()
    assert process.stop() == result


def test_a_stop_while_starting_is_no_failure(tmp_path: Path) -> None:
    """SIGTERM before the process can listen for it ends as STOPPED, with the updates that are on the disk."""
    trained(tmp_path, recommendation(), updates=2)
    process = TrainingProcess(tmp_path)
    with real_starts():  # which take a while
        process.start(recommendation(), TrainingRequest(updates=100_000))
        result = process.stop()
    assert (result.outcome, result.updates) == (RunOutcome.STOPPED, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"effective_batch_size": 12}, "effective batch size"), ({"spec": mlp_spec(precision="bf16")}, "spec")],
)
def test_the_files_of_another_run_are_not_changed(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """A run that may not resume from the checkpoints of a folder is refused before it writes there."""
    assert run_to_end(tmp_path, recommendation(), TrainingRequest(updates=1)).outcome is RunOutcome.SUCCEEDED
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds .*another {words}"):
        TrainingProcess(tmp_path).start(recommendation(**changes), TrainingRequest())
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_folder_has_one_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one is refused with the folder's name, and the first one's files stay."""
    monkeypatch.setattr(launcher, "_LOCK_WAIT_SECONDS", 0.0)
    with lock_directory(tmp_path, 0.0), pytest.raises(TrainingError, match=f"another process trains in {tmp_path}"):
        TrainingProcess(tmp_path).start(recommendation(), TrainingRequest())
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_training_process_holds_its_folder(tmp_path: Path) -> None:
    """No other process can lock the folder during training; any process can afterwards."""
    process = TrainingProcess(tmp_path)
    process.start(recommendation(), TrainingRequest(updates=100_000))
    while not process.new_progress():
        assert process.poll() is None
        time.sleep(0.01)
    with lock_directory(tmp_path, 0.0) as alone:
        assert not alone
    process.stop()
    with lock_directory(tmp_path, 0.0) as alone:
        assert alone


def test_a_training_process_in_a_held_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process takes the lock itself: of two processes started at the same moment, one trains."""
    monkeypatch.setattr(worker, "_LOCK_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(worker.StopRequest, "install", lambda _: None)  # this process keeps its own handler
    (tmp_path / "result.json").write_text("of the other process")
    with lock_directory(tmp_path, 0.0):
        assert worker.main([str(tmp_path)]) == 1
    assert (tmp_path / "result.json").read_text() == "of the other process"


def failed(folder: Path, monkeypatch: pytest.MonkeyPatch, raised: str, largest_micro_batch_size: int) -> TrainingResult:
    """The result of a run whose workload, of a module in this folder, raises in each pass."""
    (folder / "broken_workload.py").write_text(
        "import torch\n"
        "class W:\n"
        "    def build_model(self): return torch.nn.Linear(2, 1)\n"
        "    def make_batch(self, size): return torch.randn(size, 2)\n"
        f"    def loss_terms(self, model, batch): raise {raised}\n"
        "    def dataset(self): return [torch.zeros(2)] * 8\n"
        "def build(): return W()\n"
    )
    monkeypatch.chdir(folder)
    spec = mlp_spec(model={"kind": "python", "target": "broken_workload:build"}, data={"kind": "workload"})
    found = recommendation(spec, 4, largest_micro_batch_size)
    return run_to_end(folder / "run", found, TrainingRequest(updates=1))


def test_a_failure_of_user_code_comes_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log and the result point at the line."""
    result = failed(tmp_path, monkeypatch, "KeyError('no such label')", 2)
    assert result.outcome is RunOutcome.FAILED
    assert result.error_type == "builtins.KeyError"
    assert "broken_workload.py" in (result.traceback or "")
    assert not result.out_of_memory


def test_a_run_that_runs_out_of_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch of one sample does not fit: none is left to go on with."""
    result = failed(tmp_path, monkeypatch, "torch.OutOfMemoryError('CUDA out of memory.')", 1)
    assert (result.outcome, result.smaller_micro_batch) == (RunOutcome.FAILED, None)
    assert result.out_of_memory


def test_a_half_written_line_waits(tmp_path: Path) -> None:
    """A follower never sees a part of a line, and a kill's half line is dropped on resume."""
    _, made = trained(tmp_path, recommendation(), updates=3)
    log = ProgressLog(tmp_path / "progress.jsonl")
    for progress in made:
        log.append(progress)
    with log.path.open("a") as stream:
        stream.write('{"update": 4, "los')
    assert [progress.update for progress in log.new_lines()] == [1, 2, 3]
    log.truncate_after(2)
    assert [progress.update for progress in ProgressLog(log.path).new_lines()] == [1, 2]


def test_a_run_that_begins_to_accumulate_is_checked_then(tmp_path: Path) -> None:
    """BatchNorm in windows of one micro-batch is exact; resumed in smaller ones it is refused, or allowed and noted."""
    spec = resnet_spec(data={"kind": "synthetic", "samples": 20})
    trained(tmp_path, recommendation(spec, 10, 10), updates=1)
    smaller = recommendation(spec, 10, 5)
    with pytest.raises(TrainingError, match="allow_batch_coupling"):
        loop_for(tmp_path, smaller, TrainingRequest(updates=2)).resume()
    allowed = loop_for(tmp_path, smaller, TrainingRequest(updates=2, allow_batch_coupling=True))
    assert allowed.resume() == 1
    assert "BatchNorm" in " ".join(allowed.notes)
    allowed.run(lambda _: None)
    again = loop_for(tmp_path, smaller, TrainingRequest(updates=2))
    assert again.resume() == 2
    assert again.notes == allowed.notes


def checked(verdict: str, **changes: Any) -> Recommendation:
    """A recommendation for BatchNorm in two micro-batches, whose tuning has found this."""
    found = recommendation(resnet_spec(data={"kind": "synthetic", "samples": 20}), 10, 5)
    check = CouplingCheck.model_validate({"verdict": verdict, "message": "The tuning's own words."})
    evidence = found.evidence.model_copy(update={"coupling": check})
    request = found.request.model_copy(update=changes)
    return found.model_copy(update={"evidence": evidence, "request": request})


def test_the_check_of_the_tuning_is_not_repeated(tmp_path: Path) -> None:
    """The evidence of the tuning is used for each verdict: a check of BatchNorm would have another outcome."""
    assert loop_for(tmp_path / "separate", checked("separate"), TrainingRequest()).notes == []
    unknown = loop_for(tmp_path / "unknown", checked("not-compared"), TrainingRequest())
    assert "couples the samples of a batch: The tuning's own words." in unknown.notes[0]
    with pytest.raises(TrainingError, match=r"The tuning's own words.*--allow-batch-coupling"):
        loop_for(tmp_path / "coupled", checked("coupled"), TrainingRequest())


def test_coupling_that_the_tuning_allowed_needs_no_second_permission(tmp_path: Path) -> None:
    """The plan was made for it; the note names what is at fault."""
    loop = loop_for(tmp_path, checked("coupled", allow_batch_coupling=True), TrainingRequest())
    assert loop.notes == ["The tuning's own words."]


def test_a_check_without_memory_is_noted_and_not_refused(tmp_path: Path) -> None:
    """The check before the run must not use up the run's memory limit."""
    architecture = {"name": "mlp", "input_features": 8, "hidden_features": 500_000, "classes": 2}
    spec = mlp_spec(
        model={"kind": "reference", "architecture": {**architecture, "hidden_layers": 1}},
        optimizer={"name": "sgd", "learning_rate": 0.1},
    )
    found = recommendation(spec, 4, 2, limit_bytes=80 * MIB, environment=ENVIRONMENT)
    result = run_to_end(tmp_path, found, TrainingRequest(updates=1))
    assert result.outcome is RunOutcome.SUCCEEDED, result.message


def test_an_effective_batch_above_the_data_is_noted(tmp_path: Path) -> None:
    """Each update uses all samples, fewer than requested."""
    loop, made = trained(tmp_path, recommendation(effective_batch_size=80, largest_micro_batch_size=40), updates=1)
    assert made[0].samples == 50
    assert "50 samples, below the effective batch of 80" in " ".join(loop.notes)


# --- runs that are not finite ----------------------------------------------------------------------------------------

DIVERGES = mlp_spec(optimizer={"name": "sgd", "learning_rate": 1e4})
"""Its fourth update has a loss of NaN."""


def _progress(update: int, **changes: Any) -> TrainingProgress:
    figures: dict[str, Any] = {
        "loss": 2.5,
        "terms": {},
        "weights": {"loss": 64.0},
        "learning_rate": 0.1,
        "gradient_norm": 1.0,
        "skipped": False,
        "samples": 64,
        "micro_batch_sizes": (64,),
        "samples_seen": 64 * update,
        "epoch": 0,
        "seconds": 2.0,
        "peak_bytes": None,
    }
    return TrainingProgress(update=update, updates=100, **(figures | changes))


def _skipped(update: int, **changes: Any) -> TrainingProgress:
    return _progress(update, gradient_norm=None, skipped=True, **changes)


def test_a_step_along_a_gradient_of_nan_ends_the_run() -> None:
    """The weights are lost, even if the loss is still finite."""
    finite = FiniteUpdates(nn.Linear(2, 2))
    finite.add(_progress(1))
    with pytest.raises(NotFiniteError, match="the gradient of update 2 is not finite, and neither are the weights"):
        finite.add(_progress(2, gradient_norm=None))
    assert finite.since == 2


def test_updates_that_a_scaler_skips_are_normal() -> None:
    """Up to 31 in a row, and any number with a step between them; an update without a target counts as neither."""
    finite = FiniteUpdates(nn.Linear(2, 2))
    for update in range(1, 32):
        finite.add(_skipped(update))
    finite.add(_skipped(32, weights={"loss": 0.0}))
    assert finite.state() == {"since": 1, "made_step": False}
    finite.add(_progress(33))
    assert finite.state() == {"since": None, "made_step": True}
    for update in range(34, 65):
        finite.add(_skipped(update))
    assert finite.conclude(_skipped(64)) == ("no step was made since update 34, because the gradients are not finite")
    with pytest.raises(NotFiniteError, match="not been finite since update 34, for 32 updates"):
        finite.add(_skipped(65))


def test_the_end_of_a_run_is_judged() -> None:
    """A last loss of NaN, and a run without a single step, are no success."""
    finite = FiniteUpdates(nn.Linear(2, 2))
    finite.add(_skipped(1))
    with pytest.raises(NotFiniteError, match="so no step was made"):
        finite.conclude(_skipped(1))
    finite.add(_progress(2))
    assert finite.conclude(_progress(2)) is None
    finite.add(_progress(3, loss=None))
    with pytest.raises(NotFiniteError, match="since update 3"):
        finite.conclude(_progress(3, loss=None))


def test_the_sequence_goes_on_after_a_checkpoint() -> None:
    """The state of a checkpoint has its begin, and whether a step was made."""
    finite, resumed = FiniteUpdates(nn.Linear(2, 2)), FiniteUpdates(nn.Linear(2, 2))
    finite.add(_progress(1))
    finite.add(_skipped(2))
    resumed.load_state(**finite.state())  # type: ignore[arg-type] # as a checkpoint returns it
    assert resumed.conclude(_skipped(2)) is not None
    assert resumed.since == 2


@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_weights_and_statistics_must_be_finite(name: str) -> None:
    """A statistic that became infinite ruins the model in eval mode; a mask of minus infinity was there before."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2,), -math.inf))
    finite = FiniteUpdates(model)
    finite.require_finite(model.state_dict(), 3)
    with torch.no_grad():
        model.state_dict()[name].view(-1)[0] = math.inf
    with pytest.raises(NotFiniteError, match=f"`{name}` of the model is not finite after update 4"):
        finite.require_finite(model.state_dict(), 4)


def _run(folder: Path, spec: WorkloadSpec, **request: Any) -> TrainingResult:
    """Train in this process, as the process of a run does."""
    paths = RunPaths(folder)
    paths.recommendation.write_text(recommendation(spec, 16, 8).model_dump_json())
    paths.request.write_text(TrainingRequest(**request).model_dump_json())
    return worker.train(paths, worker.StopRequest())


def test_a_run_that_diverges_fails_and_keeps_its_last_finite_checkpoint(tmp_path: Path) -> None:
    """The result has the update, the checkpoint and the remedy; the update is reported; no weights are written."""
    result, paths = _run(tmp_path, DIVERGES, updates=40, checkpoint_every=2), RunPaths(tmp_path)
    assert (result.outcome, result.updates, result.not_finite_since) == (RunOutcome.FAILED, 4, 4)
    assert "the gradient of update 4 is not finite" in result.message
    assert "The finite checkpoint of update 2 is kept. Lower the learning rate" in result.message
    newest = ProgressLog(paths.progress).last()
    assert newest is not None
    assert (newest.update, newest.loss) == (4, None)
    assert not paths.weights.exists()
    parts = build_run(recommendation(DIVERGES, 16, 8), TrainingRequest(updates=40), paths, open_device("cpu"))
    weights, state = parts.checkpoints.load(2)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert state["finite"] == {"since": None, "made_step": True}


def test_weights_that_are_lost_by_the_last_step_are_not_written(tmp_path: Path) -> None:
    """The gradient of the only update is finite, and its step is infinite: the checkpoint would not be."""
    spec = mlp_spec(optimizer={"name": "sgd", "learning_rate": 3e38, "weight_decay": 1e3})
    result = _run(tmp_path, spec, updates=1)
    assert (result.outcome, result.not_finite_since) == (RunOutcome.FAILED, 1)
    assert "is not finite after update 1. No checkpoint was written" in result.message
    assert not RunPaths(tmp_path).weights.exists()


def test_a_run_that_learns_has_nothing_to_say(tmp_path: Path) -> None:
    """Its result has no such update and no note."""
    result = _run(tmp_path, mlp_spec(), updates=3)
    assert (result.outcome, result.not_finite_since, result.notes) == (RunOutcome.SUCCEEDED, None, ())


@pytest.mark.usefixtures("forked")
def test_the_command_line_says_why_and_has_the_code_of_a_failed_run(tmp_path: Path) -> None:
    """The same folder goes on from its finite checkpoint, and fails again at the same update."""
    path = tmp_path / "recommendation.json"
    path.write_text(recommendation(DIVERGES, 16, 8).model_dump_json())
    line = ("train", path, "--updates", "40", "--checkpoint-every", "2", "--output-dir", tmp_path / "run")
    for resumed in ("", ", resumed from update 2"):
        done = called(*line, columns=400)
        assert done.returncode == ExitCode.TRAINING_FAILED
        assert "FAILED: the gradient of update 4 is not finite" in done.stdout
        assert f"{resumed}. Files in" in done.stdout


@pytest.mark.thorough
def test_a_hub_that_does_not_answer_is_no_fault_of_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of a run that cannot fetch its weights names the trouble, for which a service waits."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 32, "n_positions": 8}
    spec = transformers_spec("causal-lm", config, batch={"sequence_length": 8})
    model = spec.model.model_copy(update={"pretrained": "acme/none", "revision": "0" * 40})
    result = run_to_end(
        tmp_path / "run", recommendation(spec.model_copy(update={"model": model})), TrainingRequest(updates=1)
    )
    assert result.trouble is not None
    assert (result.outcome, result.trouble.cause) == (RunOutcome.FAILED, "hub")
    assert "127.0.0.1:1" in result.trouble.message
