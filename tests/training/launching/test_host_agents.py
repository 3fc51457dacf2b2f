"""Runs over several hosts, each of which is an agent of its own on this one."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchwright.errors import TrainingError
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.system.host_failures import Cause
from batchwright.system.processes import tied
from batchwright.training.launching import rank_processes
from batchwright.training.launching.host_agents import LOST_HOST_STATUS, HostAgents, Hosts
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.training.launching.rank_processes import training_command
from batchwright.training.launching.run_directory import RunPaths
from tests.support.factories import gpt_spec, recommendation
from tests.support.faults import relative_distance
from tests.support.whole_runs import ENVIRONMENT, run_to_end, wait_for, weights_of
from tests.training.launching.test_rank_processes import SGD

HERE = "127.0.0.1"
TWO = Hosts(address=HERE, others=(("env",),))
FOUND = recommendation(gpt_spec(optimizer=SGD), 16, 3, environment=ENVIRONMENT)
_LOSES_HOST = f"""
import signal, subprocess, sys
process = subprocess.Popen(sys.argv[1:], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: process.terminate())
sys.exit({LOST_HOST_STATUS} if process.wait() < 0 else process.returncode)
"""
"""The words of a host that is lost when its agent is killed."""


def started(directory: Path, request: TrainingRequest, hosts: Hosts) -> TrainingProcess:
    """A run that was started on some hosts."""
    process = TrainingProcess(directory)
    process.start(FOUND, request, hosts=hosts)
    return process


def ranks_of(directory: Path) -> dict[int, int]:
    """The processes of the ranks of a run."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = dict(line.partition(b"=")[::2] for line in (folder / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if b"batchwright.training.worker" in words and str(directory).encode() in words and b"RANK" in variables:
            found[int(variables[b"RANK"])] = int(folder.name)
    return found


