"""What is counted of programs whose samples are not simply the rows of one call, one way of a program each."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.hardware.inventory import find_device
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import CountedUpdates, Outcome

pytestmark = pytest.mark.torch

SIZE, STEPS = 3, 2
PROGRAM = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
way, size, steps = open(sys.argv[1]).read(), int(sys.argv[2]), int(sys.argv[3])
model, second = nn.Linear(8, 8), nn.Linear(8, 8)
optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
if way == "frozen":
    optimizers[0].add_param_group({"params": second.requires_grad_(False).parameters()})

class Stream(IterableDataset):
    def __iter__(self):
        scale = nn.Linear(8, 8)
        while True:
            yield scale(torch.ones(8)).detach() if way == "transform" else torch.ones(8)

def loader(samples=1000, times=1):
    return DataLoader(TensorDataset(torch.ones(samples, 8)), batch_size=times * size)

def endless(make):
    while True:
        yield from make()

def micro_batch():
    if way == "two-loaders":
        (first,), (more,) = next(batches), next(others)
        model(torch.cat([first, more])).sum().backward()
    elif way == "time-first":
        model(torch.ones(5, size, 8)).sum().backward()
    elif way == "two-losses":
        hidden = model(next(batches)[0])
        hidden.sum().backward(retain_graph=True)
        hidden.square().sum().backward()
    elif way == "autograd-grad":
        inputs = list(model.parameters())
        penalized = torch.ones(size, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(model(penalized).sum(), penalized, create_graph=True)
        for parameter, gradient in zip(inputs, torch.autograd.grad(model(torch.ones(size, 8)).sum(), inputs)):
            parameter.grad = gradient + (parameter.grad if parameter.grad is not None else 0)
    elif way == "critic":
        second(torch.ones(size, 8)).sum().backward()
        with torch.no_grad():
            made = model(torch.ones(size, 8))
        second(made).sum().backward()
    elif way == "not-trained":
        with torch.no_grad():
            model(torch.ones(64, 8))
        second(torch.ones(32, 8))
        nn.Flatten()(torch.ones(16, 8))
        model(torch.ones(size, 8)).sum().backward()
    elif way == "solver":
        state = model(torch.ones(size, 8))
        for _ in range(update):
            state = model(state)
        state.sum().backward()
    elif way == "outputs":
        class Found:
            logits = model(torch.ones(size, 8))
        Found.logits.sum().backward()
    else:
        batch = next(batches)
        model(batch[0] if isinstance(batch, (list, tuple)) else batch).sum().backward()

batches = endless(loader)
if way in ("stream", "transform"):
    batches = iter(DataLoader(Stream(), batch_size=size))
if way == "epoch-ends":
    batches = endless(lambda: loader(2 * size * steps + 1))
others = endless(lambda: loader(times=7))
if way == "critic":
    optimizers.append(torch.optim.SGD(second.parameters(), 0.1))
for update in range(100):
    if way == "critic":
        for _ in range(steps):
            micro_batch()
        optimizers[1].step()
        optimizers[1].zero_grad()
        if update % 3 == 2:
            for _ in range(steps):
                second(model(torch.ones(size, 8))).sum().backward()
            optimizers[1].zero_grad()
            optimizers[0].step()
            optimizers[0].zero_grad()
    elif way == "ramp" and update < 4:
        micro_batch()
        optimizers[0].step()
        optimizers[0].zero_grad()
    else:
        for _ in range(steps):
            micro_batch()
        optimizers[0].step()
        optimizers[0].zero_grad()
"""


def request(folder: Path, steps: str, samples: int) -> ProbeRequest:
    """A probe of the program, which is told its steps by a word."""
    words = [sys.executable, "program.py", "way", "{micro_batch_size}", steps]
    environment = {"OMP_NUM_THREADS": "1"}
    model = {"kind": "command", "argv": words, "environment": environment, "working_directory": str(folder)}
    fields = {"micro_batch_size": SIZE, "samples_per_window": samples, "device": "cpu", "counts_plan": True}
    return ProbeRequest.model_validate({"spec": {"model": model}, **fields})


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], CountedUpdates]]:
    """What is counted of a way of the program. The command is the same for all, so that it is imported once."""
    folder = tmp_path_factory.mktemp("samples")
    (folder / "program.py").write_text(PROGRAM)
    probe = request(folder, "{gradient_accumulation_steps}", SIZE * STEPS)
    with CommandSupervisor(find_device("cpu")) as supervisor:

        def run(way: str) -> CountedUpdates:
            (folder / "way").write_text(way)
            result = supervisor.run(probe)
            assert result.outcome is Outcome.FIT, result
            assert result.counted is not None
            return result.counted

        yield run


