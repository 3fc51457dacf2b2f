"""A loss that is not a sum over its samples is found in a user's own loop, in the first window."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from batchwright.errors import WorkloadError
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import Gathering
from batchwright.training.micro_batches.loss_window import UpdateReport
from batchwright.training.micro_batches.rng_state import RandomState, seed_everything

CPU = torch.device("cpu")
WINDOW = 3


def _model(middle: nn.Module | None = None) -> nn.Sequential:
    seed_everything(0)
    return nn.Sequential(nn.Linear(4, 8), middle or nn.ReLU(), nn.Linear(8, 3))


def _window(count: int = WINDOW, size: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(size, 4, generator=generator), "y": torch.randint(3, (size,), generator=generator)}
        for _ in range(count)
    ]


def _entropy(model: nn.Module, batch: dict[str, Tensor], reduction: str = "sum") -> Tensor:
    return F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction=reduction)


def _sum(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return _entropy(model, batch), len(batch["y"])


def _mean(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return _entropy(model, batch, "mean"), len(batch["y"])


def _mean_of_weight_one(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return _entropy(model, batch, "mean"), 1.0


def _wrong_weight(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return _entropy(model, batch), 2.0


def _contrastive(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    outputs = model(batch["x"])
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="sum"), len(outputs)


def _penalty(model: nn.Module, _: dict[str, Tensor]) -> tuple[Tensor, float]:
    return sum((parameter.square().sum() for parameter in model.parameters()), torch.zeros(())), 1.0


def _noisy(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return _entropy(model, {**batch, "x": batch["x"] + torch.randn_like(batch["x"])}), len(batch["y"])


def _in_bf16(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    with torch.autocast("cpu", torch.bfloat16):
        return _sum(model, batch)


def _mean_in_bf16(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    with torch.autocast("cpu", torch.bfloat16):
        return _mean(model, batch)


def _mean_times_size(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return _entropy(model, batch, "mean") * len(batch["y"]), len(batch["y"])


def _update(model: nn.Module, loss: Any, window: Any = None, **options: Any) -> UpdateReport:
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    return accumulation.update(_window() if window is None else window, loss)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (_mean, r"`loss` is a mean, returned as a sum.*checks_coupling=False"),
        (_mean_in_bf16, r"is a mean"),
        (_mean_of_weight_one, r"is a mean"),
        (_wrong_weight, r"weights that do not add up"),
        (_contrastive, r"couples the samples"),
    ],
)
def test_a_loss_that_is_no_sum_is_refused(loss: Any, words: str) -> None:
    """The loss is refused before any step, unless the check is switched off."""
    model = _model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(WorkloadError, match=words):
        _update(model, loss)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not _update(model, loss, checks_coupling=False).skipped


def test_batch_norm_is_refused_only_where_it_matters() -> None:
    """A window of one micro-batch has the full batch's statistics; the first that accumulates is refused."""
    model = _model(nn.BatchNorm1d(8))
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accumulation.update(_window(1), _sum)
    with pytest.raises(WorkloadError, match="couples the samples"):
        accumulation.update(_window(2), _sum)


def _image_net(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    seed_everything(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def _images(size: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(size, 3, 6, 6), "y": torch.randint(3, (size,))} for _ in range(2)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 64])
@pytest.mark.parametrize("loss", [_sum, _in_bf16])
def test_a_batch_norm_is_refused_where_its_losses_agree(loss: Any, size: int) -> None:
    """Few samples, a part of which torch refuses, and losses that agree within the tolerance hide no batch norm."""
    words = r"couples the samples .* by module `1` \(BatchNorm[12]d\).*GroupNorm.*checks_coupling"
    with pytest.raises(WorkloadError, match=words):
        _update(_model(nn.BatchNorm1d(8)), loss, _window(2, size))
    with pytest.raises(WorkloadError, match=words):
        _update(_image_net(), loss, _images(size))
    assert not _update(_image_net().eval(), loss, _images(size)).skipped


class _Standardised(nn.Conv2d):
    """A convolution whose weights a batch norm standardises, as in timm's ResNets without batch norms."""

    def forward(self, features: Tensor) -> Tensor:
        """Convolve with weights of mean 0 and variance 1."""
        weight = F.batch_norm(self.weight.view(1, self.out_channels, -1), None, None, training=True)
        return F.conv2d(features, weight.view_as(self.weight))


