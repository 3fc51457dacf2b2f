"""Losses that are coupled through state of a model, which each micro-batch would find as the one before has left it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.nn.utils.parametrizations import spectral_norm

from batchwright.errors import WorkloadError
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.coupling.check import check_coupling
from batchwright.training.coupling.report import CouplingReport
from batchwright.training.micro_batches.loss_window import UpdateReport
from batchwright.training.micro_batches.splitting import sliced
from tests.support.coupled import WIDTH, Case

Pair = tuple[Tensor, float]


class Codebook(nn.Module):
    """The nearest of many codes, which follow their inputs as a moving average (van den Oord et al., 2017, A.1)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(512, WIDTH))
        self.register_buffer("counts", torch.ones(512))
        self.register_buffer("sums", self.codes.clone())
        self.codes: Tensor
        self.counts: Tensor
        self.sums: Tensor

    def forward(self, features: Tensor) -> Tensor:
        """Codes of the same shape."""
        chosen = torch.cdist(features, self.codes).argmin(1)
        found = self.codes[chosen]
        with torch.no_grad():
            is_chosen = F.one_hot(chosen, len(self.codes)).to(features.dtype)
            self.counts.lerp_(is_chosen.sum(0), 0.01)
            self.sums.lerp_(is_chosen.T @ features, 0.01)
            self.codes.copy_(self.sums / self.counts[:, None])
        return found


class Quantized(nn.Module):
    """An autoencoder with a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codebook, self.decoder = nn.Linear(WIDTH, WIDTH), Codebook(), nn.Linear(WIDTH, WIDTH)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The reconstruction, and the squared distances from the codes."""
        encoded = self.encoder(features)
        found = self.codebook(encoded)
        return self.decoder(encoded + (found - encoded).detach()), (encoded - found.detach()).square().sum()


def quantized(model: nn.Module, batch: Tensor) -> Pair:
    """Reconstruction and commitment."""
    output, distances = model(batch)
    return (output - batch).square().sum() + 0.25 * distances, len(batch)


class Distilled(nn.Module):
    """A student, and a teacher whose outputs are centred by their moving average (Caron et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, WIDTH)
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)
        self.register_buffer("center", torch.zeros(WIDTH))
        self.center: Tensor

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The student's logits and the teacher's shares."""
        outputs = self.teacher(features)
        shares = ((outputs - self.center) / 0.04).softmax(-1)
        self.center.lerp_(outputs.detach().mean(0), 0.1)
        return self.student(features) / 0.1, shares


def distilled(model: nn.Module, batch: Tensor) -> Pair:
    """Cross-entropy."""
    logits, shares = model(batch)
    return F.cross_entropy(logits, shares, reduction="sum"), len(batch)


def _normed() -> nn.Sequential:
    return nn.Sequential(spectral_norm(nn.Linear(WIDTH, 16)), nn.ReLU(), nn.Linear(16, 1))


def distances(model: nn.Module, batch: Tensor) -> Pair:
    """Squared distances from one."""
    return (model(batch) - 1).square().sum(), len(batch)


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Pair], str]] = {
    "codebook": (Quantized, quantized, "codebook"),
    "centre": (Distilled, distilled, ""),
    "spectral norm": (_normed, distances, "0.parametrizations.weight.0"),
}
losses = pytest.mark.parametrize(("build", "loss", "path"), LOSSES.values(), ids=LOSSES)


def _gradient(model: nn.Module, loss: Any, micro_batches: list[Tensor]) -> list[Tensor]:
    """The gradient of the mean over all samples, by autograd alone."""
    model.zero_grad()
    samples = sum(map(len, micro_batches))
    for micro_batch in micro_batches:
        torch.autograd.backward(loss(model, micro_batch)[0] / samples)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _true_error(model: nn.Module, loss: Any, window: list[Tensor]) -> float:
    """The error of an accumulated gradient against the full batch's in fp64, relative, after one update."""
    model = copy.deepcopy(model).double()
    window = [batch.double() for batch in window]
    _gradient(model, loss, [torch.cat(window)])
    torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.05).step()
    full, accumulated = (_gradient(copy.deepcopy(model), loss, parts) for parts in ([torch.cat(window)], window))
    errors = (float((one - other).abs().max() / one.abs().max()) for one, other in zip(full, accumulated, strict=True))
    return max(errors)


def _report(model: nn.Module, loss: Any, batch: Tensor) -> CouplingReport:
    return check_coupling(model, Case(model, lambda m, b: {"loss": loss(m, b)}), sliced(batch), torch.device("cpu"))


def _update(model: nn.Module, loss: Any, window: list[Tensor]) -> UpdateReport:
    return GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.1)).update(window, loss)


