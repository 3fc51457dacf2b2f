"""Tunings that Ctrl-C, a scheduler, a time limit or a failing host stops, and those that go on from them."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from batchwright.cli import running
from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.driving import foreground
from batchwright.errors import DeviceError, ProbeCancelledError
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import ProbeResult
from batchwright.schemas.unfinished import UnfinishedTuning
from tests.planning.test_command_tunings import answer, counted
from tests.support.command import called
from tests.support.factories import gpt_spec, plan_of

COMMAND = ("--", sys.executable, "train.py", "{micro_batch_size}", "{gradient_accumulation_steps}")
SIGNALS = pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)


class Clock(SimpleNamespace):
    """A clock that the test advances."""

    seconds: float = 0.0

    def monotonic(self) -> float:
        """The time."""
        return self.seconds


class Stop:
    """A reason to stop a tuning while a probe runs."""

    def __init__(self, at: int, how: signal.Signals | Clock | Exception, *, proves_plans: bool = False) -> None:
        self.at, self.how, self.proves_plans = at, how, proves_plans

    def __call__(self, should_stop: Callable[[], bool]) -> None:
        """Stop."""
        if isinstance(self.how, signal.Signals):
            os.kill(os.getpid(), self.how)
            time.sleep(60)
        elif isinstance(self.how, Clock):
            self.how.seconds += 3600.0
            assert should_stop()
            raise ProbeCancelledError("the tuning was stopped")
        else:
            raise self.how


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line, tuning a command of which 32 samples fit, until ``stop``."""

    def run(*arguments: str | Path, stop: Stop | None = None) -> subprocess.CompletedProcess[str]:
        class Supervisor(CommandSupervisor):
            probes = 0

            def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
                self.probes += 1
                if stop is not None and self.probes == stop.at:
                    stop(should_stop)
                proves = stop is None or stop.proves_plans or request.runs_plan
                return answer(request, 32, counted=counted(request, of_plan=proves))

        monkeypatch.setattr(foreground, "CommandSupervisor", Supervisor)
        if stop is not None and isinstance(stop.how, Clock):
            monkeypatch.setattr(foreground, "time", stop.how)
        return called("tune", "--effective-batch-size", "128", "--device", "cpu", *arguments, *COMMAND)

    return run


Tune = Callable[..., subprocess.CompletedProcess[str]]


@SIGNALS
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_interrupted_tuning_goes_on(
    tune: Tune, tmp_path: Path, number: signal.Signals, status: int, at: int
) -> None:
    """From its file, by the command that it printed, to the recommendation of one that was not interrupted."""
    output, whole = tmp_path / "found.json", tmp_path / "whole.json"
    stopped = tune("-o", output, stop=Stop(at, number))
    assert (stopped.returncode, stopped.stdout) == (status, "")
    *_, said = stopped.stderr.partition("Interrupted")
    if at == 1:
        assert said == " before the first probe ended\n"
        assert not output.exists()
        return
    assert said.startswith(f" after {at - 1} probe{'s' if at > 2 else ''}: ")
    assert "fits so far\nNothing is lost. Go on with: batchwright tune " in said
    left = UnfinishedTuning.model_validate_json(output.read_text())
    assert (left.stopped_by, len(left.probes)) == ("interrupted", at - 1)
    words = shlex.split(said.rpartition("Go on with: batchwright ")[2])
    assert words[-len(COMMAND) - 2 :] == ["--resume", str(output), *COMMAND]
    done = tune(*words[words.index("cpu") + 1 : -len(COMMAND)])
    assert done.returncode == 0, done.stderr
    assert tune("-o", whole).returncode == 0
    resumed, found = (Recommendation.model_validate_json(path.read_text()) for path in (output, whole))
    assert resumed.evidence.probes[: at - 1] == left.probes
    assert resumed.evidence.proof == found.evidence.proof
    assert (plan_of(resumed), resumed.largest_micro_batch_size) == (plan_of(found), found.largest_micro_batch_size)


