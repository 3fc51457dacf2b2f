"""After a failed pass the model's own state is as before it: attributes, queues, generators, a teacher's parameters."""

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from batchwright.errors import WorkloadError
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import Gathering
from batchwright.training.micro_batches.snapshot import Snapshot
from tests.support.faults import out_of_memory

both_gatherings = pytest.mark.parametrize("gathering", ["scratch", "in-place"])
SIZES = (4, 4, 4)
CUT: dict[Gathering, tuple[int, ...]] = {"scratch": (4, 2, 2, 2, 2), "in-place": (2,) * 6}
"""How the micro-batches of 12 samples run when the second does not fit."""


class Stateful(nn.Module):
    """A layer whose output is scaled by state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def scale(self, features: Tensor) -> Tensor | float:
        """The scale, which changes the state."""
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        """Keep the shape."""
        features: Tensor = self.layer(inputs)
        return features * self.scale(features.detach())


class Counter(Stateful):
    """A number that is replaced."""

    calls = 1

    def scale(self, _: Tensor) -> float:
        """Grow."""
        self.calls += 1
        return float(self.calls)


class Level(Stateful):
    """A tensor that is no buffer, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.level = torch.ones(3)

    def scale(self, features: Tensor) -> Tensor:
        """Follow the features."""
        self.level.mul_(0.5).add_(features.mean(0))
        return self.level.clone()


class Queue(Stateful):
    """The keys of earlier samples, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: deque[Tensor] = deque(maxlen=5)

    def scale(self, features: Tensor) -> Tensor:
        """The mean of the queue."""
        self.keys.extend(features)
        return torch.stack(list(self.keys)).mean(0)


class Range(Stateful):
    """A tuple that is replaced."""

    seen = (0.0, 1.0)

    def scale(self, features: Tensor) -> float:
        """The widest range so far."""
        self.seen = (min(self.seen[0], float(features.min())), self.seen[1] + 1.0)
        return self.seen[1] - self.seen[0]


class TorchNoise(Stateful):
    """A generator of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def scale(self, _: Tensor) -> Tensor:
        """Draw."""
        return torch.rand(3, generator=self.generator)


class NumpyNoise(Stateful):
    """The same of numpy's, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = [np.random.default_rng(3)]

    def scale(self, _: Tensor) -> float:
        """Draw."""
        return float(self.generators[0].random())


class PythonNoise(Stateful):
    """The same of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(3)

    def scale(self, _: Tensor) -> float:
        """Draw."""
        return self.generator.random()


class Teacher(Stateful):
    """Frozen parameters that follow the trained ones, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(3, 3).requires_grad_(False)

    def scale(self, features: Tensor) -> Tensor:
        """The teacher's output for the samples' mean."""
        for own, trained in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            own.data = own.data * 0.5 + trained.data
        output: Tensor = self.teacher(features.mean(0))
        return output


class EqualTeacher(Stateful):
    """Parameters that begin as those that they follow, and so are first changed in the second window, as in BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

    @torch.no_grad()
    def scale(self, features: Tensor) -> Tensor:
        """The teacher's output for the samples' mean."""
        for own, trained in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            own.lerp_(trained, 0.5)
        output: Tensor = self.teacher(features.mean(0))
        return output


STATES = [Counter, Level, Queue, Range, TorchNoise, NumpyNoise, PythonNoise, Teacher, EqualTeacher]


class Loop:
    """A model that is trained."""

    def __init__(self, kind: type[Stateful], gathering: Gathering) -> None:
        torch.manual_seed(0)
        self.model: Any = kind()
        self.inputs = torch.randn(12, 3)
        optimizer = torch.optim.SGD(self.model.layer.parameters(), 0.1)
        self.engine = GradientAccumulation(self.model, optimizer, gathering=gathering, checks_coupling=False)

    def update(self, *sizes: int, fails: Callable[[int], bool] = lambda _: False) -> Tensor:
        """The weights after an update in micro-batches of these sizes, of which some may not fit."""
        calls = 0

        def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
            nonlocal calls
            calls += 1
            outputs = model(batch)
            if fails(calls):
                raise out_of_memory()
            return outputs.square().sum(), len(batch)

        self.engine.update(list(torch.split(self.inputs, list(sizes))), loss)
        weight: Tensor = self.model.layer.weight.detach().clone()
        return weight


