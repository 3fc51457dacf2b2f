"""State of a model that its own forward passes change: running statistics, power iterations, queues, counters.

State is found without knowledge of a module's class: it is any buffer, parameter, or attribute of a module that is a
number or tensor, if a forward pass in training changes it.
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
class _SavedState:
    """Saved buffer or attribute: the object and a copy of its content."""

    holder: dict[str, Any]
    name: str
    value: Any
    content: Tensor | None

    def changed(self) -> bool:
        """Return whether the state has changed since."""
        current = self.holder.get(self.name)
        if not isinstance(current, Tensor) or self.content is None:
            return current is not self.value and bool(current != self.value)
        same = current.shape == self.content.shape and current.dtype == self.content.dtype
        return not (same and torch.equal(current.detach(), self.content))

    def restore(self) -> None:
        """Restore the object and its content."""
        if isinstance(self.value, Tensor) and self.content is not None:
            with torch.no_grad():
                self.value.copy_(self.content)
        self.holder[self.name] = self.value


class ModelState:
    """Snapshot of the state that forward passes may change, taken at construction.

    Args:
        model: the model whose modules hold the state.
        changing: the parameters that forward passes are known to change. Only these are copied.
    """

    def __init__(self, model: nn.Module, changing: frozenset[str] = frozenset()) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._saved = {path: list(_state_of(module)) for path, module in self._modules.items()}
        self._names = [(own_buffers(module), list(own_buffers(module))) for module in self._modules.values()]
        named = dict(model.named_parameters())
        self.changing = changing
        self._parameters = {name: (named[name], named[name].detach().clone()) for name in changing}
        self._norms = _norms(named)

    def restore(self) -> None:
        """Restore all of the state."""
        for buffers, names in self._names:
            for name in set(buffers) - set(names):
                del buffers[name]
        for saved in self._all_states():
            saved.restore()
        with torch.no_grad():
            for parameter, content in self._parameters.values():
                parameter.copy_(content)

    def restore_modules(self, paths: Collection[str]) -> None:
        """Restore the state of these modules."""
        for path in paths:
            for saved in self._saved[path]:
                saved.restore()
        with torch.no_grad():
            for name, (parameter, content) in self._parameters.items():
                if name.rpartition(".")[0] in paths:
                    parameter.copy_(content)

    def changed_parameters(self) -> frozenset[str]:
        """Parameters whose norms have changed."""
        norms = _norms(dict(self._model.named_parameters()))
        return frozenset(name for name, norm in norms.items() if norm != self._norms[name])

    def changed(self) -> dict[str, tuple[str, ...]]:
        """Names of the state that has changed, by path of the module."""
        found = {path: [saved.name for saved in states if saved.changed()] for path, states in self._saved.items()}
        for name in sorted(self.changed_parameters()):
            path, _, own = name.rpartition(".")
            found[path].append(own)
        return {path: tuple(names) for path, names in found.items() if names}

    def _all_states(self) -> Iterator[_SavedState]:
        for states in self._saved.values():
            yield from states


def _state_of(module: nn.Module) -> Iterator[_SavedState]:
    """A module's own buffers, and its attributes that are numbers or tensors without a graph."""
    buffers = own_buffers(module)  # a buffer may be replaced by assignment
    for name, buffer in buffers.items():
        yield _SavedState(buffers, name, buffer, _copy_of(buffer))
    for name, value in vars(module).items():
        if isinstance(value, _NUMBERS) and name != "training":
            yield _SavedState(vars(module), name, value, None)
        elif isinstance(value, Tensor) and not value.requires_grad:
            yield _SavedState(vars(module), name, value, _copy_of(value))


def _copy_of(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _norms(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """The norm of each parameter, to detect a change without the memory of a copy."""
    with torch.no_grad():
        return {name: _norm(tensor).hex() for name, tensor in parameters.items() if tensor.is_floating_point()}


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
