"""Accumulated updates have the full batch's gradient for any split, and each known mistake is detected."""

import copy
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from transformers.modeling_outputs import CausalLMOutput

from batchwright.errors import SpecError, WorkloadError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import Gathering, GradientSums, InPlaceSums, ScratchSums
from batchwright.training.micro_batches.loss_window import UpdateReport
from batchwright.training.micro_batches.splitting import sliced, split_batch, windows
from batchwright.training.update_engine import UpdateEngine
from batchwright.workloads.base import IGNORED_LABEL, Batch, LossTerms, count_labels, pad_tokens
from batchwright.workloads.build import build_model, build_workload
from tests.support.factories import gpt_spec, mlp_spec
from tests.support.faults import (
    AnyLoss,
    CountingGpt,
    Gradients,
    bit_equal,
    count_tokens,
    exact_gradient,
    gradients,
    ragged_tokens,
    relative_distance,
    relative_error,
    steps_of,
    token_batch,
    token_batches,
    token_loss,
)

SAMPLES = ragged_tokens(8)
TOKENS = count_tokens(token_batch(SAMPLES))
SGD = {"name": "sgd", "learning_rate": 1.0}
both_gatherings = pytest.mark.parametrize("gathering", ["scratch", "in-place"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread, which is fastest for tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _accumulated(
    model: nn.Module, micro_batches: list[Any], loss: AnyLoss, weigh: Any = None, **options: Any
) -> Gradients:
    """The gradient that an optimizer is stepped with, once, after these micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = steps_of(optimizer, model)
    GradientAccumulation(model, optimizer, **options).update(micro_batches, loss, weigh)
    (only,) = steps
    return only


# --- the full batch's gradient ----------------------------------------------------------------------------------------


@both_gatherings
@pytest.mark.parametrize("weigh", [count_tokens, None], ids=["weighed-before", "weighed-by-the-loss"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("size", range(1, 9))
def test_ragged_samples_give_the_full_batch_gradient(
    size: int, dtype: torch.dtype, tolerance: float, weigh: Any, gathering: Gathering
) -> None:
    """For every micro-batch size, with samples of different lengths and tied weights, against one pass in fp64."""
    model = CountingGpt(8).to(dtype)
    truth = exact_gradient(model, token_batch(SAMPLES), token_loss)
    batches = [token_batch(SAMPLES, start, start + size) for start in range(0, 8, size)]
    found = _accumulated(model, batches, token_loss, weigh, gathering=gathering)
    assert relative_error(found, truth) < tolerance


@pytest.mark.parametrize("size", range(1, 9))
def test_a_workloads_updates_have_the_full_batch_gradient(size: int) -> None:
    """The engine of a spec, whose workload pads each micro-batch by itself."""
    engine = _engine(gpt_spec(optimizer=SGD))
    workload = build_workload(engine.spec)
    truth = exact_gradient(engine.model, pad_tokens(SAMPLES), workload.loss_terms)
    steps = steps_of(engine.optimizer, engine.model)
    engine.update([sliced(pad_tokens(SAMPLES[start : start + size])) for start in range(0, 8, size)])
    assert relative_error(steps[0], truth) < 1e-5


def _three_terms(model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
    """Next token by tokens, a penalty by samples, and one that most micro-batches have nothing of."""
    loss, tokens = token_loss(model, batch)
    logits = model(batch["input_ids"])
    rare = batch["sample"] == 5
    return {
        "next_token": (loss, tokens),
        "penalty": (logits.square().mean((1, 2)).sum(), float(len(logits))),
        "rare": (logits[rare, 0].logsumexp(-1).sum(), float(rare.sum())),
    }


def _three_weights(batch: Mapping[str, Tensor]) -> dict[str, float]:
    samples, rare = float(len(batch["sample"])), float((batch["sample"] == 5).sum())
    return {"next_token": count_tokens(batch), "penalty": samples, "rare": rare}


@both_gatherings
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("sizes", [(8,), (3, 3, 2), (1,) * 8])
def test_each_term_is_divided_by_its_own_weight(
    sizes: tuple[int, ...], dtype: torch.dtype, tolerance: float, gathering: Gathering
) -> None:
    """Several terms, weighed by tokens, by samples and by a rare event, against one pass over all."""
    model = CountingGpt(8).to(dtype)
    full = token_batch(SAMPLES)
    parts = [
        {name: tensor[part] for name, tensor in full.items()} for part in torch.split(torch.arange(8), list(sizes))
    ]
    truth = exact_gradient(model, full, _three_terms)
    found = _accumulated(model, parts, _three_terms, _three_weights, gathering=gathering)
    assert relative_error(found, truth) < tolerance


def test_the_reported_loss_is_the_windows_mean() -> None:
    """Per term the summed loss over the summed weight, not a mean of means."""
    report = _engine(mlp_spec(), Regression()).update([sliced(part) for part in _parts(5, 3)])
    assert report.loss == pytest.approx(sum((2.0 * x) ** 2 for x in range(1, 9)) / 8)
    assert report.weights == {"squared_error": 8.0}


# --- published results ------------------------------------------------------------------------------------------------


class Regression:
    """The published example: one weight, y = 2x, mean squared error; without ``loss_weights``."""

    def build_model(self) -> nn.Module:
        """A single weight of zero."""
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def make_batch(self, size: int) -> Tensor:
        """The numbers 1 .. size as x."""
        return torch.arange(1.0, size + 1)[:, None]

    def loss_terms(self, model: nn.Module, batch: Batch) -> LossTerms:
        """Squared error and its number of samples."""
        return {"squared_error": (F.mse_loss(model(batch), 2 * batch, reduction="sum"), float(len(batch)))}


def _parts(*sizes: int) -> list[Tensor]:
    """The eight samples of the regression in micro-batches of these sizes."""
    return list(torch.split(Regression().make_batch(8), list(sizes)))


def _engine(spec: WorkloadSpec, workload: Any = None) -> UpdateEngine:
    torch.manual_seed(0)
    workload = workload or build_workload(spec)
    return UpdateEngine(spec, workload, build_model(spec, workload), open_device("cpu"))


@pytest.mark.parametrize("sizes", [(8,), (2, 2, 2, 2), (3, 3, 2), (1,) * 8])
def test_the_published_regression_is_reproduced(sizes: tuple[int, ...]) -> None:
    """With x = 1..8, y = 2x, SGD with rate 0.02: the weight after one update is 2.04, accumulated or not."""
    engine = _engine(mlp_spec(optimizer={"name": "sgd", "learning_rate": 0.02}), Regression())
    engine.update([sliced(part) for part in _parts(*sizes)])
    assert engine.parameters[0].item() == pytest.approx(2.04, abs=1e-5)


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (1, 7)])
def test_the_published_token_example_is_reproduced(sizes: tuple[int, ...]) -> None:
    """Samples of 1 to 8 tokens with the label id mod 2, SGD with rate 0.08: [0.0953, 0.4337] after one update."""
    ids = torch.arange(1, 9).repeat(8, 1)
    labels = torch.where(ids <= torch.arange(1, 9)[:, None], ids % 2, IGNORED_LABEL)
    model = nn.Linear(1, 2, bias=False)
    model.weight.data = torch.tensor([[-0.0075], [0.5364]])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        logits = model(batch[0].float()[..., None]).flatten(0, 1)
        return F.cross_entropy(logits, batch[1].flatten(), reduction="sum"), float(count_labels(batch[1]))

    batches = list(zip(torch.split(ids, list(sizes)), torch.split(labels, list(sizes)), strict=True))
    GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.08)).update(batches, loss)
    assert model.weight.flatten().tolist() == pytest.approx([0.0953, 0.4337], abs=1e-4)


# --- tails ------------------------------------------------------------------------------------------------------------


@both_gatherings
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 2, 1), (4, 4, 3), (10, 1), (1, 10)])
def test_a_smaller_last_micro_batch_weighs_what_it_holds(sizes: tuple[int, ...], gathering: Gathering) -> None:
    """A window whose micro-batches are of different sizes."""
    samples = ragged_tokens(11)
    model = CountingGpt(11)
    truth = exact_gradient(model, token_batch(samples), token_loss)
    found = _accumulated(model, token_batches(samples, *sizes), token_loss, count_tokens, gathering=gathering)
    assert relative_error(found, truth) < 1e-5


@pytest.mark.parametrize(("samples", "largest", "sizes"), [(3, 4, (3,)), (10, 4, (4, 3, 3)), (7, 2, (2, 2, 2, 1))])
def test_a_batch_is_split_as_evenly_as_can_be(samples: int, largest: int, sizes: tuple[int, ...]) -> None:
    """The fewest parts, sizes that differ by at most one, and the full batch's gradient."""
    tokens = ragged_tokens(samples)
    model = CountingGpt(samples)
    truth = exact_gradient(model, token_batch(tokens), token_loss)
    parts = split_batch(token_batch(tokens), largest)
    assert tuple(part.size for part in parts) == sizes
    assert relative_error(_accumulated(model, parts, token_loss, count_tokens), truth) < 1e-5


@both_gatherings
def test_two_epochs_of_a_loader_without_a_length_leak_nothing(gathering: Gathering) -> None:
    """7 micro-batches in windows of 3: three updates an epoch, the last of one micro-batch, each exact by itself."""
    samples = ragged_tokens(13)
    batches = token_batches(samples, 2, 2, 2, 2, 2, 2, 1)
    wanted = [token_batch(samples, start, stop) for start, stop in ((0, 6), (6, 12), (12, 13))] * 2
    model = CountingGpt(13)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = steps_of(optimizer, model)
    accumulation = GradientAccumulation(model, optimizer, gathering=gathering)

    def loader() -> Iterator[dict[str, Tensor]]:
        yield from batches

    for _ in range(2):
        for window in windows(loader(), 3):
            accumulation.update(window, token_loss, count_tokens)
    assert len(steps) == 6
    for step, batch in zip(steps, wanted, strict=True):
        assert relative_error(step, exact_gradient(model, batch, token_loss)) < 1e-5


def test_no_window_is_empty() -> None:
    """An epoch whose length is a multiple of the window ends with a full window; one of nothing has none."""
    assert list(windows(iter(range(6)), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert list(windows(iter(()), 3)) == []


def test_a_window_without_weight_makes_no_step() -> None:
    """A window of padding alone leaves parameters and optimizer as they were."""
    engine = _engine(gpt_spec())
    before = _state(engine)
    report = engine.update([sliced(pad_tokens([torch.zeros(1, dtype=torch.long)]))])
    assert report.skipped
    assert _same(before, _state(engine))


# --- mutants: the measure above sees each known mistake ---------------------------------------------------------------

UNEVEN = (3, 3, 2)


def _mean_of_means(model: nn.Module) -> Gradients:
    """The tutorial's loop: each micro-batch's mean counts alike."""
    for batch in token_batches(SAMPLES, *UNEVEN):
        loss, weight = token_loss(model, batch)
        torch.autograd.backward(loss / weight / len(UNEVEN))
    return gradients(model)


def _unshifted_count(model: nn.Module) -> Gradients:
    """The engine itself, told the number of tokens before the shift."""

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        return token_loss(model, batch)[0], float(count_labels(batch["labels"]))

    return _accumulated(model, token_batches(SAMPLES, *UNEVEN), loss)


def _padding_counted(model: nn.Module) -> Gradients:
    """The engine itself, told the number of positions."""

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        return token_loss(model, batch)[0], float(batch["labels"][:, 1:].numel())

    return _accumulated(model, token_batches(SAMPLES, *UNEVEN), loss)


def _window_leaks(model: nn.Module) -> Gradients:
    """A last window that never steps, so that its gradient is in the next one's."""
    batches = token_batches(SAMPLES, *UNEVEN)
    for batch in (batches[-1], *batches):
        torch.autograd.backward(token_loss(model, batch)[0] / TOKENS)
    return gradients(model)


@pytest.mark.parametrize("mutant", [_mean_of_means, _unshifted_count, _padding_counted, _window_leaks])
def test_a_wrong_divisor_would_be_detected(mutant: Any) -> None:
    """The known mistakes are off by more than a hundredth, by the measure that the engine passes with 1e-5."""
    model = CountingGpt(8)
    truth = exact_gradient(model, token_batch(SAMPLES), token_loss)
    assert relative_error(mutant(model), truth) > 1e-2


def _clipped(exact: Gradients, max_norm: float) -> Gradients:
    norm = torch.cat([tensor.flatten() for tensor in exact.values()]).norm()
    assert norm > 2 * max_norm
    return {name: tensor * (max_norm / norm) for name, tensor in exact.items()}


def test_the_whole_gradient_is_clipped_once() -> None:
    """The update's norm, not each micro-batch's, meets the limit."""
    model = CountingGpt(8)
    truth = _clipped(exact_gradient(model, token_batch(SAMPLES), token_loss), 0.1)
    found = _accumulated(model, token_batches(SAMPLES, *UNEVEN), token_loss, max_norm=0.1)
    assert relative_error(found, truth) < 1e-5


def test_clipping_per_micro_batch_would_be_detected() -> None:
    """The mutant that clips what it has so far after each backward pass is off by more than a hundredth."""
    model = CountingGpt(8)
    truth = _clipped(exact_gradient(model, token_batch(SAMPLES), token_loss), 0.1)
    for batch in token_batches(SAMPLES, *UNEVEN):
        torch.autograd.backward(token_loss(model, batch)[0] / TOKENS)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert relative_error(gradients(model), truth) > 1e-2


def test_the_reported_norm_is_that_before_clipping() -> None:
    """The published regression: a gradient of 102, clipped to 0.5."""
    engine = _engine(mlp_spec(optimizer=SGD, gradient_clipping=0.5), Regression())
    report = engine.update([sliced(part) for part in _parts(2, 2, 2, 2)])
    assert report.gradient_norm == pytest.approx(102.0)
    assert engine.parameters[0].item() == pytest.approx(0.5, rel=1e-4)


# --- what no fault costs ----------------------------------------------------------------------------------------------


@both_gatherings
@pytest.mark.parametrize("sizes", [(8,), (3, 3, 2), (1,) * 8])
def test_without_a_fault_the_sums_are_those_of_plain_accumulation(sizes: tuple[int, ...], gathering: Gathering) -> None:
    """Bit for bit what backward passes into ``.grad`` give, with the same divisor."""
    model = CountingGpt(8)
    for batch in token_batches(SAMPLES, *sizes):
        torch.autograd.backward(token_loss(model, batch)[0] / TOKENS)
    plain = gradients(model)
    model.zero_grad()
    found = _accumulated(model, token_batches(SAMPLES, *sizes), token_loss, count_tokens, gathering=gathering)
    assert bit_equal(found, plain)


# --- fp16 -------------------------------------------------------------------------------------------------------------


class Poisoned(Regression):
    """Regression whose gradient is infinite where x is negative, as fp16 overflow makes."""

    def loss_terms(self, model: nn.Module, batch: Batch) -> LossTerms:
        """Infinite where x is negative."""
        loss = F.mse_loss(model(batch), 2 * batch, reduction="sum")
        return {"squared_error": (loss * float("inf") if bool((batch < 0).any()) else loss, float(len(batch)))}


def _state(engine: UpdateEngine) -> list[Any]:
    """Copies of all that an update may move."""
    return copy.deepcopy(
        [[parameter.detach() for parameter in engine.parameters], engine.averages, engine.optimizer.state_dict()]
    )


def _same(one: Any, other: Any) -> bool:
    """Return whether nested lists and dicts of tensors are equal to the last bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(tensor, other[name]) for name, tensor in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _fp16_engine(gathering: Gathering) -> UpdateEngine:
    """One that has made a step already: its state and averages are not zero."""
    optimizer = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1}
    changes = {"ema_decay": 0.9, "gradient_gathering": gathering, "gradient_clipping": 1.0}
    engine = _engine(mlp_spec(precision="fp16-mixed", optimizer=optimizer, **changes), Poisoned())
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 64.0})
    assert not engine.update([sliced(part) for part in _parts(4, 4)]).skipped
    return engine


@both_gatherings
@pytest.mark.parametrize("poisoned", range(4))
def test_an_infinite_micro_batch_skips_the_whole_window(poisoned: int, gathering: Gathering) -> None:
    """Parameters, optimizer state and averages stay, and the scale is halved once, whichever micro-batch overflowed."""
    engine = _fp16_engine(gathering)
    before = _state(engine)
    batches = _parts(2, 2, 2, 2)
    batches[poisoned] = -batches[poisoned]
    report = engine.update([sliced(batch) for batch in batches])
    assert report.skipped
    assert report.gradient_norm is None
    assert engine.scaler.get_scale() == 32.0
    assert _same(before, _state(engine))


@both_gatherings
def test_a_finite_window_after_a_skipped_one_steps(gathering: Gathering) -> None:
    """It has the gradient of its own samples alone, unscaled, and everything moves."""
    engine = _fp16_engine(gathering)
    engine.update([sliced(-part) for part in _parts(4, 4)])
    before, steps = _state(engine), steps_of(engine.optimizer, engine.model)
    report = engine.update([sliced(part) for part in _parts(4, 4)])
    assert not report.skipped
    assert engine.scaler.get_scale() == 32.0
    weight = before[0][0].item()
    assert report.gradient_norm == pytest.approx(sum(2 * x * (2 * x - weight * x) for x in range(1, 9)) / 8, rel=1e-2)
    assert steps[0]["weight"].item() == pytest.approx(-1.0, rel=1e-4)
    assert not any(_same(old, new) for old, new in zip(before, _state(engine), strict=True))


# --- bf16 -------------------------------------------------------------------------------------------------------------


def _sum_in_fp64(model: nn.Module, batches: list[dict[str, Tensor]]) -> Gradients:
    """The fp64 sum of the very gradients that each backward pass gives in bf16."""
    tokens = sum(count_tokens(batch) for batch in batches)
    total: Gradients = {}
    for batch in batches:
        model.zero_grad()
        torch.autograd.backward(token_loss(model, batch)[0] / tokens)
        for name, gradient in gradients(model).items():
            total[name] = total.get(name, 0.0) + gradient.double()
    model.zero_grad()
    return total


WideWindow: TypeAlias = tuple[nn.Module, list[dict[str, Tensor]], Gradients]


@pytest.fixture(scope="module")
def wide_window() -> WideWindow:
    """A bf16 model, 256 micro-batches of one sample, and the fp64 sum of their gradients."""
    model, batches = CountingGpt(256).to(torch.bfloat16), token_batches(ragged_tokens(256), *[1] * 256)
    return model, batches, _sum_in_fp64(model, batches)


@both_gatherings
def test_bf16_gradients_are_summed_in_fp32(wide_window: WideWindow, gathering: Gathering) -> None:
    """256 micro-batches, in two windows one after the other: within 1e-6 of their sum in fp64."""
    model, batches, truth = copy.deepcopy(wide_window)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulation = GradientAccumulation(model, optimizer, gathering=gathering)
    for _ in range(2):
        accumulation.accumulate(batches, token_loss, count_tokens)
        sums = dict(zip(truth, accumulation.gradients.tensors(), strict=True))
        assert relative_distance(sums, truth) < 1e-6
    assert bit_equal(gradients(model), {name: total.bfloat16() for name, total in sums.items()})


def test_summing_in_bf16_would_be_detected(wide_window: WideWindow) -> None:
    """The mutant that accumulates in ``.grad`` is off by more than a thousandth, by the same measure."""
    model, batches, truth = copy.deepcopy(wide_window)
    tokens = sum(count_tokens(batch) for batch in batches)
    for batch in batches:
        torch.autograd.backward(token_loss(model, batch)[0] / tokens)
    assert relative_distance(gradients(model), truth) > 1e-3


@both_gatherings
@pytest.mark.parametrize("sizes", [(8,), (1,) * 8])
def test_bf16_gradients_are_clipped_in_fp32(sizes: tuple[int, ...], gathering: Gathering) -> None:
    """The norm is that of the fp32 sums, and what is stepped with has the largest norm allowed, but for rounding."""
    model = CountingGpt(8).to(torch.bfloat16)
    batches = token_batches(SAMPLES, *sizes)
    truth = torch.cat([tensor.flatten() for tensor in _sum_in_fp64(model, batches).values()]).norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = steps_of(optimizer, model)
    accumulation = GradientAccumulation(model, optimizer, gathering=gathering, max_norm=0.1)
    report = accumulation.update(batches, token_loss, count_tokens)
    assert report.gradient_norm == pytest.approx(float(truth), rel=1e-5)
    assert {tensor.dtype for tensor in steps[0].values()} == {torch.bfloat16}
    assert torch.cat([tensor.flatten().double() for tensor in steps[0].values()]).norm() == pytest.approx(0.1, rel=1e-3)


# --- parameters and gradients out of the ordinary ---------------------------------------------------------------------


class TwoHeads(Regression):
    """Regression with a second weight that no loss uses."""

    def build_model(self) -> nn.Module:
        """Two weights of one."""
        model = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "unused": nn.Linear(1, 1, bias=False)})
        nn.init.ones_(cast("nn.Linear", model["unused"]).weight)
        return model

    def loss_terms(self, model: nn.Module, batch: Batch) -> LossTerms:
        """That of the first weight."""
        return super().loss_terms(cast("nn.ModuleDict", model)["used"], batch)


@both_gatherings
def test_an_unused_parameter_is_not_changed(gathering: Gathering) -> None:
    """Its gradient is none, not zero, so that AdamW's weight decay does not touch it."""
    optimizer = {"name": "adamw", "learning_rate": 0.1, "weight_decay": 0.5}
    engine = _engine(mlp_spec(optimizer=optimizer, gradient_gathering=gathering), TwoHeads())
    steps = steps_of(engine.optimizer, engine.model)
    for _ in range(2):
        engine.update([sliced(part) for part in _parts(4, 4)])
    assert [set(step) for step in steps] == [{"used.weight"}] * 2
    assert engine.model.get_parameter("unused.weight").item() == 1.0


@both_gatherings
def test_sparse_gradients_are_refused(gathering: Gathering) -> None:
    """The message says what to change, and no step is made."""
    model = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulation = GradientAccumulation(model, optimizer, gathering=gathering)
    steps = steps_of(optimizer, model)
    with pytest.raises(WorkloadError, match=r"shape \(8, 2\).*sparse=False"):
        accumulation.update([torch.arange(4)] * 2, lambda model, ids: (model(ids).sum(), len(ids)))
    assert not steps


@both_gatherings
def test_parameters_of_the_loss_are_accumulated_too(gathering: Gathering) -> None:
    """Parameters that only the optimizer knows, a temperature say, get the full batch's gradient, and no leftovers."""
    model, temperature = nn.Linear(1, 1), nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.0)
    accumulation = GradientAccumulation(model, optimizer, gathering=gathering)

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        return (model(batch).square() * temperature).sum(), len(batch)

    wanted = float(model(Regression().make_batch(8)).detach().square().mean())
    for _ in range(2):
        accumulation.accumulate(_parts(3, 3, 2), loss)
        assert temperature.grad is not None
        assert temperature.grad.item() == pytest.approx(wanted, rel=1e-5)


def test_a_model_without_parameters_is_refused() -> None:
    """There is nothing to accumulate."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1), requires_grad=False)], lr=1.0)
    with pytest.raises(WorkloadError, match="no trainable parameter"):
        GradientAccumulation(nn.ReLU(), optimizer)


# --- the contract of a loss -------------------------------------------------------------------------------------------


class TwoTerms(Regression):
    """Two terms with different weights, without telling them beforehand."""

    def loss_terms(self, model: nn.Module, batch: Batch) -> LossTerms:
        """Adds a penalty that weighs one per batch."""
        penalty = cast("nn.Linear", model).weight.square().sum()
        return {**super().loss_terms(model, batch), "penalty": (penalty, 1.0)}


@both_gatherings
@pytest.mark.parametrize("sizes", [(8,), (3, 3, 2), (1,) * 8])
def test_several_terms_need_no_weights_beforehand(sizes: tuple[int, ...], gathering: Gathering) -> None:
    """Without `weigh` a forward pass over each micro-batch adds up the weights, and changes neither draws nor state."""

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
        drawn.append(torch.rand(()).item())
        return _three_terms(model, batch)

    model, full = CountingGpt(8), token_batch(SAMPLES)
    parts = [
        {name: tensor[part] for name, tensor in full.items()} for part in torch.split(torch.arange(8), list(sizes))
    ]
    truth = exact_gradient(model, full, _three_terms)
    accumulation = GradientAccumulation(
        model, torch.optim.SGD(model.parameters(), lr=0.0), gathering=gathering, checks_coupling=False
    )
    for _ in range(2):
        drawn: list[float] = []
        torch.manual_seed(0)
        accumulation.accumulate(parts, loss)
        assert relative_error(gradients(model), truth) < 1e-5
        torch.manual_seed(0)
        assert drawn[-len(sizes) :] == [torch.rand(()).item() for _ in sizes]


def test_several_terms_over_ranks_need_weights_beforehand() -> None:
    """A rank may have no micro-batch to learn the names from: the error says which method to add."""
    ranks = Ranks()
    ranks.size = 2
    model = Regression().build_model()
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0), ranks=ranks)
    with pytest.raises(WorkloadError, match="loss_weights"):
        accumulation.update([Regression().make_batch(2)], TwoTerms().loss_terms)


def _update_with(answer: Any) -> UpdateReport:
    model = nn.Linear(1, 1)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return accumulation.update([torch.ones(2, 1)], lambda *_: answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({}, "no term"),
        (torch.zeros(()), "with a gradient"),
        (torch.zeros(2, requires_grad=True), r"shape \(2,\): return a scalar"),
        ([torch.zeros(())], "must return the mean loss.*not list"),
        ({"a": torch.zeros(())}, "loss_sum, weight"),
        (
            CausalLMOutput(loss=torch.zeros(())),
            r"\(CausalLMOutput\): return its `.loss`",
        ),
        ({"a": (torch.zeros(()), 1)}, "with a gradient"),
        ((torch.zeros(2, requires_grad=True), 1), "scalar"),
    ],
)
def test_a_broken_loss_is_named(answer: Any, words: str) -> None:
    """A loss that breaks the contract gets told which part."""
    with pytest.raises(WorkloadError, match=words):
        _update_with(answer)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_compiled_a_bounded_number_of_times(backend: str) -> None:
    """Windows of 4, 3, 3 and of less, down to one sample, take at most four graphs and keep the exact gradient."""
    torch._dynamo.reset()
    workload = build_workload(mlp_spec())
    torch.manual_seed(0)
    model = build_model(mlp_spec(), workload)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = steps_of(optimizer, model)
    accumulation = GradientAccumulation(cast("nn.Module", compiled), optimizer)
    counters.clear()
    for sizes in ((4, 3, 3), (4, 3, 3), (4, 3), (3, 3), (3, 2), (2,), (1,), (4, 3, 3)):
        window = [workload.make_batch(size) for size in sizes]
        accumulation.update(window, workload.loss_terms)
        whole = {name: torch.cat([batch[name] for batch in window]) for name in window[0]}
        assert relative_error(steps[-1], exact_gradient(model, whole, workload.loss_terms)) < 1e-5
    assert 1 <= counters["stats"]["unique_graphs"] <= 4


def test_complex_parameters_keep_their_imaginary_part() -> None:
    """Two micro-batches give the gradient of both at once, and its norm."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    model = nn.ParameterList([weight])
    inputs = torch.randn(4, 3)

    def loss(_: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        return (batch.to(weight.dtype) @ weight).abs().square().sum(), float(len(batch))

    (truth,) = torch.autograd.grad(loss(model, inputs)[0] / 4, weight)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    accumulation = GradientAccumulation(model, optimizer, max_norm=1e9)
    steps = steps_of(optimizer, model)
    report = accumulation.update(split_batch(inputs, 2), loss)
    torch.testing.assert_close(steps[0]["0"], truth)
    assert report.gradient_norm == pytest.approx(torch.view_as_real(truth).norm().item())


def test_micro_batches_with_other_terms_are_refused_without_weights() -> None:
    """Each term has a divisor of its own, which must be known: a window of `a`, then `b`, has none for both."""
    model, names = nn.Linear(1, 1), iter("ab")
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=1.0), checks_coupling=False)
    with pytest.raises(WorkloadError, match=r"several loss terms \(a, b\)"):
        accumulation.update(split_batch(torch.ones(4, 1), 2), lambda m, b: {next(names): (m(b).sum(), len(b))})


# --- what a micro-batch costs beside its passes ---


def _calls(action: Callable[[], object]) -> int:
    """Number of function calls in Python, including C functions: a cost that is independent of other load."""
    seen = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal seen
        seen += event in {"call", "c_call"}

    gc.disable()  # a collection may call what others have asked it to
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen


def _calls_of_commit(kind: type[GradientSums], tensors: int) -> int:
    """Those of the third micro-batch's commit; the sums are checked too."""
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(tensors)]
    sums = kind(parameters)
    sums.start()
    for _ in range(3):
        torch.autograd.backward(torch.stack(list(parameters)).sum())
        calls = _calls(sums.commit)
    sums.collect()
    assert all(total is not None and total.tolist() == [3.0] * 3 for total in sums.sums)
    return calls


@pytest.mark.parametrize("kind", [ScratchSums, InPlaceSums])
def test_a_commit_calls_no_function_for_each_parameter(kind: type[GradientSums]) -> None:
    """A tiny micro-batch of a model with many tensors would pay for it."""
    assert _calls_of_commit(kind, 100) == _calls_of_commit(kind, 10)


@both_gatherings
def test_a_micro_batch_calls_no_function_for_each_parameter(gathering: Gathering) -> None:
    """Of what is done between the passes of a window, nothing but torch's own grows with the parameters."""

    def calls(tensors: int, micro_batches: int) -> int:
        model = nn.ParameterList(torch.ones(3) for _ in range(tensors))
        accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0), gathering=gathering)
        whole = list(model)
        window = [torch.ones(2, 3)] * micro_batches
        update = partial(
            accumulation.update, window, lambda _, batch: ((torch.stack(whole).sum(0) * batch).sum(), len(batch))
        )
        update()
        return _calls(update)

    assert calls(100, 9) - calls(100, 3) == calls(10, 9) - calls(10, 3)


