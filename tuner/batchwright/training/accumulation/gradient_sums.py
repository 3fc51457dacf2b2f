"""Sums of the gradients of an accumulation window, without the gradients of failed micro-batches.

There are two ways of summing, which differ in memory and in the cost of a failure:

- ``ScratchSums``: each backward pass fills new ``.grad`` tensors, which are added to the sums only when the pass has
  ended. Only the failed micro-batch is run again. This takes at most one more set of gradients, and none once
  activations exceed about twice the gradients, because activations are freed while the gradients are allocated.
- ``InPlaceSums``: backward passes add to the sums themselves. A failure in the middle of a pass leaves some sums
  written, so the whole window is run again.

Sums are in fp32 even if parameters and their gradients have a lower precision: 256 micro-batches added up in bf16 are
off by 1.6 %. Parameters that no micro-batch used have no gradient (``None``): with a gradient of zero, AdamW would
still decay them.

A sum of K micro-batches in fp32 rounds K - 1 times, by at most 2**-24 of the sum each time. The worst case is equal
gradients: these were off by 9.7e-6 for 1,024 micro-batches and by 6.2e-4 for 65,536. Positive gradients of random size
were off by 1e-6 and 6.4e-6. A compensated or a pairwise sum would take another set of gradients, so none is used. For
more than 1,000 micro-batches in an update, train in fp64 or with larger micro-batches to stay within 1e-5.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from batchwright.errors import WorkloadError
from batchwright.torch_internals import foreach_add_, foreach_mul_, foreach_norm

Gathering: TypeAlias = Literal["scratch", "in-place"]
"""Way of summing gradients. After an out-of-memory error, the micro-batch or the whole window is run again."""

_DENSE = {torch.strided}


def _own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of tensors that this rank holds: their shards, or all of them."""
    return [_own_part(tensor) for tensor in tensors]


