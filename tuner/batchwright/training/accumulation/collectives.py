"""The ranks of a data-parallel run, and their collectives between micro-batches.

Gradients are reduced once per window, outside the backward passes (no ``DistributedDataParallel``), so that ranks may
run different numbers of micro-batches, divide one of them, or have no samples, without a deadlock.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from batchwright.device_traits import traits_of
from batchwright.errors import PeerError, TrainingError
from batchwright.torch_internals import fake_store, foreach_copy_

T = TypeVar("T")

_BUCKET_BYTES = 25 * 1024**2
"""Size of the buckets that gradients are sent in: torch's default for ``DistributedDataParallel``."""


class Ranks:
    """The single rank of a run of one process, without communication.

    Attributes:
        rank: the number of this process.
        size: the number of processes.
        reduces: whether gradients go through collectives. True for a group of one rank too, which a probe uses in place
            of a larger group.
    """

    rank = 0
    size = 1
    reduces = False

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order, on every rank."""
        return [value]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, bit-equal on all of them."""

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the tensor of rank 0."""

    def run_collectively(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank. Return its results in rank order. A failure on one rank is raised on all of them.

        Raises:
            PeerError: when another rank failed.
        """
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:  # of any kind: the other ranks must know of the error before it is raised
            if self.size == 1:
                raise
            failure = error
        described = None if failure is None else f"{type(failure).__name__}: {failure}"
        results = self.gather((described, result))
        if failure is not None:
            raise failure
        for rank, (description, _) in enumerate(results):
            if description is not None:
                raise PeerError(f"rank {rank} failed: {description}")
        return [result for _, result in results]  # type: ignore[misc] # without a failure there is a result

    def close(self) -> None:
        """Leave the group."""


class ProcessGroup(Ranks):
    """The ranks of torch's default process group: gloo for objects, and the device's backend for tensors.

    Raises:
        TrainingError: when there is no such group.
    """

    reduces = True

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise TrainingError("there is no process group: call torch.distributed.init_process_group() first")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def gather(self, value: T) -> list[T]:
        """Gather the value of every rank by pickling, for small values only."""
        values: list[T | None] = [None] * self.size
        with _lost_peers_translated():
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value] # every place has been filled

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum in buckets; a tensor larger than one bucket is reduced where it is."""
        for bucket in _buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._all_reduce(bucket[0])
                continue
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            self._all_reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])

    def _all_reduce(self, tensor: Tensor) -> None:
        with _lost_peers_translated():
            dist.all_reduce(tensor)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast one tensor after the other: buffers are few and small, and parameters are sent once."""
        for tensor in tensors:
            contiguous = tensor.contiguous()
            with _lost_peers_translated():
                dist.broadcast(contiguous.view(-1).view(torch.uint8), 0)  # as bytes, which every backend knows
            if contiguous is not tensor:
                tensor.copy_(contiguous)

    def close(self) -> None:
        """Destroy the group."""
        dist.destroy_process_group()


@contextmanager
def _lost_peers_translated() -> Iterator[None]:
    """Translate a backend's error for a lost rank into ``PeerError``."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer_error(error):
            raise
        raise PeerError(f"lost contact with another rank: {error}") from error


_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "socket timeout",
)


def is_lost_peer_error(error: BaseException) -> bool:
    """Return whether a collective failed because of another rank, by the error messages of gloo and NCCL."""
    message = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(phrase in message for phrase in _LOST_PEER)
    )


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group ``tensors``, in order, by type into buckets of at most ``_BUCKET_BYTES`` or of one tensor."""
    filled = 0
    number = 0

    def bucket_of(tensor: Tensor) -> tuple[int, torch.dtype]:
        nonlocal filled, number
        size = tensor.numel() * tensor.element_size()
        if filled + size > _BUCKET_BYTES:
            filled, number = 0, number + 1
        filled += size
        return number, tensor.dtype

    return [list(group) for _, group in groupby(tensors, bucket_of)]


RENDEZVOUS = "BATCHWRIGHT_RENDEZVOUS"
"""Environment variable with the path of the store by which the ranks of a run on one host find each other, without
``torchrun``."""


def world_size() -> int:
    """Number of ranks that ``torchrun`` or ``TrainingProcess`` has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    """Number of this process among the ranks."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this process on its host, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def join_ranks(device: torch.device) -> Ranks:
    """Join the process group of the other ranks, if any were started."""
    if world_size() == 1:
        return Ranks()
    rendezvous = os.environ.get(RENDEZVOUS)
    if rendezvous is None:
        dist.init_process_group(traits_of(device.type).process_group, init_method="env://")
    else:
        store = dist.FileStore(rendezvous, world_size())  # type: ignore[attr-defined] # as HashStore below
        dist.init_process_group(
            traits_of(device.type).process_group, store=store, rank=own_rank(), world_size=world_size()
        )
    return ProcessGroup()


class SimulatedRanks(ProcessGroup):
    """One rank of a group whose other ranks do not exist, for a probe: buffers are as large as with all of them.

    Every rank is taken to have the values of this one. Gradients stay as they are.
    """

    def gather(self, value: T) -> list[T]:
        """The value of this rank for every rank."""
        return [value] * self.size

    def _all_reduce(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Leave the tensors as they are."""


def simulated_ranks(size: int) -> SimulatedRanks:
    """A process group of ``size`` ranks, of which this process is the first and the only one."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=size)
    return SimulatedRanks()


def single_rank_group(device: torch.device) -> Ranks:
    """A process group of this process alone, whose collectives are executed, for a probe of a distributed run."""
    store = dist.HashStore()  # type: ignore[attr-defined] # documented, but not in the stubs' __all__
    dist.init_process_group(traits_of(device.type).process_group, store=store, rank=0, world_size=1)
    return ProcessGroup()
