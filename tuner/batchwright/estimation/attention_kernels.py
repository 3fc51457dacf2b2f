"""Choose the attention kernel that CUDA runs, by the rules of torch 2.13. No torch.

From ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, for dense inputs. Torch 2.11 chose alike on an H100 in
120 cases, but for a rule that it did not have yet (``_limits_dropout``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from importlib.metadata import version

from batchwright.schemas.gpus import KernelProfile

_HALF, _FLOAT, _BFLOAT16 = 5, 6, 15
"""``c10::ScalarType``."""
_MAX_CUDNN_HEADS = 65535
_MAX_FLASH_WIDTH = 256
_MAX_CUDNN_WIDTH, _MAX_CUDNN_WIDTH_ON_HOPPER = 128, 256
_LATENT_ATTENTION_WIDTHS = (192, 128)
"""Widths of query and value: the only pair above 128 that data centre Blackwell GPUs support (DeepSeek's)."""
_AMPERE, _VOLTA = (8, 0), (7, 0)


class Kernel(IntEnum):
    """Attention kernels, with the values of ``at::SDPBackend``."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


@dataclass(frozen=True)
class Attention:
    """One call of attention. The fields are integers in the order in which ``fake_cuda.cpp`` passes them."""

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
    mask_requires_grad: int
    causal: int
    grouped: int
    state: int
    """Bit 0: a gradient is required. Bit 1: the last dimensions are contiguous."""
    dropout: float = 0.0

    @classmethod
    def from_figures(cls, figures: Sequence[int], dropout: float) -> Attention:
        """Build a call from the integers that the shim passes."""
        names = [field.name for field in fields(cls)]
        return cls(**dict(zip(names, figures, strict=False)), dropout=dropout)

    @property
    def requires_grad(self) -> bool:
        """True if a gradient is required."""
        return bool(self.state & 1)

    @property
    def dense(self) -> bool:
        """True if the last dimensions of the inputs are contiguous."""
        return bool(self.state & 2)

    @property
    def width(self) -> int | None:
        """The width of a head if it is equal for query, key and value, else None."""
        return self.query_width if self.query_width == self.key_width == self.value_width else None

    @property
    def same_heads(self) -> bool:
        """True if every query head has its own key and value head."""
        return self.query_heads == self.key_heads == self.value_heads


FIGURE_COUNT = len(fields(Attention)) - 1
"""Number of integers that describe a call."""


def choose_kernel(attention: Attention, profile: KernelProfile) -> Kernel:
    """Return the first kernel in torch's order that supports the call."""
    supports = [(Kernel.FLASH, _flash_supports), (Kernel.EFFICIENT, _efficient_supports)]
    if profile.has_cudnn and profile.compute_capability[0] in (9, 10):  # ``check_prefer_cudnn_attention``
        supports.insert(0, (Kernel.CUDNN, _cudnn_supports))
    for kernel, is_supported in supports:
        if attention.dense and is_supported(attention, profile):
            return kernel
    return Kernel.MATH


def _is_half(attention: Attention, profile: KernelProfile) -> bool:
    """Return whether tensor cores support the type: fp16, and bf16 since Ampere."""
    types = (_HALF, _BFLOAT16) if profile.compute_capability >= _AMPERE else (_HALF,)
    return attention.dtype in types


def _cudnn_supports(attention: Attention, profile: KernelProfile) -> bool:
    widths = (attention.query_width, attention.value_width)
    return (
        _is_half(attention, profile)
        and not attention.mask_requires_grad
        and ((attention.dropout * 16.0).is_integer() or not _limits_dropout())
        and max(attention.batch, attention.query_heads) <= _MAX_CUDNN_HEADS
        and all(width <= _max_cudnn_width(widths, profile) and width % 8 == 0 for width in widths)
        and attention.key_length > 1
        and (attention.dropout == 0.0 or attention.query_length > 1)
        and (attention.same_heads or bool(attention.grouped))
    )


@cache
def _limits_dropout() -> bool:
    """Return whether the installed torch leaves dropouts to cuDNN only in sixteenths (``check_cudnn_dropout``).

    Torch 2.11 does not, 2.13 does; 2.12 is assumed to.
    """
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 12)


def _max_cudnn_width(widths: tuple[int, int], profile: KernelProfile) -> int:
    """Follow ``check_cudnn_tensor_shapes`` with cuDNN 9.11 or later (torch 2.13's wheels contain 9.20)."""
    if profile.compute_capability == (9, 0):
        return _MAX_CUDNN_WIDTH_ON_HOPPER
    if profile.compute_capability[0] == 10 and widths == _LATENT_ATTENTION_WIDTHS:  # noqa: PLR2004 - Blackwell
        return max(widths)
    return _MAX_CUDNN_WIDTH


def _flash_supports(attention: Attention, profile: KernelProfile) -> bool:
    width = attention.width
    return (
        _is_half(attention, profile)
        and (profile.kind == "rocm" or profile.compute_capability >= _AMPERE)
        and not attention.masked
        and width is not None
        and width <= _MAX_FLASH_WIDTH
        and not (attention.requires_grad and _exceeds_shared_memory(width, attention.dropout, profile))
        and not (attention.causal and attention.query_length != attention.key_length)
        and (attention.same_heads or bool(attention.grouped))
    )


def _exceeds_shared_memory(width: int, dropout: float, profile: KernelProfile) -> bool:
    """Return whether a backward pass of wide heads exceeds the shared memory of consumer GPUs (sm86 to sm89, sm120)."""
    capability = profile.compute_capability
    if profile.kind == "rocm" or not ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)):
        return False
    return not (width <= 192 or (width > 224 and dropout == 0.0))  # noqa: PLR2004 - torch's own bounds


def _efficient_supports(attention: Attention, profile: KernelProfile) -> bool:
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
    """Follow ``minimum_gemm_alignment``, in elements."""
    half = dtype in (_HALF, _BFLOAT16)
    if profile.compute_capability >= _AMPERE or (half and profile.compute_capability >= _VOLTA):
        return 8 if half else 4
    return 1
