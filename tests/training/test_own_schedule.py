"""Learning-rate schedules of a `python` workload's own: rates, checkpoints, and what is refused."""

from pathlib import Path

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, OneCycleLR, SequentialLR

from batchwright.errors import CheckpointError, SpecError, WorkloadError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, TrainingProgress
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.assembly import build_run
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.trainer import Trainer
from batchwright.workloads.build import build_workload, check_workload
from tests.support.factories import mlp_spec, recommendation

_MODULE = """
import torch
from torch.optim import lr_scheduler as schedulers


class Unkept(schedulers.LambdaLR):
    def state_dict(self):
        return {{"path": __import__("pathlib").Path()}}


class Workload:
    def build_model(self): return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2))
    def make_batch(self, size): return torch.randn(size, 4)
    def loss_terms(self, model, batch): return {{"loss": (model(batch).square().sum(), len(batch))}}
    def dataset(self): return torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    def build_optimizer(self, parameters): return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    def build_lr_scheduler(self, optimizer, updates): return {returned}


def build(): return Workload()
"""
"""A workload of this module's tests; ``returned`` is an expression over ``optimizer`` and ``updates``."""

_ONE_CYCLE = "schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=updates)"
_MILESTONES = "schedulers.MultiStepLR(optimizer, [2, 5])"
_SEQUENCE = (
    "schedulers.SequentialLR(optimizer, [schedulers.LinearLR(optimizer, total_iters=3), "
    "schedulers.CosineAnnealingLR(optimizer, updates - 3)], milestones=[3])"
)


def spec_returning(folder: Path, monkeypatch: pytest.MonkeyPatch, returned: str, **changes: object) -> WorkloadSpec:
    """The spec of a workload whose ``build_lr_scheduler`` returns this expression."""
    name = f"scheduled_{abs(hash((str(folder), returned)))}"  # modules of other tests stay imported
    (folder / f"{name}.py").write_text(_MODULE.format(returned=returned))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return mlp_spec(model={"kind": "python", "target": f"{name}:build"}, data={"kind": "workload"}, **changes)


def loop_for(directory: Path, found: Recommendation, updates: int) -> Trainer:
    """A loop in this process."""
    return Trainer(build_run(found, TrainingRequest(updates=updates), RunPaths(directory), open_device("cpu")))


def rates_of_torch(returned: str, updates: int) -> list[float]:
    """The rate of each update in a plain loop, in which torch's scheduler is stepped after each optimizer step."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    scheduler: LRScheduler
    match returned:
        case _ if returned == _ONE_CYCLE:
            scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=updates)
        case _ if returned == _MILESTONES:
            scheduler = MultiStepLR(optimizer, [2, 5])
        case _:
            parts = [LinearLR(optimizer, total_iters=3), CosineAnnealingLR(optimizer, updates - 3)]
            scheduler = SequentialLR(optimizer, parts, milestones=[3])
    rates: list[float] = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        parameter.sum().backward()  # type: ignore[no-untyped-call] # of torch
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("returned", [_ONE_CYCLE, _MILESTONES, _SEQUENCE])
def test_each_update_has_the_rate_of_torchs_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str
) -> None:
    """One step an update, whatever the accumulation: the rates are those of a plain loop, to the bit."""
    spec = spec_returning(tmp_path, monkeypatch, returned)
    made: list[TrainingProgress] = []
    loop_for(tmp_path / "run", recommendation(spec, 16, 5), updates=8).run(made.append)
    assert [len(progress.micro_batch_sizes) for progress in made[:3]] == [4, 4, 4]
    assert [progress.learning_rate for progress in made] == rates_of_torch(returned, 8)


@pytest.mark.parametrize("returned", [_ONE_CYCLE, _MILESTONES, _SEQUENCE])
def test_a_stopped_run_resumes_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str) -> None:
    """Stopped after 3 of 8 updates and resumed: the rates that follow and the weights are those of a whole run."""
    found = recommendation(spec_returning(tmp_path, monkeypatch, returned), 16, 5)
    undisturbed: list[TrainingProgress] = []
    whole = loop_for(tmp_path / "whole", found, updates=8)
    whole.run(undisturbed.append)
    first = loop_for(tmp_path / "cut", found, updates=8)
    assert first.run(lambda _: None, lambda: first.position.update >= 3) is RunOutcome.STOPPED
    second, made = loop_for(tmp_path / "cut", found, updates=8), list[TrainingProgress]()
    assert second.resume() == 3
    assert second.run(made.append) is RunOutcome.SUCCEEDED
    assert [progress.learning_rate for progress in made] == [progress.learning_rate for progress in undisturbed[3:]]
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_another_number_of_updates_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule was built over the updates of the run, so its checkpoints cannot go on with more of them."""
    found = recommendation(spec_returning(tmp_path, monkeypatch, _ONE_CYCLE), 16, 5)
    loop_for(tmp_path / "run", found, updates=4).run(lambda _: None)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        loop_for(tmp_path / "run", found, updates=8).resume()


def test_a_schedule_of_the_spec_beside_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two would be ignored: the check of a spec names the field and both remedies."""
    spec = spec_returning(tmp_path, monkeypatch, _ONE_CYCLE, schedule={"name": "cosine"})
    with pytest.raises(
        SpecError, match=r"schedule.*Workload also has a `build_lr_scheduler`: leave out `schedule`, or remove"
    ):
        check_workload(spec)
    build_workload(spec_returning(tmp_path, monkeypatch, _ONE_CYCLE))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "must return a torch.optim.lr_scheduler.LRScheduler, not NoneType"),
        ("(lambda update: 0.1)", "must return a torch.optim.lr_scheduler.LRScheduler, not function"),
        ("schedulers.ReduceLROnPlateau(optimizer)", "ReduceLROnPlateau is stepped with a metric"),
        (
            "schedulers.ConstantLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))",
            "a ConstantLR of another optimizer than the one it was given",
        ),
        ("Unkept(optimizer, lambda update: 1.0)", r"state_dict\(\) of Unkept cannot be kept in a checkpoint"),
    ],
)
def test_what_is_no_schedule_of_updates_is_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str, words: str
) -> None:
    """The message names what was returned and what is needed."""
    found = recommendation(spec_returning(tmp_path, monkeypatch, returned), 16, 5)
    with pytest.raises(WorkloadError, match=words):
        loop_for(tmp_path / "run", found, updates=4)