class _PerSample(nn.BatchNorm2d):
    """A batch norm over the pixels of one sample at a time."""

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        return torch.cat([super(_PerSample, self).forward(one) for one in torch.split(features, 1)])


@pytest.mark.parametrize("norm", [lambda width: _Standardised(width, width, 1), _PerSample, nn.InstanceNorm2d])
def test_a_batch_norm_of_weights_or_of_one_sample_is_no_false_alarm(norm: Callable[[int], nn.Module]) -> None:
    """What a batch norm normalises does not grow with the micro-batch."""
    for size in (2, 5, 64):
        assert not _update(_image_net(norm), _sum, _images(size)).skipped


def test_a_mean_is_refused_in_a_window_of_one_micro_batch() -> None:
    """The gradient of such a loss would be divided by the number of samples twice."""
    with pytest.raises(WorkloadError, match="is a mean"):
        _update(_model(), _mean, _window(1))


@pytest.mark.parametrize("loss", [_sum, _penalty, _noisy, _in_bf16, _mean_times_size])
@pytest.mark.parametrize("middle", [nn.ReLU, lambda: nn.Dropout(0.5), lambda: nn.LayerNorm(8)])
def test_there_is_no_false_alarm(loss: Any, middle: Callable[[], nn.Module]) -> None:
    """Sums, penalties of weight one, noise, dropout and low precision pass, with samples of several seeds."""
    for size in (2, 3, 7, 32):
        assert not _update(_model(middle()), loss, _window(2, size)).skipped


def _group_relative(size: int, group: int, seed: int) -> dict[str, Tensor]:
    """Samples of a policy with advantages that add up to zero in each group."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(size // group, group, generator=generator)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    actions = torch.randint(3, (size, 1), generator=generator)
    return {"x": torch.randn(size, 4, generator=generator), "actions": actions, "advantages": advantages.reshape(-1)}


def _policy_terms(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, float]]:
    chosen = model(batch["x"]).float().log_softmax(-1).gather(1, batch["actions"])[:, 0]
    ahead = chosen - batch["before"]
    penalty = (-ahead).exp() + ahead - 1  # estimates the divergence from the policy of before
    size = len(batch["x"])
    return {"policy": (-(ahead.exp() * batch["advantages"]).sum(), size), "divergence": (penalty.sum(), size)}


def _policy_terms_in_bf16(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, float]]:
    with torch.autocast("cpu", torch.bfloat16):
        return _policy_terms(model, batch)


@pytest.mark.parametrize("terms", [_policy_terms, _policy_terms_in_bf16])
@pytest.mark.parametrize("seed", [*range(10), 20, 30])
def test_the_first_update_of_a_policy_is_no_false_alarm(terms: Any, seed: int) -> None:
    """The loss is zero but for rounding, in the batch and in parts of whole groups, and cannot be compared."""
    model = _model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    window = [_group_relative(size=24, group=8, seed=2 * seed + half) for half in range(2)]
    with torch.no_grad():  # one sample at a time, as another engine generates them
        for batch in window:
            one = [
                model(x[None]).log_softmax(-1)[0, action]
                for x, action in zip(batch["x"], batch["actions"], strict=True)
            ]
            batch["before"] = torch.cat(one)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0))
    accumulation.update(window, terms, lambda batch: dict.fromkeys(("policy", "divergence"), float(len(batch["x"]))))
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_dropout_does_not_hide_a_mean() -> None:
    """Dropout is disabled while the loss is compared, and then restored."""
    model = _model(nn.Dropout(0.5))
    with pytest.raises(WorkloadError, match="is a mean"):
        _update(model, _mean)
    assert model.get_submodule("1").p == 0.5


def _noise_of(batch: dict[str, Tensor], source: str) -> Tensor:
    shape = (*batch["y"].shape, 3)
    return torch.randn(shape) if source == "torch" else torch.from_numpy(_NUMPY.normal(size=shape)).float()


_NUMPY = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("reduction", "words"), [("sum", "grows with the batch"), ("mean of a pair", "`loss` is a mean, returned as a sum")]
)
def test_random_numbers_do_not_hide_a_wrong_reduction(reduction: str, words: str) -> None:
    """The samples of a part get the numbers that they had in the whole, as for a variational autoencoder."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        errors = (model(batch["x"]) + 3 * _noise_of(batch, "torch")).square()
        return errors.sum() if reduction == "sum" else (errors.mean(), len(batch["y"]))

    for size in (2, 3, 6, 64):
        with pytest.raises(WorkloadError, match=words):
            _update(_model(), loss, _window(2, size))


