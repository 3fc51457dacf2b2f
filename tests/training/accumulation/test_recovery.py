"""A micro-batch that does not fit runs in smaller parts, and the update is as if it had never been tried whole."""

import gc
import random
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from batchwright.device_traits import traits_of
from batchwright.errors import OutOfMemoryError, WorkloadError
from batchwright.training.accumulation import engine
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import Gathering, InPlaceSums
from batchwright.training.accumulation.recovery import Action, decide
from batchwright.training.micro_batches.loss_window import UpdateReport
from batchwright.training.micro_batches.rng_state import RandomState, seed_everything
from batchwright.training.micro_batches.splitting import sliced, split_batch
from batchwright.workloads.base import LossTerms
from batchwright.workloads.build import build_model, build_workload
from tests.support.factories import mlp_spec
from tests.support.faults import (
    CountingGpt,
    Faults,
    Gradients,
    bit_equal,
    count_tokens,
    exact_gradient,
    out_of_memory,
    plain_out_of_memory,
    ragged_tokens,
    relative_distance,
    relative_error,
    steps_of,
    times_committed,
    token_batch,
    token_batches,
    token_loss,
)

SAMPLES = ragged_tokens(12, longest=8)
WINDOW = token_batches(SAMPLES, 4, 4, 4)
BACKWARD_OF_LAYER_0 = "backward of gpt.blocks.0.query_key_value"
FAILING = {(2, "scratch"), (1, "in-place")}
"""The micro-batch that fails at any place, and how gradients are gathered, where every pair would take long."""
both_gatherings = pytest.mark.parametrize("gathering", ["scratch", "in-place"])


class Trial:
    """A model whose passes can be made to fail, and the gradients of its optimizer's steps."""

    def __init__(self, gathering: Gathering, error: Callable[[], Exception] = out_of_memory, **changes: Any) -> None:
        self.model = CountingGpt(len(SAMPLES), **changes)
        self.truth = exact_gradient(self.model, token_batch(SAMPLES), token_loss)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.steps = steps_of(self.optimizer, self.model)
        self.accumulation = GradientAccumulation(self.model, self.optimizer, gathering=gathering, checks_coupling=False)
        self.faults = Faults(self.model, error)
        self.attempts: list[int] = []

    def update(self) -> UpdateReport:
        """One update over all samples."""
        self.attempts.clear()
        return self.accumulation.update(WINDOW, self._loss, count_tokens)

    def _loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        self.attempts.append(len(batch["sample"]))
        return token_loss(model, batch)

    def places(self) -> dict[str, int]:
        """Every place, with the number of passes of a micro-batch."""
        self.faults.reset()
        self.update()
        return {place: passes // len(WINDOW) for place, passes in self.faults.seen.items()}

    def after(self, place: str, *passes: int) -> UpdateReport:
        """An update, without a bound from earlier ones, in which these passes through ``place`` fail."""
        self.accumulation.largest_micro_batch = None
        self.faults.fail(place, *passes)
        return self.update()

    def error(self) -> float:
        """Relative error of the last update's gradient."""
        return relative_error(self.steps[-1], self.truth)

    def require_exact(self, where: str = "") -> None:
        """Check that the last update had the full batch's gradient, with each sample in it once."""
        assert self.error() < 1e-5, where
        assert times_committed(self.steps[-1], SAMPLES) == [1] * len(SAMPLES), where


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Use one thread, fastest for tiny models, and keep each recovery's garbage collection from existing objects."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Trial("scratch").update()  # torch imports some of itself at the first step
    gc.collect()
    gc.freeze()
    yield
    torch.set_num_threads(threads)


def _splits(report: UpdateReport) -> list[tuple[int, tuple[int, ...]]]:
    return [(split.size, split.parts) for split in report.splits]


# --- a fault anywhere -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failing", "gathering"),
    [
        pytest.param(failing, gathering, marks=() if (failing, gathering) in FAILING else pytest.mark.thorough)
        for gathering in ("scratch", "in-place")
        for failing in range(3)
    ],
)
def test_a_fault_at_any_place_leaves_no_trace(failing: int, gathering: Gathering) -> None:
    """Each micro-batch of a window, forward and backward of each layer, and after each parameter's gradient."""
    trial = Trial(gathering)
    kept = failing if gathering == "scratch" else 0
    places = trial.places()
    assert len(places) > 60
    for place, passes in places.items():
        report = trial.after(place, failing * passes)
        trial.require_exact(place)
        assert _splits(report) == [(4, (2, 2))], place
        assert report.micro_batch_sizes == (4,) * kept + (2,) * 2 * (3 - kept), place


