"""The devices a probe can run on: what they hold, what they may hold, and what their errors mean.

A ``MemoryDevice`` belongs to one process. Setting a limit is for good: the process is meant to end after its probe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tuner.errors import BatchwrightError, DeviceError, InvalidSizeError, OutOfMemoryError
from tuner.hardware.failures import FailureKind, classify_exception

_NEARLY_FULL = 0.8
"""A failure whose message only hints at memory counts as one when this share of the limit was in use."""


def translate_certain(error: Exception) -> BatchwrightError | None:
    """``error`` as an ``OutOfMemoryError`` or ``InvalidSizeError`` where its own words say so, else none."""
    message = " ".join(str(error).split()) or type(error).__name__
    match classify_exception(error):
        case FailureKind.OUT_OF_MEMORY:
            return OutOfMemoryError(message)
        case FailureKind.INVALID_SIZE:
            return InvalidSizeError(message)
        case _:
            return None


@dataclass(frozen=True)
class Peaks:
    """What a device held at most since ``reset_peaks``. Bytes; none for what the device does not count."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    allocator_retries: int | None = None


class MemoryDevice(ABC):
    """One device as this process sees it."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.limit_bytes: int | None = None

    def limit(self, limit_bytes: int, margin: float = 0.0) -> None:
        """Let this process take at most ``limit_bytes`` on the device from now on; ``limit_bytes`` then tells how much.

        It may be less: a card's context and other processes take their part. ``margin`` is the share of what is really
        free that must stay so (it is already taken off ``limit_bytes``).

        Raises:
            DeviceError: when the limit cannot be set.
        """
        if self.limit_bytes is not None:
            raise DeviceError("a limit was already set in this process")
        effective = self._effective_limit(limit_bytes, margin)
        self._set_limit(effective)
        self.limit_bytes = effective

    def lift_limit(self) -> None:
        """Take the limit back, so that a process that ran into it can still say so."""
        if self.limit_bytes is not None:
            self._lift_limit()
            self.limit_bytes = None

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """A stretch that may take more than the run: reading or writing a checkpoint."""
        limit_bytes = self.limit_bytes
        if limit_bytes is None:
            yield
            return
        self._lift_limit()
        try:
            yield
        finally:
            self.release()  # what the stretch left behind would count against the limit
            self._set_limit(limit_bytes)

    def translate(self, error: Exception) -> BatchwrightError | None:
        """``error`` as an ``OutOfMemoryError`` or ``InvalidSizeError``, or none when it is neither.

        Call it after the ``except`` block has ended: the traceback of an error keeps its tensors alive.
        """
        message = " ".join(str(error).split()) or type(error).__name__
        if classify_exception(error) is FailureKind.SUSPECTED_OUT_OF_MEMORY and self._nearly_full():
            return OutOfMemoryError(f"{message} (with {_NEARLY_FULL:.0%} or more of the limit in use)")
        return translate_certain(error)

    def _nearly_full(self) -> bool:
        capacity = self.limit_bytes or self.total_bytes()
        return self.peak_bytes() >= _NEARLY_FULL * capacity

    def peak_bytes(self) -> int:
        """The most this process held since ``reset_peaks``: reserved on CUDA, private memory on the CPU."""
        peaks = self.peaks()
        return peaks.reserved_bytes if peaks.reserved_bytes is not None else peaks.process_bytes or 0

    @abstractmethod
    def _effective_limit(self, limit_bytes: int, margin: float) -> int: ...

    @abstractmethod
    def _set_limit(self, limit_bytes: int) -> None: ...

    @abstractmethod
    def _lift_limit(self) -> None: ...

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory of the device."""

    @abstractmethod
    def used_bytes(self) -> int:
        """What this process holds now: in tensors on CUDA, private memory on the CPU."""

    @abstractmethod
    def peaks(self) -> Peaks:
        """What was held at most since ``reset_peaks``."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """Start counting peaks anew."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""

    @abstractmethod
    def release(self) -> None:
        """Give back what no tensor holds, to the device or the operating system."""

    @abstractmethod
    def other_processes_bytes(self) -> int | None:
        """What other processes hold on the device; none where it cannot be told."""

    @abstractmethod
    def context_bytes(self) -> int | None:
        """What this process holds on the device outside the allocator; none where it cannot be told."""
