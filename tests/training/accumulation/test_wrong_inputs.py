"""Wrong inputs of a loop of one's own: each is refused by name, with its value and the remedy, and moves nothing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from warnings import catch_warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from batchwright.errors import BatchwrightError
from batchwright.planning.accumulation import balanced_plan
from batchwright.training.accumulation.collectives import ProcessGroup
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import Gathering
from batchwright.training.micro_batches.loss_window import UpdateReport
from batchwright.training.micro_batches.rng_state import RandomState
from batchwright.training.micro_batches.splitting import split_batch, windows

WINDOWS: Any = windows
SPLIT_BATCH: Any = split_batch
MODEL = nn.Linear(8, 3)
OTHER = nn.Linear(8, 3)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
BATCH = torch.ones(4, 8)
PLAN = balanced_plan(effective_batch_size=4, world_size=1, max_micro_batch_size=2)


def _loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    return model(batch).square().sum(), len(batch)


def _made(model: Any = MODEL, optimizer: Any = SGD, **options: Any) -> GradientAccumulation:
    return GradientAccumulation(model, optimizer, **options)


def _updated(window: Any = (BATCH, BATCH), loss: Any = _loss, *rest: Any, **options: Any) -> UpdateReport:
    return _made().update(window, loss, *rest, **options)


def _returning(make: Callable[[Tensor, int], object]) -> Callable[[nn.Module, Tensor], object]:
    """A loss that returns something made of its sum and its number of samples."""
    return lambda model, batch: make(_loss(model, batch)[0], len(batch))


def _without_gradients() -> None:
    with torch.no_grad():
        _updated()


def _in_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Linear(8, 3)
    _made(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _frozen() -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(requires_grad=False), nn.Linear(8, 3))
    _made(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def _replaced_head() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(8, 5)
    _made(model, optimizer).update([BATCH], _loss)


def _of_other_model(_: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    return _loss(OTHER, batch)


def _clears(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    SGD.zero_grad()
    return _loss(model, batch)


def _runs_backward(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    loss_sum, count = _loss(model, batch)
    torch.autograd.backward(loss_sum, retain_graph=True)
    return loss_sum, count


def _steps(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    SGD.step()
    return _loss(model, batch)


def _fused(weight: Tensor) -> None:
    """A hook as in the tutorial of torch, which leaves no gradient."""
    torch.optim.SGD([weight], lr=0.1).step()
    weight.grad = None


def _moves(weight: Tensor) -> None:
    with torch.no_grad():
        weight.sub_(1)


def _moves_data(weight: Tensor) -> None:
    weight.data.sub_(1)


def _hooked(hook: Callable[[Tensor], None]) -> None:
    model = nn.Linear(8, 3)
    model.weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    _made(model, torch.optim.SGD(model.parameters(), lr=0.1)).update([BATCH], _loss)


def _bound(size: Any) -> None:
    _made().largest_micro_batch = size


CASES: dict[str, tuple[Callable[[], object], str]] = {
    # --- GradientAccumulation ---
    "no model": (partial(_made, None), r"model: .*torch\.nn\.Module.*None"),
    "a class of models": (partial(_made, nn.Linear), r"model: .*call it.*Linear"),
    "parameters for a model": (partial(_made, list(MODEL.parameters())), r"model: .*list"),
    "weights for a model": (partial(_made, MODEL.state_dict()), r"model: .*OrderedDict"),
    "a model on the meta device": (
        lambda: _made(other := nn.Linear(2, 2, device="meta"), torch.optim.SGD(other.parameters())),
        r"model: .*`weight`.*meta.*to_empty",
    ),
    "a lazy model": (
        lambda: _made(other := nn.LazyLinear(3), torch.optim.SGD(other.parameters())),
        r"model: .*`weight`.*no shape.*forward pass",
    ),
    "a model of inference mode": (_in_inference_mode, r"model: .*`weight`.*inference_mode"),
    "model and optimizer exchanged": (partial(_made, SGD, MODEL), r"(?s)model: .*SGD.*optimizer: .*Linear"),
    "no optimizer": (partial(_made, MODEL, None), r"optimizer: .*None"),
    "a class of optimizers": (partial(_made, MODEL, torch.optim.SGD), r"optimizer: .*call it.*SGD"),
    "several optimizers": (partial(_made, MODEL, [SGD, SGD]), r"optimizer: .*accumulate.*list"),
    "the name of an optimizer": (partial(_made, MODEL, "adamw"), r"optimizer: .*'adamw'"),
    "a schedule for an optimizer": (
        partial(_made, MODEL, torch.optim.lr_scheduler.ConstantLR(SGD)),
        r"optimizer: .*ConstantLR",
    ),
    "an optimizer of another model": (
        lambda: _made(MODEL, torch.optim.SGD(OTHER.parameters(), lr=0.1)),
        r"optimizer: none of its 2 parameters .* 2 trainable parameters of Linear.*`weight`",
    ),
    "an optimizer that needs a closure": (
        lambda: GradientAccumulation(MODEL, torch.optim.LBFGS(MODEL.parameters())).update([BATCH], _loss),
        r"optimizer: steps with a closure only.*`accumulate`.*'LBFGS'",
    ),
    "an optimizer of frozen layers": (_frozen, r"optimizer: none of its 2 parameters .*`1\.weight`"),
    "an optimizer from before a layer was replaced": (_replaced_head, r"`1\.weight`.*optimizer.*after"),
    "a dict for a plan": (partial(_made, plan={"micro_batch_size": 2}), r"plan: .*'micro_batch_size'"),
    "a number for a plan": (partial(_made, plan=2), r"plan: .*2"),
    "a negative norm": (partial(_made, max_norm=-1), r"max_norm: .*-1.*|max_norm: .*None"),
    "a norm of zero": (partial(_made, max_norm=0.0), r"max_norm: .*0\.0"),
    "a norm that is no number": (partial(_made, max_norm=float("nan")), r"max_norm: .*nan"),
    "a norm as text": (partial(_made, max_norm="1.0"), r"max_norm: .*'1\.0'"),
    "a norm of True": (partial(_made, max_norm=True), r"max_norm: .*True"),
    "no scaler": (partial(_made, scaler=True), r"scaler: .*torch\.amp\.GradScaler.*True"),
    "the name of a device": (partial(_made, memory="cuda:0"), r"memory: .*'cuda:0'"),
    "a number of ranks": (partial(_made, ranks=2), r"ranks: .*ProcessGroup.*2"),
    "ranks without a process group": (lambda: _made(ranks=ProcessGroup()), r"init_process_group"),
    "misspelt sums": (partial(_made, gathering="inplace"), r"gathering: .*did you mean `in-place`.*'inplace'"),
    "other sums": (partial(_made, gathering=True), r"gathering: .*scratch.*True"),
    "text for a flag": (partial(_made, checks_coupling="no"), r"checks_coupling: .*True or False.*'no'"),
    "nothing for a flag": (partial(_made, recovers=None), r"recovers: .*None"),
    "a number for a flag": (partial(_made, lock_step=1), r"lock_step: .*1"),
    "a type by name": (partial(_made, floating="bf16"), r"floating: .*torch\.bfloat16.*'bf16'"),
    "a type of integers": (partial(_made, floating=torch.int32), r"floating: .*torch\.int32"),
    "a bound of zero": (partial(_bound, 0), r"largest_micro_batch: .*0"),
    "a bound as text": (partial(_bound, "4"), r"largest_micro_batch: .*'4'"),
    # --- windows, split_batch ---
    "windows of zero": (partial(WINDOWS, [1, 2, 3], 0), r"steps: .*at least 1.*0"),
    "windows of less": (partial(WINDOWS, [1, 2, 3], -2), r"steps: .*-2"),
    "windows of a fraction": (partial(WINDOWS, [1, 2, 3], 2.5), r"steps: .*2\.5"),
    "windows of text": (partial(WINDOWS, [1, 2, 3], "4"), r"steps: .*'4'"),
    "windows of True": (partial(WINDOWS, [1, 2, 3], True), r"steps: .*True"),
    "windows of a plan": (partial(WINDOWS, [1, 2, 3], PLAN), r"steps: .*gradient_accumulation_steps"),
    "windows of nothing": (partial(WINDOWS, None, 4), r"micro_batches: .*None"),
    "windows of a tensor": (partial(WINDOWS, BATCH, 2), r"micro_batches: .*rows.*Tensor"),
    "parts of zero samples": (partial(SPLIT_BATCH, BATCH, 0), r"micro_batch_size: .*0"),
    "parts of no number of samples": (partial(SPLIT_BATCH, BATCH, None), r"micro_batch_size: .*None"),
    # --- update ---
    "no window": (partial(_updated, None), r"micro_batches: .*None"),
    "an empty window": (partial(_updated, iter(())), r"micro_batches: .*empty"),
    "a batch for a window": (partial(_updated, BATCH), r"`\[batch\]`"),
    "one micro-batch for a window": (lambda: _updated(split_batch(BATCH, 4)[0]), r"micro_batches: .*`\[batch\]`"),
    "a computed loss": (lambda: _updated((BATCH,), _loss(MODEL, BATCH)), r"loss: .*function.*not its result"),
    "torch's loss": (partial(_updated, (BATCH,), nn.MSELoss()), r"loss: .*loss\(model, batch\).*MSELoss"),
    "a loss of the batch alone": (partial(_updated, (BATCH,), lambda batch: batch), r"loss: .*\(model, batch\)"),
    "a loss of nothing": (partial(_updated, (BATCH,), lambda *_: None), r"NoneType"),
    "a pair as a list": (
        partial(_updated, loss=_returning(lambda total, count: [total, count])),
        r"\(loss_sum, weight\).*not list",
    ),
    "three results": (partial(_updated, loss=_returning(lambda total, count: (total, count, 1))), r"loss_sum, weight"),
    "a weight of None": (
        partial(_updated, loss=_returning(lambda total, _: (total, None))),
        r"weight of loss term `loss` is None",
    ),
    "a negative weight": (
        partial(_updated, loss=_returning(lambda total, count: (total, -count))),
        r"weight of loss term `loss` is -4",
    ),
    "a weight that is no number": (
        partial(_updated, loss=_returning(lambda total, _: (total, float("nan")))),
        r"weight of loss term `loss` is nan",
    ),
    "weights for each sample": (
        partial(_updated, loss=_returning(lambda total, count: (total, torch.ones(count)))),
        r"weight of loss term `loss`.*\(4,\).*sum",
    ),
    "a complex loss": (
        partial(_updated, loss=_returning(lambda total, count: (total * 1j, count))),
        r"`loss`.*complex64.*\.real",
    ),
    "no function for weights": (partial(_updated, (BATCH,), _loss, 4.0), r"weigh: .*4\.0"),
    "weights of nothing": (partial(_updated, (BATCH,), _loss, lambda _: None), r"weigh.*None"),
    "negative weights": (partial(_updated, (BATCH,), _loss, lambda batch: -len(batch)), r"weigh.*-4"),
    "text for the noise": (partial(_updated, measures_noise="yes"), r"measures_noise: .*'yes'"),
    "gradients disabled": (_without_gradients, r"no_grad"),
    "a loss of another model": (partial(_updated, loss=_of_other_model), r"no gradient.*reaches.*Linear"),
    "gradients cleared in the loss": (partial(_updated, loss=_clears), r"zero_grad"),
    "a backward pass in the loss": (partial(_updated, loss=_runs_backward), r"backward"),
    "a step in the loss": (partial(_updated, loss=_steps), r"step\(\)"),
    "an optimizer in the backward pass": (partial(_hooked, _fused), r"SGD\.step\(\).*backward pass.*hook"),
    "an update in the backward pass": (partial(_hooked, _moves), r"`weight` was moved by the backward pass"),
    "an update without a trace": (partial(_hooked, _moves_data), r"`weight` was moved by the backward pass"),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Use one thread, and begin with new weights without gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    MODEL.reset_parameters()
    MODEL.zero_grad()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("call", "words"), CASES.values(), ids=CASES)
def test_a_wrong_input_is_refused_by_name(call: Callable[[], object], words: str) -> None:
    """An error of the library with words to act on, and none of Python or torch; no weight has moved."""
    before = MODEL.weight.detach().clone()
    with pytest.raises(BatchwrightError, match=words):
        call()
    assert torch.equal(MODEL.weight, before)
    assert MODEL.weight.grad is None


class Wrapper:
    """An optimizer in an object of another class, as trainers have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self.step = optimizer.step


