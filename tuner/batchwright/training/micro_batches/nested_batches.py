"""Nested batches: find their tensors, move them to a device and slice them, in containers of the same type.

Mappings, lists, tuples and dataclasses are containers. Other objects are leaves: they are kept unchanged, or moved by
their own ``to`` to a device other than the CPU.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from batchwright.workloads.base import Batch

_CPU = torch.device("cpu")
Change: TypeAlias = Callable[[Any], Any]
"""Maps each value in a container to a new one."""


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield every tensor in a batch."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for value in _values(batch):
            yield from tensors_of(value)


def named_tensors(batch: Batch, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with the expression that reaches it, such as ``batch['input_ids']``.

    Objects of unknown type are searched as well, by their attributes.
    """
    yield from _named(batch, name, set())


def _named(batch: Batch, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield name, batch
    elif id(batch) not in seen:
        seen.add(id(batch))
        for suffix, value in _entries(batch) or _attributes(batch):
            yield from _named(value, f"{name}{suffix}", seen)


def to_device(batch: Batch, device: torch.device, floating: torch.dtype | None = None) -> Batch:
    """Move every tensor of ``batch`` to ``device``, in new containers, which a loss may change.

    Floating-point tensors are cast to ``floating``, if a type is given.
    """
    if isinstance(batch, Tensor):
        dtype = floating if floating is not None and batch.is_floating_point() else batch.dtype
        return batch if batch.device == device and batch.dtype == dtype else batch.to(device, dtype, non_blocking=True)
    if type(batch) is dict:
        return {name: to_device(value, device, floating) for name, value in batch.items()}
    if _is_container(batch):
        return _rebuild(batch, lambda value: to_device(value, device, floating))
    if device == _CPU or isinstance(batch, type):
        return batch
    move = getattr(batch, "to", None)
    return move(device) if callable(move) else batch


def sliced_samples(batch: Batch, start: int, stop: int, size: int) -> Batch:
    """Slice the samples ``start`` to ``stop`` out of a batch of ``size``.

    Tensors are sliced along their first dimension, as are lists of ``size`` other values (names, ids). Other values are
    shared by all samples.
    """
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.dim() else batch
    is_array = isinstance(batch, np.ndarray) and batch.ndim > 0 and len(batch) == size
    if is_array or _is_list_of(size, batch):
        return batch[start:stop]
    if not _is_container(batch):
        return batch
    part = _rebuild(batch, lambda value: sliced_samples(value, start, stop, size))
    attributes = getattr(part, "__dict__", {}) if isinstance(batch, Mapping) else {}
    for name, value in attributes.items():  # such as the encodings of a ``BatchEncoding``
        if _is_list_of(size, value):
            attributes[name] = value[start:stop]
    return part


def _is_list_of(size: int, value: object) -> bool:
    """Return whether ``value`` is a list or tuple of ``size`` values without tensors."""
    return isinstance(value, (list, tuple)) and len(value) == size and next(tensors_of(value), None) is None


# --- containers -------------------------------------------------------------------------------------------------------


def _is_container(value: object) -> bool:
    if isinstance(value, PackedSequence):  # a tuple, but one whose parts are on two devices
        return False
    return isinstance(value, (Mapping, list, tuple)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _values(batch: Any) -> Iterable[Any]:  # noqa: ANN401 - of any type
    """The values in a container; a leaf has none."""
    if type(batch) is dict:  # nearly always: skip the slower checks below
        return batch.values()
    if not _is_container(batch):
        return ()
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, (list, tuple)):
        return batch
    return [getattr(batch, field.name, None) for field in dataclasses.fields(batch)]


def _entries(batch: Any) -> list[tuple[str, Any]]:  # noqa: ANN401 - of any type
    """The values in a container, each with the expression that reaches it from there; a leaf has none."""
    if not _is_container(batch):
        return []
    if isinstance(batch, Mapping):
        return [(f"[{name!r}]", value) for name, value in batch.items()]
    if isinstance(batch, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(batch)]
    return [(f".{field.name}", getattr(batch, field.name, None)) for field in dataclasses.fields(batch)]


def _attributes(leaf: Any) -> list[tuple[str, Any]]:  # noqa: ANN401 - of any type
    """The attributes of an object of unknown type, unless it is code."""
    if isinstance(leaf, PackedSequence):
        return [(f".{name}", value) for name, value in leaf._asdict().items()]
    if isinstance(leaf, type) or callable(leaf):
        return []
    return [(f".{name}", value) for name, value in getattr(leaf, "__dict__", {}).items()]


def _rebuild(batch: Any, change: Change) -> Any:  # noqa: ANN401 - of any type
    """A container of the same type with changed values; a dict where a mapping cannot be copied and filled."""
    if isinstance(batch, Mapping):
        changed = {name: change(value) for name, value in batch.items()}
        return changed if type(batch) is dict else _refill(batch, changed)
    if isinstance(batch, (list, tuple)):
        make = getattr(batch, "_make", type(batch))
        return make([change(value) for value in batch])
    part = copy.copy(batch)
    for field in dataclasses.fields(batch):
        if hasattr(batch, field.name):
            object.__setattr__(part, field.name, change(getattr(batch, field.name)))  # a frozen one too
    return part


def _refill(batch: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    if not isinstance(batch, MutableMapping):
        return changed
    try:
        part = copy.copy(batch)
        for name, value in changed.items():
            part[name] = value
    except Exception:  # noqa: BLE001 - a user's type may raise any error
        return changed
    return part
