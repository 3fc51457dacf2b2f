"""Gradient noise of an update: what is measured, what the measurement leaves alone, and its truth, sample by sample."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchwright.planning.noise_scale import NoiseMeasurement, noise_scale
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_noise import GradientNoise
from batchwright.training.accumulation.gradient_sums import Gathering
from batchwright.training.batch_schedule import cut
from batchwright.training.micro_batches.splitting import MicroBatch, sliced
from tests.support.faults import (
    CountingGpt,
    Faults,
    bit_equal,
    count_tokens,
    ragged_tokens,
    steps_of,
    token_batch,
    token_batches,
    token_loss,
)

SAMPLES = ragged_tokens(8)
TOKENS = count_tokens(token_batch(SAMPLES))
both_gatherings = pytest.mark.parametrize("gathering", ["scratch", "in-place"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread, which is fastest for tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def squared_norm_of_sum(model: nn.Module, batch: Any) -> float:
    """Squared norm of the gradient of the summed loss of a batch, in fp64 and without any code under test."""
    wide = copy.deepcopy(model).double()
    wide.zero_grad()
    torch.autograd.backward(token_loss(wide, batch)[0])
    return sum(float(parameter.grad.square().sum()) for parameter in wide.parameters() if parameter.grad is not None)


def expected(model: nn.Module, first: int) -> NoiseMeasurement:
    """What the first samples and the whole window give, by the estimators of appendix A.1 for tokens."""
    start, whole = token_batch(SAMPLES, 0, first), token_batch(SAMPLES)
    small, tokens = squared_norm_of_sum(model, start), count_tokens(start)
    large = squared_norm_of_sum(model, whole) / TOKENS**2
    per_token = (small / tokens**2 - large) / (1 / tokens - 1 / TOKENS)
    variance = per_token * len(SAMPLES) / TOKENS
    return NoiseMeasurement(variance, large - variance / len(SAMPLES))


def measured(model: nn.Module, micro_batches: Sequence[Any], weigh: Any = None, **options: Any) -> Any:
    """The gradient noise of one update of a learning rate of zero."""
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0), **options)
    return accumulation.update(list(micro_batches), token_loss, weigh, measures_noise=True).noise


def close(found: NoiseMeasurement | None, truth: NoiseMeasurement, tolerance: float = 1e-4) -> bool:
    """Return whether two measurements are equal but for rounding."""
    return found is not None and all(
        getattr(found, name) == pytest.approx(getattr(truth, name), rel=tolerance)
        for name in ("variance", "squared_norm")
    )


@both_gatherings
@pytest.mark.parametrize("weigh", [count_tokens, None], ids=["weighed-before", "weighed-by-the-loss"])
@pytest.mark.parametrize("sizes", [(1, 3, 4), (4, 4), (5, 1, 1, 1)])
def test_the_first_micro_batch_is_compared_with_the_update(
    sizes: tuple[int, ...], weigh: Any, gathering: Gathering
) -> None:
    """Ragged micro-batches of unequal sizes, weighed by their tokens."""
    model = CountingGpt(8)
    found = measured(model, token_batches(SAMPLES, *sizes), weigh, gathering=gathering)
    assert close(found, expected(model, sizes[0]))


@both_gatherings
def test_narrow_gradients_are_measured_in_their_fp32_sums(gathering: Gathering) -> None:
    """A model in bf16: the estimates are those of fp64 but for bf16's own rounding."""
    model = CountingGpt(8).to(torch.bfloat16)
    found = measured(model, token_batches(SAMPLES, 4, 4), gathering=gathering)
    assert close(found, expected(model, 4), tolerance=0.1)


def test_clipping_leaves_the_measurement_alone() -> None:
    """The norm before clipping is that of the gradient."""
    model = CountingGpt(8)
    found = measured(model, token_batches(SAMPLES, 3, 5), max_norm=1e-3)
    assert close(found, expected(model, 3))


