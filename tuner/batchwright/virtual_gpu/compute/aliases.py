"""Tensors on the CPU that share the memory of a virtual card."""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from batchwright.torch_internals import is_dense, storage_at

_CPU = torch.device("cpu")


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the strided tensors among arguments or results of an operator, those in lists included."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not value.is_nested:
                yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - an argument of any operator
    """Return an argument with its tensors changed, those in lists included."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return [mapped(part, change) for part in value]
    return value


def on_cpu(value: Any) -> Any:  # noqa: ANN401 - an argument of any operator
    """Return an argument with CUDA tensors replaced by CPU tensors of the same memory, and devices by the CPU."""
    return _CPU if isinstance(value, torch.device) else mapped(value, alias)


def storage_address(tensor: Tensor) -> int:
    """Return the address at which the storage of a tensor begins.

    Not by ``untyped_storage``: an object of Python would hold the storage from then on, and autograd would no longer
    add gradients to it in place.
    """
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size() if tensor.numel() else 0


def alias(tensor: Tensor) -> Tensor:
    """Return a CPU tensor with the memory, shape and strides of a CUDA tensor, or the tensor if it is on the CPU.

    The memory belongs to the CUDA tensor: the result must not outlive it.
    """
    if not tensor.is_cuda:
        return tensor
    reached = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_CPU)
    # from the first element on: for the reason of ``storage_address``
    memory = storage_at(tensor.data_ptr(), _CPU, reached * tensor.element_size())
    shared = torch.empty(0, dtype=tensor.dtype, device=_CPU)
    shared.set_(memory, 0, tensor.size(), tensor.stride())
    if tensor.is_conj():
        shared = shared.conj()
    return shared.neg() if tensor.is_neg() else shared


def write_zeros(tensor: Tensor) -> None:
    """Zero the memory of a dense CUDA tensor; the virtual card does that without touching large ranges."""
    if tensor.is_cuda and tensor.numel() and is_dense(tensor):
        _runtime().cudaMemset(ctypes.c_void_p(tensor.data_ptr()), 0, ctypes.c_size_t(tensor.nbytes))


@cache
def _runtime() -> ctypes.CDLL:
    """The virtual card's libcudart, which is loaded already: the loader finds it by its name."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