@losses
@pytest.mark.parametrize("seed", range(4))
def test_state_that_lags_is_named_by_its_module(build: Any, loss: Any, path: str, seed: int) -> None:
    """By the thorough check of four samples, none of which shares a code; and in a loop of one's own, for no window."""
    torch.manual_seed(seed)
    model, batch = build(), torch.randn(4, WIDTH)
    before = copy.deepcopy(model.state_dict())
    assert _true_error(model, loss, [batch] * 3) > 1e-4
    report = _report(copy.deepcopy(model), loss, batch)
    assert report.verdict == "coupled"
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("state", path)]
    name = f"module `{path}`" if path else "the model itself"
    with pytest.raises(WorkloadError, match=f"depends on state of {name} .* once per update.*checks_coupling"):
        _update(model, loss, [batch] * 3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@losses
def test_one_micro_batch_is_the_full_batch(build: Any, loss: Any, path: str) -> None:
    """An update of one micro-batch changes the state once, as the full batch does."""
    del path
    torch.manual_seed(0)
    assert not _update(build(), loss, [torch.randn(4, WIDTH)]).skipped


class Moving(nn.Module):
    """A frozen parameter that each pass moves, without a count of versions."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        self.code.data.mul_(0.9)
        return features + self.code.clone()


def test_a_frozen_parameter_that_moves_is_state_and_is_restored() -> None:
    """The passes of the check leave it where it was."""
    moving = Moving()
    with pytest.raises(WorkloadError, match=r"state of module `1` \(Moving: code\)"):
        _update(nn.Sequential(nn.Linear(WIDTH, WIDTH), moving), distances, [torch.randn(4, WIDTH)] * 2)
    assert torch.equal(moving.code, torch.ones(WIDTH))


class Centers(nn.Module):
    """Subtracts the center of each sample's class, a frozen parameter that follows its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.centers = nn.ParameterList(nn.Parameter(torch.randn(WIDTH), requires_grad=False) for _ in range(2))

    def forward(self, features: Tensor) -> Tensor:
        """Distances, of the same shape."""
        chosen = [self.centers[int(positive)] for positive in features[:, 0] > 0]
        outputs: Tensor = self.layer(features) - torch.stack([center.clone() for center in chosen])
        with torch.no_grad():
            for center, sample in zip(chosen, features if self.training else (), strict=False):
                center.lerp_(sample, 0.1)
        return outputs


def test_a_parameter_that_the_first_sample_does_not_move_is_restored() -> None:
    """A later sample of another class moves it: each run starts from the same value of it."""
    torch.manual_seed(0)
    batch = torch.randn(3, WIDTH)
    batch[:, 0] = torch.tensor([-1.0, 1.0, 1.0])
    model = Centers()
    report = check_coupling(model, Case(model), sliced(batch), torch.device("cpu"))
    assert report.train_mode, report.message
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("state", "centers")]


class Counting(nn.Module):
    """Statistics that no output depends on: a counter, a history, and a mean without momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.history: list[int] = []
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, features: Tensor) -> Tensor:
        """Keep the values."""
        self.passes += 1
        self.history.append(self.passes)
        self.mean += (features.detach().mean(0) - self.mean) / self.passes
        return features


class OwnNoise(nn.Module):
    """Noise of a generator of its own, whose state no pass restores, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        self.passes += 1
        return features + 0.01 * torch.randn(features.shape, generator=self.generator)


@pytest.mark.parametrize(
    "middle",
    [
        Counting(),
        OwnNoise(),
        nn.Sequential(Counting(), nn.Dropout(0.5)),
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
        spectral_norm(nn.Linear(WIDTH, WIDTH)).eval(),
        nn.BatchNorm1d(WIDTH).eval(),
    ],
)
def test_state_that_no_loss_depends_on_is_no_fault(middle: nn.Module) -> None:
    """Counters, running statistics, and state that eval mode keeps."""
    torch.manual_seed(0)
    window = [torch.randn(8, WIDTH) for _ in range(3)]
    assert not _update(nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, 1)), distances, window).skipped


class Unused(nn.Module):
    """A BatchNorm whose output is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, features: Tensor) -> Tensor:
        """Keep the values."""
        self.norm(features)
        return features


@pytest.mark.parametrize(("middle", "calls"), [(nn.ReLU(), 4), (Unused(), 4), (Counting(), 6)])
def test_state_costs_two_passes_of_the_first_window(middle: nn.Module, calls: int) -> None:
    """The window's own pass and three of the check, and none for the statistics of a BatchNorm."""
    sizes = []

    def loss(model: nn.Module, batch: Tensor) -> Pair:
        sizes.append(len(batch))
        return distances(model, batch)

    _update(nn.Sequential(nn.Linear(WIDTH, WIDTH), middle), loss, [torch.randn(6, WIDTH)])
    assert len(sizes) == calls


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_model_is_checked_and_its_statistics_are_restored() -> None:
    """Scripted modules keep their buffers in no dictionary, and give no access to parameters by name."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH, momentum=0.5)
    model = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 1)))
    wanted, batch = copy.deepcopy(model), torch.randn(8, WIDTH)
    wanted(batch)
    with pytest.raises(WorkloadError, match="is a mean"):
        _update(model, lambda model, batch: (model(batch).square().mean(), len(batch)), [batch])
    _update(model, lambda model, batch: (model(batch).sum() * 0 + model[0](batch).square().sum(), len(batch)), [batch])
    torch.testing.assert_close(dict(model.named_buffers()), dict(wanted.named_buffers()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("samples", [2, 3, 4])
def test_a_scripted_batch_norm_that_refuses_a_part_is_found(samples: int) -> None:
    """Its error is another one than that of a module in Python, and a part has a single value."""
    model = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    with pytest.raises(WorkloadError, match=r"by module `1` \(BatchNorm1d\)"):
        _update(model, distances, [torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)])


def test_a_loss_that_fails_for_a_part_is_said_to_be_unchecked() -> None:
    """A model may need a batch of one size."""

    def loss(model: nn.Module, batch: Tensor) -> Pair:
        return distances(model, batch.reshape(6, WIDTH))

    with pytest.warns(UserWarning, match=r"sum over the samples, because it fails on a part of its 6 samples \(Runt"):
        _update(nn.Linear(WIDTH, 1), loss, [torch.randn(6, WIDTH)])