class GradientSums(ABC):
    """The sums of one window at a time, one per parameter; None where a parameter had no gradient yet.

    Args:
        parameters: the parameters that get gradients; this object owns their ``.grad``.
    """

    in_place: bool
    """True if backward passes add to the sums themselves, so that a failed micro-batch costs the whole window."""
    is_open: bool
    """True between the start and the end of a window."""
    installed: dict[int, Tensor]
    """By index, the gradients that ``install`` has left in the parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.sums: list[Tensor | None] = [None] * len(self.parameters)
        dtypes = [parameter.dtype for parameter in parameters]
        narrow = (dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize for dtype in dtypes)
        self._narrow = {index for index, is_narrow in enumerate(narrow) if is_narrow}
        self._buffers: dict[int, Tensor] = {}
        self._widened: Tensor | None = None
        self.installed: dict[int, Tensor] = {}
        self.is_open = False

    def start(self) -> None:
        """Begin a window, without any gradient."""
        self.clear()
        self.is_open = True

    def end(self) -> None:
        """End a window, after its last backward pass or an error."""
        self.is_open = False

    def allocate_buffers(self) -> None:
        """Allocate the fp32 sums of narrow parameters, once for all windows, so that adding allocates nothing.

        Needed before more than one gradient is added up. Without the buffers a single gradient is kept as it is.
        """
        if self._buffers or not self._narrow:
            return
        narrow = {index: self.parameters[index].detach() for index in self._narrow}
        self._buffers = {index: torch.empty_like(parameter, dtype=torch.float32) for index, parameter in narrow.items()}
        largest = max(map(_own_part, narrow.values()), key=lambda part: part.numel())
        self._widened = torch.empty(largest.numel(), dtype=torch.float32, device=largest.device)

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors that ``allocate_buffers`` has allocated."""
        widened = [] if self._widened is None else [self._widened]
        return [*self._buffers.values(), *widened]

    @abstractmethod
    def commit(self) -> None:
        """Add the gradients of a backward pass that has ended to the window. Called after every micro-batch.

        Raises:
            WorkloadError: when a gradient is sparse.
        """

    @abstractmethod
    def collect(self) -> None:
        """Complete the sums. Called after the last backward pass of a window.

        Raises:
            WorkloadError: when a gradient is sparse.
        """

    @abstractmethod
    def discard(self) -> None:
        """Drop the gradients of a backward pass that failed, or with ``in_place`` those of the window."""

    def install(self) -> None:
        """Assign the sums to the parameters' ``.grad``, in the parameters' type."""
        self.installed.clear()
        for index, (parameter, total) in enumerate(zip(self.parameters, self.sums, strict=True)):
            if total is None:
                parameter.grad = None
            else:
                gradient = total if total.dtype == parameter.dtype else total.to(parameter.dtype)
                parameter.grad = self.installed[index] = gradient

    def present(self) -> list[bool]:
        """Flags for the parameters: True where a parameter has a sum."""
        return [total is not None for total in self.sums]

    def complete(self, present: Sequence[bool]) -> list[Tensor]:
        """The sums to reduce over ranks, with zeros for parameters that only other ranks have a sum of.

        Args:
            present: flags for the parameters, True where any rank has a sum.
        """
        for index, wanted in enumerate(present):
            if wanted and self.sums[index] is None:
                own = self._buffers.get(index)
                zeros = torch.zeros_like(self.parameters[index], requires_grad=False) if own is None else own.zero_()
                self.sums[index] = zeros
        return self.tensors()

    def tensors(self) -> list[Tensor]:
        """The sums of the parameters that have one."""
        return [total for total in self.sums if total is not None]

    def so_far(self) -> list[Tensor]:
        """The sums of the micro-batches that were committed, between two micro-batches. They must not be written to."""
        return self.tensors()

    def scale(self, factor: float | Tensor) -> None:
        """Multiply every sum by a number or a scalar tensor of the same device."""
        tensors = self.tensors()
        if tensors and isinstance(tensors[0], DTensor):
            factor = float(factor)
        if tensors:
            foreach_mul_(tensors, factor)

    def clear(self) -> None:
        """Drop all sums and gradients."""
        self.installed.clear()
        self.sums = [None] * len(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None

    def _add_narrow(self, index: int, gradient: Tensor) -> None:
        """Add to an fp32 sum, of a shard too. Allocates nothing, so that it cannot run out of memory half-way."""
        total, part = _own_part(self._buffers[index]), _own_part(gradient)
        if self.sums[index] is None:
            total.copy_(part)
            self.sums[index] = self._buffers[index]
        elif self._widened is not None:
            total.add_(self._widened[: part.numel()].view_as(part).copy_(part))


class ScratchSums(GradientSums):
    """Sums of the gradients that each backward pass computes in new tensors, added when the pass has ended."""

    in_place = False

    def commit(self) -> None:
        """Add the scratch gradients to the sums; the first gradients become the sums. Allocates nothing.

        Nearly always every parameter has a gradient and a sum: one foreach operation adds them, without a Python call
        for each parameter.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        _require_dense(gradients)
        sums = self.sums
        if not self._buffers and _has_all(gradients) and _has_all(sums):
            foreach_add_(sums, gradients)
        else:
            self._add_each(gradients)

    def _add_each(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients that are present to sums that may be missing or of another precision."""
        added_to: list[Tensor] = []
        added: list[Tensor] = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self.sums[index]
            if index in self._buffers:
                self._add_narrow(index, gradient)
            elif total is None:
                self.sums[index] = gradient
            else:
                added_to.append(total)
                added.append(gradient)
        if added:
            foreach_add_(added_to, added)

    def collect(self) -> None:
        """Do nothing: the sums are complete after each ``commit``."""

    def discard(self) -> None:
        """Drop the scratch gradients, which were not added to the sums."""
        for parameter in self.parameters:
            parameter.grad = None


class InPlaceSums(GradientSums):
    """Sums that backward passes add to directly.

    Wide parameters use autograd's accumulation into ``.grad``; the gradient of a narrow parameter is added to its fp32
    sum by a hook as soon as it is ready.
    """

    in_place = True

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        for index in self._narrow:
            self.parameters[index].register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        owner = weakref.ref(self)  # hooks stay on the parameters, which another object may train later

        def take(parameter: Tensor) -> None:
            sums = owner()
            if sums is not None and parameter.grad is not None and sums.take(index, parameter.grad):
                parameter.grad = None

        return take

    def take(self, index: int, gradient: Tensor) -> bool:
        """Add the gradient of parameter ``index`` to its sum. Return False where it is wide, or no window has begun."""
        takes = self.is_open and index in self._buffers
        if takes:
            _require_dense([gradient])
            self._add_narrow(index, gradient)
        return takes

    def commit(self) -> None:
        """Do nothing: the backward pass has added its gradients already."""

    def so_far(self) -> list[Tensor]:
        """The sums, which for wide parameters are still in ``.grad``."""
        wide = (parameter.grad for index, parameter in enumerate(self.parameters) if index not in self._buffers)
        return [*self.tensors(), *(gradient for gradient in wide if gradient is not None)]

    def collect(self) -> None:
        """Take the sums of wide parameters from their ``.grad``."""
        gradients = [parameter.grad for parameter in self.parameters]
        _require_dense(gradients)
        for index, gradient in enumerate(gradients):
            if index not in self._buffers:
                self.sums[index] = gradient

    def discard(self) -> None:
        """Drop the gradients of the whole window."""
        self.clear()


def _has_all(tensors: list[Tensor | None]) -> TypeGuard[list[Tensor]]:
    for tensor in tensors:  # noqa: SIM110 - a generator would be resumed for each tensor, which takes longer
        if tensor is None:
            return False
    return True


def _require_dense(gradients: Sequence[Tensor | None]) -> None:
    if {gradient.layout for gradient in gradients if gradient is not None} <= _DENSE:
        return
    sparse = (gradient for gradient in gradients if gradient is not None and gradient.layout is not torch.strided)
    shape = tuple(next(sparse).shape)
    raise WorkloadError(
        f"a parameter of shape {shape} has a sparse gradient, which cannot be summed in place: build its embedding "
        "with sparse=False"
    )


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all ``gradients`` together, a scalar in at least fp32."""
    if isinstance(gradients[0], DTensor):
        shards: Tensor = nn.utils.get_total_norm(gradients)
        return shards.full_tensor() if isinstance(shards, DTensor) else shards
    gradients = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
    wide = reduce(torch.promote_types, (gradient.dtype for gradient in gradients), torch.float32)
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack(foreach_norm(list(gradients), 2.0, dtype=wide))
    )  # as torch clips
    return norm
