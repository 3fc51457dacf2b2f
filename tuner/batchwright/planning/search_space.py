"""The bounds of a tuning: the memory it may take, and the sizes worth probing. Pure, no torch."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from batchwright.errors import DeviceError, FieldProblem, SearchError, SpecError
from batchwright.planning.parameters import PARAMETERS
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo, ExpectedPeaks
from batchwright.units import format_bytes, format_share


@dataclass(frozen=True)
class SearchSpace:
    """The sizes worth probing: multiples of ``granularity`` up to ``bound`` (``bound`` itself where it is smaller).

    Attributes:
        bound: the largest useful size.
        bound_reason: explanation of the bound, for the proof.
        granularity: step between the sizes.
        limit_bytes: the memory a probe may take, if known.
        expected: the estimated memory curve. A wrong estimate costs probes, never correctness.
        elastic: whether a part of the measured memory is reclaimable where memory is short, as with buffers of a
            process's libraries. It changes only the order of probes.
        sizes: the only sizes worth probing, rising, up to ``bound``; ``granularity`` is 1 then.

    Raises:
        SearchError: when a number is below 1, or the sizes are empty, do not rise, or exceed the bound.
    """

    bound: int
    bound_reason: str
    granularity: int = 1
    limit_bytes: int | None = None
    expected: ExpectedPeaks | None = None
    sizes: tuple[int, ...] | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.bound < 1 or self.granularity < 1:
            raise SearchError(f"bound and granularity must be at least 1, got {self.bound} and {self.granularity}")
        if self.sizes is None:
            return
        rises = all(low < high for low, high in pairwise((0, *self.sizes)))
        if not self.sizes or not rises or self.sizes[-1] > self.bound or self.granularity > 1:
            raise SearchError(
                f"sizes must rise from 1 or more to at most {self.bound}, with a granularity of 1, got "
                f"{list(self.sizes)} and {self.granularity}"
            )

    @property
    def count(self) -> int:
        """Number of candidates."""
        return len(self.sizes) if self.sizes else max(1, self.bound // self.granularity)

    def size(self, index: int) -> int:
        """The candidate with an index from 1 to ``count``; 0 for index 0."""
        return (0, *self.sizes)[index] if self.sizes else min(index * self.granularity, self.bound)

    def index(self, size: int) -> int:
        """The index of a candidate.

        Raises:
            SearchError: when the size is not a candidate.
        """
        index = bisect_left(self.sizes, size) + 1 if self.sizes else -(-size // self.granularity)
        if not 1 <= index <= self.count or self.size(index) != size:
            candidates = f"{self.count} sizes" if self.sizes else f"multiples of {self.granularity}"
            raise SearchError(
                f"micro-batch {size} is not among the sizes searched: {candidates} from {self.size(1)} to "
                f"{self.size(self.count)}"
            )
        return index

    def __contains__(self, size: int) -> bool:
        """Return whether a size is a candidate."""
        index = self.at_most(size)
        return index > 0 and self.size(index) == size

    def at_most(self, size: float) -> int:
        """The index of the largest candidate of at most ``size``; 0 when there is none."""
        if self.sizes:
            return bisect_right(self.sizes, size)
        return min(int(size) // self.granularity, self.count) if size < self.bound else self.count


_MOST_CPU_RANKS = 16


def rank_devices(
    request: TuningRequest, device: DeviceInfo, limit_bytes: int, peers: Sequence[str] = ()
) -> tuple[str, ...]:
    """The device of each rank, where all ranks of a probe can run; an empty tuple where one stands for all.

    Args:
        request: the request, whose spec has the number of ranks.
        device: the device of the first rank.
        limit_bytes: the memory that each rank may take.
        peers: further devices of the same kind.
    """
    count = request.spec.parallelism.world_size
    if count == 1 or (request.command is not None and not device.traits.is_gpu):
        return ()
    if not device.traits.is_gpu:
        can_run = count <= _MOST_CPU_RANKS and count * limit_bytes <= device.total_bytes
        return (device.id,) * count if can_run else ()
    return (device.id, *peers[: count - 1]) if len(peers) >= count - 1 else ()


def memory_limit(request: TuningRequest, device: DeviceInfo) -> int:
    """The memory a run may take, before the margin: as requested, else the whole card, or half of the host.

    Raises:
        SpecError: when the request is for more than the device has.
        DeviceError: when the context of a process alone takes the limit that is left by the margin.
    """
    if request.memory_limit_bytes is None:
        share = PARAMETERS.cpu_memory_share if device.traits.counts_host_memory else 1
        return int(device.total_bytes * share)
    if request.memory_limit_bytes > device.total_bytes:
        message = (
            f"is above the {format_bytes(device.total_bytes)} of {device.id} ({device.name}): lower the "
            "limit, or leave it out to use the whole device"
        )
        given = format_bytes(request.memory_limit_bytes)
        raise SpecError([FieldProblem("memory_limit_bytes", message, given)], "request")
    _check_room_for_context(request.memory_limit_bytes, request.memory_margin, device)
    return request.memory_limit_bytes


def _check_room_for_context(limit_bytes: int, margin: float, device: DeviceInfo) -> None:
    """Refuse a limit that no context fits into; a larger context is noticed by the first probe.

    Raises:
        DeviceError: with the limit, the context's bytes and the remedy.
    """
    context = device.least_context_bytes
    if context is None or int(limit_bytes * (1.0 - margin)) > context:
        return
    raise DeviceError(
        f"the memory limit of {format_bytes(limit_bytes)}, less the margin of {format_share(margin)}, leaves no memory "
        f"for tensors: the context of a process on {device.id} ({device.name}) takes at least "
        f"{format_bytes(context)}. Raise the limit, or leave it out to use the whole device"
    )
