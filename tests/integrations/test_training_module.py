"""Samples of a loader's data for probes, and a module with its optimizer in the process of one."""

import importlib
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from batchwright.errors import SpecError
from batchwright.workloads.build import build_model
from tests.support.factories import python_spec

pytestmark = [pytest.mark.exports, pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def integration() -> Any:
    """The module under test, imported only where the library is installed."""
    return importlib.import_module("batchwright.integrations.training_module")


class Stream(IterableDataset[torch.Tensor]):
    """Samples without an end, each longer than the one before."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        length = 0
        while True:
            length += 1
            yield torch.zeros(length)


def lengths(found: list[torch.Tensor]) -> list[int]:
    """The lengths of samples of one axis."""
    return [len(sample) for sample in found]


def test_the_largest_samples_of_the_whole_data_are_found(integration: Any) -> None:
    """A batch of them is the worst case; they differ."""
    data = [torch.zeros(length) for length in range(1000)]

    found = lengths(integration.largest_samples(DataLoader(data)))  # type: ignore[arg-type] # a list will do

    assert len(found) == 64
    assert found == sorted(found, reverse=True)
    assert found[0] >= 990


def test_a_stream_is_read_at_its_beginning(integration: Any) -> None:
    """It may have no end."""
    assert lengths(integration.largest_samples(DataLoader(Stream())))[0] == 256


class OneShot(IterableDataset[torch.Tensor]):
    """A stream that can be read once."""

    def __init__(self, source: Iterator[torch.Tensor]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.source


def test_a_stream_keeps_the_samples_that_were_read(integration: Any) -> None:
    """The fit reads all of them."""
    stream = OneShot(iter([torch.zeros(length) for length in range(400)]))
    assert len(integration.largest_samples(DataLoader(stream))) == 64
    assert lengths(list(stream)) == list(range(400))


def test_a_stream_that_cannot_be_copied_is_refused(integration: Any) -> None:
    """Samples that are read from a generator would be missing from the fit."""
    stream = OneShot(torch.zeros(length) for length in range(400))
    with pytest.raises(SpecError, match=r"train_dataloader: is a stream that cannot be copied .*generator.*`__iter__`"):
        integration.largest_samples(DataLoader(stream))
    assert len(list(stream)) == 400


@pytest.mark.parametrize(
    "data",
    [
        [{"input_ids": [0] * length} for length in (3, 9, 6)],
        [(np.zeros((2, length)), 0) for length in (3, 9, 6)],
        [{"a": (torch.zeros(length), "name")} for length in (3, 9, 6)],
    ],
    ids=["lists", "arrays", "nested"],
)
def test_lists_arrays_and_nested_samples_have_a_size(integration: Any, data: list[object]) -> None:
    """Before they are collated."""
    assert integration.largest_samples(DataLoader(data))[0] is data[1]  # type: ignore[arg-type] # a list will do


def test_an_optimizer_has_the_parameters_of_its_module(integration: Any, tmp_path: Path) -> None:
    """Of each copy that is read."""
    module = nn.Linear(2, 2)
    file = tmp_path / "module"
    integration.save(file, module, torch.optim.AdamW(module.parameters(), lr=0.5), [torch.zeros(2)], torch.stack)
    workload = integration.TrainingModule(str(file))

    copies = [workload.build_model() for _ in range(2)]
    optimizer = workload.build_optimizer([])

    assert [id(parameter) for parameter in copies[1].parameters()] == [
        id(parameter) for parameter in optimizer.param_groups[0]["params"]
    ]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert copies[0].weight is not copies[1].weight
    moved = [nn.Parameter(parameter.detach().clone()) for parameter in copies[1].parameters()]
    assert all(map(operator.is_, workload.build_optimizer(moved).param_groups[0]["params"], moved))


def test_a_module_keeps_its_modes(integration: Any, tmp_path: Path) -> None:
    """Lightning's fit changes none, so that a BatchNorm in eval mode has fixed statistics in probes too."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    integration.save(tmp_path / "module", module, torch.optim.AdamW(module.parameters()), [], torch.stack)
    workload = integration.TrainingModule(str(tmp_path / "module"))

    assert not any(each.training for each in build_model(python_spec("a:b"), workload).modules())


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_training_step_has_its_optimizer_and_schedulers(integration: Any, tmp_path: Path, package: str) -> None:
    """As in a fit, with either package; nothing is logged."""
    library: Any = importlib.import_module(package)
    configs: Any = importlib.import_module(f"{package}.utilities.types")

    class Module(library.LightningModule):  # type: ignore[misc] # of either package
        """A module that logs its rates."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            """A loss multiplied by the rate and the epochs of the scheduler."""
            rate = self.optimizers().param_groups[0]["lr"]
            self.log("rate", rate)
            loss: torch.Tensor = self.layer(batch).square().mean() * rate * (1 + self.lr_schedulers().last_epoch)
            return loss

    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module.trainer = library.Trainer(accelerator="cpu", devices=1, barebones=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: float(module.layer.in_features) / 2)
    module.trainer.strategy.lr_scheduler_configs = [configs.LRSchedulerConfig(scheduler)]
    integration.save(tmp_path / "module", module, optimizer, [torch.ones(2)], torch.stack)
    workload = integration.TrainingModule(str(tmp_path / "module"))

    built = workload.build_model()
    loss = workload.loss_terms(built, workload.make_batch(4))

    assert loss.item() == pytest.approx(0.5 * module.layer(torch.ones(4, 2)).square().mean().item())
    assert built._trainer is None  # a copy of the model must not copy it


def test_a_batch_repeats_the_samples(integration: Any, tmp_path: Path) -> None:
    """From the largest on."""
    module = nn.Linear(2, 2)
    samples = [torch.tensor(3), torch.tensor(2)]
    integration.save(tmp_path / "module", module, torch.optim.AdamW(module.parameters()), samples, torch.stack)

    assert integration.TrainingModule(str(tmp_path / "module")).make_batch(5).tolist() == [3, 2, 3, 2, 3]


def test_the_process_of_a_probe_has_the_settings_of_the_caller(integration: Any, tmp_path: Path) -> None:
    """Also where the data's function refers to a module that torch has replaced by an object."""
    module, file = nn.Linear(2, 2), tmp_path / "module"
    backend = torch.backends.cudnn
    before = backend.benchmark
    backend.benchmark = True
    try:
        integration.save(
            file, module, torch.optim.AdamW(module.parameters()), [torch.zeros(2)], lambda _: backend.benchmark
        )
        backend.benchmark = False
        assert integration.TrainingModule(str(file)).make_batch(1) is True
    finally:
        backend.benchmark = before


def test_samples_that_are_views_are_written_without_the_rest_of_the_data(integration: Any, tmp_path: Path) -> None:
    """64 samples of a ``TensorDataset`` would else be 64 times the data."""
    module, data = nn.Linear(2, 2), torch.arange(1_000_000)
    file = tmp_path / "module"

    integration.save(file, module, torch.optim.AdamW(module.parameters()), [data[7:9], data[3:5]], torch.stack)

    assert file.stat().st_size < 100_000
    assert integration.TrainingModule(str(file)).make_batch(2).tolist() == [[7, 8], [3, 4]]