def wait_until(condition: Callable[[], object], process: TrainingProcess) -> None:
    """Wait for a condition while a run goes on."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.poll()
        assert time.monotonic() < deadline, process.paths.log.read_text()
        time.sleep(0.02)


class Recorded:
    """A started agent: its words, its environment, and the status that it ends with."""

    pid = 0

    def __init__(self, words: list[str], *, env: dict[str, str], **_: Any) -> None:
        self.words, self.env = words, env
        self.status = 0

    def wait(self) -> int:
        """Return the status."""
        return self.status


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[HostAgents, list[Recorded]]:
    """Agents of two hosts with two ranks each, which are recorded and not started."""
    monkeypatch.setattr(rank_processes, "subprocess", SimpleNamespace(Popen=Recorded, DEVNULL=None))
    paths = RunPaths(tmp_path)
    paths.log.write_text("rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 7)\nof an earlier start\n")
    agents = HostAgents(paths, 2, {"A": "1"}, TWO)
    started: Any = agents._processes
    return agents, started


def test_each_host_has_an_agent_that_meets_the_others(
    recorded: tuple[HostAgents, list[Recorded]], tmp_path: Path
) -> None:
    """The words of another host come before the command, and all have the address of the first one."""
    variables = []
    for number, agent in enumerate(recorded[1]):
        prefix, command = ((), *TWO.others)[number], training_command(tmp_path, 2, hosts=2)
        words = agent.words[len(tied([])) :]
        assert words[: len(prefix) + 1] == [*prefix, "env"]
        assert words[-len(command) :] == command
        variables.append(dict(word.split("=") for word in words[len(prefix) + 1 : -len(command)]))
        assert agent.env.items() >= {"A": "1", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2))}.items()
    assert [each.pop("PET_NODE_RANK") for each in variables] == ["0", "1"]
    assert variables[0] == variables[1]
    assert (variables[0]["PET_MASTER_ADDR"], variables[0]["PET_LOG_DIR"]) == (HERE, os.devnull)
    assert 0 < int(variables[0]["PET_MASTER_PORT"]) < 2**16


def test_the_report_of_an_agent_names_the_killed_rank(
    recorded: tuple[HostAgents, list[Recorded]], tmp_path: Path
) -> None:
    """A rank that SIGTERM has ended was stopped by its agent; an earlier start does not count."""
    agents, _ = recorded
    assert agents.crashed() is None
    with RunPaths(tmp_path).log.open("a") as log:
        for rank, code in ((2, -15), (3, -9)):
            log.write(
                f"  rank      : {rank} (local_rank: {rank % 2})\n  exitcode  : {code} (pid: 71)\n  error_file: <N/A>\n"
            )
    assert agents.crashed() == (3, -9)


def test_a_host_is_lost_if_its_words_say_so(recorded: tuple[HostAgents, list[Recorded]]) -> None:
    """By their exit status."""
    agents, started = recorded
    assert agents.lost_host is None
    started[1].status = LOST_HOST_STATUS
    assert agents.lost_host == 1


@pytest.mark.fleet
def test_two_hosts_train_what_one_host_trains_and_another_number_resumes(tmp_path: Path) -> None:
    """Two hosts with two ranks have the weights of four ranks on one host, also when one host resumes alone."""
    four = run_to_end(tmp_path / "one", FOUND, TrainingRequest(updates=8, processes_per_node=4))
    assert four.outcome is RunOutcome.SUCCEEDED, four.message
    two_hosts = TrainingRequest(updates=8, nodes=2, processes_per_node=2)
    both = wait_for(started(tmp_path / "two", two_hosts, TWO))
    assert both.outcome is RunOutcome.SUCCEEDED, both.message + tmp_path.joinpath("two/log.txt").read_text()
    first = wait_for(started(tmp_path / "mixed", two_hosts.model_copy(update={"updates": 5}), TWO))
    assert first.updates == 5, first.message
    alone = run_to_end(tmp_path / "mixed", FOUND, TrainingRequest(updates=8, processes_per_node=2))
    assert (alone.outcome, alone.resumed_from) == (RunOutcome.SUCCEEDED, 5), alone.message
    for name in ("two", "mixed"):
        assert relative_distance(weights_of(tmp_path / name), weights_of(tmp_path / "one")) < 1e-6


@pytest.mark.thorough
def test_a_killed_rank_ends_all_hosts_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result names the rank and the signal, and neither a rank nor a temporary folder of an agent is left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    request = TrainingRequest(updates=100_000, checkpoint_every=100_000, nodes=2, processes_per_node=2)
    process = started(tmp_path, request, TWO)
    wait_until(process.new_progress, process)
    os.kill(ranks_of(tmp_path)[3], signal.SIGKILL)
    began = time.monotonic()
    result = wait_for(process)
    seconds = time.monotonic() - began
    assert result.outcome is RunOutcome.FAILED
    assert result.message.startswith("the training process of rank 3 was killed"), result.message
    assert not ranks_of(tmp_path)
    assert not list(temporary.glob("torchelastic_*"))
    print(f"all ranks have ended {seconds:.1f} s after one was killed")  # noqa: T201 - a figure


@pytest.mark.fleet
def test_a_lost_host_is_trouble_of_the_system_and_the_run_resumes(tmp_path: Path) -> None:
    """The work is not blamed, and goes on from its checkpoint to the weights of an undisturbed run."""
    request = TrainingRequest(updates=400, checkpoint_every=10, nodes=2, processes_per_node=1)
    hosts = Hosts(address=HERE, others=((sys.executable, "-c", _LOSES_HOST),))
    process = started(tmp_path / "lost", request, hosts)
    paths = RunPaths(tmp_path / "lost")
    wait_until(paths.checkpointed_update, process)
    agent = int(Path(f"/proc/{ranks_of(paths.directory)[1]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    result = wait_for(process)
    assert result.trouble is not None, result.message
    assert result.trouble.cause == Cause.HOST_LOST
    assert not ranks_of(paths.directory)
    resumed = wait_for(started(paths.directory, request, hosts))
    assert resumed.outcome is RunOutcome.SUCCEEDED, resumed.message
    assert resumed.resumed_from
    calm = run_to_end(tmp_path / "calm", FOUND, TrainingRequest(updates=400, processes_per_node=2))
    assert calm.outcome is RunOutcome.SUCCEEDED, calm.message
    assert relative_distance(weights_of(paths.directory), weights_of(tmp_path / "calm")) < 1e-4


@pytest.mark.thorough
def test_a_run_over_hosts_is_stopped_with_a_checkpoint(tmp_path: Path) -> None:
    """SIGTERM reaches the ranks of every host, which stop after the same update."""
    request = TrainingRequest(updates=100_000, checkpoint_every=100_000, nodes=2, processes_per_node=1)
    process = started(tmp_path, request, TWO)
    wait_until(process.new_progress, process)
    stopped = process.stop(grace_seconds=60.0)
    assert (stopped.outcome, stopped.updates > 0) == (RunOutcome.STOPPED, True), stopped.message
    assert process.paths.checkpointed_update() == stopped.updates


def test_a_run_over_hosts_needs_its_hosts(tmp_path: Path) -> None:
    """On one host it is refused, with both numbers."""
    process = TrainingProcess(tmp_path)
    with pytest.raises(TrainingError, match="needs 2 hosts at once, but has 1"):
        process.start(FOUND, TrainingRequest(updates=1, nodes=2))