@both_gatherings
@pytest.mark.parametrize("kind", STATES)
def test_a_window_that_ran_out_of_memory_is_as_if_it_had_not(kind: type[Stateful], gathering: Gathering) -> None:
    """The second micro-batch of the second window fails after it has changed the state."""
    exact, failing = Loop(kind, gathering), Loop(kind, gathering)
    exact.update(*SIZES)
    failing.update(*SIZES)
    truth = exact.update(*CUT[gathering])
    found = failing.update(*SIZES, fails=lambda call: call == 2)
    assert failing.engine.failed_micro_batch == 4
    assert torch.allclose(found, truth, rtol=1e-6, atol=0)
    truth, found = exact.update(2, 2, 2, 2, 2, 2), failing.update(2, 2, 2, 2, 2, 2)
    assert torch.allclose(found, truth, rtol=1e-6, atol=0)


@both_gatherings
@pytest.mark.parametrize("kind", [kind for kind in STATES if kind is not Teacher])
def test_the_first_micro_batch_of_all_may_fail(kind: type[Stateful], gathering: Gathering) -> None:
    """Nothing is known of the model then, so that all of its attributes were captured."""
    truth = Loop(kind, gathering).update(2, 2, 2, 2, 2, 2)
    found = Loop(kind, gathering).update(*SIZES, fails=lambda call: call == 1)
    assert torch.allclose(found, truth, rtol=1e-6, atol=0)


@both_gatherings
def test_a_parameter_that_the_very_first_pass_has_changed_is_named(gathering: Gathering) -> None:
    """Copying all parameters before it would take the memory of a second model."""
    with pytest.raises(WorkloadError, match=r"changes the parameter `teacher.bias`.*begin with a smaller micro-batch"):
        Loop(Teacher, gathering).update(*SIZES, fails=lambda call: call == 1)


class Late(Counter):
    """A counter that begins to count in a later window."""

    counts = False

    def scale(self, features: Tensor) -> float:
        """Grow, from then on."""
        return super().scale(features) if self.counts else 1.0


@both_gatherings
def test_state_that_begins_to_change_later_is_told(gathering: Gathering) -> None:
    """The failed pass may have changed what was not captured: the module is named, and captured from then on."""
    loop, exact = Loop(Late, gathering), Loop(Late, gathering)
    loop.update(*SIZES)
    loop.model.counts = exact.model.counts = True
    with pytest.warns(UserWarning, match="changes `calls` of `Late`, which it did not in the first micro-batch"):
        loop.update(*SIZES, fails=lambda call: call == 2)
    exact.model.calls = loop.model.calls
    exact.model.load_state_dict(loop.model.state_dict())
    truth = exact.update(*((2,) + (1,) * 10 if gathering == "scratch" else (1,) * 12))
    found = loop.update(2, 2, 2, 2, 2, 2, fails=lambda call: call == 2)
    assert torch.allclose(found, truth, rtol=1e-6, atol=0)


def test_a_model_without_such_state_is_read_once() -> None:
    """The snapshots of later micro-batches have the random numbers and buffers alone."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    snapshot = Snapshot(model, torch.device("cpu"))
    snapshot.capture()
    model(torch.randn(4, 3))
    snapshot.learn()
    snapshot.capture()
    assert vars(snapshot)["_state"] is None


def test_a_tensor_that_a_pass_moves_to_another_device_has_changed() -> None:
    """It is not compared with what it was, which no operator of two devices allows."""
    model = Level()
    snapshot = Snapshot(model, torch.device("cpu"))
    snapshot.capture()
    model.level = model.level.to("meta")
    snapshot.learn()
    assert snapshot.has_changing_state
    snapshot.roll_back()
    assert model.level.device == torch.device("cpu")