@both_gatherings
def test_a_second_fault_after_a_split_leaves_no_trace(gathering: Gathering) -> None:
    """At every third place: half of the second micro-batch fails again, and single samples go through."""
    trial = Trial(gathering)
    for place, passes in list(trial.places().items())[::3]:
        report = trial.after(place, passes, passes + 1)
        trial.require_exact(place)
        assert _splits(report) == [(4, (2, 2)), (2, (1, 1))], place
        assert report.micro_batch_sizes == ((4,) + (1,) * 8 if gathering == "scratch" else (1,) * 12), place


@pytest.mark.parametrize(
    ("architecture", "gathering"),
    [
        ("gpt", "scratch"),
        pytest.param("gpt", "in-place", marks=pytest.mark.thorough),
        ("mlp", "scratch"),
        ("mlp", "in-place"),
    ],
)
def test_a_fault_under_activation_checkpointing_leaves_no_trace(architecture: str, gathering: Gathering) -> None:
    """Recomputed forward passes too: every pass of the second micro-batch through the first layer."""
    trial = Trial(gathering, activation_checkpointing=True) if architecture == "gpt" else _MlpTrial(gathering)
    first = "blocks.0" if architecture == "gpt" else "hidden.0"
    places = {place: passes for place, passes in trial.places().items() if first in place}
    assert max(places.values()) >= 2
    for place, passes in places.items():
        for number in range(passes, 2 * passes):
            assert len(trial.after(place, number).splits) == 1, place
            assert trial.error() < 1e-5, place


class _MlpTrial(Trial):
    """The reference MLP with activation checkpointing."""

    def __init__(self, gathering: Gathering) -> None:
        spec = mlp_spec(activation_checkpointing=True)
        workload = build_workload(spec)
        torch.manual_seed(0)
        model, batch = build_model(spec, workload), workload.make_batch(12)
        self.truth = exact_gradient(model, batch, workload.loss_terms)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.steps = steps_of(self.optimizer, model)
        self.accumulation = GradientAccumulation(model, self.optimizer, gathering=gathering, checks_coupling=False)
        self.faults = Faults(model)
        self.update = lambda: self.accumulation.update(split_batch(batch, 4), workload.loss_terms)  # type: ignore[method-assign]


def _invalid_size() -> Exception:
    return RuntimeError("CUDA error: invalid configuration argument")


def _wrapped() -> Exception:
    error = RuntimeError("the compiled graph failed")
    error.__cause__ = out_of_memory()
    return error


@both_gatherings
@pytest.mark.parametrize("kind", [out_of_memory, plain_out_of_memory, MemoryError, _invalid_size, _wrapped])
def test_every_kind_of_out_of_memory_error_is_recovered_from(
    kind: Callable[[], Exception], gathering: Gathering
) -> None:
    """Torch's own error, a plain one with its words, Python's, a size that a kernel refuses, and one in another."""
    trial = Trial(gathering, kind)
    undisturbed = trial.update()
    report = trial.after(BACKWARD_OF_LAYER_0, 2)
    trial.require_exact()
    assert _splits(report) == [(4, (2, 2))]
    assert report.weights == {"loss": count_tokens(token_batch(SAMPLES))}
    assert report.loss == pytest.approx(undisturbed.loss, rel=1e-6)
    assert str(trial.faults.error()) in report.splits[0].message or kind in (MemoryError, _wrapped)


@both_gatherings
def test_memory_for_one_sample_is_enough(gathering: Gathering) -> None:
    """A model that fits a single sample: splits go down to one, and the update is exact."""
    trial = Trial(gathering)
    trial.faults.fail_above("backward of gpt.blocks.0", 1)
    report = trial.update()
    trial.require_exact()
    assert _splits(report) == [(4, (2, 2)), (2, (1, 1))]
    assert report.micro_batch_sizes == (1,) * 12


