"""Tunings and jobs of a registered command by a real worker on the CPU."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchwright.client import Client
from batchwright.client.documents.states import State
from batchwright.hardware.inventory import cpu
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import Outcome
from batchwright.schemas.training import CommandProgress
from batchwright_service.bootstrap import app_of, build
from batchwright_service.settings import Settings
from tests.support.service.asking import PATIENCE_SECONDS
from tests.support.service.registered import commands_file, recommended, submission
from tests.support.service.running import listening

LEAVES = """
import signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
Path("held").touch()
while not Path("fail").exists(): time.sleep(0.01)
raise ValueError("the data is gone")
"""


@pytest.fixture
def operator(tmp_path: Path) -> Path:
    """The folder of the operator's file."""
    return commands_file(tmp_path / "operator").parent


@pytest.fixture
def client(operator: Path, tmp_path: Path) -> Iterator[Client]:
    """A client of a service whose worker runs real programs."""
    settings = Settings(
        data_dir=tmp_path / "data", node_name="host", poll_seconds=0.05, commands=operator / "commands.yaml"
    )
    system = build(settings, devices=[cpu()], versions={"torch": "2.8"})
    with listening(app_of(system, settings)) as url, Client(url) as opened:
        yield opened


def request(**arguments: object) -> TuningRequest:
    """A tuning of the command."""
    return TuningRequest.model_validate(submission(**arguments))


def wait_for(path: Path) -> None:
    """Wait until a program has written a file."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.05)):
        if path.exists():
            return
        pause.wait(0.05)
    pytest.fail(f"{path} is not there")


@pytest.mark.thorough
@pytest.mark.torch
def test_a_command_is_tuned_and_its_plan_proven(client: Client) -> None:
    """Each sample takes 12 MiB: of the divisors of 60, 20 fit into 400 MiB, and 30 do not."""
    tuning = client.tunings.submit(request(width=12, packing=True))
    found = client.tunings.wait(tuning.id, PATIENCE_SECONDS).recommendation
    assert found is not None
    assert found.plan is not None
    assert found.plan.micro_batch_sizes == ((20, 20, 20),)
    assert found.evidence.plan_proof.endswith("3 backward passes of 20 samples per update: 60, as planned.")
    probes = [recorded.result for recorded in client.tunings.probes(tuning.id)]
    assert {(probe.micro_batch_size, probe.outcome) for probe in probes} >= {(20, Outcome.FIT), (30, Outcome.OOM)}
    assert all(probe.counted is not None for probe in probes if probe.outcome is Outcome.FIT)
    assert found.environment["ARROW_DEFAULT_MEMORY_POOL"] == "system"
    assert client.tunings.submit(request(width=12, packing=True)).id == tuning.id


def test_a_running_command_is_ended_by_a_cancellation(client: Client, operator: Path) -> None:
    """Nothing of it is left."""
    tuning = client.tunings.submit(request(width=12, note="hold"))
    wait_for(operator / "held")
    client.tunings.cancel(tuning.id)
    assert client.tunings.wait(tuning.id, PATIENCE_SECONDS).state is State.CANCELLED
    assert not [path for path in running_commands() if str(operator) in path]


@pytest.mark.thorough
@pytest.mark.torch
def test_a_job_is_counted_and_watched(client: Client) -> None:
    """Its events have the updates so far, and its result the samples and the peak beside the limit."""
    found = Recommendation.model_validate(recommended(cpu(), width=1))
    job = client.jobs.wait(client.jobs.submit(found).id, PATIENCE_SECONDS)
    assert job.result is not None
    assert (job.state, job.result.exit_status) == (State.SUCCEEDED, 0), job.result
    assert (job.result.updates, job.result.samples_seen) == (256, 4096)
    assert job.result.peak_bytes is not None
    assert job.result.limit_bytes is not None
    reported = [event.progress for event in client.jobs.events(job.id) if event.progress is not None]
    assert [progress.update for progress in reported] == sorted({progress.update for progress in reported})
    assert reported[-1] == job.progress
    assert isinstance(job.progress, CommandProgress)
    assert (job.progress.update, job.progress.updates) == (256, None)
    assert client.jobs.logs(job.id) == "'none'\n"
    assert client.jobs.checkpoints(job.id) == ()


def test_nothing_is_left_of_a_cancelled_or_failed_job(client: Client, operator: Path) -> None:
    """Not a grandchild in a session of its own, nor a command that ignores SIGTERM."""
    found = Recommendation.model_validate(recommended(cpu(), width=1))
    (operator / "program.py").write_text(LEAVES)
    for state in (State.CANCELLED, State.FAILED):
        (operator / "held").unlink(missing_ok=True)
        job = client.jobs.submit(found)
        wait_for(operator / "held")
        if state is State.CANCELLED:
            client.jobs.cancel(job.id)
        else:
            (operator / "fail").touch()
        ended = client.jobs.wait(job.id, PATIENCE_SECONDS)
        assert ended.state is state
        assert not [path for path in running_commands() if str(operator) in path]
    assert ended.problem is not None
    assert "exit status 1 after 0 updates: ValueError: the data is gone" in ended.problem.detail
    assert ended.result is not None
    assert ended.result.output.endswith("the data is gone")


def running_commands() -> list[str]:
    """The working folders of all processes."""
    folders = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            folders.append(str(entry.readlink()))
        except OSError:
            continue
    return folders


def test_a_worker_runs_nothing_that_its_own_file_does_not_register(operator: Path, tmp_path: Path) -> None:
    """A submission of an earlier registration fails with the remedy, before any probe."""
    settings = Settings(data_dir=tmp_path / "data", node_name="host", poll_seconds=0.05, worker=False)
    with_file = settings.model_copy(update={"commands": operator / "commands.yaml"})
    held = build(with_file.model_copy(update={"worker": True}), devices=[cpu()], versions={"torch": "2.8"})
    with listening(app_of(held, with_file)) as url, Client(url) as client:
        blocking = client.tunings.submit(request(width=12, note="hold"))
        wait_for(operator / "held")
        waiting = client.tunings.submit(request(width=13))
    path = commands_file(operator, environment={"CHANGED": "yes"})
    changed = settings.model_copy(update={"worker": True, "commands": path})
    system = build(changed, devices=[cpu()], versions={"torch": "2.8"})
    with listening(app_of(system, changed)) as url, Client(url) as client:
        for tuning in (blocking, waiting):
            ended = client.tunings.wait(tuning.id, PATIENCE_SECONDS)
            assert ended.state is State.FAILED
            assert ended.problem is not None
            assert "another registration than at the submission (environment): submit it again" in ended.problem.detail
