"""Blocks as they come and go: every storage of one device, from the operator that makes it to its last reference."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tuner.estimation.trace import Bound, Category, Mark
from tuner.estimation.tracing.torch_internals import storage_key


class Recorder:
    """The events of a trace while it is made. Storages are known by their address while they live.

    Attributes:
        events: as in ``Trace``.
        sizes: bytes asked for, by block.
        categories: by block, where it is known already.
        bounds: by block, of those that stop growing.
        live: the blocks that are held now, by the address of their storage.
    """

    def __init__(self) -> None:
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.categories: dict[int, Category] = {}
        self.bounds: dict[int, Bound] = {}
        self.live: dict[int, int] = {}
        self.marks: list[Mark] = []
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._known: set[int] = set()
        self._recording = True

    def mark(self, name: str) -> None:
        """A stretch begins."""
        self.marks.append(Mark(name=name, position=len(self.events)))

    def take(self, nbytes: int | Bound, category: Category | None = None) -> int:
        """A block is taken; returns its number."""
        block = len(self.sizes)
        if isinstance(nbytes, Bound):
            self.bounds[block] = nbytes
            nbytes = nbytes.nbytes
        self.sizes.append(nbytes)
        self.events.append(block)
        if category is not None:
            self.categories[block] = category
        return block

    def give_back(self, block: int) -> None:
        """A block is given back."""
        self.events.append(~block)

    def settled_events(self) -> list[int]:
        """The events, with blocks that go at one moment in the order of their numbers.

        Which of them goes first may depend on addresses (sets of objects); an allocator ends up the same.
        """
        settled: list[int] = []
        going: list[int] = []
        for event in self.events:
            if event < 0:
                going.append(event)
                continue
            settled += sorted(going, reverse=True)
            going.clear()
            settled.append(event)
        return settled + sorted(going, reverse=True)

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Results of an operator: storages that are new are taken, until they are gone."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage_key(storage)
            if address not in self._known:
                nbytes = storage.nbytes()
                self._watch(storage, address, self.take(nbytes) if nbytes else None)

    def adopt(self, tensor: Tensor) -> None:
        """A tensor that stands for one outside of the trace: no block of it is recorded."""
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._known:
            self._watch(storage, storage_key(storage), None)

    def fill(self, tensor: Tensor) -> None:
        """The storage of a tensor gets the bytes that its shape needs, where it has not."""
        storage = tensor.untyped_storage()
        nbytes = tensor.numel() * tensor.itemsize
        if storage.size() != nbytes:
            storage.resize_(nbytes)
            self._watch(storage, storage_key(storage), self.take(nbytes))

    def empty(self, tensor: Tensor) -> None:
        """The storage of a tensor gives its bytes back; the tensor stays."""
        storage = tensor.untyped_storage()
        block = self.live.pop(storage_key(storage), None)
        if storage.size():
            storage.resize_(0)
        if block is not None:
            self.give_back(block)

    def block_of(self, tensor: Tensor) -> int | None:
        """The block that holds ``tensor``; none when it is not recorded."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        return self.live.get(storage_key(tensor.untyped_storage()))

    def label(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Say what the blocks of ``tensors`` hold, if nobody has said so yet."""
        for tensor in tensors:
            block = self.block_of(tensor)
            if block is not None:
                self.categories.setdefault(block, category)

    def stop(self) -> None:
        """What goes from here on is no part of the trace."""
        self._recording = False

    def _watch(self, storage: torch.UntypedStorage, address: int, block: int | None) -> None:
        self._known.add(address)
        if block is not None:
            self.live[address] = block
        self._watched[address] = weakref.ref(storage, partial(self._gone, address))

    def _gone(self, address: int, _reference: object) -> None:
        self._known.discard(address)
        self._watched.pop(address, None)
        block = self.live.pop(address, None)
        if block is not None and self._recording:
            self.give_back(block)
