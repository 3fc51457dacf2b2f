"""Casting a model to another floating-point type, but for the parts of it that are quantised.

Quantised weights are packed integers, or tensors of a class of their own, beside scales in the type that their kernels
expect: none of them may be cast, and transformers refuses ``.float()`` and ``.to(dtype)`` for a model that has any.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tuner.torch_internals import apply_to_own, is_traceable_wrapper_subclass

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Classes of tensors that hold the numbers they stand for."""
_MATRIX = 2
"""Dimensions of a weight. Integers with fewer are counters, positions or indices."""
_NARROW_BYTES = 1
"""Of a floating-point number (float8) that nothing computes in without a scale."""


def cast_floating(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating-point parameters and buffers of ``model`` in place; returns it.

    In a model with quantised modules those are left as they are, scales and biases included.
    """
    if not is_quantized(model):
        return model.to(dtype)
    for module in model.modules():
        if not _holds_quantized(module):
            _cast_own(module, dtype)
    return model


def _cast_own(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast what a module itself holds, as torch does it, past the refusal of a quantised model's class."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    apply_to_own(module, cast)


def uncastable(model: nn.Module) -> frozenset[int]:
    """The ids of the parameters and buffers that ``cast_floating`` leaves as they are."""
    if not is_quantized(model):
        return frozenset()
    holders = [module for module in model.modules() if _holds_quantized(module)]
    own = (tensor for module in holders for tensor in _own(module))
    return frozenset(map(id, own))


def is_quantized(model: nn.Module) -> bool:
    """Return whether a library has quantised a part of ``model``, which says so or shows it in its weights."""
    said = any(getattr(module, "is_quantized", False) is True for module in model.modules())
    return said or any(_packed(parameter) for parameter in model.parameters())


def _holds_quantized(module: nn.Module) -> bool:
    """Return whether a module itself, not one within it, holds quantised weights or those of a library's own class."""
    parameters = list(module.parameters(recurse=False))
    buffers = [buffer for buffer in module.buffers(recurse=False) if buffer.dim() >= _MATRIX]
    return any(_packed(tensor) or type(tensor) not in _PLAIN for tensor in [*parameters, *buffers])


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _packed(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers are not those that it stands for."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return not numbers or tensor.element_size() <= _NARROW_BYTES or is_traceable_wrapper_subclass(tensor)
