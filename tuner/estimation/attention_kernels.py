"""Which attention kernel CUDA runs: the rules of torch 2.13, in Python. No torch.

From ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, for dense inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

from tuner.schemas.gpus import KernelProfile

_HALF, _FLOAT, _BFLOAT16 = 5, 6, 15
"""``c10::ScalarType``."""
_MOST_CUDNN_HEADS = 65535
_WIDEST_FLASH = 256
_WIDEST_CUDNN, _WIDEST_CUDNN_ON_HOPPER = 128, 256
_WIDTHS_OF_LATENT_ATTENTION = (192, 128)
"""Of query and value: the one pair above 128 that the Blackwell of data centres takes (DeepSeek's)."""
_AMPERE, _VOLTA = (8, 0), (7, 0)


class Kernel(IntEnum):
    """As ``at::SDPBackend``."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


@dataclass(frozen=True)
class Attention:
    """One call, as the shim tells it: in this order, all whole numbers."""

    dtype: int
    """The type of query, key and value as a ``c10::ScalarType``; -1 when they differ."""
    batch: int
    query_heads: int
    key_heads: int
    value_heads: int
    query_length: int
    key_length: int
    query_width: int
    key_width: int
    value_width: int
    masked: int
    mask_trained: int
    causal: int
    grouped: int
    state: int
    """1: a gradient will be asked for; 2: the last dimensions are dense."""
    dropout: float = 0.0

    @classmethod
    def told(cls, figures: Sequence[int], dropout: float) -> Attention:
        """From the figures of the shim."""
        names = [it.name for it in fields(cls)]
        return cls(**dict(zip(names, figures, strict=False)), dropout=dropout)

    @property
    def trained(self) -> bool:
        """Whether a gradient will be asked for."""
        return bool(self.state & 1)

    @property
    def dense(self) -> bool:
        """Whether the last dimensions of the inputs are contiguous."""
        return bool(self.state & 2)

    @property
    def width(self) -> int | None:
        """The width of a head, where it is the same for query, key and value."""
        return self.query_width if self.query_width == self.key_width == self.value_width else None

    @property
    def same_heads(self) -> bool:
        """Whether every query head has a key and value head of its own."""
        return self.query_heads == self.key_heads == self.value_heads


FIGURES = len(fields(Attention)) - 1
"""How many whole numbers tell of a call."""


def choose(attention: Attention, profile: KernelProfile) -> Kernel:
    """The first kernel in torch's order that can do it."""
    takes = {Kernel.CUDNN: _cudnn_takes, Kernel.FLASH: _flash_takes, Kernel.EFFICIENT: _efficient_takes}
    for kernel in _order(profile):
        if attention.dense and takes[kernel](attention, profile):
            return kernel
    return Kernel.MATH


def _order(profile: KernelProfile) -> tuple[Kernel, ...]:
    """CuDNN first on Hopper and the Blackwell of data centres (``check_prefer_cudnn_attention``), else never."""
    order = (Kernel.FLASH, Kernel.EFFICIENT)
    prefers = profile.kind == "cuda" and profile.compute_capability[0] in (9, 10)
    return (Kernel.CUDNN, *order) if prefers else order


def _is_half(attention: Attention, profile: KernelProfile) -> bool:
    """Whether the type is one that tensor cores take: bfloat16 since Ampere."""
    types = (_HALF, _BFLOAT16) if profile.compute_capability >= _AMPERE else (_HALF,)
    return attention.dtype in types


def _cudnn_takes(attention: Attention, profile: KernelProfile) -> bool:
    widths = (attention.query_width, attention.value_width)
    return (
        _is_half(attention, profile)
        and not attention.mask_trained
        and (attention.dropout * 16.0).is_integer()
        and max(attention.batch, attention.query_heads) <= _MOST_CUDNN_HEADS
        and all(it <= _widest_cudnn(widths, profile) and it % 8 == 0 for it in widths)
        and attention.key_length > 1
        and (attention.dropout == 0.0 or attention.query_length > 1)
        and (attention.same_heads or bool(attention.grouped))
    )


def _widest_cudnn(widths: tuple[int, int], profile: KernelProfile) -> int:
    """``check_cudnn_tensor_shapes`` with cuDNN 9.11 or later, which the wheels of torch 2.13 bring (9.20)."""
    if profile.compute_capability == (9, 0):
        return _WIDEST_CUDNN_ON_HOPPER
    if profile.compute_capability[0] == 10 and widths == _WIDTHS_OF_LATENT_ATTENTION:  # noqa: PLR2004 - Blackwell
        return max(widths)
    return _WIDEST_CUDNN


def _flash_takes(attention: Attention, profile: KernelProfile) -> bool:
    width = attention.width
    return (
        _is_half(attention, profile)
        and (profile.kind == "rocm" or profile.compute_capability >= _AMPERE)
        and not attention.masked
        and width is not None
        and width <= _WIDEST_FLASH
        and not (attention.trained and _too_wide_for_shared_memory(width, attention.dropout, profile))
        and not (attention.causal and attention.query_length != attention.key_length)
        and (attention.same_heads or bool(attention.grouped))
    )


def _too_wide_for_shared_memory(width: int, dropout: float, profile: KernelProfile) -> bool:
    """Consumer cards have too little for the backward pass of wide heads (sm86 to sm89, sm120)."""
    capability = profile.compute_capability
    if profile.kind == "rocm" or not ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)):
        return False
    return not (width <= 192 or (width > 224 and dropout == 0.0))  # noqa: PLR2004 - torch's own bounds


def _efficient_takes(attention: Attention, profile: KernelProfile) -> bool:
    types = (_HALF, _FLOAT, _BFLOAT16) if profile.compute_capability >= _AMPERE else (_HALF, _FLOAT)
    alignment = _alignment(attention.dtype, profile)
    return (
        attention.dtype in types
        and attention.query_width == attention.key_width
        and attention.query_width % alignment == 0
        and attention.value_width % alignment == 0
        and attention.same_heads
    )


def _alignment(dtype: int, profile: KernelProfile) -> int:
    """``minimum_gemm_alignment``, in elements."""
    half = dtype in (_HALF, _BFLOAT16)
    if profile.compute_capability >= _AMPERE or (half and profile.compute_capability >= _VOLTA):
        return 8 if half else 4
    return 1
