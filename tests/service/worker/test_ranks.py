"""Jobs of several ranks: what a dry run answers, where they run, and how they end."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchwright.client import ApiError, Client
from batchwright.client.documents.states import State
from batchwright.device_traits import visible_devices
from batchwright.hardware.matching import kind_of
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, RunProgress, TrainingProgress, TrainingResult
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from batchwright_service.application.rules.device_checks import check_process_count, hardware_of_job
from batchwright_service.errors import UnsupportedJobError
from batchwright_service.worker.executors.base import TrainingRun
from batchwright_service.worker.executors.local import LocalExecutor
from tests.support.exports.plans import command_plan
from tests.support.factories import CPU, CUDA, recommendation
from tests.support.forked import await_server, forked_starts
from tests.support.service.scripted import ScriptedRunner

TWO_RANKS = """
import sys, torch
size, steps = int(sys.argv[1]), int(sys.argv[2])
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(1, 3 * steps + 1):
    model(torch.randn(size, 8)).sum().backward()
    if number % steps == 0:
        optimizer.step(); optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""
"""A program of three updates."""


@pytest.fixture
def executor() -> Iterator[LocalExecutor]:
    """Runs jobs as processes."""
    opened = LocalExecutor(CPU, ScriptedRunner(8))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def fork_server() -> None:
    """Import torch where ranks are forked from, before a test is measured."""
    await_server()


def two_ranks(directory: Path, updates: int) -> TrainingRun:
    """A small run on synthetic data, planned for two ranks."""
    return TrainingRun(directory, recommendation(world_size=2), TrainingRequest(updates=updates))


def test_a_dry_run_names_as_many_processes_as_there_are_ranks(client: Client) -> None:
    """The plan's, or as many as were asked for; more than a job may have, too."""
    planned = recommendation(None, 64, world_size=2)
    assert "--nproc-per-node=2" in client.jobs.configure(planned).command
    assert "--nproc-per-node=32" in client.jobs.configure(planned, TrainingRequest(processes_per_node=32)).command
    assert "torch.distributed.run" not in client.jobs.configure(planned, TrainingRequest(processes_per_node=1)).command


