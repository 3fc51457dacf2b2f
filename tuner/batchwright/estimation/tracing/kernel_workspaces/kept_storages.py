"""Results that keep a larger storage than their values need: a kernel has made them smaller, which frees nothing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchwright.estimation.tracing.torch_internals import OpOverload

_aten = torch.ops.aten
_MEAN = 1
"""``Reduction::Mean``, the default of losses."""


def is_reduced(args: Sequence[Any], position: int) -> bool:
    """Return whether a loss is one number. ``position`` is that of the reduction among its arguments, 0 for none."""
    return bool(args[position] if len(args) > position else _MEAN)


def _of_reduced_loss(position: int) -> Callable[[Sequence[Any]], int]:
    """Return the elements of a loss that is computed for each value, then reduced within the same tensor."""
    return lambda args: args[0].numel() if is_reduced(args, position) else 0


_ELEMENTS: Mapping[OpOverload, Callable[[Sequence[Any]], int]] = {
    _aten.mse_loss.default: _of_reduced_loss(2),  # `TORCH_META_FUNC(mse_loss)` in `BinaryOps.cpp`
    _aten.smooth_l1_loss.default: _of_reduced_loss(2),  # the same file
    _aten.soft_margin_loss.default: _of_reduced_loss(2),  # `Loss.cpp`
    _aten.binary_cross_entropy.default: _of_reduced_loss(3),  # `cuda/Loss.cu`, `Loss.cpp`
    _aten.col2im.default: lambda args: args[0].numel(),  # made like the input (`cuda/Col2Im.cu`)
}
"""The elements for which a kernel allocates its result."""


_CONTIGUOUS = frozenset({_aten.im2col.default, _aten.col2im.default})
"""Operators whose results are contiguous; torch's rules for fake tensors keep the strides of some inputs."""


def in_kept_storage(func: OpOverload, args: Sequence[Any], result: Any) -> Any:  # noqa: ANN401 - an operator's results
    """Return the result of ``func`` in the storage that its kernel keeps for it."""
    elements = _ELEMENTS[func](args) if func in _ELEMENTS else 0
    if func in _CONTIGUOUS:
        result = result.new_empty(result.shape)
    if not isinstance(result, Tensor) or elements <= result.numel():
        return result
    return result.new_empty(elements).as_strided(result.shape, result.stride())