def test_a_mean_among_random_numbers_of_another_library_is_warned_of() -> None:
    """Only torch's numbers can be given to a sample again, so a doubt remains, and the update is made."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        return (model(batch["x"]) + _noise_of(batch, "numpy")).square().mean(), len(batch["y"])

    with pytest.warns(UserWarning, match=r"is a mean.*leave some doubt"):
        assert not _update(_model(), loss, _window(2, 64)).skipped


@pytest.mark.parametrize("draw", ["rows", "samples", "batch", "permutation", "subset", "numpy"])
@pytest.mark.parametrize("is_mean", [True, False])
def test_random_numbers_are_no_false_alarm(draw: str, *, is_mean: bool) -> None:
    """Several rows for each sample, one for the batch, other rows of the batch, a random subset, another library."""
    draws: dict[str, Callable[[Tensor], Tensor]] = {
        "rows": lambda features: (features.repeat_interleave(2, 0) + torch.randn(2 * len(features), 4))[::2],
        "samples": lambda features: features + torch.rand(len(features), 1) * torch.randn_like(features),
        "batch": lambda features: features + torch.randn(4),
        "permutation": lambda features: features + features[torch.randperm(len(features))],
        "subset": lambda features: features * F.dropout(torch.ones_like(features), 0.5),
        "numpy": lambda features: features + torch.from_numpy(_NUMPY.normal(size=features.shape)).float(),
    }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        errors = (model(draws[draw](batch["x"])) ** 2).sum(1)
        return errors.mean() if is_mean else (errors.sum(), len(errors))

    for size in (2, 3, 6, 64):
        assert not _update(_model(), loss, _window(2, size)).skipped


@pytest.mark.parametrize("gathering", ["scratch", "in-place"])
def test_a_checked_update_is_that_of_an_unchecked_one(gathering: Gathering) -> None:
    """Weights, buffers and every generator are equal to the last bit, with dropout and statistics in the model."""

    def world(*, checks: bool) -> list[Tensor]:
        model = _model(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)))
        window = _window(1)
        _update(model, _sum, window, gathering=gathering, checks_coupling=checks)
        state = RandomState.capture(CPU)
        assert torch.equal(window[0]["x"], _window(1)[0]["x"])
        return [*model.state_dict().values(), state.cpu, torch.tensor(state.python[1])]

    pairs = zip(world(checks=True), world(checks=False), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_check_costs_nothing_after_the_first_window() -> None:
    """The check runs six samples and their parts of four and two, once, before the first window."""
    sizes: list[int] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        sizes.append(len(batch["y"]))
        return _sum(model, batch)

    model = _model()
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for count in (2, 2, 1):
        accumulation.update(_window(count), loss)
    assert sizes == [6, 4, 2] + [6] * 5


def test_a_loss_that_writes_to_its_batch_is_checked_on_a_copy() -> None:
    """The window's own passes get the caller's batches unchanged."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        seen.append(float(batch["x"].sum()))
        total = _sum(model, {**batch, "x": batch["x"].clone()})
        batch["x"].zero_()
        return total

    seen: list[float] = []
    window = _window(2)
    wanted = [float(batch["x"].sum()) for batch in window]
    _update(_model(), loss, window)
    assert seen[-2:] == wanted


class _Counted(nn.Module):
    """The number of passes in two attributes, on which no output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.history: list[int] = []

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        self.passes += 1
        self.history.append(self.passes)
        return features


def test_state_in_attributes_of_modules_is_as_without_the_check() -> None:
    """The passes of the check are not among those that the model counts."""
    counted = []
    for checks in (False, True):
        torch.manual_seed(0)
        passing = _Counted()
        model = nn.Sequential(nn.Linear(4, 3), passing)
        accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters()), checks_coupling=checks)
        report = accumulation.update(_window(), _sum)
        counted.append((passing.passes, passing.history, report.gradient_norm))
    assert counted[0] == counted[1]
    assert counted[0][0] == WINDOW