def _penalized(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    inputs = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    return slope.square().sum(), len(batch)


def _steps_another(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    """A second model of its own is trained in the loss."""
    optimizer = torch.optim.SGD(OTHER.parameters(), lr=0.1)
    torch.autograd.backward(OTHER(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
    return _loss(model, batch)


def _prompted() -> UpdateReport:
    """Parameters of the loss alone are trained, with a frozen model."""
    model, prompt = nn.Linear(8, 3).requires_grad_(requires_grad=False), nn.Parameter(torch.ones(8))
    return _made(model, torch.optim.SGD([prompt], lr=0.1)).update([BATCH], lambda m, b: _loss(m, b + prompt))


def _normalized() -> UpdateReport:
    """An embedding that its own forward pass moves."""
    model = nn.Embedding(4, 3, max_norm=0.5)
    loss = lambda m, b: (m(b).square().sum(), len(b))  # noqa: E731 - one line
    return _made(model, torch.optim.SGD(model.parameters(), lr=0.1)).update([torch.tensor([0, 1, 2])] * 2, loss)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _made(max_norm=float("inf"), recovers=np.True_).update([BATCH], _loss),
        lambda: _made(max_norm=np.float32(1)).update((batch for batch in (BATCH, BATCH)), partial(_loss)),
        lambda: _made(optimizer=Wrapper(SGD)).update([BATCH], _loss),
        lambda: _made().update(next(WINDOWS(iter([BATCH] * 2), np.int64(2))), _loss, len),
        lambda: _updated(loss=_penalized),
        lambda: _updated(loss=_steps_another),
        lambda: _updated(loss=_returning(lambda total, count: (total, torch.tensor([count])))),
        _prompted,
        _normalized,
    ],
)
def test_an_unusual_input_is_no_wrong_one(call: Callable[[], UpdateReport]) -> None:
    """Numbers of numpy, wrapped optimizers, other models' steps, and parameters of a loss train as they did."""
    assert not call().skipped


def _clamp_sum(weight: Tensor) -> None:
    weight.grad.clamp_(-1, 1)  # type: ignore[union-attr] # after the gradient was accumulated


@pytest.mark.parametrize(
    ("register", "hook", "warnings"),
    [
        ("register_hook", lambda gradient: gradient.clamp(-1, 1), 1),
        ("register_hook", lambda _: None, 0),
        ("register_hook", lambda gradient: gradient, 0),
        ("register_post_accumulate_grad_hook", _clamp_sum, 1),
        ("register_post_accumulate_grad_hook", lambda _: None, 0),
    ],
)
@pytest.mark.parametrize("gathering", ["scratch", "in-place"])
def test_a_hook_that_changes_gradients_is_warned_of_once(
    register: str, hook: Callable[[Tensor], Tensor | None], warnings: int, gathering: Gathering
) -> None:
    """It sees the gradient of a micro-batch, so that clipping depends on the micro-batches; one may look."""
    model = nn.Linear(8, 3)
    getattr(model.weight, register)(hook)
    accumulation = _made(model, torch.optim.SGD(model.parameters(), lr=0.1), gathering=gathering)
    with catch_warnings(record=True, action="always") as caught:
        accumulation.update([BATCH, BATCH], _loss)
        accumulation.update([BATCH, BATCH], _loss)
    assert len(caught) == warnings
    assert all("`weight` has a hook" in str(each.message) for each in caught)


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_making_one_leaves_every_generator(block: Callable[[], AbstractContextManager[None]]) -> None:
    """Also in a block without gradients, and with another default type."""
    before = RandomState.capture(torch.device("cpu"))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with block():
            _made()
    finally:
        torch.set_default_dtype(torch.float32)
    assert before.equals(RandomState.capture(torch.device("cpu")))