@pytest.mark.parametrize(
    ("way", "samples"),
    [
        pytest.param("plain", {"loader 1": 6, "dimension 0": 6, "dimension 1": 16}, id="a data loader"),
        pytest.param("two-loaders", {"loader 1": 6, "loader 2": 42, "dimension 0": 48, "dimension 1": 16}, id="two"),
        pytest.param("stream", {"loader 1": 6, "dimension 0": 6, "dimension 1": 16}, id="an iterable data set"),
        pytest.param("transform", {"loader 1": 6, "dimension 0": 6, "dimension 1": 16}, id="a transform is a module"),
        pytest.param("not-trained", {"dimension 0": 6, "dimension 1": 16}, id="calls without a backward pass"),
        pytest.param("outputs", {"dimension 0": 6, "dimension 1": 16}, id="an output of a class of its own"),
    ],
)
def test_the_samples_of_an_update_are_those_planned(
    counted: Callable[[str], CountedUpdates], way: str, samples: dict[str, int]
) -> None:
    """By one of the things that may count them."""
    found = counted(way)
    assert {name: counts[-1] for name, counts in found.ranks[0].samples.items()} == samples
    assert (found.ranks[0].backward_passes[-1], found.as_planned) == (STEPS, True)


def test_a_batch_with_time_first_is_left_open(counted: Callable[[str], CountedUpdates]) -> None:
    """Another size of the tuning confirms the second dimension."""
    found = counted("time-first")
    assert {name: counts[-1] for name, counts in found.ranks[0].samples.items()}["dimension 1"] == SIZE * STEPS
    assert found.as_planned is None


def test_two_losses_of_a_micro_batch_are_confirmed_by_the_loader(counted: Callable[[str], CountedUpdates]) -> None:
    """The second backward pass reaches no call of its own."""
    found = counted("two-losses")
    assert (found.ranks[0].backward_passes[-1], found.as_planned) == (2 * STEPS, True)
    assert found.ranks[0].samples["dimension 0"][-1] == SIZE * STEPS


def test_gradients_by_autograd_are_backward_passes(counted: Callable[[str], CountedUpdates]) -> None:
    """Those for the parameters, and not a penalty that is differentiated again."""
    found = counted("autograd-grad")
    assert (found.ranks[0].backward_passes[-1], found.as_planned) == (STEPS, True)


def test_a_generator_is_awaited_and_has_updates_of_its_own(counted: Callable[[str], CountedUpdates]) -> None:
    """The critic steps three times first, goes backward twice in a micro-batch, and discards what it did not make."""
    found = counted("critic")
    assert [set(rank.backward_passes) for rank in found.ranks] == [{2 * STEPS}, {STEPS}]
    assert len(found.ranks[1].backward_passes) == 2
    assert not found.unseen


@pytest.mark.parametrize("way", ["ramp", "epoch-ends"])
def test_smaller_updates_are_passed_by(counted: Callable[[str], CountedUpdates], way: str) -> None:
    """Before the first whole one, and where an epoch ends."""
    found = counted(way)
    assert found.as_planned is True
    assert found.statement == f"{STEPS} backward passes of {SIZE} samples per update: {SIZE * STEPS}, as planned"


def test_frozen_parameters_of_an_optimizer_are_named(counted: Callable[[str], CountedUpdates]) -> None:
    """They take gradients and state once they are unfrozen, also where their group was added later."""
    assert "72 parameters" in counted("frozen").unseen["parameters-without-gradient"]


@pytest.mark.parametrize("way", ["plain", "two-losses"])
def test_a_command_that_takes_its_size_only_is_timed_by_what_it_makes(way: str, tmp_path: Path) -> None:
    """A program without accumulation is timed by its own micro-batches, not by the plan's or by two losses of each."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "way").write_text(way)
    with CommandSupervisor(find_device("cpu")) as supervisor:
        result = supervisor.run(request(tmp_path, "2", 24 * SIZE))
    assert result.timing is not None
    assert result.timing.micro_batch_sizes == (SIZE, SIZE)
    assert result.counted is not None
    assert result.counted.accumulation_steps is None


def test_a_model_that_is_called_ever_more_often_is_named(counted: Callable[[str], CountedUpdates]) -> None:
    """As by an adaptive solver, whose later updates take more memory."""
    assert "calls-vary" in counted("solver").unseen
    for way in ("plain", "critic", "two-losses", "two-loaders"):
        assert "calls-vary" not in counted(way).unseen