@both_gatherings
def test_uneven_halves_are_split_again(gathering: Gathering) -> None:
    """Five samples where two fit: 5 becomes 3 + 2, and 3 becomes 2 + 1."""
    trial = Trial(gathering)
    trial.faults.fail_above("backward of gpt.blocks.0", 2)
    report = trial.accumulation.update(token_batches(SAMPLES, 5, 5, 2), token_loss, count_tokens)
    trial.require_exact()
    assert _splits(report) == [(5, (3, 2)), (3, (2, 1))]
    assert report.micro_batch_sizes == ((2, 1, 2, 2, 1, 2, 2) if gathering == "scratch" else (2, 2, 1, 2, 2, 1, 2))


@both_gatherings
def test_later_windows_keep_to_the_lowered_bound(gathering: Gathering) -> None:
    """After a split no micro-batch is larger than its parts, one of three neither, and nothing is tried in vain."""
    trial = Trial(gathering)
    trial.after(BACKWARD_OF_LAYER_0, 2)
    trial.faults.reset()
    report = trial.accumulation.update(token_batches(SAMPLES, 4, 4, 3, 1), token_loss, count_tokens)
    trial.require_exact()
    assert report.splits == ()
    assert report.micro_batch_sizes == (2, 2, 2, 2, 2, 1, 1)


@pytest.mark.parametrize(("gathering", "passes"), [("scratch", [4, 4, 4, 2, 2]), ("in-place", [4, 4, 4] + [2] * 6)])
def test_what_a_fault_costs(gathering: Gathering, passes: list[int]) -> None:
    """Of twelve samples the failed four are run again with scratch sums, and all twelve with sums in place."""
    trial = Trial(gathering)
    trial.after(BACKWARD_OF_LAYER_0, 2)
    assert trial.attempts == passes


# --- the decision table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_type", "lock_step", "action"),
    [
        ("cuda", False, Action.DIVIDE_MICRO_BATCH),
        ("cpu", False, Action.DIVIDE_WINDOW),
        ("cuda", True, Action.RESTART),
        ("cpu", True, Action.RESTART),
    ],
)
def test_the_response_to_an_out_of_memory_error(device_type: str, *, lock_step: bool, action: Action) -> None:
    """Divided on the spot where a rank may run alone, restarted where it may not."""
    in_place = lock_step or traits_of(device_type).gradient_gathering == "in-place"
    assert decide(lock_step=lock_step, sums_in_place=in_place) is action


# --- what cannot be recovered from ------------------------------------------------------------------------------------


@both_gatherings
def test_one_sample_that_does_not_fit_raises(gathering: Gathering) -> None:
    """The tuner's own error is raised, with the device's message; the next window is exact."""
    trial = Trial(gathering)
    trial.faults.fail_above(BACKWARD_OF_LAYER_0, 0)
    with pytest.raises(OutOfMemoryError, match=r"one sample does not fit: CUDA out of memory"):
        trial.update()
    assert not trial.steps
    trial.faults.reset()
    trial.update()
    trial.require_exact()


@both_gatherings
@pytest.mark.parametrize("kind", [lambda: ValueError("memory"), lambda: RuntimeError("shapes do not match")])
def test_an_error_other_than_out_of_memory_is_raised_unchanged(
    kind: Callable[[], Exception], gathering: Gathering
) -> None:
    """The very error, after one attempt; no bound is lowered, and the next window is exact."""
    error = kind()
    trial = Trial(gathering, lambda: error)
    with pytest.raises(type(error)) as caught:
        trial.after(BACKWARD_OF_LAYER_0, 1)
    assert caught.value is error
    assert (trial.attempts, trial.steps, trial.accumulation.largest_micro_batch) == ([4, 4], [], None)
    trial.faults.reset()
    trial.update()
    trial.require_exact()