@both_gatherings
def test_a_measured_update_is_equal_to_the_last_bit(gathering: Gathering) -> None:
    """The gradient that the optimizer gets is the same, in fp32 and bf16, whether or not it was measured."""
    for dtype in (torch.float32, torch.bfloat16):
        steps = []
        for measures in (False, True):
            model = CountingGpt(8).to(dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            steps += [taken := steps_of(optimizer, model)]
            accumulation = GradientAccumulation(model, optimizer, max_norm=0.5, gathering=gathering)
            accumulation.update(token_batches(SAMPLES, 2, 3, 3), token_loss, measures_noise=measures)
            assert len(taken) == 1
        assert bit_equal(steps[0][0], steps[1][0])


@both_gatherings
def test_parts_of_a_micro_batch_that_did_not_fit_are_measured(gathering: Gathering) -> None:
    """The first micro-batch of four runs out of memory, and its first part of two is what is compared."""
    model = CountingGpt(8)
    faults = Faults(model)
    faults.fail("backward of gpt.blocks.0", 0)
    window = [sliced(batch) for batch in token_batches(SAMPLES, 4, 4)]
    found = measured(model, window, gathering=gathering)
    assert close(found, expected(model, 2))


@both_gatherings
def test_a_later_failure_leaves_the_measured_part_whole(gathering: Gathering) -> None:
    """The second micro-batch runs out of memory: the first is measured once, or with in-place sums again."""
    model = CountingGpt(8)
    faults = Faults(model)
    faults.fail("backward of gpt.blocks.0", 1)
    window = [sliced(batch) for batch in token_batches(SAMPLES, 4, 4)]
    found = measured(model, window, gathering=gathering)
    assert close(found, expected(model, 4 if gathering == "scratch" else 2))


def test_one_micro_batch_on_one_rank_is_not_measured() -> None:
    """There is nothing to compare."""
    assert measured(CountingGpt(8), token_batches(SAMPLES, 8)) is None


def test_an_update_is_not_measured_unless_it_is_asked() -> None:
    """Nor is a later one, after one that was."""
    model = CountingGpt(8)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0))
    window = token_batches(SAMPLES, 4, 4)
    found = [accumulation.update(window, token_loss, measures_noise=asked).noise for asked in (False, True, False)]
    assert [each is not None for each in found] == [False, True, False]


def test_a_window_without_targets_is_not_measured() -> None:
    """Samples of one token predict nothing."""
    model = CountingGpt(8)
    one_token = [token_batch([sample[:1] for sample in SAMPLES], 0, 4)] * 2
    assert measured(model, one_token, count_tokens) is None


# --- memory ----------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own
    """The bytes of the largest tensor that an operator has returned in new memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own
        self.operators = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and look at the tensors it returns."""
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        answer = func(*args, **(kwargs or {}))
        self.operators += 1
        for leaf in tree_leaves(answer):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return answer


