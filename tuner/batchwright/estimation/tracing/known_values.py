"""Values that are known although tensors are fake: the integers of the batch, and values computed from them.

A traced model computes nothing, yet some code reads values: the number of labels, whether a mask is empty, the loss
scale. If such a value depends only on the batch and on constants, it is computed beside the trace, on small real
tensors. Otherwise a stand-in value is used.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from batchwright.errors import EstimateError
from batchwright.estimation.tracing.torch_internals import (
    CHECK_AND_UNSCALE,
    FakeTensor,
    OpOverload,
    storage_key,
    unset_fake_temporarily,
    without_dispatch,
)
from batchwright.torch_internals import schema_of

_MAX_INTEGER_ELEMENTS = 2**22
"""Elements of the largest integer or boolean tensor whose values are computed (ids, labels, masks)."""
_MAX_OTHER_ELEMENTS = 2**12
"""Elements of the largest tensor of any other type (counts, weights of samples, a loss scale)."""
_ATTRIBUTE = "_batchwright_value"
_COPIED = "_batchwright_copied"
"""Attribute of a copy: what ``content_of`` returned for its source."""
_LIKELY = "_batchwright_likely"
"""Attribute of a condition that is rarely false: a check of all elements (``assert (x >= 0).all()``), or whether
any number is not zero."""
_aten = torch.ops.aten
_WITHOUT_VALUES = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default}
_COMPARISONS = {
    getattr(getattr(_aten, name), kind) for name in ("lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")
}
_KEEPS_VALUES = {CHECK_AND_UNSCALE}
"""Writes an overflow flag to its second argument: in a trace there is no overflow."""


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results, those in lists included."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_in(argument)


def map_tensors(argument: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - an operator's arguments
    """Apply ``change`` to every tensor in ``argument``, also in lists and tuples."""
    if isinstance(argument, Tensor):
        return change(argument)
    if isinstance(argument, (list, tuple)):
        return type(argument)(map_tensors(item, change) for item in argument)
    return argument


@contextmanager
def values_read_by_transformers() -> Iterator[None]:
    """Have transformers read values as in a run, once it is imported.

    It takes fake tensors for those of an export, which must not depend on values. Attention would then get a mask of
    ``(n, 1, L, L)`` and repeated keys and values, where a run passes ``is_causal=True`` and ``enable_gqa=True``
    (``transformers.masking_utils``, tested with transformers 5.23).
    """
    utilities = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(utilities, "is_fake_tensor"):
        yield
        return
    with patch.object(utilities, "is_fake_tensor", lambda _: False):
        yield


class KnownValues:
    """Computes known values beside a trace.

    Attributes:
        stand_ins: the kinds of values for which a stand-in was used.
    """

    def __init__(self) -> None:
        self.stand_ins: set[str] = set()
        self._invalidated: dict[int, Tensor] = {}  # kept, so that their addresses are not reused
        self._writes: Counter[int] = Counter()

    def set_value(self, fake: Tensor, value: Tensor) -> None:
        """Set the values of ``fake``, unless the tensor is too large."""
        if _is_small(value):
            setattr(fake, _ATTRIBUTE, value)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of ``tensor`` on the CPU; None if they are unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value: Tensor | None = getattr(tensor, _ATTRIBUTE, None)
        if value is not None and self._invalidated and value.untyped_storage().data_ptr() in self._invalidated:
            return None
        return value

    def scalar(self, tensor: Tensor) -> float | int | bool | complex:
        """Return the result of ``tensor.item()``; if unknown, 1 or 0.5 for numbers, the likely answer for booleans.

        Not 1 for fractions, since denominators such as ``1 - mu`` occur in optimizers.
        """
        value = self.value_of(tensor)
        if value is not None:
            with unset_fake_temporarily():
                known: float | int | bool | complex = value.item()
            return known
        if tensor.dtype is torch.bool:
            self.stand_ins.add("conditions")
            return hasattr(tensor, _LIKELY)
        if not tensor.dtype.is_floating_point:
            self.stand_ins.add("whole numbers")
            return 1
        return 0.5

    def largest(self, tensor: Tensor) -> int | None:
        """Return the largest of known whole numbers; None if they are unknown."""
        value = self.value_of(tensor)
        if value is None:
            return None
        with unset_fake_temporarily():
            return int(value.max())

    def array(self, tensor: Tensor, *, force: bool = False) -> Any:  # noqa: ANN401 - an array of NumPy, which may be missing
        """Return the result of ``tensor.numpy()``, which has no rule for tensors without values.

        Raises:
            EstimateError: when the values are unknown.
        """
        value = self.value_of(tensor)
        if value is None:
            raise EstimateError(
                "the workload reads values known only at run time (numpy): it can be measured, not estimated"
            )
        with without_dispatch():
            return value.numpy(force=force)

    def content_of(self, tensor: Tensor) -> tuple[int, int]:
        """Return a storage and the number of writes to it, which tell whether a live tensor has changed."""
        key = storage_key(tensor.untyped_storage())
        return key, self._writes[key]

    def are_equal(self, first: Tensor, second: Tensor) -> bool:
        """Return the result of ``torch.equal``: whether values are known to be equal, or one is a copy of the other."""
        for copy, source in ((first, second), (second, first)):
            if getattr(copy, _COPIED, None) == self.content_of(source):
                return True
        values = [self.value_of(tensor) for tensor in (first, second)]
        if values[0] is not None and values[1] is not None:
            with unset_fake_temporarily():
                return torch.equal(values[0], values[1])
        self.stand_ins.add("conditions")
        return False

    def propagate(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:  # noqa: ANN401 - an operator's results
        """Set the values of the results of ``func`` if those of its arguments are known."""
        self._writes.update(storage_key(tensor.untyped_storage()) for tensor in _written(func, args, kwargs))
        if func is _aten.clone.default:
            setattr(outputs, _COPIED, self.content_of(args[0]))
        if func is _aten.rand.default and outputs.numel() == 1:  # by which a layer is left out, as a rule rarely
            with unset_fake_temporarily():
                self.set_value(outputs, torch.full(outputs.shape, self.scalar(outputs), dtype=outputs.dtype))
            return
        inputs = list(tensors_in((*args, *kwargs.values())))
        if func in _COMPARISONS:
            self._set_stand_ins(inputs)
        if any(self.value_of(tensor) is None for tensor in inputs) or torch.Tag.nondeterministic_seeded in func.tags:
            self._invalidate_written(func, args, kwargs)
            if func is _aten.all.default or (func is _aten.any.default and args[0].dtype is not torch.bool):
                setattr(outputs, _LIKELY, True)
            return
        results = list(tensors_in((outputs,)))
        if func in _WITHOUT_VALUES or not results or not all(map(_is_small, results)):
            self._invalidate_written(func, args, kwargs)
            return
        values = self.compute(func, args, kwargs)
        for result, value in zip(results, tensors_in((values,)), strict=False):
            if not value._is_zerotensor():  # noqa: SLF001 - of forward-mode differentiation; it has no storage
                setattr(result, _ATTRIBUTE, value)

    def _set_stand_ins(self, compared: list[Tensor]) -> None:
        """Compare unknown single whole numbers as what ``scalar`` returns for them, lest a size is less than its least.

        ``max(positions.max() + 1, capacity)`` then is the capacity.
        """
        if all(tensor.dim() == 0 and not tensor.dtype.is_floating_point for tensor in compared):
            for tensor in compared:
                if self.value_of(tensor) is None and tensor.dtype is not torch.bool:
                    with unset_fake_temporarily():
                        self.set_value(tensor, torch.tensor(self.scalar(tensor), dtype=tensor.dtype))

    def compute(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an operator's results
        """Run ``func`` on the known values of its arguments; None if the CPU has no kernel for it."""
        real = tuple(map_tensors(argument, self._value) for argument in args)
        named = {name: map_tensors(argument, self._value) for name, argument in kwargs.items()}
        if "device" in named:
            named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
        with unset_fake_temporarily():
            try:
                return func(*real, **named)
            except (RuntimeError, NotImplementedError, TypeError):  # no kernel for the CPU: the value is unknown
                return None

    def _value(self, tensor: Tensor) -> Tensor:
        value = self.value_of(tensor)
        return tensor if value is None else value

    def _invalidate_written(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Invalidate tensors to which unknown values may have been written, and their views."""
        if func in _KEEPS_VALUES:
            return
        for tensor in _written(func, args, kwargs):
            value = self.value_of(tensor)
            if value is not None and isinstance(tensor, FakeTensor):
                self._invalidated[value.untyped_storage().data_ptr()] = value
                delattr(tensor, _ATTRIBUTE)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that ``func`` writes to."""
    if schema_of(func).is_mutable:
        yield from tensors_in(
            args[index] if index < len(args) else kwargs.get(declared.name)
            for index, declared in enumerate(schema_of(func).arguments)
            if declared.alias_info is not None and declared.alias_info.is_write
        )


def _is_small(tensor: Tensor) -> bool:
    fractions = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.layout is torch.strided and tensor.numel() <= (
        _MAX_OTHER_ELEMENTS if fractions else _MAX_INTEGER_ELEMENTS
    )
