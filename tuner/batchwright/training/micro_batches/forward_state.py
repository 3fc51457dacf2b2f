"""State of a model that its own forward passes change: running statistics, power iterations, queues, counters.

State is found without knowledge of a module's class: it is any buffer, parameter, or attribute of a module that a
forward pass in training changes. Attributes are numbers, tensors, arrays, random generators, and lists, mappings, sets
and plain objects of these.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from batchwright.torch_internals import foreach_norm, own_buffers, version_of
from batchwright.training.micro_batches.rng_state import equal_states, generator_state, set_generator_state

_VALUES = (bool, int, float, complex, str, bytes, np.generic, type(None))
"""Types of attributes that are replaced, and never written to."""
_DEPTH = 4
"""Number of containers inside one another that are followed."""
_MOST_ENTRIES = 10_000
"""A container of more entries is data, and no state of a model."""
_MOST_ENTRIES_OF_ALL = 100_000
"""Entries of all containers that are followed; those that come later are not."""
_MOST_ELEMENTS = 2**24
"""Elements of all tensors and arrays in containers that are copied; more are data."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class _Saved:
    """Part of the state as it was."""

    name: str
    """The buffer or attribute."""
    changed: Callable[[], bool]
    """Returns whether the part has changed since."""
    restore: Callable[[], object]
    """Restores the part, without gradients."""
    is_generator: bool = False


def _entry(holder: dict[str, Any], name: str, value: Any) -> _Saved:  # noqa: ANN401 - of any type
    """A buffer or attribute: the object, and the content of a tensor."""
    content = value.detach().clone() if isinstance(value, Tensor) else None

    def changed() -> bool:
        current = holder.get(name)
        if not isinstance(current, Tensor) or content is None:
            return _differ(current, value)
        kinds = [(each.shape, each.dtype, each.device) for each in (current, content)]
        return kinds[0] != kinds[1] or not torch.equal(current.detach(), content)

    def restore() -> None:
        if content is not None:
            value.copy_(content)
        holder[name] = value

    return _Saved(name, changed, restore)


def _tensor(name: str, value: Tensor) -> _Saved:
    """The content of a tensor inside a container."""
    content = value.detach().clone()
    return _Saved(name, lambda: not torch.equal(value.detach(), content), lambda: value.copy_(content))


def _array(name: str, value: np.ndarray[Any, Any]) -> _Saved:
    content = value.copy()
    # as bytes, because NaN differs from itself
    return _Saved(name, lambda: value.tobytes() != content.tobytes(), lambda: np.copyto(value, content))


def _container(name: str, value: list[Any] | deque[Any] | set[Any] | dict[Any, Any]) -> _Saved:
    """The entries of a list, queue, set or mapping, or attributes of an object."""
    entries = _by_key(value)

    def changed() -> bool:
        current = _by_key(value)
        return current.keys() != entries.keys() or any(_differ(current[key], entry) for key, entry in entries.items())

    def restore() -> None:
        value.clear()
        if isinstance(value, (list, deque)):
            value.extend(entries.values())
        else:
            value.update(entries)

    return _Saved(name, changed, restore)


def _by_key(value: list[Any] | deque[Any] | set[Any] | dict[Any, Any]) -> dict[Any, Any]:
    """The entries by place or key; the elements of a set as keys."""
    if isinstance(value, set):
        return dict.fromkeys(value)
    return dict(value if isinstance(value, dict) else enumerate(value))