@pytest.mark.thorough
def test_the_command_of_a_dry_run_trains_its_ranks(client: Client, tmp_path: Path) -> None:
    """With the files of the answer in a folder, as a launcher of one's own would start it."""
    configured = client.jobs.configure(recommendation(world_size=2), TrainingRequest(updates=2))
    for file in configured.files:
        (tmp_path / file.path).write_text(file.content)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, **configured.environment}
    folder = tmp_path / configured.working_directory
    done = subprocess.run(configured.command, env=environment, cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    paths = RunPaths(tmp_path)
    assert TrainingResult.model_validate_json(paths.result.read_bytes()).outcome is RunOutcome.SUCCEEDED
    assert [sum(update.micro_batch_sizes) for update in ProgressLog(paths.progress).new_lines()] == [5, 5]


def test_a_job_of_two_ranks_is_taken_on_the_cpu(client: Client) -> None:
    """The run succeeds, and its progress reports the weights of the accumulation windows."""
    job = client.jobs.wait(client.jobs.submit(recommendation(world_size=2), TrainingRequest(updates=2)).id)
    assert job.state is State.SUCCEEDED
    assert isinstance(job.progress, TrainingProgress)
    assert job.progress.weights == {"loss": 10.0}


def test_a_job_needs_a_card_for_each_rank() -> None:
    """One rank needs the card that was probed, several as many of its kind on any host, and no host has very many."""
    planned = recommendation(world_size=2, device=CUDA)
    assert hardware_of_job(planned, TrainingRequest(processes_per_node=1)) is None
    need = hardware_of_job(planned, TrainingRequest())
    assert need is not None
    assert (need.kind, need.devices_per_node) == (kind_of(CUDA), 2)
    check_process_count(planned, TrainingRequest())
    with pytest.raises(UnsupportedJobError, match=r"65 processes.* may have 64: .*dry run"):
        check_process_count(planned, TrainingRequest(processes_per_node=65))


def test_the_job_of_a_command_needs_a_card_for_each_rank() -> None:
    """Like other jobs; on the CPU the ranks share the device."""
    argv = ("train", "{micro_batch_size}")
    for device, devices in ((CUDA, 2), (CPU, None)):
        need = hardware_of_job(command_plan(*argv, world_size=2, device=device), TrainingRequest())
        assert (None if need is None else need.devices_per_node) == devices
    assert hardware_of_job(command_plan(*argv, device=CUDA), TrainingRequest()) is None


@pytest.mark.thorough
def test_a_command_of_two_ranks_trains_as_a_job(executor: LocalExecutor, tmp_path: Path) -> None:
    """Both ranks are counted, and the samples of an update are those of the plan."""
    (tmp_path / "program.py").write_text(TWO_RANKS)
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2")
    argv = (*torchrun, str(tmp_path / "program.py"), "{micro_batch_size}", "{gradient_accumulation_steps}")
    found = command_plan(*argv, world_size=2, device=CPU)
    made: list[RunProgress] = []
    run = TrainingRun(tmp_path / "run", found, TrainingRequest(), devices=(CPU.id,))
    result = executor.train(run, made.extend, lambda: None)
    assert (result.outcome, result.updates, result.samples_seen) == (RunOutcome.SUCCEEDED, 3, 96), result
    assert made[-1].update == 3


def test_a_job_over_hosts_needs_their_devices_at_once(client: Client) -> None:
    """Each host runs a share of the ranks; a service without a cluster refuses the job, a dry run has its command."""
    on_cards, training = recommendation(world_size=4, device=CUDA), TrainingRequest(nodes=2)
    need = hardware_of_job(on_cards, training)
    assert need is not None
    assert (need.devices_per_node, need.nodes, need.takes_several) == (2, 2, True)
    assert need.in_words.startswith("2 hosts with 2 x ")
    on_cpus = hardware_of_job(recommendation(world_size=4), training)
    assert on_cpus is not None
    assert (on_cpus.devices_per_node, on_cpus.nodes) == (1, 2)
    planned = recommendation(None, 64, world_size=4)
    with pytest.raises(ApiError, match=r"takes 2 hosts .*this service has no cluster"):
        client.jobs.submit(planned, training)
    command = client.jobs.configure(planned, training).command
    assert {"--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=static"} <= set(command)


def test_the_ranks_of_a_job_see_its_cards_only() -> None:
    """They are numbered as the worker sees them, which may be a part of the host's."""
    assert visible_devices(["cuda:2", "cuda:0"], {}) == {"CUDA_VISIBLE_DEVICES": "2,0"}
    assert visible_devices(["cuda:2", "cuda:0"], {"CUDA_VISIBLE_DEVICES": "4, 5,GPU-6"}) == {
        "CUDA_VISIBLE_DEVICES": "GPU-6,4"
    }


@pytest.mark.usefixtures("fork_server")
def test_two_ranks_train_together(executor: LocalExecutor, tmp_path: Path) -> None:
    """Each takes half of the effective batch."""
    made: list[Any] = []
    with forked_starts():
        result = executor.train(two_ranks(tmp_path, 3), made.extend, lambda: None)
    assert (result.outcome, result.updates, result.samples_seen) == (RunOutcome.SUCCEEDED, 3, 30)
    assert [(update.samples, sum(update.micro_batch_sizes)) for update in made] == [(10, 5)] * 3


@pytest.mark.thorough
def test_no_rank_outlives_its_job(executor: LocalExecutor, tmp_path: Path) -> None:
    """A failed listener of a run (a lost lease, say) ends every process of the run."""
    alive: set[str] = set()

    def fail(updates: Sequence[RunProgress]) -> None:
        if updates:
            alive.update(processes_of(tmp_path))
            raise ValueError("the listener's own")

    with pytest.raises(ValueError, match="the listener's own"):
        executor.train(two_ranks(tmp_path, 100_000), fail, lambda: None)
    assert len(alive) == 2
    assert processes_of(tmp_path) == set()


@pytest.mark.usefixtures("fork_server")
def test_a_stopped_job_of_two_ranks_goes_on(executor: LocalExecutor, tmp_path: Path) -> None:
    """Told to stop, the ranks write a checkpoint together; the job goes on from it."""
    seen = threading.Event()

    def note(updates: Sequence[RunProgress]) -> None:
        if updates:
            seen.set()

    with forked_starts():
        stopped = executor.train(two_ranks(tmp_path, 100_000), note, lambda: 30.0 if seen.is_set() else None)
        ended = executor.train(two_ranks(tmp_path, stopped.updates + 1), note, lambda: None)
    assert (stopped.outcome, stopped.updates > 0) == (RunOutcome.STOPPED, True)
    assert (ended.outcome, ended.resumed_from) == (RunOutcome.SUCCEEDED, stopped.updates)


def processes_of(directory: Path) -> set[str]:
    """Ids of the processes whose command line names a folder, zombies aside."""
    return {path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, directory)}


def _names(path: Path, directory: Path) -> bool:
    try:
        return str(directory).encode() in path.read_bytes().split(b"\0")
    except OSError:
        return False
