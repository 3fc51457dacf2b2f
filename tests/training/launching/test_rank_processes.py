"""Whole runs as processes: real allocation failures in training, several ranks, and changes of their number."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, TrainingProgress
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.files import write_atomically
from batchwright.training.launching import launcher
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.training.launching.rank_processes import training_command
from batchwright.training.launching.run_directory import RunPaths
from tests.support.factories import gpt_spec, mlp_spec, recommendation
from tests.support.faults import relative_distance
from tests.support.scarce import fill, small_disk
from tests.support.whole_runs import ENVIRONMENT, MIB, run_to_end, wait_for, weights_of

pytestmark = pytest.mark.usefixtures("forked")

SGD = {"name": "sgd", "learning_rate": 0.1}


def progress_of(directory: Path) -> list[TrainingProgress]:
    """The progress that a run reported."""
    lines = RunPaths(directory).progress.read_text().splitlines()
    return [TrainingProgress.model_validate_json(line) for line in lines]


def wide_mlp(**changes: Any) -> WorkloadSpec:
    """Return a model that computes little and whose activations take about 120 MiB for 200 samples, 60 MiB for 100."""
    architecture = {"name": "mlp", "input_features": 8, "hidden_features": 50_000, "hidden_layers": 1, "classes": 2}
    return mlp_spec(
        model={"kind": "reference", "architecture": architecture},
        optimizer=SGD,
        data={"kind": "synthetic", "samples": 500},
        **changes,
    )


@pytest.mark.parametrize("gathering", ["scratch", pytest.param("in-place", marks=pytest.mark.thorough)])
def test_a_run_restarts_with_smaller_micro_batches(tmp_path: Path, gathering: str) -> None:
    """A real allocation failure in update 1: split, reported, the effective batch kept, the same weights."""
    spec, request = wide_mlp(gradient_gathering=gathering), TrainingRequest(updates=3)
    roomy = recommendation(spec, 200, 50, limit_bytes=1000 * MIB, environment=ENVIRONMENT)
    assert run_to_end(tmp_path / "roomy", roomy, request).outcome is RunOutcome.SUCCEEDED
    tight = recommendation(spec, 200, 200, limit_bytes=90 * MIB, environment=ENVIRONMENT)
    result = run_to_end(tmp_path / "tight", tight, request)
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    made = progress_of(tmp_path / "tight")
    assert [(split.size, split.parts) for split in made[0].splits] == [(200, (100, 100))]
    assert "allocate" in made[0].splits[0].message
    assert [progress.samples for progress in made] == [200, 200, 100]
    assert [progress.micro_batch_sizes for progress in made] == [(100, 100), (100, 100), (100,)]
    assert relative_distance(weights_of(tmp_path / "tight"), weights_of(tmp_path / "roomy")) < 1e-6


def test_two_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    """Windows are equal, so weights are equal within rounding; one rank resumes from the checkpoint of two."""
    spec = gpt_spec(optimizer=SGD, gradient_clipping=0.5, schedule={"name": "cosine"}, ema_decay=0.9)
    found = recommendation(spec, 16, 3, environment=ENVIRONMENT)
    one, two = (
        TrainingRequest(updates=8, checkpoint_every=3),
        TrainingRequest(updates=8, processes_per_node=2, workers=1),
    )
    assert run_to_end(tmp_path / "one", found, one).outcome is RunOutcome.SUCCEEDED
    assert run_to_end(tmp_path / "two", found, two).outcome is RunOutcome.SUCCEEDED
    assert [progress.micro_batch_sizes for progress in progress_of(tmp_path / "two")[:1]] == [(3, 3, 2)]
    assert [progress.samples for progress in progress_of(tmp_path / "two")] == [
        progress.samples for progress in progress_of(tmp_path / "one")
    ]
    assert relative_distance(weights_of(tmp_path / "two"), weights_of(tmp_path / "one")) < 1e-6
    assert RunPaths(tmp_path / "two").average_weights.exists()


def test_a_run_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Stopped with two ranks, resumed alone: no sample is lost or used twice, the weights are those of one process."""
    spec = gpt_spec(optimizer=SGD)
    found = recommendation(spec, 16, 3, environment=ENVIRONMENT)
    assert run_to_end(tmp_path / "one", found, TrainingRequest(updates=8)).outcome is RunOutcome.SUCCEEDED
    process = TrainingProcess(tmp_path / "mixed")
    process.start(found, TrainingRequest(updates=5, processes_per_node=2))
    first = wait_for(process)
    assert first.updates == 5, first.message
    second = run_to_end(tmp_path / "mixed", found, TrainingRequest(updates=8))
    assert (second.outcome, second.resumed_from) == (RunOutcome.SUCCEEDED, 5)
    assert [progress.update for progress in progress_of(tmp_path / "mixed")] == list(range(1, 9))
    assert relative_distance(weights_of(tmp_path / "mixed"), weights_of(tmp_path / "one")) < 1e-6


