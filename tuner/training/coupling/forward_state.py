"""State of a model that its own forward passes move: running statistics, power iterations, queues, counters.

Nothing is known of a module's class: whatever a forward pass in training changes is state, if it is a buffer, a
parameter, or a number or tensor that a module holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tuner.torch_internals import own_buffers

_NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class _Kept:
    """A buffer or attribute as it was: the object, and what was in it."""

    holder: dict[str, Any]
    name: str
    value: Any
    content: Tensor | None

    def moved(self) -> bool:
        """Return whether the state has changed since."""
        now = self.holder.get(self.name)
        if not isinstance(now, Tensor) or self.content is None:
            return now is not self.value and bool(now != self.value)
        same = now.shape == self.content.shape and now.dtype == self.content.dtype
        return not (same and torch.equal(now.detach(), self.content))

    def restore(self) -> None:
        """Put it back."""
        if isinstance(self.value, Tensor) and self.content is not None:
            with torch.no_grad():
                self.value.copy_(self.content)
        self.holder[self.name] = self.value


class ModelState:
    """State that forward passes may move, as it was when this object was made.

    Args:
        model: whose modules hold it.
        moving: the parameters that forward passes are known to move; those alone are copied.
    """

    def __init__(self, model: nn.Module, moving: frozenset[str] = frozenset()) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._kept = {path: list(_held(module)) for path, module in self._modules.items()}
        self._names = [(own_buffers(module), list(own_buffers(module))) for module in self._modules.values()]
        named = dict(model.named_parameters())
        self.moving = moving
        self._parameters = {name: (named[name], named[name].detach().clone()) for name in moving}
        self._marks = _marks(named)

    def restore(self) -> None:
        """Restore all of the state."""
        for buffers, names in self._names:
            for name in set(buffers) - set(names):
                del buffers[name]
        for kept in self._every():
            kept.restore()
        with torch.no_grad():
            for parameter, content in self._parameters.values():
                parameter.copy_(content)

    def restore_modules(self, paths: Collection[str]) -> None:
        """Restore the state of these modules."""
        for path in paths:
            for kept in self._kept[path]:
                kept.restore()
        with torch.no_grad():
            for name, (parameter, content) in self._parameters.items():
                if name.rpartition(".")[0] in paths:
                    parameter.copy_(content)

    def moved_parameters(self) -> frozenset[str]:
        """Parameters that have changed, as far as their norms show."""
        marks = _marks(dict(self._model.named_parameters()))
        return frozenset(name for name, mark in marks.items() if mark != self._marks[name])

    def moved(self) -> dict[str, tuple[str, ...]]:
        """Names of the state that has changed, by path of the module."""
        found = {path: [kept.name for kept in held if kept.moved()] for path, held in self._kept.items()}
        for name in sorted(self.moved_parameters()):
            path, _, own = name.rpartition(".")
            found[path].append(own)
        return {path: tuple(names) for path, names in found.items() if names}

    def _every(self) -> Iterator[_Kept]:
        for held in self._kept.values():
            yield from held


def _held(module: nn.Module) -> Iterator[_Kept]:
    """A module's own buffers, and its attributes that are numbers or tensors without a graph."""
    buffers = own_buffers(module)  # a buffer may be replaced by assignment
    for name, buffer in buffers.items():
        yield _Kept(buffers, name, buffer, _content(buffer))
    for name, value in vars(module).items():
        if isinstance(value, _NUMBERS) and name != "training":
            yield _Kept(vars(module), name, value, None)
        elif isinstance(value, Tensor) and not value.requires_grad:
            yield _Kept(vars(module), name, value, _content(value))


def _content(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _marks(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """A number for each parameter that changes when its content does: its norm. Copies would take its memory."""
    with torch.no_grad():
        return {name: _norm(tensor).hex() for name, tensor in parameters.items() if tensor.is_floating_point()}


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
