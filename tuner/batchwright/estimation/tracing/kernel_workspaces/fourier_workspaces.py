"""Workspaces of Fourier transforms: torch's copies (`cuda/SpectralOps.cpp`), and the work area of a cuFFT plan.

The work area is not known without a card. cuFFT documents one to eight complex elements for each element of the signals
("Fourier Transform Setup"), and that some plans need none (``estimate_workspace_size`` of nvmath-python). One is
assumed.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

from torch import Tensor

from batchwright.estimation.tracing.kernel_workspaces.workspace import bytes_of
from batchwright.schemas.gpus import KernelProfile

_MOST_ELEMENTS = 8
"""Elements of a work area for each element of the signals, in the worst case."""
_DIMENSIONS_OF_PLAN = 3
"""The most dimensions that one plan transforms."""


def fourier_transform(args: Sequence[Any], outputs: Sequence[Tensor], profile: KernelProfile) -> Sequence[int]:
    """Workspaces of a transform, allocated after the result: its copies, and the work area.

    A real result costs a copy of the spectrum, which cuFFT overwrites. Batch dimensions that are no single dimension in
    memory are copied. A transform of more than three dimensions needs a second result.
    """
    del profile
    (signals, dimensions), result = args[:2], outputs[0]
    copies = []
    strides: Sequence[int] = signals.stride()
    if not result.is_complex():
        copies.append(bytes_of(signals))
        strides = [prod(signals.shape[each + 1 :]) for each in range(signals.dim())]
    elif len(dimensions) > _DIMENSIONS_OF_PLAN:
        copies.append(bytes_of(result))
    batch = [(strides[each], signals.shape[each]) for each in range(signals.dim()) if each not in dimensions]
    outer = sorted(((stride, size) for stride, size in batch if size > 1), reverse=True)
    if any(stride != inner * size for (stride, _), (inner, size) in pairwise(outer)):
        copies.append(bytes_of(signals))
    return [*copies, _work_area(args, outputs)]


def fourier_error(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes by which the work area may be smaller, and larger."""
    area = _work_area(args, outputs)
    return area, (_MOST_ELEMENTS - 1) * area


def _work_area(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    tensors = args[0], outputs[0]
    element_bytes = max(tensor.element_size() for tensor in tensors if tensor.is_complex())
    return max(tensor.numel() for tensor in tensors) * element_bytes
