"""The reference policy of training on preference pairs: the model that a run starts from, which does not change.

Below an adapter that is the model itself with its adapter disabled. Otherwise it is a frozen copy of the model, a
module of it: the copy is moved, cast and sharded with the model, and has neither gradients nor a state of the
optimizer. The copy is left out of the model's ``state_dict``, so that checkpoints and results hold what is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from batchwright.workloads.adapters.lora import adapter_disabled

Value: TypeAlias = Any
"""An argument or a result of a model."""

_NAME = "reference_policy"
"""Name of the copy among the modules of a model."""


class _WithReference(nn.Module):
    """Part of the class of a model with a frozen copy, whose ``forward`` runs the copy on request.

    The copy is called by the model's own ``forward``, because FSDP gathers the parameters of a model when it is called.
    """

    reference_policy: nn.Module
    runs_reference: bool

    def forward(self, *args: Value, **keywords: Value) -> Value:
        """Run the model, or its copy while ``runs_reference`` is true."""
        return self.reference_policy(*args, **keywords) if self.runs_reference else super().forward(*args, **keywords)

    def train(self, mode: bool = True) -> _WithReference:  # noqa: FBT001, FBT002 - as torch defines it
        """Set the mode of the model. The copy stays in evaluation, without dropout."""
        super().train(mode)
        self.reference_policy.eval()
        return self


def keep_reference(model: nn.Module) -> nn.Module:
    """Give a model a frozen copy of its present weights, and return the model, whose class is a subclass from now on.

    It has no adapter.
    """
    reference = copy.deepcopy(model).requires_grad_(requires_grad=False)
    kind = type(model)
    model.__class__ = type(kind.__name__, (_WithReference, kind), {})
    model.runs_reference = False  # type: ignore[assignment] # a plain attribute
    setattr(model, _NAME, reference)
    model.register_state_dict_post_hook(_leave_out_reference)  # type: ignore[no-untyped-call]
    return model.train(model.training)


def reference_of(model: nn.Module) -> nn.Module | None:
    """The frozen copy in a model; None where the model has none."""
    return getattr(model, _NAME, None)


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Let a model compute as its reference policy, without gradients and dropout."""
    if reference_of(model) is None:
        with torch.no_grad(), adapter_disabled(model):
            yield
        return
    model.runs_reference = True  # type: ignore[assignment] # a plain attribute
    try:
        with torch.no_grad():
            yield
    finally:
        model.runs_reference = False  # type: ignore[assignment]


def _leave_out_reference(_model: nn.Module, state: dict[str, Value], prefix: str, _metadata: Value) -> None:
    """Remove the copy from a state: a hook of ``state_dict``."""
    for name in [name for name in state if name.startswith(f"{prefix}{_NAME}.")]:
        del state[name]