class ModelState:
    """Snapshot of the state that forward passes may change, taken at construction.

    Args:
        model: the model whose modules hold the state.
        changing: the parameters that forward passes are known to change. Only these are copied.
        modules: paths of the modules whose state is saved; None for all modules, with the norms of all parameters.
        buffers: whether the buffers are saved.
    """

    def __init__(
        self,
        model: nn.Module,
        changing: frozenset[str] = frozenset(),
        *,
        modules: frozenset[str] | None = None,
        buffers: bool = True,
    ) -> None:
        self._model = model
        found = {path: each for path, each in model.named_modules() if modules is None or path in modules}
        reader = _Reader(model)
        self._saved = {path: list(reader.state_of(module, buffers=buffers)) for path, module in found.items()}
        self._names = [(own_buffers(module), list(own_buffers(module))) for module in found.values() if buffers]
        self._attributes = {path: (vars(module), set(vars(module))) for path, module in found.items()}
        named = dict(model.named_parameters())
        self.changing = changing
        self._parameters = {name: (named[name], named[name].detach().clone()) for name in sorted(changing)}
        self._norms = norms_of(named) if modules is None else {}
        self._versions = {name: version_of(named[name]) for name in self._norms if not named[name].is_inference()}

    def restore(self, *, generators: bool = True) -> None:
        """Restore all of the state, with or without the random generators of the model's own."""
        for buffers, names in self._names:
            for name in set(buffers) - set(names):
                del buffers[name]
        self.restore_modules(self._saved, generators=generators)

    @torch.no_grad()
    def restore_modules(self, paths: Collection[str], *, generators: bool = True) -> None:
        """Restore the state of these modules, with or without random generators."""
        for path in paths:
            attributes, before = self._attributes[path]
            for name in attributes.keys() - before:
                del attributes[name]
            for saved in self._saved[path]:
                if generators or not saved.is_generator:
                    saved.restore()
        for name, (parameter, content) in self._parameters.items():
            if name.rpartition(".")[0] in paths:
                parameter.copy_(content)

    def changed_parameters(self) -> frozenset[str]:
        """Parameters whose norms have changed."""
        norms = norms_of(dict(self._model.named_parameters())) if self._norms else {}
        return frozenset(name for name, norm in norms.items() if norm != self._norms.get(name, norm))

    def written_parameters(self) -> frozenset[str]:
        """Parameters that have changed or were written to, as is a teacher that still equals what it follows."""
        named = dict(self._model.named_parameters())
        versions = {name: version_of(named[name]) for name in self._versions.keys() & named.keys()}
        return self.changed_parameters() | {name for name in versions if versions[name] != self._versions[name]}

    def changed(self, parameters: frozenset[str] | None = None) -> dict[str, tuple[str, ...]]:
        """Names of the state that has changed, by path of the module, with ``parameters`` if these are known."""
        found = {
            path: list(dict.fromkeys(saved.name for saved in states if saved.changed()))
            for path, states in self._saved.items()
        }
        for path, (attributes, before) in self._attributes.items():
            found[path] += sorted(attributes.keys() - before)
        for name in sorted(self.changed_parameters() if parameters is None else parameters):
            path, _, own = name.rpartition(".")
            found[path].append(own)
        return {path: tuple(names) for path, names in found.items() if names}


class _Reader:
    """Reader of the state of a model's modules.

    Args:
        model: the model, whose parameters and buffers are not copied again where attributes lead to them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._elements = 0
        self._entries = 0

    def state_of(self, module: nn.Module, *, buffers: bool) -> Iterator[_Saved]:
        """A module's own ``buffers``, and its attributes but for modules and tensors with a graph."""
        own = own_buffers(module) if buffers else {}  # a buffer may be replaced by assignment
        for name, buffer in own.items():
            yield _entry(own, name, buffer)
        attributes = vars(module)
        for name, value in attributes.items():
            if name in _MODULE_ATTRIBUTES or isinstance(value, nn.Module):
                continue
            if not isinstance(value, Tensor):
                yield _entry(attributes, name, value)
                yield from self._parts_of(name, value, _DEPTH)
            elif not value.requires_grad:
                yield _entry(attributes, name, value)

    def _parts_of(self, name: str, value: object, depth: int) -> Iterator[_Saved]:
        """Yield the parts of an attribute that a forward pass may change."""
        if isinstance(value, (_VALUES, nn.Module, type)) or id(value) in self._seen or depth == 0:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.requires_grad and not isinstance(value, nn.Parameter) and self._takes(value.numel()):
                yield _tensor(name, value)
            return
        if isinstance(value, np.ndarray):
            if not value.dtype.hasobject and self._takes(value.size):
                yield _array(name, value)
            return
        if (state := generator_state(value)) is not None:
            yield _Saved(
                name,
                lambda: not equal_states(generator_state(value), state),
                lambda: set_generator_state(value, state),
                is_generator=True,
            )
            return
        entries = _entries_of(value)
        if entries is None or len(entries) > min(_MOST_ENTRIES, _MOST_ENTRIES_OF_ALL - self._entries):
            return
        self._entries += len(entries)
        if not isinstance(value, tuple):
            container = value if isinstance(value, (list, deque, set, dict)) else vars(value)
            yield _container(name, container)
        for entry in tuple(entries):
            yield from self._parts_of(name, entry, depth - 1)

    def _takes(self, elements: int) -> bool:
        """Return whether that many more elements are copied, and count them."""
        if self._elements + elements > _MOST_ELEMENTS:
            return False
        self._elements += elements
        return True


def _entries_of(value: object) -> Collection[object] | None:
    """Return the contents of a container or plain object; None for an object of another kind."""
    if isinstance(value, (list, deque, set, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    attributes = getattr(value, "__dict__", None)
    return attributes.values() if type(attributes) is dict and not callable(value) else None


def _differ(current: object, before: object) -> bool:
    """Return whether an entry is another one; of values, whether it differs."""
    if current is before:
        return False
    if isinstance(before, Tensor) and isinstance(current, Tensor):
        same = current.shape == before.shape and current.dtype == before.dtype and current.device == before.device
        return not (same and torch.equal(current.detach(), before.detach()))
    return not (isinstance(before, _VALUES) and isinstance(current, _VALUES)) or bool(current != before)


def norms_of(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """The norm of each parameter, to detect a change without the memory of a copy."""
    read = {name: each for name, each in parameters.items() if each.is_floating_point() and not is_lazy(each)}
    with torch.no_grad():
        norms = foreach_norm(list(read.values())) if read else ()
    return {name: float(norm).hex() for name, norm in zip(read, norms, strict=True)}