def test_shards_that_run_out_of_memory_resume_smaller(tmp_path: Path) -> None:
    """FSDP ranks cannot split alone: both end, and resume from the checkpoint with half the micro-batch."""
    spec = wide_mlp(parallelism={"world_size": 2, "strategy": "fsdp"})
    found = recommendation(spec, 200, 100, limit_bytes=50 * MIB, environment=ENVIRONMENT, world_size=2)
    directory = tmp_path / "run #1?"  # characters that mean something in a URL
    result = run_to_end(directory, found, TrainingRequest(updates=2, checkpoint_every=1))
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    assert [progress.micro_batch_sizes for progress in progress_of(directory)] == [(50, 50), (50, 50)]
    assert [progress.samples for progress in progress_of(directory)] == [200, 200]
    assert "at most 50 samples instead of 100" in " ".join(result.notes)


def test_shards_of_which_one_runs_out_of_memory_resume_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 only loses contact with rank 1; the bound that rank 1 has written is used."""
    (tmp_path / "one_runs_out.py").write_text(
        "import os, torch\n"
        "class W:\n"
        "    def build_model(self): return torch.nn.Linear(2, 1)\n"
        "    def make_batch(self, size): return torch.randn(size, 2)\n"
        "    def loss_terms(self, model, batch):\n"
        "        loss = model(batch).square().sum()\n"
        "        if os.environ['RANK'] == '1' and len(batch) > 2: raise MemoryError('injected')\n"
        "        return {'loss': (loss, len(batch))}\n"
        "    def dataset(self): return [torch.ones(2)] * 16\n"
        "def build(): return W()\n"
    )
    monkeypatch.chdir(tmp_path)
    parallelism = {"world_size": 2, "strategy": "fsdp"}
    model = {"kind": "python", "target": "one_runs_out:build"}
    spec = mlp_spec(model=model, data={"kind": "workload"}, parallelism=parallelism)
    found = recommendation(spec, 8, 4, world_size=2)
    result = run_to_end(tmp_path / "run", found, TrainingRequest(updates=2))
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    assert [progress.micro_batch_sizes for progress in progress_of(tmp_path / "run")] == [(2, 2), (2, 2)]


def test_several_ranks_are_started_by_torchrun() -> None:
    """One rank needs no launcher; over several hosts, each runs the command."""
    python, worker = ["python", "-P", "-m"], ["-m", "batchwright.training.worker", "run"]
    alone, both, two_hosts = (
        training_command(Path("run"), processes, "python", hosts=hosts) for processes, hosts in ((1, 1), (2, 1), (1, 2))
    )
    assert alone == [*python[:-1], *worker]
    assert both == [*python, "torch.distributed.run", "--standalone", "--nproc-per-node=2", *worker]
    across = ["--nnodes=2", "--rdzv-backend=static", "--nproc-per-node=1"]
    assert two_hosts == [*python, "torch.distributed.run", *across, *worker]


@pytest.mark.thorough
def test_torchrun_starts_a_run(tmp_path: Path) -> None:
    """The configured command of a plan for two ranks is torchrun's, and it trains."""
    found, paths = recommendation(gpt_spec(), 16, 3, world_size=2), RunPaths(tmp_path)
    write_atomically(paths.recommendation, found.model_dump_json())
    write_atomically(paths.request, TrainingRequest(updates=3).model_dump_json())
    command = training_command(tmp_path, processes=2)
    ended = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(paths.result.read_text())["outcome"] == "SUCCEEDED"
    assert next(iter(progress_of(tmp_path))).micro_batch_sizes == (3, 3, 2)


