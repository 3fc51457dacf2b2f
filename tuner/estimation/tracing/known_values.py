"""Values that are known although tensors are fake: those of the batch's whole numbers, and all that follows from them.

A traced model computes nothing, yet some code asks for values: how many labels count, whether a mask masks anything,
what the loss scale is. Where they follow from the batch or from constants alone, they are computed beside the trace, on
small real tensors; other questions get a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tuner.estimation.tracing.torch_internals import (
    CHECK_AND_UNSCALE,
    FakeTensor,
    OpOverload,
    unset_fake_temporarily,
)
from tuner.torch_internals import schema_of

_MOST_WHOLE_NUMBERS = 2**22
"""Elements of the largest tensor of whole numbers or truth values whose values are followed (ids, labels, masks)."""
_MOST_FRACTIONS = 2**12
"""Likewise of any other type (counts, weights of samples, a loss scale)."""
_ATTRIBUTE = "_batchwright_value"
_aten = torch.ops.aten
_WITHOUT_VALUES = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default}
_LEAVES_SCALES_AS_THEY_ARE = {CHECK_AND_UNSCALE}
"""Reports an overflow through its second argument: in a trace there is none."""


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, those in lists included."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_in(argument)


def mapped(argument: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - an operator's arguments
    """``argument`` with every tensor changed; lists and tuples are walked."""
    if isinstance(argument, Tensor):
        return change(argument)
    if isinstance(argument, (list, tuple)):
        return type(argument)(mapped(it, change) for it in argument)
    return argument


class KnownValues:
    """Computes beside a trace what follows from known values.

    Attributes:
        guesses: for what kinds of values there was no answer but a stand-in.
    """

    def __init__(self) -> None:
        self.guesses: set[str] = set()
        self._stale: dict[int, Tensor] = {}  # kept, so that nothing else comes to lie where they are

    def know(self, fake: Tensor, value: Tensor) -> None:
        """From now on ``fake`` has the values of ``value``, unless it is too large to follow."""
        if _is_small(value):
            setattr(fake, _ATTRIBUTE, value)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The values of ``tensor``, on the CPU; none when they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value: Tensor | None = getattr(tensor, _ATTRIBUTE, None)
        if value is not None and self._stale and value.untyped_storage().data_ptr() in self._stale:
            return None
        return value

    def scalar(self, tensor: Tensor) -> float | int | bool | complex:
        """What ``tensor.item()`` says: its value, else 1 for numbers and ``False`` for truth values."""
        value = self.value_of(tensor)
        if value is not None:
            with unset_fake_temporarily():
                known: float | int | bool | complex = value.item()
            return known
        if tensor.dtype is torch.bool:
            self.guesses.add("conditions")
            return False
        if not tensor.dtype.is_floating_point:
            self.guesses.add("whole numbers")
            return 1
        return 1.0

    def follow(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:  # noqa: ANN401 - an operator's results
        """After ``func``: what its results are, if its arguments are known."""
        inputs = list(tensors_in((*args, *kwargs.values())))
        if any(self.value_of(it) is None for it in inputs) or torch.Tag.nondeterministic_seeded in func.tags:
            self._forget_written(func, inputs)
            return
        results = list(tensors_in((outputs,)))
        if func in _WITHOUT_VALUES or not results or not all(map(_is_small, results)):
            self._forget_written(func, inputs)
            return
        values = self.compute(func, args, kwargs)
        for result, value in zip(results, tensors_in((values,)), strict=False):
            setattr(result, _ATTRIBUTE, value)

    def compute(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an operator's results
        """What ``func`` really gives for arguments whose values are all known; none where the CPU cannot tell."""
        real = tuple(mapped(it, self._value) for it in args)
        named = {name: mapped(it, self._value) for name, it in kwargs.items()}
        if "device" in named:
            named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
        with unset_fake_temporarily():
            try:
                return func(*real, **named)
            except (RuntimeError, NotImplementedError, TypeError):  # no kernel for the CPU: the value is not known
                return None

    def _value(self, tensor: Tensor) -> Tensor:
        value = self.value_of(tensor)
        return tensor if value is None else value

    def _forget_written(self, func: OpOverload, inputs: list[Tensor]) -> None:
        """Unknown values may have been written to tensors that were known: forget those, and their views."""
        if not schema_of(func).is_mutable or func in _LEAVES_SCALES_AS_THEY_ARE:
            return
        for tensor in inputs:
            value = self.value_of(tensor)
            if value is not None and isinstance(tensor, FakeTensor):
                self._stale[value.untyped_storage().data_ptr()] = value
                delattr(tensor, _ATTRIBUTE)


def _is_small(tensor: Tensor) -> bool:
    fractions = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.layout is torch.strided and tensor.numel() <= (_MOST_FRACTIONS if fractions else _MOST_WHOLE_NUMBERS)
