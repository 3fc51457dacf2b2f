"""Calls whose workspace cuDNN chooses: their kinds, by which measured workspaces are found, and assumptions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchwright.estimation.trace import BlockBytes
from batchwright.estimation.tracing.kernel_workspaces.workspace import IMAGE_DIMENSIONS, bytes_of
from batchwright.estimation.tracing.torch_internals import OpOverload
from batchwright.schemas.gpus import KernelProfile

_aten = torch.ops.aten


CONVOLUTIONS = frozenset({_aten.convolution.default, _aten.convolution_backward.default})
_LIBRARY_CALLS: Mapping[OpOverload, str] = {
    _aten.convolution.default: "convolution",
    _aten.convolution_backward.default: "convolution-backward",
}
_TYPES: Mapping[torch.dtype, str] = {torch.float32: "fp32", torch.float16: "half", torch.bfloat16: "half"}
"""Both half types run the same kernels."""
UNMEASURED_CONVOLUTION = (1, 2)
"""Multiples of ``sample_bytes`` that a workspace may be smaller and larger than estimated: see the verdict."""


@dataclass(frozen=True)
class LibraryCall:
    """A call whose workspace is the choice of a library: of cuDNN.

    Attributes:
        kind: the operator, the type and the layout of the call, by which measured workspaces are found.
        operand_bytes: bytes of all tensors of the call.
        sample_bytes: bytes of those that have a dimension of samples, so that the same call of a workload is the
            largest one at every micro-batch size.
    """

    kind: str
    operand_bytes: int
    sample_bytes: int


def library_call(func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> LibraryCall | None:
    """Return the call of a library that ``func`` is; None for the operators whose workspaces torch itself chooses."""
    name = _LIBRARY_CALLS.get(func)
    if name is None:
        return None
    weight = args[1] if func is _aten.convolution.default else args[2]
    samples = (args[0], *outputs) if func is _aten.convolution.default else args[:2]
    layout = _layout(args[0]) if args[8 if func is _aten.convolution.default else 9] == 1 else "grouped"
    sample_bytes = sum(bytes_of(tensor) for tensor in samples)
    return LibraryCall(
        kind=f"{name} {_TYPES.get(args[0].dtype, 'other')} {layout}",
        operand_bytes=sample_bytes + bytes_of(weight),
        sample_bytes=sample_bytes,
    )


def _layout(images: Tensor) -> str:
    if images.dim() != IMAGE_DIMENSIONS:
        return f"{images.dim()}d"
    is_plain = images.is_contiguous() or not images.is_contiguous(memory_format=torch.channels_last)
    return "contiguous" if is_plain else "channels-last"


def convolution(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[BlockBytes]:
    """Estimate the workspace of a convolution."""
    return _transposed([args[0], args[1], *outputs], groups=args[8], profile=profile)


def convolution_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile
) -> Sequence[BlockBytes]:
    """Workspaces of the larger of the two kernels, for the gradients of input and weight, which run in sequence."""
    gradient, inputs, weight = args[:3]
    del outputs
    return _transposed([gradient, inputs, weight], groups=args[9], profile=profile)


def _transposed(tensors: Sequence[Tensor], *, groups: int, profile: KernelProfile) -> Sequence[BlockBytes]:
    """Estimate of the copies to channels-last format that kernels on tensor cores make (half types, fp32 by TF32)."""
    images = tensors[0]
    needed = (8, 0) if images.dtype in {torch.float32, torch.bfloat16} else (7, 0)
    if groups != 1 or profile.compute_capability < needed or images.dtype is torch.float64:
        return []
    if images.dim() == IMAGE_DIMENSIONS and images.is_contiguous(memory_format=torch.channels_last):
        return []
    return [sum(bytes_of(tensor) for tensor in tensors)]