def test_without_recovery_the_error_is_raised() -> None:
    """A probe needs the error, not a split."""
    model = CountingGpt(12)
    faults = Faults(model)
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0), recovers=False)
    faults.fail(BACKWARD_OF_LAYER_0, 1)
    with pytest.raises(torch.OutOfMemoryError):
        accumulation.update(WINDOW, token_loss)


@both_gatherings
def test_the_failed_pass_is_freed_before_the_retry(gathering: Gathering) -> None:
    """Losses, logits, activations and gradients of the failed pass are freed before its first half starts."""
    trial = Trial(gathering)
    trial.faults.fail("gradient of gpt.blocks.0.attention_norm.weight", 0)
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    trial.model.gpt.get_submodule("blocks.1").register_forward_hook(
        lambda *arguments: held.append(weakref.ref(arguments[2]))
    )
    for parameter in trial.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda owner: held.append(weakref.ref(owner.grad)))  # type: ignore[no-untyped-call]

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        alive.append(sum(reference() is not None for reference in held))
        result = token_loss(model, batch)
        held.append(weakref.ref(result[0]))
        return result

    trial.accumulation.update(WINDOW[:1], loss, count_tokens)
    assert len(held) > 10
    assert alive[:2] == [0, 0]


# --- mutants: each known way to recover wrongly is detected -----------------------------------------------------------


class KeepsPartialGradients(InPlaceSums):
    """Split and retry, with what the failed pass wrote left in ``.grad``."""

    in_place = False

    def discard(self) -> None:
        """Do nothing."""


class DropsAllGradients(InPlaceSums):
    """All gradients dropped, those of earlier micro-batches too, and the window continued."""

    in_place = False


