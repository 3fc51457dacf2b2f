"""A tracker that fails is noted and left out; the run and its other trackers go on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from batchwright.errors import SpecError
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.trackers import requested_trackers
from batchwright.training.trackers.base import TrackedRun
from batchwright.training.trackers.requested_trackers import Trackers
from tests.support.factories import gpt_spec, recommendation
from tests.support.whole_runs import run_to_end


class Scripted:
    """A tracker that fails at one of its calls."""

    def __init__(self, at: str) -> None:
        self._at = at
        self.calls: list[str] = []

    def __call__(self, _: TrackedRun) -> Scripted:
        """Open it."""
        self._call("open")
        return self

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._at:
            raise RuntimeError(f"no server at {name}")

    def begin(self, _: int) -> None:
        """Begin."""
        self._call("begin")

    def log(self, _: int, __: Mapping[str, float]) -> None:
        """Log."""
        self._call("log")

    def close(self, _: RunOutcome) -> None:
        """Close."""
        self._call("close")


def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notes: list[str], **trackers: Scripted) -> Trackers:
    """Trackers by name, of a module of their own."""
    module = f"{requested_trackers.__package__}.scripted"
    monkeypatch.setitem(sys.modules, module, type(sys)(module))
    for name, tracker in trackers.items():
        monkeypatch.setattr(sys.modules[module], name, tracker, raising=False)
    monkeypatch.setattr(requested_trackers, "_CLASSES", {name: ("scripted", name) for name in trackers})
    monkeypatch.setattr(requested_trackers, "require_trackers", lambda _: None)
    return Trackers((*trackers, *trackers), TrackedRun(RunPaths(tmp_path), "a run", {}), notes.append)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("at", "made"),
    [
        ("open", ["open"]),
        ("begin", ["open", "begin"]),
        ("log", ["open", "begin", "log"]),
        ("close", ["open", "begin", "log", "log", "close"]),
    ],
)
def test_a_failure_is_noted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str, made: list[str]) -> None:
    """The failed tracker is called no more; the other one gets every call."""
    notes: list[str] = []
    failing, other = Scripted(at), Scripted("never")
    trackers = opened(monkeypatch, tmp_path, notes, wandb=failing, mlflow=other)
    trackers.begin(0)
    trackers.log(1, {})
    trackers.log(2, {})
    trackers.close(RunOutcome.SUCCEEDED)
    trackers.close(RunOutcome.SUCCEEDED)
    assert failing.calls == made
    assert other.calls == ["open", "begin", "log", "log", "close"]
    assert notes == [f"`wandb` no longer tracks this run: RuntimeError: no server at {at}"]


def test_a_failure_of_the_runs_own_disk_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TensorBoard's events are in the run's folder."""
    trackers = opened(monkeypatch, tmp_path, [], tensorboard=Scripted("log"))
    with pytest.raises(RuntimeError, match="no server"):
        trackers.log(1, {})


@pytest.mark.usefixtures("forked")
def test_a_run_without_the_package_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run fails before its first update."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(SpecError, match=r"pip install 'batchwright\[mlflow\]'") as caught:
        Trackers(("tensorboard", "mlflow"), TrackedRun(RunPaths(tmp_path), "a run", {}), pytest.fail)
    assert caught.value.problems[0].field == "trackers.1"
    result = run_to_end(tmp_path / "run", recommendation(gpt_spec()), TrainingRequest(updates=1, trackers=("mlflow",)))
    assert (result.outcome, result.updates) == (RunOutcome.FAILED, 0)
    assert "batchwright[mlflow]" in result.message