@SIGNALS
def test_an_interrupt_after_a_proven_plan_leaves_the_plan(
    tune: Tune, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """In its file, although a larger size was still to be tried. The tuning can go on from there."""
    output = tmp_path / "recommendation.json"
    done = tune("-o", output, stop=Stop(3, number, proves_plans=True))
    assert done.returncode == status, done.stderr
    found = Recommendation.model_validate_json(output.read_text())
    assert found.evidence.proof.stopped_by == "interrupted"
    assert "plan around a micro-batch that fits" in done.stdout
    assert done.stderr.startswith("checking the command ...")
    assert "Interrupted after 2 probes: " in done.stderr
    assert tune("-o", output, "--resume", output).returncode == 0
    resumed = Recommendation.model_validate_json(output.read_text())
    assert (resumed.evidence.proof.fits, resumed.evidence.proof.stopped_by) == (32, "oom")
    again = tune("--resume", output)
    assert again.returncode == 2
    assert "is a tuning that has ended" in again.stderr


@pytest.mark.parametrize("proves_plans", [False, True])
def test_a_time_limit_ends_a_tuning(tune: Tune, tmp_path: Path, *, proves_plans: bool) -> None:
    """With the plan that was proven, or with exit code 4 and the probes."""
    output = tmp_path / "found.json"
    done = tune("-o", output, "--time-limit", "50m", stop=Stop(3, Clock(), proves_plans=proves_plans))
    assert "topped by the time limit after 2 probes: " in done.stderr
    assert "Go on with: batchwright tune" in done.stderr
    if proves_plans:
        found = Recommendation.model_validate_json(output.read_text())
        assert (done.returncode, found.evidence.proof.stopped_by) == (0, "time-limit")
        assert not found.evidence.proof.is_conclusive
    else:
        assert (done.returncode, done.stdout) == (4, "")
        assert UnfinishedTuning.model_validate_json(output.read_text()).stopped_by == "time-limit"
        assert "no plan was proven" in done.stderr


def test_a_device_that_fails_leaves_the_probes(tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file to write to, in a temporary one; the error is JSON on request."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = tune("--json", stop=Stop(3, DeviceError("cuda:0 fell off the bus")))
    assert done.returncode == 5
    error = json.loads(done.stdout)
    assert error["message"] == "cuda:0 fell off the bus"
    left = Path(shlex.split(error["notes"][0])[shlex.split(error["notes"][0]).index("--resume") + 1])
    assert left.is_relative_to(tmp_path)
    assert UnfinishedTuning.model_validate_json(left.read_text()).stopped_by == "error"


def test_probes_of_another_request_are_refused(tune: Tune, tmp_path: Path) -> None:
    """With what differs; an unfinished tuning is no recommendation anywhere."""
    output = tmp_path / "found.json"
    tune("-o", output, stop=Stop(3, signal.SIGINT))
    other = tune("--resume", output, "--memory-limit", "1GiB", "--granularity", "2")
    assert other.returncode == 2
    assert "request.granularity: is 1 in the stopped tuning" in " ".join(other.stderr.split())
    assert "memory_limit: is " in other.stderr
    with pytest.raises(ValidationError):
        Recommendation.model_validate_json(output.read_text())
    for words in (("train", output), ("export", output, "--format", "slurm"), ("verify", output, *COMMAND)):
        done = called(*words)
        assert done.returncode == 2
        assert "is a tuning that was stopped before it had a plan: go on with" in done.stderr


@SIGNALS
def test_an_interrupt_of_a_tuning_that_has_no_probes_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    """Interrupted by Ctrl-C or a scheduler: the signal's exit code, and a word."""

    def tune(*_: object) -> Recommendation:
        os.kill(os.getpid(), number)
        time.sleep(60)
        raise AssertionError("no signal came")

    spec = tmp_path / "spec.json"
    spec.write_text(gpt_spec().model_dump_json())
    monkeypatch.setattr(running, "tune", tune)
    done = called("tune", spec, "--effective-batch-size", "8", "--device", "cpu", "--json")
    assert done.returncode == status
    word = "Interrupted" if number is signal.SIGINT else "Terminated"
    assert json.loads(done.stdout) == {"error": "EndedBySignalError", "message": word}