def test_two_ranks_stop_together(tmp_path: Path) -> None:
    """SIGTERM reaches them at different moments; they agree on the update after which they stop."""
    process = TrainingProcess(tmp_path)
    found = recommendation(gpt_spec(), 40, 2, environment=ENVIRONMENT, world_size=2)
    process.start(found, TrainingRequest(updates=100_000))
    while not process.new_progress():
        assert process.poll() is None
        time.sleep(0.01)
    result = process.stop(grace_seconds=30.0)
    assert result.outcome is RunOutcome.STOPPED, result.message
    assert result.updates == RunPaths(tmp_path).checkpointed_update()


def test_the_result_has_the_message_of_the_failed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of the rank that failed, with its traceback, and no rank hangs."""
    (tmp_path / "one_fails.py").write_text(
        "import os, torch\n"
        "class W:\n"
        "    def build_model(self): return torch.nn.Linear(2, 1)\n"
        "    def make_batch(self, size): return torch.randn(size, 2)\n"
        "    def loss_terms(self, model, batch):\n"
        "        if os.environ['RANK'] == '1': raise KeyError('no such label')\n"
        "        return {'loss': (model(batch).square().sum(), len(batch))}\n"
        "    def dataset(self): return [torch.ones(2)] * 8\n"
        "def build(): return W()\n"
    )
    monkeypatch.chdir(tmp_path)
    spec = mlp_spec(model={"kind": "python", "target": "one_fails:build"}, data={"kind": "workload"})
    result = run_to_end(tmp_path / "run", recommendation(spec, 4, 2, world_size=2), TrainingRequest(updates=1))
    assert result.outcome is RunOutcome.FAILED
    assert result.error_type == "builtins.KeyError"
    assert "one_fails.py" in (result.traceback or "")


def test_a_process_that_lingers_after_its_result_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the user's keeps the interpreter from its end: the run has ended well, and its device is free."""
    (tmp_path / "lingers.py").write_text(
        "import threading\nimport torch\n"
        "class W:\n"
        "    def build_model(self): return torch.nn.Linear(2, 1)\n"
        "    def make_batch(self, size): return torch.ones(size, 2)\n"
        "    def loss_terms(self, model, batch): return {'loss': (model(batch).square().sum(), len(batch))}\n"
        "    def dataset(self): return [torch.ones(2)] * 8\n"
        "def build():\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        "    return W()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launcher, "_LINGER_SECONDS", 0.1)
    spec = mlp_spec(model={"kind": "python", "target": "lingers:build"}, data={"kind": "workload"})
    result = run_to_end(tmp_path / "run", recommendation(spec, 4, 2), TrainingRequest(updates=1))
    assert (result.outcome, result.updates) == (RunOutcome.SUCCEEDED, 1)


def test_a_process_without_room_for_its_result_tells_by_its_exit_status(tmp_path: Path) -> None:
    """Its log is on the full disk as well: the run failed for its disk, and not for its workload."""
    with small_disk(tmp_path / "run", 512 * 1024) as directory:
        process = TrainingProcess(directory)
        process.start(recommendation(), TrainingRequest(updates=1000, checkpoint_every=1000))
        while not process.new_progress():
            time.sleep(0.02)
        fill(directory)
        result = wait_for(process)
    assert result.outcome is RunOutcome.FAILED
    assert result.trouble is not None


def test_workers_are_bound_by_the_memory_limit(tmp_path: Path) -> None:
    """Each takes a thread of the process that trains: no more than there is room for, and the result says so."""
    request = TrainingRequest(updates=2, workers=64)
    result = run_to_end(tmp_path, recommendation(limit_bytes=48 * MIB), request)
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    assert any(note.startswith("21 of the 64 requested workers") for note in result.notes), result.notes
