"""The parts of a run are built in the one order that keeps memory and random numbers right."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from batchwright.hardware.memory_devices.cpu import CpuDevice
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.training.assembly import build_run
from batchwright.training.launching.run_directory import RunPaths
from tests.support.factories import mlp_spec, recommendation
from tests.support.whole_runs import ENVIRONMENT, MIB

WORKLOAD = """
import torch

EVENTS = []


class Recorded:
    def build_model(self):
        EVENTS.append("model")
        return torch.nn.Linear(2, 1)

    def make_batch(self, size):
        return torch.randn(size, 2)

    def loss_terms(self, model, batch):
        return {"loss": (model(batch).sum(), float(len(batch)))}

    def dataset(self):
        EVENTS.append("data")
        torch.rand(3)
        return [torch.zeros(2)] * 8


def build():
    return Recorded()
"""


class RecordingDevice(CpuDevice):
    """A CPU that records its limit among the workload's events, and sets none."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self._events = events

    def limit(self, limit_bytes: int, margin: float = 0.0) -> None:
        """Record the limit."""
        del limit_bytes, margin
        self._events.append("limit")


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events of a workload in a module of its own, ``recorded_workload``."""
    (tmp_path / "recorded_workload.py").write_text(WORKLOAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "recorded_workload", raising=False)
    found: list[str] = importlib.import_module("recorded_workload").EVENTS
    return found


def plan(micro_batch_size: int) -> Recommendation:
    """A plan for the workload, with a limit."""
    spec = mlp_spec(model={"kind": "python", "target": "recorded_workload:build"}, data={"kind": "workload"})
    return recommendation(spec, 4, micro_batch_size, limit_bytes=400 * MIB, environment=ENVIRONMENT)


@pytest.mark.parametrize(
    ("micro_batch_size", "order"), [(4, ["data", "limit", "model"]), (2, ["data", "model", "limit", "model"])]
)
def test_the_limit_comes_after_the_data_and_the_check_and_before_the_model(
    tmp_path: Path, events: list[str], micro_batch_size: int, order: list[str]
) -> None:
    """The check for coupled samples, made where micro-batches are accumulated, builds a model of its own."""
    build_run(plan(micro_batch_size), TrainingRequest(), RunPaths(tmp_path / "run"), RecordingDevice(events))
    assert events == order


def test_the_weights_depend_on_the_seed_alone(tmp_path: Path, events: list[str]) -> None:
    """Neither random numbers drawn before nor the check for coupled samples change them."""
    weights = []
    for number, micro_batch_size in enumerate((4, 2)):
        torch.rand(1 + number)
        paths = RunPaths(tmp_path / str(number))
        parts = build_run(plan(micro_batch_size), TrainingRequest(), paths, RecordingDevice(events))
        weights.append(next(parts.engine.model.parameters()).detach().clone())
    assert torch.equal(*weights)