@pytest.mark.parametrize("mutant", [KeepsPartialGradients, DropsAllGradients])
def test_a_wrong_recovery_would_be_detected(mutant: type[InPlaceSums], monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by more than a hundredth, by the measure that the real recoveries pass with 1e-5."""
    monkeypatch.setattr(engine, "InPlaceSums", mutant)
    trial = Trial("in-place")
    report = trial.after(BACKWARD_OF_LAYER_0, 2)
    assert _splits(report) == [(4, (2, 2))]
    assert trial.error() > 1e-2


def test_skipping_the_failed_micro_batch_would_be_detected() -> None:
    """The update of the others alone is off by more than a hundredth, and the engine sees that weight is missing."""
    trial = Trial("scratch")
    with pytest.raises(WorkloadError, match=r"a weight of .* the two must be equal"):
        trial.accumulation.update(WINDOW[:2], token_loss, lambda _: count_tokens(token_batch(SAMPLES)) / 2)
    trial.accumulation.update(WINDOW[:2], token_loss)
    assert trial.error() > 1e-2
    assert times_committed(trial.steps[0], SAMPLES[:8]) == [1] * 8 + [0] * 4


# --- random numbers and running statistics ----------------------------------------------------------------------------


class Noisy(nn.Module):
    """A model whose forward pass changes running statistics, a buffer that it replaces, and every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.average: Tensor
        self.register_buffer("average", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        """With noise of Python, numpy and torch."""
        hidden = self.first(inputs)
        self.average = self.average * 0.9 + hidden.detach().mean(0) * 0.1
        noise = random.random() + np.random.rand() + torch.randn(1)  # noqa: NPY002 - user code may use the old interface
        output: Tensor = self.second(self.dropout(self.norm(hidden) + noise))
        return output


class NoisyRun:
    """One update of ``Noisy`` over eight samples, and the state afterwards."""

    def __init__(self, gathering: Gathering) -> None:
        seed_everything(1)
        self.model = Noisy()
        self.inputs = torch.randn(16, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.steps = steps_of(self.optimizer, self.model)
        self.accumulation = GradientAccumulation(self.model, self.optimizer, gathering=gathering, checks_coupling=False)
        self.faults = Faults(self.model)
        self.calls = 0

    def update(self, *sizes: int, fail_call: int | None = None) -> UpdateReport:
        """Micro-batches of these sizes; call number ``fail_call`` of the loss fails before any work."""

        def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
            self.calls += 1
            if self.calls - 1 == fail_call:
                raise out_of_memory()
            return model(batch).square().sum(), len(batch)

        return self.accumulation.update(list(torch.split(self.inputs, list(sizes))), loss)

    def state(self) -> dict[str, Tensor]:
        """Buffers and the state of every generator."""
        random_state = RandomState.capture(torch.device("cpu")).state_dict()
        return {
            **{name: buffer.clone() for name, buffer in self.model.named_buffers()},
            "python": torch.tensor(random_state["python"][1]),
            "numpy": torch.cat([random_state["numpy"][1], torch.tensor([random_state["numpy"][2]])]),
            "torch": random_state["cpu"],
        }


CUT: dict[str, tuple[int, ...]] = {"scratch": (4, 2, 2, 2, 2, 2, 2), "in-place": (2,) * 8}
"""Sizes of the micro-batches of sixteen samples in fours when the second four fail."""


def _undisturbed(gathering: Gathering) -> tuple[Gradients, dict[str, Tensor]]:
    run = NoisyRun(gathering)
    run.update(*CUT[gathering])
    return run.steps[0], run.state()


@both_gatherings
@pytest.mark.parametrize("place", [None, "forward of norm", "forward of second", "backward of first"])
def test_the_state_is_as_if_the_failed_pass_had_never_run(place: str | None, gathering: Gathering) -> None:
    """Before, during and after the work: generators, buffers and gradient bit-equal to a run that was cut like this."""
    run = NoisyRun(gathering)
    if place is not None:
        run.faults.fail(place, 1)
    report = run.update(4, 4, 4, 4, fail_call=1 if place is None else None)
    assert report.micro_batch_sizes == CUT[gathering]
    found = run.state()
    gradient, state = _undisturbed(gathering)
    assert bit_equal(found, state)
    assert bit_equal(run.steps[0], gradient)


@both_gatherings
def test_a_recovery_without_restore_would_be_detected(gathering: Gathering) -> None:
    """The mutant without a restore draws other numbers, and counts the failed pass in its statistics."""
    run = NoisyRun(gathering)
    run.accumulation._recovery._snapshot = None
    run.faults.fail("backward of first", 1)
    run.update(4, 4, 4, 4)
    found = run.state()
    gradient, state = _undisturbed(gathering)
    assert not bit_equal(run.steps[0], gradient)
    assert {name for name, tensor in found.items() if not torch.equal(tensor, state[name])} == set(state)


@both_gatherings
def test_a_buffer_that_a_pass_replaced_is_restored(gathering: Gathering) -> None:
    """The retry finds the original tensor, with its values."""
    run = NoisyRun(gathering)
    found: list[Tensor] = []
    run.model.register_forward_pre_hook(lambda model, _: found.append(cast("Noisy", model).average))
    original, values = run.model.average, run.model.average.clone()
    run.faults.fail("backward of first", 0)
    run.update(16)
    assert found[1] is original
    assert torch.equal(original, values)


# --- the optimizer's step ---------------------------------------------------------------------------------------------


class FailsHalfway(torch.optim.SGD):
    """Steps half of the parameters, then runs out of memory."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Half of one."""
        del closure
        self.steps += 1
        parameters = [parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None]
        with torch.no_grad():
            for parameter in parameters[: len(parameters) // 2]:
                parameter.sub_(parameter.grad)
        raise out_of_memory()


@both_gatherings
def test_a_fault_in_the_step_is_never_retried(gathering: Gathering) -> None:
    """It comes out as it is after one step half made: no split is recorded, no parameter is stepped twice."""
    model = CountingGpt(12)
    truth = exact_gradient(model, token_batch(SAMPLES), token_loss)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = FailsHalfway(model.parameters(), lr=1.0)
    accumulation = GradientAccumulation(model, optimizer, gathering=gathering)
    with pytest.raises(torch.OutOfMemoryError):
        accumulation.update(WINDOW, token_loss, count_tokens)
    moved = {
        name: before[name] - parameter
        for name, parameter in model.named_parameters()
        if not torch.equal(before[name], parameter)
    }
    assert (optimizer.steps, accumulation.largest_micro_batch) == (1, None)
    assert len(moved) == len(truth) // 2
    assert relative_distance(moved, {name: truth[name] for name in moved}) < 1e-5


# --- dividing batches -------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - as user code has them


def _nested() -> dict[str, Any]:
    """Three samples in every kind of nesting, and what belongs to all of them."""
    rows = torch.arange(6).view(3, 2)
    return {
        "tensor": rows,
        "pair": Pair(rows + 10, rows + 20),
        "list": [rows + 30, {"deep": (rows + 40,)}],
        "names": ["a", "b", "c"],
        "ids": (7, 8, 9),
        "scale": torch.tensor(0.5),
        "task": "translate",
        "count": 3,
    }


def test_nested_batches_are_divided_sample_by_sample() -> None:
    """Dicts, lists, tuples, named tuples, lists of names; what has no samples goes to every part."""
    first, second = sliced(_nested()).divide((2, 1))
    assert (first.size, second.size) == (2, 1)
    assert second.batch["tensor"].tolist() == [[4, 5]]
    assert isinstance(second.batch["pair"], Pair)
    assert second.batch["pair"].right.tolist() == [[24, 25]]
    assert second.batch["list"][1]["deep"][0].tolist() == [[44, 45]]
    assert (first.batch["names"], second.batch["names"]) == (["a", "b"], ["c"])
    assert (first.batch["ids"], second.batch["ids"]) == ((7, 8), (9,))
    for part in (first, second):
        assert (float(part.batch["scale"]), part.batch["task"], part.batch["count"]) == (0.5, "translate", 3)


def test_parts_are_divided_again() -> None:
    """Down to one sample each, in order."""
    parts = [one for part in sliced(_nested()).divide((2, 1)) for one in part.at_most(1)]
    assert [part.batch["names"] for part in parts] == [["a"], ["b"], ["c"]]
    assert [part.batch["tensor"].tolist() for part in parts] == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_a_packed_batch_is_not_divided() -> None:
    """A tensor without the samples along its first dimension has no known parts: the message names it."""
    packed = {"tokens": torch.zeros(10), "ends": torch.tensor([4, 10])}
    with pytest.raises(WorkloadError, match=r"2 samples cannot be divided: `batch\['tokens'\]` has the shape \(10,\)"):
        sliced(packed, 2).divide((1, 1))


def test_a_packed_batch_that_does_not_fit_raises() -> None:
    """An OOM with a batch that cannot be divided ends in the message about its shapes, and without a step."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = steps_of(optimizer, model)

    def loss(*_: Any) -> LossTerms:
        raise out_of_memory()

    with pytest.raises(OutOfMemoryError, match=r"out of memory.* cannot be divided"):
        GradientAccumulation(model, optimizer).update([sliced({"x": torch.zeros(5, 1), "y": torch.zeros(2)}, 2)], loss)
    assert not steps


def test_a_batch_without_tensors_has_no_size() -> None:
    """Its size cannot be told, and the message says why."""
    with pytest.raises(WorkloadError, match="no tensor with samples"):
        sliced({"names": ["a"], "scale": torch.tensor(1.0)})


@both_gatherings
@pytest.mark.parametrize("when", ["before the forward pass", "after the forward pass"])
def test_a_written_batch_is_never_run_again(when: str, gathering: Gathering) -> None:
    """A later micro-batch runs out of memory: no step is made from what the loss wrote, and the tensor is named."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = steps_of(optimizer, model)
    inputs = torch.randn(12, 3)
    failing = [True]

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        if when == "before the forward pass":
            batch["features"].mul_(2.0)
        total = model(batch["features"].clone()).sum()
        if when == "after the forward pass":
            batch["features"].zero_()
        if float(batch["number"][0]) == 8.0 and len(batch["number"]) == 4 and failing:
            failing.pop()
            raise out_of_memory()
        return total, len(batch["number"])

    numbers = torch.arange(12.0)
    window = [
        {"number": number.clone(), "features": part.clone()}
        for number, part in zip(torch.split(numbers, 4), torch.split(inputs, 4), strict=True)
    ]
    accumulation = GradientAccumulation(model, optimizer, gathering=gathering)
    with pytest.raises(WorkloadError, match=r"writes to `batch\['features'\]`"):
        accumulation.update(window, loss)
    assert not steps


def test_a_batch_that_only_earlier_micro_batches_wrote_to_is_named_with_its_number() -> None:
    """In place all micro-batches are run again, so the first that was written to stands in the way."""
    model = nn.Linear(1, 1, bias=False)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        if batch[0][0] == 2.0:
            raise out_of_memory()
        total = model(batch[0].clone()).sum()
        batch[0].zero_()
        return total, len(batch[0])

    window = [(torch.full((2, 1), float(number)), torch.zeros(2)) for number in range(3)]
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=1.0), gathering="in-place")
    with pytest.raises(WorkloadError, match=r"`batch\[0\]` of micro-batch 1 of 3"):
        accumulation.update(window, loss)
    assert model.weight.grad is None


def test_scratch_sums_run_only_the_failed_micro_batch_again() -> None:
    """Tensors that earlier micro-batches wrote to are not read again, so that the update is made and exact."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = steps_of(optimizer, model)

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        if len(batch) > 1 and batch[0] == 2.0:
            raise out_of_memory()
        total = model(batch.clone()).sum()
        batch.zero_()
        return total, len(batch)

    window = [torch.full((2, 1), float(number)) for number in range(3)]
    GradientAccumulation(model, optimizer, gathering="scratch").update(window, loss)
    assert steps[0]["weight"].item() == pytest.approx(1.0)


def test_tensors_without_a_version_are_run_again() -> None:
    """Inference tensors cannot be written to in training, so they need no counter."""
    with torch.inference_mode():
        batch = torch.ones(4, 1)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = steps_of(optimizer, model)

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        if len(batch) > 2:
            raise out_of_memory()
        return model(batch.clone()).sum(), len(batch)

    GradientAccumulation(model, optimizer).update([batch], loss)
    assert steps[0]["weight"].item() == pytest.approx(1.0)


def test_a_loss_that_writes_to_its_batch_is_not_run_again() -> None:
    """A second pass would see other samples than the first: the error says what to do."""
    model = nn.Linear(1, 1)

    def loss(_: nn.Module, batch: Tensor) -> LossTerms:
        batch.mul_(2.0)
        raise out_of_memory()

    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(WorkloadError, match="writes to `batch`"):
        accumulation.update([torch.ones(4, 1)], loss)


def test_a_buffer_that_a_failed_pass_has_filled_is_empty_again() -> None:
    """A cache that is made in the first forward pass must not outlive a pass that failed."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.cache: Tensor | None
            self.register_buffer("cache", None)
            self.found: list[bool] = []

        def forward(self, inputs: Tensor) -> Tensor:
            self.found.append(self.cache is not None)
            self.cache = inputs.detach().mean()
            if len(inputs) > 2:
                raise out_of_memory()
            output: Tensor = self.layer(inputs)
            return output

    model = Caching()
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=1.0), checks_coupling=False)
    accumulation.update([torch.ones(4, 1)], lambda m, b: (m(b).sum(), len(b)))
    assert model.found == [False, True]  # without the pass that failed


def test_hooks_of_an_object_that_is_gone_take_nothing() -> None:
    """bf16 parameters trained in place by one object, then by another, whose gradients must be its own."""
    model = nn.Linear(2, 1).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = torch.ones(4, 2, dtype=torch.bfloat16)
    norms = []
    for _ in range(2):
        accumulation = GradientAccumulation(model, optimizer, gathering="in-place")
        report = accumulation.accumulate(split_batch(batch, 2), lambda m, b: (m(b).sum(), len(b)))
        assert report.weights == {"loss": 4.0}
        norms.append(
            [parameter.grad.float().norm().item() for parameter in model.parameters() if parameter.grad is not None]
        )
        optimizer.zero_grad()
    assert norms[0] == norms[1]
    assert len(norms[0]) == 2


def test_a_scaler_needs_wide_parameters() -> None:
    """Gradients of bf16 parameters are summed apart from what the scaler sees."""
    model = nn.Linear(2, 1).to(torch.bfloat16)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(WorkloadError, match="fp32"):
        GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=1.0), scaler=scaler)
