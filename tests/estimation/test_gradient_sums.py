"""Gradients that autograd makes in place: a trace must see them, although a dispatch mode changes what it does."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

from batchwright.estimation.tracing.torch_internals import FakeTensorMode, OpOverload, operator_in_place
from batchwright.torch_internals import TorchDispatchMode


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's types
    """Counts operators that would be made in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.found = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator."""
        del types
        self.found += operator_in_place(func, args, kwargs or {}, sys._getframe().f_back) is not func
        return func(*args, **(kwargs or {}))


class AddsInPython(torch.autograd.Function):
    """Its backward pass adds two tensors of its own."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor) -> Tensor:
        """The same values."""
        del ctx
        return values.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        """The gradient, by an addition."""
        del ctx
        return gradient / 2 + gradient / 2


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "three uses": lambda it: it.sin() + it.cos() + it.exp(),
    "a residual": lambda it: it + it.sin(),
    "a residual of a residual": lambda it: (it.exp() + (it + it.sin()).view(-1).view_as(it)).sin(),
    "a view": lambda it: it.view(-1).sin() + it.cos().view(-1),
    "twice the same": lambda it: (it + it) + it.sin(),
    "python code": lambda it: AddsInPython.apply(it).sin(),  # type: ignore[no-untyped-call]
    "gathered values": lambda it: it.gather(1, torch.zeros(8, 3, dtype=torch.int64)).sin(),
    "selected rows": lambda it: it.index_select(0, torch.zeros(9, dtype=torch.int64)).sin(),
    "indexed values": lambda it: it[torch.zeros(9, dtype=torch.int64)].sin(),
    "values at flat positions": lambda it: it.take(torch.zeros(9, dtype=torch.int64)).sin(),
    "maxima": lambda it: it.max(1).values.sin(),
    "largest values": lambda it: it.topk(3).values + it.sort().values[:, :3],
}
IN_PLACE = {f"aten::{it}" for it in ("add_", "scatter_", "scatter_add_", "index_add_", "_index_put_impl_", "put_")}


def _is_outermost(event: FunctionEvent) -> bool:
    """Return whether the operator was called by none that works in place, as the CPU's kernels call it."""
    return event.cpu_parent is None or event.cpu_parent.name not in IN_PLACE


def backward(loss: Callable[[Tensor], Tensor]) -> None:
    """Make the gradient of a loss of values that an operator has made."""
    values = torch.randn(8, 8, requires_grad=True)
    torch.autograd.backward(loss(values * 2).sum())


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_made_in_place_where_autograd_makes_them_so(name: str) -> None:
    """As many as in the same backward pass without a dispatch mode; so with fake tensors too."""
    with profile() as recorded:
        backward(LOSSES[name])
    expected = sum(event.name in IN_PLACE and _is_outermost(event) for event in recorded.events() or ())
    with Counter() as of_real:
        backward(LOSSES[name])
    with FakeTensorMode(), Counter() as of_fake:
        backward(LOSSES[name])
    assert (of_real.found, of_fake.found) == (expected, expected)


def test_some_losses_have_sums_in_place() -> None:
    """The comparison above is not one of zeros alone."""
    with Counter() as counted:
        backward(LOSSES["three uses"])
    assert counted.found == 2
    with Counter() as counted:
        backward(LOSSES["largest values"])
    assert counted.found == 3
