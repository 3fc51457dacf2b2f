"""Arithmetic of the coupling checks, and what rounding changes. In fp64, rounding does not affect the result.

Rounding in fp32 depends on the processor (the width of its vectors, the order of its sums). In fp64 rounding is nine
orders of magnitude smaller, far below the limits on any processor.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from batchwright.torch_internals import own_buffers
from batchwright.workloads.casting import uncastable

Precision = Literal["fp64", "fp32"]

_Value: TypeAlias = Any
"""An argument or a result of a torch function."""


@dataclass(frozen=True)
class Limits:
    """Relative differences that pass as rounding, in one precision."""

    largest_error: float
    """Largest difference of loss or gradient."""
    rounding: float
    """Largest difference of two runs, or of two outputs of a module, that count as equal."""
    negligible: float
    """Share of the largest gradient (or loss term). Smaller gradients are compared on this scale, not on their own.

    The gradient of a key's bias, or of a bias before a norm, is zero but for rounding.
    """


LIMITS: dict[Precision, Limits] = {
    "fp64": Limits(largest_error=1e-5, rounding=1e-6, negligible=1e-3),
    "fp32": Limits(largest_error=1e-4, rounding=1e-5, negligible=1e-2),
}
"""In fp64 the limit is the error that an accumulated update in fp32 may have: 1e-5, on a scale of at least 1e-3 of the
largest gradient, which is 4e7 roundings of it. In fp32 the smallest difference that is judged is 1e-6 of the largest
gradient, eight roundings of it. Measured with torch 2.13 on the CPU, in fp64: a LayerNorm model 2e-16 (loss) and 2e-16
(gradient), BatchNorm 1 % and 51 %, in-batch negatives 70 % and 67 %."""

_EXPERTS, _GROUPED = "_experts_implementation_internal", "grouped_mm"
"""Attribute of a transformers configuration that every forward pass reads, as of release 5.23, and its default."""
_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS: dict[_Value, Callable[..., _Value]] = {
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
}


class _Widened(TorchFunctionMode):
    """Replace fp32 and lower precisions by fp64 in the arguments of torch functions."""

    def __torch_function__(
        self, func: _Value, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _Value:
        del types
        named = {name: _wider(value) for name, value in (kwargs or {}).items()}
        wide: Callable[..., _Value] = _CASTS.get(func) or func
        return wide(*map(_wider, args), **named)


def _wider(value: _Value) -> _Value:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@contextmanager
def arithmetic(device: torch.device, precision: Precision) -> Iterator[None]:
    """Compute in full fp32 or fp64: no TF32, no autocast; gradients on."""
    matmul, default = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float64 if precision == "fp64" else torch.float32)
    cudnn = torch.backends.cudnn
    try:
        with (
            cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=cudnn.deterministic, allow_tf32=False),
            torch.autocast(device.type, enabled=False),
            torch.enable_grad(),
            _Widened() if precision == "fp64" else nullcontext(),
        ):
            yield
    finally:
        torch.set_default_dtype(default)
        torch.set_float32_matmul_precision(matmul)


@contextmanager
def kernels_for(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Run the experts of transformers models one by one in fp64: the default grouped kernel supports at most fp32.

    In fp32, rounding of a router's output can send a token to different experts in the batch and in its parts, which
    looks like coupling.
    """
    configs = {
        id(config): config
        for module in model.modules()
        if hasattr(config := getattr(module, "config", None), "__dict__")
    }
    configs_fields = [vars(config) for config in configs.values()]
    grouped = [fields for fields in configs_fields if precision == "fp64" and fields.get(_EXPERTS) == _GROUPED]
    for fields in grouped:
        fields[_EXPERTS] = "eager"
    try:
        yield
    finally:
        for fields in grouped:
            fields[_EXPERTS] = _GROUPED


def cast(model: nn.Module, precision: Precision) -> None:
    """Cast a model's parameters in place, and replace its buffers by copies, all but quantised ones."""
    real, imaginary = (torch.float64, torch.complex128) if precision == "fp64" else (torch.float32, torch.complex64)
    quantized = uncastable(model)

    def converted(tensor: Tensor) -> Tensor:
        dtype = imaginary if tensor.is_complex() else real if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(dtype)

    for parameter in model.parameters():
        if id(parameter) not in quantized:
            parameter.data = converted(parameter)
    for buffers in map(own_buffers, model.modules()):
        own = {name: each for name, each in buffers.items() if each is not None and id(each) not in quantized}
        # a buffer may be a constant of the user's, which a model that is built later has too
        buffers.update({name: converted(each).clone() for name, each in own.items()})


ROUNDED_RUNS = 3
"""Number of runs. Each changes other weights: all, every second and every third."""
ROUNDING_SAFETY = 8
"""A difference of up to this many times the largest that rounded weights caused may be rounding. One of three such runs
reaches half a standard deviation in 94 of 100 cases, and no difference reaches four."""
_LAST_BITS = 3
"""The two last bits of a number, which differ by one to three roundings when flipped, up or down."""
_INTEGER_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as floating-point numbers of so many bytes."""


def mantissa_bits(dtype: torch.dtype) -> int:
    """The binary digits that a floating-point type keeps after the first."""
    return -round(math.log2(torch.finfo(dtype).eps))


@contextmanager
def rounded_weights(model: nn.Module, bits: int, run: int) -> Iterator[None]:
    """Flip the last of ``bits`` binary digits of the weights; flip them back at the end, which is exact.

    Takes no memory, and no random numbers. ``bits`` are those of the precision that is computed in. ``run``, below
    ``ROUNDED_RUNS``, chooses the weights.
    """
    flipped = []
    try:
        for parameter in model.parameters():
            plain = parameter.is_floating_point() and type(parameter.data) is Tensor
            if plain and parameter.element_size() in _INTEGER_TYPES:
                flipped.append(_flip(parameter.data, bits, run + 1))
        yield
    finally:
        for words, mask in flipped:
            words.bitwise_xor_(mask)


def _flip(weights: Tensor, bits: int, stride: int) -> tuple[Tensor, int]:
    """Flip bits in every ``stride``-th column. Return the changed words and the mask of the flipped bits."""
    words = weights.view(_INTEGER_TYPES[weights.element_size()])
    if words.dim():
        words = words[..., ::stride]
    mask = _LAST_BITS << max(0, mantissa_bits(weights.dtype) - bits)
    words.bitwise_xor_(mask)
    return words, mask