@both_gatherings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_measurement_allocates_a_number_per_parameter(
    gathering: Gathering, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator of the measurement returns more than the norms of all parameters: a proven plan stays proven."""
    model = CountingGpt(8).to(dtype)
    seen = Allocations()
    take = GradientNoise.take

    def watched(noise: GradientNoise, losses: Any) -> None:
        with seen:
            take(noise, losses)

    monkeypatch.setattr(GradientNoise, "take", watched)
    assert measured(model, token_batches(SAMPLES, 4, 4), gathering=gathering) is not None
    assert seen.operators > 0
    assert seen.largest <= 8 * len(list(model.parameters()))


# --- the truth, sample by sample --------------------------------------------------------------------------------------


@dataclass
class Problem:
    """A small classifier with data, whose per-sample gradients are computed one by one in fp64.

    Attributes:
        lengths: rows per sample, whose losses add up: a sample's weight.
    """

    seed: int
    lengths: Sequence[int] = (1,)
    count: int = 96
    model: nn.Module = field(init=False)
    samples: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        """Build the model and the data."""
        torch.manual_seed(self.seed)
        self.model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
        rows = [self.lengths[number % len(self.lengths)] for number in range(self.count)]
        inputs = [torch.randn(length, 6) for length in rows]
        self.samples = [(each, (each[:, 0] + 0.5 * torch.randn(len(each)) > 0).long()) for each in inputs]

    def loss(self, model: nn.Module, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, float]:
        """The sum over all rows, and their number."""
        inputs, labels = (torch.cat(parts) for parts in zip(*samples, strict=True))
        inputs = inputs.to(next(model.parameters()).dtype)
        return F.cross_entropy(model(inputs), labels, reduction="sum"), float(len(labels))

    def truth(self) -> tuple[float, float]:
        """Trace of the covariance of a sample's gradient, and squared norm of the mean gradient."""
        wide = copy.deepcopy(self.model).double()
        sums, weights = [], []
        for sample in self.samples:
            wide.zero_grad()
            loss_sum, weight = self.loss(wide, [sample])
            torch.autograd.backward(loss_sum)
            sums.append(torch.cat([p.grad.flatten() for p in wide.parameters() if p.grad is not None]))
            weights.append(weight)
        total = sum(weights)
        mean = torch.stack(sums).sum(0) / total
        rest = torch.stack([each - weight * mean for each, weight in zip(sums, weights, strict=True)])
        per_sample = total / len(weights)
        variance = float(rest.square().sum()) / (len(weights) - 1) / per_sample**2
        return variance, float(mean.square().sum())

    def measurements(self, updates: int, sizes: Sequence[int]) -> list[NoiseMeasurement]:
        """Measure updates that draw from the data without replacement, in micro-batches of these sizes."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        accumulation = GradientAccumulation(self.model, optimizer, checks_coupling=False)
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for _ in range(updates):
            drawn = torch.randperm(self.count, generator=generator)[: sum(sizes)].tolist()
            parts = [[self.samples[number] for number in part] for part in cut(tuple(drawn), tuple(sizes))]
            window = [MicroBatch(part, len(part), _undivided) for part in parts]
            report = accumulation.update(window, self.loss, measures_noise=True)
            assert report.noise is not None
            found.append(report.noise.within(self.count))
        return found


def _undivided(sizes: Sequence[int]) -> list[MicroBatch]:
    raise AssertionError(f"divided into {sizes}, although all fits")


def standard_errors(values: Sequence[float], truth: float) -> float:
    """Distance of the mean from the truth, in standard errors of the mean."""
    column = torch.tensor(values, dtype=torch.float64)
    return float((column.mean() - truth).abs() / column.std() * len(values) ** 0.5)


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        pytest.param((1,), (4, 4, 4, 4), id="equal", marks=pytest.mark.thorough),
        pytest.param((1,), (1, 7, 3, 5), id="unequal"),
        pytest.param((1,), (12, 4), id="two", marks=pytest.mark.thorough),
        pytest.param((4, 5, 6), (4, 4, 4, 4), id="ragged samples", marks=pytest.mark.thorough),
    ],
)
def test_the_interval_contains_what_per_sample_gradients_say(lengths: Sequence[int], sizes: Sequence[int]) -> None:
    """Of 12 problems at least 10 intervals contain the noise scale, and no mean is off by four standard errors."""
    inside = 0
    for seed in range(12):
        problem = Problem(seed, lengths)
        variance, squared_norm = problem.truth()
        found = problem.measurements(80, sizes)
        assert standard_errors([each.variance for each in found], variance) < 4
        assert standard_errors([each.squared_norm for each in found], squared_norm) < 4
        estimate = noise_scale(found, sum(sizes))
        assert estimate.lower_samples is not None
        upper = estimate.upper_samples or float("inf")
        inside += estimate.lower_samples <= variance / squared_norm <= upper
    assert inside >= 10
