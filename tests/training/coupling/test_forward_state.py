"""State that forward passes change: more micro-batches change it more often, which no accumulation makes exact."""

from collections import deque
from collections.abc import Callable
from operator import attrgetter, itemgetter, setitem
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.profiler import ProfilerActivity, profile

from batchwright.training.coupling.check import check_coupling
from batchwright.training.coupling.report import CouplingReport
from batchwright.training.micro_batches.forward_state import ModelState
from batchwright.training.micro_batches.splitting import sliced
from tests.support.coupled import WIDTH, Case, squares

CPU = torch.device("cpu")


def report_on(model: nn.Module) -> CouplingReport:
    """The check on eight samples."""
    torch.manual_seed(0)
    return check_coupling(model, Case(model, squares), sliced(torch.randn(8, WIDTH)), CPU)


def between(middle: nn.Module) -> nn.Sequential:
    """A module between two layers."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH))


def converged(layer: nn.Module) -> nn.Module:
    """A layer whose power iterations have found the norm of its weights."""
    for _ in range(2000):
        layer(torch.zeros(1, WIDTH))
    return layer


@pytest.mark.parametrize(
    ("norm", "path", "state"),
    [
        (parametrizations.spectral_norm, "1.parametrizations.weight.0", "_u, _v"),
        (spectral_norm, "1", "weight_u, weight_v"),
    ],
)
def test_power_iterations_show_once_the_weights_have_changed(norm: object, path: str, state: str) -> None:
    """A new model's iterations have converged, and lag behind the weights only after an update."""
    torch.manual_seed(1)
    report = report_on(between(converged(norm(nn.Linear(WIDTH, WIDTH)))))  # type: ignore[operator]
    assert report.verdict == "coupled"
    assert report.updates > 0
    assert report.gradient_error > 1e-3
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("state", path)]
    assert state in report.message
    assert "after an update" in report.message


def test_power_iterations_in_eval_mode_pass() -> None:
    """In eval mode the state is fixed, as the message recommends."""
    assert report_on(between(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).eval())).verdict == "separate"


class Streaming(nn.Module):
    """Normalization by a running mean, with a custom name, that each pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(WIDTH))
        self.level: Tensor

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        self.level = 0.9 * self.level + 0.1
        return features - self.level


class Codebook(nn.Module):
    """A parameter without a gradient that each pass changes, in place and without torch's version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        self.code.data.mul_(0.9)
        return features + self.code.clone()


class Annealed(nn.Module):
    """A temperature that falls with the number of passes, which is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        self.passes += 1
        return features / (1 + 0.1 * self.passes)


class Remembering(nn.Module):
    """A tensor that no buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        self.memory = 0.5 * self.memory + 0.1
        return features + self.memory.to(features.dtype)


class Keeping(nn.Module):
    """A level in an attribute that is no tensor of the module's own; ``keep`` stores one, and ``kept`` reads it.

    It converges within a few passes: where it is not restored, every run is like the last one.
    """

    def __init__(self, state: object, kept: Callable[[Any], Any], keep: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self.state = state
        self._kept = kept
        self._keep = keep

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        self._keep(self.state, 0.5 * self._kept(self.state) + 0.1)
        return features + torch.as_tensor(self._kept(self.state)).to(features)


def kept_in_containers() -> list[Keeping]:
    """One of each kind of container, and one inside another."""
    vector = torch.zeros(WIDTH)
    return [
        Keeping([vector.clone()], itemgetter(0), lambda state, level: setitem(state, 0, level)),
        Keeping([vector.clone()], lambda state: state[0].clone(), lambda state, level: state[0].copy_(level)),
        Keeping({"level": vector.clone()}, itemgetter("level"), lambda state, level: setitem(state, "level", level)),
        Keeping(deque([0.0], 1), itemgetter(0), lambda state, level: state.append(level)),
        Keeping({0.0}, max, lambda state, level: state.add(level)),
        Keeping(np.zeros(WIDTH, np.float32), np.copy, lambda state, level: setitem(state, ..., level)),
        Keeping(SimpleNamespace(level=0.0), attrgetter("level"), lambda state, level: setattr(state, "level", level)),
        Keeping(
            ({"of": [0.0]},), lambda state: state[0]["of"][0], lambda state, level: setitem(state[0]["of"], 0, level)
        ),
    ]


@pytest.mark.parametrize("module", kept_in_containers(), ids=lambda module: type(module.state).__name__)
def test_state_inside_of_attributes_is_found(module: Keeping) -> None:
    """Each run starts from its content before."""
    report = report_on(between(module))
    assert report.verdict == "coupled", report.message
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("state", "1")]
    assert "changes state," in report.message


@pytest.mark.parametrize(
    ("module", "state"),
    [(Streaming(), "level"), (Codebook(), "code"), (Annealed(), "passes"), (Remembering(), "memory")],
    ids=lambda value: type(value).__name__,
)
def test_state_of_any_kind_is_found(module: nn.Module, state: str) -> None:
    """A buffer, a parameter, a number or a tensor is found by its change, not by a class."""
    report = report_on(between(module))
    assert report.verdict == "coupled"
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("state", "1")]
    assert f"changes {state}," in report.message


class Counting(nn.Module):
    """Statistics that training does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, features: Tensor) -> Tensor:
        """Keep the values."""
        self.passes += 1
        self.seen += features.detach().sum()
        return features


def test_state_that_no_loss_depends_on_passes() -> None:
    """Counters and statistics for evaluation may change."""
    report = report_on(between(Counting()))
    assert report.verdict == "separate", report.message


def test_a_state_and_a_coupled_module_are_distinguished() -> None:
    """Each is named with its own remedy."""
    report = report_on(between(nn.Sequential(Annealed(), nn.BatchNorm1d(WIDTH))))
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("state", "1.0"), ("module", "1.1")]


class Gated(nn.Module):
    """BatchNorm behind two gates that start at zero: neither loss nor gradient of a new model show it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.first, self.second = nn.Parameter(torch.zeros(())), nn.Parameter(torch.full((), 1e-9))

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        states: Tensor = features + self.first * self.second * self.norm(features)
        return states


def test_coupling_that_a_new_model_hides_is_found() -> None:
    """After an update the gates are open."""
    report = report_on(between(Gated()))
    assert report.verdict == "coupled"
    assert report.updates > 0
    assert [culprit.name for culprit in report.culprits] == ["1.norm"]


def test_data_that_a_module_holds_is_not_copied() -> None:
    """It may be larger than the model, and no forward pass writes to it."""
    module = Counting()
    vars(module)["data"] = [torch.zeros(2**23, dtype=torch.int8) for _ in range(4)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        ModelState(module)
    assert sum(event.cpu_memory_usage for event in profiled.key_averages() if event.key == "aten::clone") <= 2**24 + 4


def test_data_of_many_entries_is_no_state() -> None:
    """A list of all samples' names, say, would take longer to compare than the model."""
    module = Counting()
    names = vars(module)["names"] = [str(number) for number in range(20_000)]
    state = ModelState(module)
    names.append("another")
    assert state.changed() == {}
