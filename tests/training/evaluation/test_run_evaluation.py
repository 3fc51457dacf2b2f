"""Evaluations of a run: when they are due, the best weights, early stopping, and runs that were stopped or killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchwright.errors import CheckpointError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.planning.fingerprint import memory_part
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import EvaluationReport, RunOutcome, TrainingProgress
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.assembly import build_run
from batchwright.training.evaluation.evaluation_sums import EvaluationShare
from batchwright.training.evaluation.run_evaluation import RunEvaluation
from batchwright.training.launching.run_directory import ProgressLog, RunPaths, run_identity
from batchwright.training.trainer import Trainer
from tests.support.factories import gpt_spec, mlp_spec, recommendation
from tests.support.soak import killed_and_resumed, result_of, started, wait_until
from tests.support.whole_runs import ENVIRONMENT, run_to_end
from tests.training.test_progress import events

pytestmark = pytest.mark.usefixtures("forked")
DROPOUT = {
    "kind": "reference",
    "architecture": {"name": "gpt", "layers": 2, "heads": 2, "width": 32, "vocabulary_size": 256, "dropout": 0.2},
}


def spec_with(**evaluation: Any) -> WorkloadSpec:
    """A GPT with dropout, and ten of 50 samples held out."""
    return gpt_spec(model=DROPOUT, evaluation={"count": 10, "metrics": ["perplexity"], **evaluation})


def loop_for(directory: Path, spec: WorkloadSpec, **fields: Any) -> Trainer:
    """A loop in this process, with an effective batch of 16."""
    request = TrainingRequest(**{"updates": 6, **fields})
    return Trainer(build_run(recommendation(spec, 16, 5), request, RunPaths(directory), open_device("cpu")))


def evaluations(made: list[TrainingProgress]) -> list[EvaluationReport]:
    """Every evaluation of a run."""
    reports = (report for progress in made for report in progress.evaluations)
    return [report.model_copy(update={"seconds": 0.0}) for report in reports]


class Scripted:
    """Held-out samples whose losses are given, one for each evaluation; None where a single sample does not fit."""

    def __init__(self, *losses: float | None) -> None:
        self._losses = iter(losses)

    def __len__(self) -> int:
        return 10

    def run(self, _: object, **__: bool) -> tuple[list[EvaluationShare], dict[str, float]]:
        """The next loss."""
        loss = next(self._losses)
        share = EvaluationShare(
            sums={} if loss is None else {"loss": loss * 10},
            weights={} if loss is None else {"loss": 10.0},
            counts={"correct": loss or 0.0, "labels": 10.0},
            samples=10,
            largest=4,
            splits=(),
            failure="too large" if loss is None else None,
            is_stopped=False,
        )
        return [share], {}


def judged(losses: list[float | None], updates: int = 100, **fields: Any) -> tuple[RunEvaluation, int]:
    """Evaluations of the given losses, from update 0 on, and the number of those before the run ended early."""
    spec = mlp_spec(evaluation={"count": 10, "every": 1, **fields}).evaluation
    assert spec is not None
    evaluation = RunEvaluation(spec, Scripted(*losses), updates)  # type: ignore[arg-type] # the judging is under test
    for update in range(len(losses)):
        evaluation.evaluate(update, lambda: False)
        if evaluation.stops_early:
            return evaluation, update + 1
    return evaluation, len(losses)


def test_the_start_the_interval_and_the_end_are_evaluated(tmp_path: Path) -> None:
    """Each in the line of its update, the start in that of the first one."""
    made: list[TrainingProgress] = []
    loop_for(tmp_path / "run", spec_with(every=4)).run(made.append)
    assert [[report.update for report in progress.evaluations] for progress in made] == [[0], [], [], [4], [], [6]]
    made.clear()
    loop_for(tmp_path / "ends", spec_with()).run(made.append)
    assert [report.update for report in evaluations(made)] == [0, 6]


def test_the_best_is_never_the_start() -> None:
    """The first weights are for comparison; the best ones are those of the lowest loss after an update."""
    evaluation, _ = judged([1.0, 3.0, 2.0, 2.5])
    summary = evaluation.summary()
    assert (summary.first and summary.first.loss, summary.best and summary.best.loss) == (1.0, 2.0)
    assert evaluation.best_update == 2
    assert "the best is 2.0000 after update 2" in summary.message


def test_the_largest_accuracy_is_the_best() -> None:
    """By `monitor`."""
    evaluation, _ = judged([0.0, 3.0, 2.0], metrics=["accuracy"], monitor="accuracy")
    assert evaluation.best_update == 1


@pytest.mark.parametrize(
    ("losses", "stopping", "made"),
    [
        ([9.0, 5.0, 4.0, 4.5, 4.2, 3.0], {"patience": 2}, 5),
        ([9.0, 5.0, 4.0, 4.5, 3.9, 4.0, 4.1], {"patience": 2}, 7),
        ([9.0, 5.0, 4.95, 4.9, 4.0], {"patience": 2, "min_delta": 0.2}, 4),
        ([9.0, 5.0, 4.9, 4.7, 4.6], {"patience": 2, "min_delta": 0.2}, 5),
        ([9.0, float("nan"), float("nan"), 1.0], {"patience": 2}, 3),
        ([9.0, 5.0, None, None, None], {"patience": 2}, 5),
        ([9.0, 5.0, 6.0, None, 6.0, 1.0], {"patience": 2}, 5),
    ],
)
def test_a_run_ends_when_it_does_not_improve(losses: list[float | None], stopping: dict[str, Any], made: int) -> None:
    """After `patience` evaluations with figures, of which none is better by more than `min_delta` than the best."""
    evaluation, count = judged(losses, early_stopping=stopping)
    assert count == made
    assert evaluation.summary().stopped_early is evaluation.stops_early


def test_a_run_that_makes_its_last_update_has_not_ended_early() -> None:
    """Though its last evaluation is the one that would end it."""
    evaluation, count = judged([9.0, 5.0, 6.0, 6.0], 3, early_stopping={"patience": 2})
    assert (count, evaluation.stops_early) == (4, True)
    assert not evaluation.summary().stopped_early
    assert "early" not in evaluation.summary().message


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"count": 10}, {"count": 10, "monitor": "accuracy"}),
        (
            {"data": {"kind": "text", "paths": ["one.txt"]}},
            {"data": {"kind": "text", "paths": ["other.txt"]}},
        ),
        ({"count": 10, "weights": "trained"}, {"count": 10, "weights": "average"}),
    ],
)
def test_figures_of_another_kind_are_not_compared(before: dict[str, Any], after: dict[str, Any]) -> None:
    """After another `monitor`, other held-out data or weights the choice of the best begins anew; a note says so."""
    fields = {"every": 1, "metrics": ["accuracy"], "early_stopping": {"patience": 2}}
    first, second, same = (
        RunEvaluation(gpt_spec(ema_decay=0.9, evaluation={**fields, **own}).evaluation, Scripted(*losses), 100)  # type: ignore[arg-type] # as in `judged`
        for own, losses in ((before, (9.0, 0.1, 0.2)), (after, (0.05, 0.06)), (before, ()))
    )
    for update in range(3):
        first.evaluate(update, lambda: False)
    note = second.load_state(first.state())
    assert note is not None
    assert f"`evaluation.{list(after)[-1]}` has changed" in note
    assert second.best_update is None
    second.evaluate(2, lambda: False)
    summary = second.summary()
    assert summary.best is not None
    assert (summary.best.update, second.stops_early, summary.evaluations) == (2, False, 4)
    assert same.load_state(first.state()) is None
    assert same.best_update == first.best_update


def test_state_goes_on_where_it_was() -> None:
    """The judging after a resume is that of a run that was never stopped."""
    losses: list[float | None] = [9.0, 5.0, 4.0, 4.5, 4.2]
    whole, _ = judged(losses, early_stopping={"patience": 3})
    first, _ = judged(losses[:3], early_stopping={"patience": 3})
    second, _ = judged([], early_stopping={"patience": 3})
    second.load_state(first.state())
    second.evaluator = Scripted(*losses[3:])  # type: ignore[assignment] # as in `judged`
    second.take_reports()
    for update in (3, 4):
        assert second.evaluate(update, lambda: False)
    ours, theirs = second.state(), whole.state()
    for state in (ours, theirs):
        del state["unreported"]
        for name in ("first", "best", "last"):
            state[name]["seconds"] = 0.0
    assert ours == theirs


def test_an_ended_run_has_succeeded_and_stays_ended(tmp_path: Path) -> None:
    """Early stopping leaves weights, the best weights, and words; starting again makes no further update."""
    spec = spec_with(every=1, early_stopping={"patience": 2, "min_delta": 100.0})
    found, request = recommendation(spec, 16, 5, environment=ENVIRONMENT), TrainingRequest(updates=50)
    result = run_to_end(tmp_path, found, request)
    assert (result.outcome, result.updates, result.message) == (RunOutcome.SUCCEEDED, 3, "3 updates made, ended early")
    assert result.evaluation is not None
    assert result.evaluation.stopped_early
    assert "2 evaluations in a row did not improve the loss" in result.evaluation.message
    again = run_to_end(tmp_path, found, request)
    assert (again.outcome, again.updates, again.resumed_from) == (RunOutcome.SUCCEEDED, 3, 3)


def test_the_best_weights_are_kept_and_written(tmp_path: Path) -> None:
    """From a checkpoint that is kept however old it is: those of a run that ends at the best update."""
    spec = spec_with(every=2, monitor="loss").model_copy(
        update={"optimizer": gpt_spec(optimizer={"name": "sgd", "learning_rate": 1.0}).optimizer}
    )
    loop = loop_for(tmp_path / "run", spec, updates=20, checkpoint_every=1)
    made: list[TrainingProgress] = []
    loop.run(made.append)
    loop.save_weights()
    assert loop.evaluation is not None
    best = loop.evaluation.best_update
    assert best is not None
    losses = {report.update: report.loss for report in evaluations(made) if report.update}
    assert losses[best] == min(loss for loss in losses.values() if loss is not None)
    shorter = loop_for(tmp_path / "shorter", spec, updates=best)
    shorter.run(lambda _: None)
    written = load_file(RunPaths(tmp_path / "run").best_weights)
    assert all(torch.equal(tensor, dict(shorter.model.state_dict())[name]) for name, tensor in written.items())


def test_a_best_checkpoint_that_is_gone_is_noted(tmp_path: Path) -> None:
    """The run still succeeds with its last weights, and says what is missing."""
    loop = loop_for(tmp_path, spec_with(every=2), updates=4)
    loop.run(lambda _: None)
    assert loop.evaluation is not None
    best = loop.evaluation.best_update
    (tmp_path / "checkpoints" / f"update-{best:08d}" / "model.safetensors").write_bytes(b"damaged")
    assert loop.save_weights()
    assert "the weights of the best evaluation are not written" in loop.notes[-1]
    assert not RunPaths(tmp_path).best_weights.exists()


def test_the_last_weights_are_written_before_the_best(tmp_path: Path) -> None:
    """Where the best ones cannot be written, the last ones are there."""
    loop = loop_for(tmp_path, spec_with(every=1), updates=1)
    loop.run(lambda _: None)
    paths = RunPaths(tmp_path)
    (paths.best_weights / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        loop.save_weights()
    assert set(load_file(paths.weights)) <= set(loop.model.state_dict())


def test_a_run_that_was_stopped_goes_on_with_its_evaluations(tmp_path: Path) -> None:
    """Reports, choice of the best, and weights are those of a run that was never stopped."""
    spec, made, resumed = spec_with(every=3), list[TrainingProgress](), list[TrainingProgress]()
    whole = loop_for(tmp_path / "whole", spec, updates=9)
    whole.run(made.append)
    first = loop_for(tmp_path / "cut", spec, updates=9)
    assert first.run(resumed.append, lambda: first.position.update >= 4) is RunOutcome.STOPPED
    second = loop_for(tmp_path / "cut", spec, updates=9)
    assert second.resume() == 4
    second.run(resumed.append)
    assert evaluations(resumed) == evaluations(made)
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("update", [0, 3, 6])
def test_a_stop_leaves_an_evaluation_that_the_resumed_run_makes(tmp_path: Path, update: int) -> None:
    """At the start, between two updates, and at the end: the run has not succeeded until it is made."""
    spec, made, resumed = spec_with(every=3, micro_batch_size=2), list[TrainingProgress](), list[TrainingProgress]()
    whole = loop_for(tmp_path / "whole", spec)
    whole.run(made.append)
    first = loop_for(tmp_path / "cut", spec)
    calls = 0

    def stops_within_the_evaluation() -> bool:
        nonlocal calls
        calls += first.position.update == update
        return calls > 2

    assert first.run(resumed.append, stops_within_the_evaluation) is RunOutcome.STOPPED
    assert first.position.update == update
    second = loop_for(tmp_path / "cut", spec)
    assert second.resume() == update
    assert second.run(resumed.append) is RunOutcome.SUCCEEDED
    assert whole.evaluation is not None
    assert second.evaluation is not None
    ours, theirs = second.evaluation.summary(), whole.evaluation.summary()
    assert ours.message == theirs.message
    assert ours.evaluations == theirs.evaluations == 3
    log = ProgressLog(tmp_path / "progress.jsonl")
    for progress in resumed:  # the last one may be there again, with its evaluation
        log.append(progress)
    assert evaluations(log.new_lines()) == evaluations(made)
    third = loop_for(tmp_path / "cut", spec)
    third.resume()
    resumed.clear()
    assert third.run(resumed.append) is RunOutcome.SUCCEEDED
    assert resumed == []
    for tensor, other in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(tensor, other)


def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """SIGKILL after evaluations that no checkpoint has: they are made again, with the same figures and weights."""
    spec = spec_with(every=2, early_stopping={"patience": 50})
    found = recommendation(spec, 16, 5, environment=ENVIRONMENT)
    request = TrainingRequest(updates=13, checkpoint_every=4)
    whole = run_to_end(tmp_path / "whole", found, request)
    assert whole.outcome is RunOutcome.SUCCEEDED, whole.message
    result = killed_and_resumed(tmp_path / "killed", found, request, 6)
    assert result.weights_sha256 == whole.weights_sha256
    logs = [ProgressLog(RunPaths(tmp_path / name).progress).new_lines() for name in ("killed", "whole")]
    assert evaluations(logs[0]) == evaluations(logs[1])
    best = [load_file(RunPaths(tmp_path / name).best_weights) for name in ("killed", "whole")]
    assert all(torch.equal(tensor, best[1][name]) for name, tensor in best[0].items())


def held_up(directory: Path, **evaluation: Any) -> WorkloadSpec:
    """A workload with dropout, each of whose evaluations lasts for ever while there is a file `hold UPDATE`."""
    (directory / "held_up.py").write_text(
        "import pathlib, time, torch\n"
        "here = pathlib.Path(__file__).parent\n"
        "class W:\n"
        "    def build_model(self): return torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))\n"
        "    def make_batch(self, size): return torch.randn(size, 2)\n"
        "    def loss_terms(self, model, batch):\n"
        "        newest = here / 'run' / 'checkpoints' / 'newest.json'\n"
        "        holds = not model.training and newest.exists() and (here / 'hold').exists()\n"
        "        if holds and (here / 'hold').read_text() in newest.read_text():\n"
        "            (here / 'evaluating').touch()\n"
        "            time.sleep(600.0)\n"
        "        return {'loss': ((model(batch) - 1.0).square().sum(), len(batch))}\n"
        "    def dataset(self): return [torch.full((2,), n / 40.0) for n in range(40)]\n"
    )
    return mlp_spec(
        model={"kind": "python", "target": "held_up:W"},
        data={"kind": "workload"},
        evaluation={"count": 10, **evaluation},
    )


@pytest.mark.parametrize("update", [4, pytest.param(8, marks=pytest.mark.thorough)])
def test_a_kill_in_an_evaluation_loses_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: int) -> None:
    """The checkpoint is there before the evaluation, between two updates and at the end; all is recorded once."""
    monkeypatch.chdir(tmp_path)
    found = recommendation(held_up(tmp_path, every=2), 16, 5, environment=ENVIRONMENT)
    request = TrainingRequest(updates=8, checkpoint_every=4, trackers=("tensorboard",))
    whole = run_to_end(tmp_path / "whole", found, request)
    assert whole.outcome is RunOutcome.SUCCEEDED, whole.message
    (tmp_path / "hold").write_text(f"update-{update:08d}")
    with started(tmp_path / "run", found, request) as process:
        wait_until(lambda: (tmp_path / "evaluating").exists() or process.poll() is not None, "the evaluation")
        os.kill(process.pids[0], signal.SIGKILL)
        assert result_of(process).outcome is RunOutcome.FAILED
    (tmp_path / "hold").unlink()
    paths = [RunPaths(tmp_path / name) for name in ("run", "whole")]
    assert ProgressLog(paths[0].progress).last_update() == update - 1
    result = run_to_end(tmp_path / "run", found, request)
    assert (result.resumed_from, result.updates) == (update, 8), result.message
    assert result.weights_sha256 == whole.weights_sha256
    assert result.evaluation is not None
    assert whole.evaluation is not None
    assert (result.evaluation.evaluations, result.evaluation.message) == (5, whole.evaluation.message)
    logs = [ProgressLog(of_run.progress).new_lines() for of_run in paths]
    assert [progress.update for progress in logs[0]] == list(range(1, 9))
    assert [[report.update for report in progress.evaluations] for progress in logs[0]] == [
        [report.update for report in progress.evaluations] for progress in logs[1]
    ]
    assert evaluations(logs[0]) == evaluations(logs[1])
    for tag in ("loss/total", "evaluation/loss"):
        assert events(paths[0], tag) == events(paths[1], tag)


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_an_evaluation_that_a_checkpoint_lacks_is_made_again(tmp_path: Path, damage: str) -> None:
    """Its file is lost or damaged: the weights are evaluated again, with the same figures, and counted once."""
    spec, made, again = spec_with(every=3), list[TrainingProgress](), list[TrainingProgress]()
    whole = loop_for(tmp_path, spec, checkpoint_every=3)
    whole.run(made.append)
    added = tmp_path / "checkpoints" / "update-00000006" / "evaluation.json"
    if damage == "missing":
        added.unlink()
    else:
        added.write_text(added.read_text().replace('"count": 3', '"count": 4'))
    resumed = loop_for(tmp_path, spec, checkpoint_every=3)
    assert resumed.resume() == 6
    assert resumed.run(again.append) is RunOutcome.SUCCEEDED
    assert [progress.update for progress in again] == [6]
    assert evaluations(again) == evaluations(made[-1:])
    assert whole.evaluation is not None
    assert resumed.evaluation is not None
    ours, theirs = resumed.evaluation.summary(), whole.evaluation.summary()
    assert (ours.evaluations, ours.message) == (theirs.evaluations, theirs.message)
    assert resumed.evaluation.best_update == whole.evaluation.best_update
    third = loop_for(tmp_path, spec, checkpoint_every=3)
    assert third.resume() == 6
    third.run(lambda _: pytest.fail("the evaluation is recorded"))


def test_a_proven_size_is_added_with_the_evaluation(tmp_path: Path) -> None:
    """A run that resumes from the checkpoint does not prove the size of its batches again."""
    spec = spec_with(every=3, micro_batch_size=2)
    loop_for(tmp_path, spec, updates=3, checkpoint_every=3).run(lambda _: None)
    resumed = loop_for(tmp_path, spec, checkpoint_every=3)
    assert resumed.resume() == 3
    assert resumed.evaluation is not None
    assert resumed.evaluation.evaluator.proof() == (2, 2)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_two_ranks_evaluate_what_one_does(tmp_path: Path, strategy: str) -> None:
    """Each takes its share of 11 samples; the figures are those of one process, and the weights as without."""
    spec = gpt_spec(evaluation={"count": 11, "every": 2, "metrics": ["accuracy", "perplexity"]})
    alone = recommendation(spec, 16, 3, environment=ENVIRONMENT)
    shared = spec.model_copy(
        update={"parallelism": gpt_spec(parallelism={"world_size": 2, "strategy": strategy}).parallelism}
    )
    both = recommendation(shared, 16, 3, world_size=2, environment=ENVIRONMENT)
    reports = {}
    for name, found in (("one", alone), ("two", both)):
        result = run_to_end(tmp_path / name, found, TrainingRequest(updates=4))
        assert result.outcome is RunOutcome.SUCCEEDED, result.message
        reports[name] = evaluations(ProgressLog(RunPaths(tmp_path / name).progress).new_lines())
    assert [report.samples for report in reports["two"]] == [11, 11, 11]
    for ours, theirs in zip(reports["two"], reports["one"], strict=True):
        assert ours.weights == theirs.weights
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert ours.metrics["perplexity"] == pytest.approx(theirs.metrics["perplexity"], rel=1e-3)
        assert ours.metrics["accuracy"] == pytest.approx(theirs.metrics["accuracy"], abs=2 / ours.weights["next_token"])
    assert reports["two"][0].loss == pytest.approx(reports["one"][0].loss, rel=1e-6)
    without = recommendation(spec_of_split(shared), 16, 3, world_size=2, environment=ENVIRONMENT)
    seldom = run_to_end(tmp_path / "seldom", without, TrainingRequest(updates=4))
    assert seldom.weights_sha256 == result.weights_sha256


def spec_of_split(spec: WorkloadSpec) -> WorkloadSpec:
    """Spec with the same split, evaluated at the start and the end only, in batches of one."""
    assert spec.evaluation is not None
    changed = spec.evaluation.model_copy(update={"every": None, "metrics": (), "micro_batch_size": 1})
    return spec.model_copy(update={"evaluation": changed})


def tight_on_rank_1(directory: Path, strategy: str, **evaluation: Any) -> WorkloadSpec:
    """A workload of two ranks, of which rank 1 evaluates at most two samples at a time, or stops the run there."""
    (directory / "tight_evaluation.py").write_text(
        "import os, signal, torch\n"
        "class W:\n"
        "    def __init__(self, stops=False): self.stops = stops\n"
        "    def build_model(self): return torch.nn.Linear(2, 1)\n"
        "    def make_batch(self, size): return torch.randn(size, 2)\n"
        "    def loss_terms(self, model, batch):\n"
        "        evaluates = not model.training\n"
        "        if evaluates and os.environ['RANK'] == '1' and self.stops: os.kill(os.getpid(), signal.SIGTERM)\n"
        "        if evaluates and os.environ['RANK'] == '1' and len(batch) > 2: raise MemoryError('injected')\n"
        "        return {'loss': (model(batch).square().sum(), len(batch))}\n"
        "    def dataset(self): return [torch.full((2,), float(n)) for n in range(40)]\n"
    )
    return mlp_spec(
        model={"kind": "python", "target": "tight_evaluation:W", "arguments": {"stops": bool(evaluation)}},
        data={"kind": "workload"},
        evaluation={"count": 11, **evaluation},
        parallelism={"world_size": 2, "strategy": strategy},
    )


def test_ranks_that_share_a_model_restart_with_smaller_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation ends the processes there, and not the run: all resume with half the micro-batch."""
    monkeypatch.chdir(tmp_path)
    found = recommendation(tight_on_rank_1(tmp_path, "fsdp"), 16, 4, world_size=2, environment=ENVIRONMENT)
    result = run_to_end(tmp_path / "run", found, TrainingRequest(updates=2))
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    assert result.evaluation is not None
    assert result.evaluation.first is not None
    assert (result.evaluation.first.samples, result.evaluation.first.micro_batch_size) == (11, 2)
    assert "at most 2 samples instead of 4" in " ".join(result.notes)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_ranks_that_share_a_model_stop_within_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """All at the same batch, also where one of them has a batch less: the stop does not wait for the end."""
    monkeypatch.chdir(tmp_path)
    spec = tight_on_rank_1(tmp_path, "fsdp", micro_batch_size=size)
    found = recommendation(spec, 16, 4, world_size=2, environment=ENVIRONMENT)
    result = run_to_end(tmp_path / "run", found, TrainingRequest(updates=2))
    assert (result.outcome, result.updates) == (RunOutcome.STOPPED, 0), result.message
    assert result.evaluation is not None
    assert result.evaluation.evaluations == 0


