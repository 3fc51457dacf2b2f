"""A cache of operators' result shapes: torch computes them once per operator and argument shapes.

torch's own fake tensors take 0.2 ms per operator even with their cache, mostly for features that a trace does not need
(symbols, sparse layouts). This cache takes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from batchwright.estimation.tracing.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    fake_of,
    storage_key,
    without_dispatch,
)
from batchwright.torch_internals import schema_of

Key: TypeAlias = "tuple[Any, ...]"
_PLAIN = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


@dataclass(frozen=True)
class _ArgumentResult:
    """A result that is an argument."""

    index: int


@dataclass(frozen=True)
class _ValueResult:
    """A result that is not a tensor."""

    value: Any


@dataclass(frozen=True)
class _TensorResult:
    """A result with its own storage, or a view of an argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0
    view_of: int | None = None


_Result: TypeAlias = "_ArgumentResult | _ValueResult | _TensorResult"
_Entry: TypeAlias = "tuple[type | None, tuple[_Result, ...]]"
"""The type of the sequence of results (None for a single result), and the results."""


class _UncacheableError(Exception):
    """An argument of a kind that is not cached."""


class ShapeCache:
    """Runs operators on fake tensors, with cached result shapes. Several traces may share one object."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry | None] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def run(self, fakes: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an operator's results
        """Return the results of ``func``, with ``fakes`` as the innermost mode."""
        if _writes_in_place(func):
            return args[0] if schema_of(func).returns else None
        tensors: list[Tensor] = []
        key: list[Any] = [func]
        try:
            _describe_all(args, key, tensors)
            for name, value in kwargs.items():
                key.append(name)
                _describe(value, key, tensors)
        except _UncacheableError:
            return func(*args, **kwargs)
        entry = self._entries.get(tuple(key))
        if entry is not None:
            sequence_type, results = entry
            made = [self._make_output(fakes, result, tensors) for result in results]
            return made[0] if sequence_type is None else sequence_type(made)
        outputs = func(*args, **kwargs)
        if tuple(key) not in self._entries:
            self._entries[tuple(key)] = None if _depends_on_values(func) else _entry(outputs, tensors)
        return outputs

    def _make_output(self, fakes: FakeTensorMode, result: _Result, tensors: list[Tensor]) -> Any:  # noqa: ANN401 - an operator's result
        if isinstance(result, _ArgumentResult):
            return tensors[result.index]
        if isinstance(result, _ValueResult):
            return result.value
        with without_dispatch():
            if result.view_of is None:
                plain = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
            else:
                plain = torch.empty((0,), dtype=result.dtype, device="meta")
                storage = tensors[result.view_of].untyped_storage()
                plain.set_(storage, result.offset, result.shape, result.stride)
        return self._make_fake(fakes, plain, result.device)

    def _make_fake(self, fakes: FakeTensorMode, plain: Tensor, device: torch.device) -> FakeTensor:
        """Create ``FakeTensor(fakes, plain, device)``; all but the first of a trace copy its attributes."""
        known = self._attributes.get(device)
        if known is None or known["fake_mode"] is not fakes:
            made = FakeTensor(fakes, plain, device)
            self._attributes[device] = dict(vars(made))
            return made
        fake = fake_of(plain, device)
        vars(fake).update(known)
        return fake


def _writes_in_place(func: OpOverload) -> bool:
    """Return whether ``func`` only changes the values of its first argument, so that its results are known."""
    schema = schema_of(func)
    return (
        schema.is_mutable
        and schema.name.endswith("_")
        and schema.name.startswith("aten::")
        and not _depends_on_values(func)
    )


def _depends_on_values(func: OpOverload) -> bool:
    """Return whether the effect of ``func`` depends on values, or changes the shape of an argument."""
    return torch.Tag.inplace_view in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _describe_all(values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> None:
    for value in values:
        _describe(value, key, tensors)


def _describe(value: Any, key: list[Any], tensors: list[Tensor]) -> None:  # noqa: ANN401 - an operator's argument
    """Append to ``key`` all properties of ``value`` that may affect results."""
    kind = type(value)
    if kind in (int, float, bool):
        key.append(kind)
        key.append(value)
    elif isinstance(value, Tensor):
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.dtype.is_complex:
            raise _UncacheableError
        key.extend((value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device))
        tensors.append(value)
    elif isinstance(value, _PLAIN):
        key.append(value)
    elif isinstance(value, (list, tuple)):
        key.append(len(value))
        _describe_all(value, key, tensors)
    else:
        raise _UncacheableError


def _entry(outputs: Any, tensors: list[Tensor]) -> _Entry | None:  # noqa: ANN401 - an operator's results
    if not isinstance(outputs, (list, tuple)):
        outputs, sequence_type = (outputs,), None
    else:
        sequence_type = type(outputs)
    argument_by_storage = {storage_key(tensor.untyped_storage()): index for index, tensor in enumerate(tensors)}
    results: list[_Result] = []
    for output in outputs:
        result = _result(output, tensors, argument_by_storage)
        if result is None:
            return None
        results.append(result)
    return sequence_type, tuple(results)


def _result(output: Any, tensors: list[Tensor], argument_by_storage: dict[int, int]) -> _Result | None:  # noqa: ANN401 - an operator's result
    if output is None or isinstance(output, (int, float, bool)):
        return _ValueResult(output)
    if not isinstance(output, FakeTensor) or output.layout is not torch.strided or output.dtype.is_complex:
        return None
    for index, tensor in enumerate(tensors):
        if tensor is output:
            return _ArgumentResult(index)
    storage, offset = output.untyped_storage(), int(output.storage_offset())
    view_of = argument_by_storage.setdefault(storage_key(storage), -1)
    if view_of < 0 and (offset or storage.nbytes() != _bytes_of(output)):
        return None
    new = _TensorResult(tuple(output.shape), output.stride(), output.dtype, output.fake_device, offset)
    return new if view_of < 0 else _TensorResult(**{**vars(new), "view_of": view_of})


def _bytes_of(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())
