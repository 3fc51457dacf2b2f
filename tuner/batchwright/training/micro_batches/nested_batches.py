"""Nested batches: find their tensors, move them to a device and rebuild them, in containers of the same type.

Mappings, lists, tuples and dataclasses are containers. Other objects are leaves: they are kept unchanged, or moved by
their own ``to`` to a device other than the CPU. Lists, tuples, nested tensors, packed sequences and the graph batches
of PyTorch Geometric also are sequences of items, which may be samples.
"""

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from batchwright.workloads.base import Batch

_CPU = torch.device("cpu")


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
        for suffix, value in entries_of(batch) or _attributes(batch):
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
    if is_container(batch):
        return rebuilt(batch, [to_device(value, device, floating) for value in _values(batch)])
    if device == _CPU or isinstance(batch, type):
        return batch
    move = getattr(batch, "to", None)
    return move(device) if callable(move) else batch


def copied(batch: Batch) -> Batch:
    """Copy a batch and its tensors, for a loss that may write to them."""
    nested = {id(tensor): tensor.clone() for tensor in tensors_of(batch) if tensor.is_nested}  # has no deep copy
    return copy.deepcopy(batch, nested)


# --- sequences of items -----------------------------------------------------------------------------------------------


def item_count(value: Any) -> int | None:  # noqa: ANN401 - of any type
    """The number of items in a sequence of items; None for anything else."""
    if isinstance(value, Tensor):
        return int(value.size(0)) if value.is_nested else None
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, (list, tuple)):
        return None if hasattr(value, "_make") else len(value)  # the fields of a named tuple are no samples
    return int(value.num_graphs) if _is_graph_batch(value) else None


def items_of(value: Any) -> Sequence[Any]:  # noqa: ANN401 - of any type
    """The items of a sequence of items."""
    if isinstance(value, Tensor):
        return value.unbind()
    if isinstance(value, PackedSequence):
        return unpack_sequence(value)
    items: Sequence[Any] = value.to_data_list() if _is_graph_batch(value) else value
    return items


def with_items(value: Any, items: Sequence[Any]) -> Any:  # noqa: ANN401 - of any type
    """A sequence of the type of ``value`` with other items."""
    if isinstance(value, Tensor):
        return torch.nested.as_nested_tensor(list(items), layout=value.layout)
    if isinstance(value, PackedSequence):
        return pack_sequence(list(items), enforce_sorted=value.sorted_indices is None)
    if _is_graph_batch(value):
        kind = next(kind for kind in reversed(type(value).__mro__) if hasattr(kind, "from_data_list"))
        return kind.from_data_list(list(items))
    return type(value)(items)


def _is_graph_batch(value: Any) -> bool:  # noqa: ANN401 - of any type
    """Return whether a value has the interface of ``torch_geometric.data.Batch``."""
    return hasattr(type(value), "from_data_list") and hasattr(value, "to_data_list") and hasattr(value, "num_graphs")


# --- containers -------------------------------------------------------------------------------------------------------


def is_container(value: object) -> bool:
    """Return whether the values in an object are parts of a batch."""
    if isinstance(value, PackedSequence):  # a tuple, but one whose parts are on two devices
        return False
    return isinstance(value, (Mapping, list, tuple)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _values(batch: Any) -> Iterable[Any]:  # noqa: ANN401 - of any type
    """The values in a container; a leaf has none."""
    if type(batch) is dict:  # nearly always: skip the slower checks below
        return batch.values()
    if not is_container(batch):
        return ()
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, (list, tuple)):
        return batch
    return [getattr(batch, field.name, None) for field in dataclasses.fields(batch)]


def entries_of(batch: Any) -> list[tuple[str, Any]]:  # noqa: ANN401 - of any type
    """The values in a container, each with the expression that reaches it from there; a leaf has none."""
    if not is_container(batch):
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


def rebuilt(batch: Any, values: Sequence[Any]) -> Any:  # noqa: ANN401 - of any type
    """A container of the same type with other values, in order; a dict if a mapping cannot be copied and filled."""
    if isinstance(batch, Mapping):
        changed = dict(zip(batch, values, strict=True))
        return changed if type(batch) is dict else _refill(batch, changed)
    if isinstance(batch, (list, tuple)):
        return getattr(batch, "_make", type(batch))(values)
    part = copy.copy(batch)
    for field, value in zip(dataclasses.fields(batch), values, strict=True):
        if hasattr(batch, field.name):
            object.__setattr__(part, field.name, value)  # a frozen one too
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
