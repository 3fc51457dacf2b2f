"""The type of functions that return workspaces, and figures that several kinds of kernels share."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from batchwright.estimation.trace import BlockBytes
from batchwright.schemas.gpus import KernelProfile

INDEX_BYTES = 8
FLOAT_BYTES = 4
IMAGE_DIMENSIONS = 4
"""Of a batch of images: samples, channels, height and width."""

Workspace: TypeAlias = "Callable[[Sequence[Any], Sequence[Tensor], KernelProfile], Sequence[BlockBytes]]"
"""Function from an operator's arguments and results to the bytes of the workspaces it holds while it runs."""


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of all elements of a tensor."""
    return tensor.numel() * tensor.element_size()
