"""Cast a model to another floating-point type, except its quantised parts.

Quantised weights are packed integers or tensors of special classes, with scales in the type that their kernels expect.
They must not be cast, and transformers refuses ``.float()`` and ``.to(dtype)`` for a model that has any.
"""

import torch
from torch import Tensor, nn

from batchwright.torch_internals import apply_to_own, is_traceable_wrapper_subclass

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Classes of tensors that store their numbers directly."""
_FAKE = "torch._subclasses.fake_tensor"
"""Module of the class of tensors without values."""
_MATRIX = 2
"""Dimensions of a weight. Integer tensors with fewer are counters, positions or indices."""
_NARROW_BYTES = 1
"""Bytes of a floating-point number (float8) that is only used with a scale."""


def cast_floating(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating-point parameters and buffers of ``model`` in place, and return the model.

    Quantised modules are not changed, including their scales and biases.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if not is_quantized(model):
        return model.to(dtype)
    for module in model.modules():
        if not _holds_quantized(module):
            apply_to_own(module, cast)  # as torch does, but without the check of a quantised model's class
    return model


def uncastable(model: nn.Module) -> frozenset[int]:
    """The ids of the parameters and buffers that ``cast_floating`` does not change."""
    if not is_quantized(model):
        return frozenset()
    holders = [module for module in model.modules() if _holds_quantized(module)]
    owned = ((*module.parameters(recurse=False), *module.buffers(recurse=False)) for module in holders)
    return frozenset(id(tensor) for tensors in owned for tensor in tensors)


def is_quantized(model: nn.Module) -> bool:
    """Return whether a part of ``model`` is quantised, by its attribute ``is_quantized`` or its weights."""
    declared = any(getattr(module, "is_quantized", False) is True for module in model.modules())
    return declared or any(_packed(parameter) for parameter in model.parameters())


def _holds_quantized(module: nn.Module) -> bool:
    """Return whether a module itself, not its children, has weights that are quantised or of a library's own class."""
    parameters = list(module.parameters(recurse=False))
    buffers = [buffer for buffer in module.buffers(recurse=False) if buffer.dim() >= _MATRIX]
    tensors = [*parameters, *buffers]
    return any(
        _packed(each) or not (type(each) in _PLAIN or type(each).__module__ == _FAKE)  # of a trace, for a plain one
        for each in tensors
    )


def _packed(tensor: Tensor) -> bool:
    """Return whether a tensor stores its numbers in packed form."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return not numbers or tensor.element_size() <= _NARROW_BYTES or is_traceable_wrapper_subclass(tensor)
