"""Normalization of a virtual card: statistics in float32 whatever the inputs are, as CUDA's kernels keep them."""

from collections.abc import Callable

import torch
from torch import Tensor

_aten = torch.ops.aten
NARROW = frozenset({torch.half, torch.bfloat16})


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 where it is in half or bfloat16."""
    return tensor.float() if tensor.dtype in NARROW else tensor


def batch_norm(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute ``native_batch_norm`` and ``cudnn_batch_norm``, which update the running statistics in place."""
    running = [_widened(running_mean), _widened(running_var)]
    wide = [_widened(tensor), _widened(weight), _widened(bias)]
    results: tuple[Tensor, ...] = _aten.native_batch_norm(*wide, *running, training, momentum, eps)
    for narrow, updated in zip((running_mean, running_var), running, strict=True):
        if narrow is not None and updated is not None and narrow is not updated:
            narrow.copy_(updated)
    return results


def cudnn_batch_norm_backward(
    tensor: Tensor,
    gradient: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    inverse_deviation: Tensor | None,
    eps: float,
    _reserve: Tensor,
) -> tuple[Tensor, ...]:
    """Compute ``cudnn_batch_norm_backward``."""
    running = (_widened(running_mean), _widened(running_var))
    saved = (_widened(mean), _widened(inverse_deviation))
    wide = (_widened(gradient), _widened(tensor), _widened(weight))
    results: tuple[Tensor, ...] = _aten.native_batch_norm_backward(*wide, *running, *saved, True, eps, [True] * 3)
    return results


def rms_norm(
    tensor: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Compute ``_fused_rms_norm``: the output and the saved reciprocals of the root mean squares."""
    wide, dims = widened(tensor), tuple(range(-len(normalized_shape), 0))
    reciprocal = (
        wide.pow(2).mean(dims, keepdim=True) + (torch.finfo(tensor.dtype).eps if eps is None else eps)
    ).rsqrt()
    output = wide * reciprocal
    return (output if weight is None else output * weight), reciprocal


def rms_norm_backward(
    gradient: Tensor,
    tensor: Tensor,
    normalized_shape: list[int],
    reciprocal: Tensor,
    weight: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute ``_fused_rms_norm_backward``: the gradients of the input and of the weight."""
    wide_gradient, wide = gradient.to(reciprocal.dtype), tensor.to(reciprocal.dtype)
    dims = tuple(range(-len(normalized_shape), 0))
    normalized = wide * reciprocal
    weighted = wide_gradient if weight is None else wide_gradient * weight
    of_input = reciprocal * (weighted - normalized * (weighted * normalized).mean(dims, keepdim=True))
    of_weight = (wide_gradient * normalized).sum_to_size(normalized_shape)
    return of_input if wanted[0] else None, of_weight if weight is not None and wanted[1] else None


def softmax(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function of ``_softmax`` or ``_log_softmax``, which may widen its input."""
    return lambda tensor, dim, _half_to_float: operator(widened(tensor), dim, False)


def softmax_backward(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function of ``_softmax_backward_data`` or the logarithm's, which may narrow its result."""

    def compute(gradient: Tensor, output: Tensor, dim: int, _input_dtype: torch.dtype) -> Tensor:
        wide = widened(output)
        return operator(widened(gradient), wide, dim, wide.dtype)

    return compute


def _widened(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else widened(tensor)