def test_a_rank_that_runs_out_halves_its_own_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank keeps its size, and the report names the rank."""
    monkeypatch.chdir(tmp_path)
    spec = tight_on_rank_1(tmp_path, "ddp")
    found = recommendation(spec, 16, 4, world_size=2, environment=ENVIRONMENT)
    result = run_to_end(tmp_path / "run", found, TrainingRequest(updates=2))
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    assert result.evaluation is not None
    first = result.evaluation.first
    assert first is not None
    assert [(split.rank, split.size, split.parts) for split in first.splits] == [(1, 4, (2, 2))]
    assert (first.samples, first.micro_batch_size) == (11, 4)


def test_an_evaluation_changes_neither_fingerprint_nor_identity_but_for_its_split() -> None:
    """A run may resume with another interval, and not with another split; neither changes what fits."""
    plain = gpt_spec()
    own = gpt_spec(evaluation={"data": {"kind": "text", "paths": ["held-out.txt"]}})
    split, often, other = (
        gpt_spec(evaluation=fields) for fields in ({"count": 5}, {"count": 5, "every": 2}, {"count": 6})
    )
    assert memory_part(plain) == memory_part(own) == memory_part(split)
    of_plain, of_own, of_split, of_often, of_other = (
        run_identity(recommendation(spec), TrainingRequest()) for spec in (plain, own, split, often, other)
    )
    assert of_plain == of_own
    assert of_split == of_often
    assert of_plain != of_split != of_other


def test_another_split_does_not_resume(tmp_path: Path) -> None:
    """Samples that have trained would be held out. Another `monitor` does, with a note."""
    loop_for(tmp_path, spec_with(), updates=2).run(lambda _: None)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        loop_for(tmp_path, spec_with(seed=1), updates=2).resume()
    other = loop_for(tmp_path, spec_with(monitor="perplexity"), updates=2)
    assert other.resume() == 2
    assert "`evaluation.monitor` has changed" in other.notes[-1]
