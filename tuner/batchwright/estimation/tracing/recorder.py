"""Record the blocks of one device: every storage, from the operator that creates it to its last reference."""

import weakref
from collections.abc import Iterable
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from batchwright.estimation.trace import BlockBytes, Bound, Category, Mark, RowSums
from batchwright.estimation.tracing.kernel_workspaces.shared_kernels import SharedBytes
from batchwright.estimation.tracing.torch_internals import storage_key


class Recorder:
    """The events of a trace in progress. Live storages are identified by ``storage_key``.

    Attributes:
        events: as in ``Trace``.
        sizes: bytes requested, by block.
        categories: categories that are known so far, by block.
        bounds: blocks that do not grow as tensors do.
        differing: the blocks whose bytes the profiles do not share.
        parts: numbers of equal blocks that a recorded one stands for, by block.
        live: the allocated blocks, by the key of their storage.
        marks: as in ``Trace``.
    """

    def __init__(self) -> None:
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.categories: dict[int, Category] = {}
        self.bounds: dict[int, Bound | RowSums] = {}
        self.differing: dict[int, SharedBytes] = {}
        self.parts: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self.marks: list[Mark] = []
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._seen: set[int] = set()
        self._recording = True

    def mark(self, name: str) -> None:
        """Begin a section."""
        self.marks.append(Mark(name=name, position=len(self.events)))

    def allocate(self, nbytes: BlockBytes | SharedBytes, category: Category | None = None) -> int:
        """Record the allocation of a block, and return its number."""
        block = len(self.sizes)
        if isinstance(nbytes, SharedBytes):
            self.differing[block] = nbytes
            nbytes = nbytes.nbytes
        if not isinstance(nbytes, int):
            self.bounds[block] = nbytes
            nbytes = nbytes.nbytes
        self.sizes.append(nbytes)
        self.events.append(block)
        if category is not None:
            self.categories[block] = category
        return block

    def free(self, block: int) -> None:
        """Record that a block is freed."""
        self.events.append(~block)

    def ordered_events(self) -> list[int]:
        """Return the events, with consecutive frees in the order of their blocks.

        The original order may depend on addresses (sets of objects). The state of an allocator does not depend on it.
        """
        ordered: list[int] = []
        freed: list[int] = []
        for event in self.events:
            if event < 0:
                freed.append(event)
                continue
            ordered += sorted(freed, reverse=True)
            freed.clear()
            ordered.append(event)
        return ordered + sorted(freed, reverse=True)

    def record(self, tensors: Iterable[Tensor]) -> None:
        """Record the new storages among an operator's results, until they are freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage_key(storage)
            if address not in self._seen:
                nbytes = storage.nbytes()
                self._track(storage, address, self.allocate(nbytes) if nbytes else None)

    def ignore(self, tensor: Tensor) -> None:
        """Exclude the storage of a tensor that represents one outside of the trace."""
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._seen:
            self._track(storage, storage_key(storage), None)

    def resize_to_shape(self, tensor: Tensor) -> None:
        """Resize the storage of a tensor to the bytes that its shape needs."""
        storage = tensor.untyped_storage()
        nbytes = tensor.numel() * tensor.itemsize
        if storage.size() != nbytes:
            storage.resize_(nbytes)
            self._track(storage, storage_key(storage), self.allocate(nbytes))

    def empty(self, tensor: Tensor) -> None:
        """Resize the storage of a tensor to 0 bytes."""
        storage = tensor.untyped_storage()
        block = self.live.pop(storage_key(storage), None)
        if storage.size():
            storage.resize_(0)
        if block is not None:
            self.free(block)

    def block_of(self, tensor: Tensor) -> int | None:
        """Return the block of ``tensor``; None if it is not recorded."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        return self.live.get(storage_key(tensor.untyped_storage()))

    def label(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of the blocks of ``tensors`` that have none."""
        for tensor in tensors:
            block = self.block_of(tensor)
            if block is not None:
                self.categories.setdefault(block, category)

    def scale(self, tensors: Iterable[Tensor], factor: Fraction) -> None:
        """Multiply the bytes of the blocks of ``tensors``, which stand for others too."""
        for block in {block for tensor in tensors if (block := self.block_of(tensor)) is not None}:
            self.sizes[block] = int(self.sizes[block] * factor)

    def divide(self, tensor: Tensor, parts: int, *, kept: int) -> None:
        """Record the block of ``tensor`` as equal parts, of which only ``kept`` are allocated. Once for each block."""
        block = self.block_of(tensor)
        if block is not None and block not in self.parts:
            self.sizes[block] = self.sizes[block] // parts * kept
            self.parts[block] = kept

    def stop(self) -> None:
        """Stop recording frees."""
        self._recording = False

    def _track(self, storage: torch.UntypedStorage, address: int, block: int | None) -> None:
        self._seen.add(address)
        if block is not None:
            self.live[address] = block
        self._references[address] = weakref.ref(storage, partial(self._on_freed, address))

    def _on_freed(self, address: int, _reference: object) -> None:
        self._seen.discard(address)
        self._references.pop(address, None)
        block = self.live.pop(address, None)
        if block is not None and self._recording:
            self.free(block)
