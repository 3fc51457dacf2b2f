"""Limit the memory of this process, and read its peaks.

On the CPU the limit is `RLIMIT_DATA`, counted from the end of torch's import, as ``tuner.hardware.memory_devices.cpu``
counts from the start of a probe. On a card it is the allocator's fraction, set as soon as CUDA is initialised.
"""

from __future__ import annotations

import os
import resource
from typing import Any

from .torch_internals import when_cuda_starts

_LARGEST_CONTEXT = 2 * 1024**3
"""A larger difference between two readings of a card's memory is another process's (contexts take 0.25 to 0.6 GiB)."""


class CpuMemory:
    """The private memory of this process, with a budget.

    Args:
        limit_bytes: the budget; none for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._start = _status_bytes("VmData")

    def limit(self) -> None:
        """Set the limit. Allocations beyond it fail."""
        if self._limit_bytes is not None:
            _set_data_limit(self._start + self._limit_bytes)

    def lift(self) -> None:
        """Lift the limit, so that a process that reached it can report."""
        if self._limit_bytes is not None:
            _set_data_limit(resource.RLIM_INFINITY)

    def check_devices(self) -> None:
        """Do nothing: there is one device."""

    def synchronize(self) -> None:
        """Do nothing: the CPU has no queue."""

    def peaks(self) -> dict[str, int | None]:
        """Return the peak of private memory above that at the start, by the kernel's high-water mark."""
        others = _status_bytes("VmSize") - _status_bytes("VmData")
        return {
            "process_peak_bytes": max(0, _status_bytes("VmPeak") - others - self._start),
            "limit_bytes": self._limit_bytes,
        }


class CudaMemory:
    """The memory of this process's cards, limited through the caching allocator.

    Args:
        torch: the module.
        settings: the settings of the probe.
    """

    def __init__(self, torch: Any, settings: dict[str, Any]) -> None:
        self._torch = torch
        self._limit_bytes: int | None = settings["limit_bytes"]
        self._margin: float = settings["memory_margin"]
        self._used_before: list[int | None] = settings["used_bytes"]
        self._least_context: int = settings["least_context_bytes"] or 0
        self._limits: dict[int, int] = {}
        self._contexts: dict[int, int] = {}

    def limit(self) -> None:
        """Set the limit on this rank's card, as soon as CUDA is initialised."""
        when_cuda_starts(self._torch, self._limit_own_card)

    def _limit_own_card(self) -> None:
        local = os.environ.get("LOCAL_RANK", "")
        count = self._torch.cuda.device_count()
        self._limit_card(int(local) if local.isdigit() and int(local) < count else 0)

    def _limit_card(self, index: int) -> None:
        cuda = self._torch.cuda
        free, total = cuda.mem_get_info(index)
        reserved = int(cuda.memory_reserved(index))
        self._contexts[index] = context = self._context_bytes(index, total - free - reserved)
        if self._limit_bytes is None:
            return
        available = int((free + reserved) * (1.0 - self._margin))
        self._limits[index] = limit = max(0, min(self._limit_bytes - context, available, total))
        total_of_allocator = cuda.get_device_properties(index).total_memory
        cuda.set_per_process_memory_fraction(min(1.0, limit / total_of_allocator), index)

    def _context_bytes(self, index: int, outside: int) -> int:
        """Bytes of the context: used on the card outside the allocator, less what others used before the command."""
        before = self._used_before[index] if index < len(self._used_before) else None
        found = outside - before if before is not None else self._least_context
        return found if self._least_context <= found <= _LARGEST_CONTEXT else self._least_context

    def lift(self) -> None:
        """Do nothing: a report takes no memory of a card."""

    def check_devices(self) -> None:
        """Limit every card that this process has begun to use."""
        if not self._torch.cuda.is_initialized():
            return
        for index in range(self._torch.cuda.device_count()):
            if index not in self._contexts and self._torch.cuda.memory_reserved(index):
                self._limit_card(index)

    def synchronize(self) -> None:
        """Wait for the cards, so that an error of their queues is raised here and times are those of the work."""
        if self._torch.cuda.is_initialized():
            self._torch.cuda.synchronize()

    def peaks(self) -> dict[str, int | None]:
        """Return the allocator's peaks on the card with the most reserved memory."""
        cuda = self._torch.cuda
        if not cuda.is_initialized():
            return {}
        cards = range(cuda.device_count())
        index = max(cards, key=cuda.max_memory_reserved)
        stats = cuda.memory_stats(index)
        return {
            "allocated_bytes": int(cuda.max_memory_allocated(index)),
            "reserved_bytes": int(cuda.max_memory_reserved(index)),
            "allocator_retries": int(stats.get("num_alloc_retries", 0)),
            "context_bytes": self._contexts.get(index),
            "limit_bytes": self._limits.get(index),
            "card": index,
        }


def _status_bytes(field: str) -> int:
    """Read a ``kB`` field of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
        for line in stream:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _set_data_limit(total: int) -> None:
    """Set the soft limit, bounded by the hard one, so that this process may raise it again."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        total = hard if total == resource.RLIM_INFINITY else min(total, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (total, hard))