@both_gatherings
def test_gradients_that_come_late_or_not_at_all_are_summed(gathering: Gathering) -> None:
    """Some micro-batches use parameters that others leave out, and one that all leave out keeps none."""
    model = nn.ParameterList(torch.zeros(1) for _ in range(4))
    accumulation = GradientAccumulation(
        model, torch.optim.SGD(model.parameters(), lr=0.0), gathering=gathering, checks_coupling=False
    )
    used = [(0,), (0, 1), (0, 1, 2), (0, 1, 2), (1,)]
    window = [torch.tensor([index]) for index in range(len(used))]
    accumulation.accumulate(
        window,
        lambda _, batch: (torch.stack([model[used_index] for used_index in used[int(batch)]]).sum() * (1 + batch), 1.0),
    )
    assert [module.grad and pytest.approx(module.grad.item()) for module in model] == [2.0, 2.8, 1.4, None]


@pytest.mark.parametrize("batch", [torch.ones(3, 2), {"rows": torch.ones(3, 2)}], ids=["tensor", "mapping"])
def test_a_batch_that_is_no_list_is_refused(batch: Batch) -> None:
    """Its rows would run as micro-batches of their own, with a wrong weight and no error."""
    model = nn.Linear(2, 1)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(SpecError, match=r"a window is a list of batches.*`\[batch\]`"):
        accumulation.update(batch, lambda model, rows: (model(rows).sum(), len(rows)))
