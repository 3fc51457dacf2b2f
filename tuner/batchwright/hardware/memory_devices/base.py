"""The interface of devices that a probe can run on: memory in use, memory limits, and translation of errors.

A ``MemoryDevice`` belongs to one process, which is meant to end after its probe.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from batchwright.device_traits import traits_of
from batchwright.errors import BatchwrightError, DeviceError, InvalidSizeError, OutOfMemoryError
from batchwright.hardware.failures import FailureKind, classify_exception
from batchwright.schemas.results import NEARLY_FULL


def translate_by_message(error: Exception) -> BatchwrightError | None:
    """Translate to an OutOfMemoryError, InvalidSizeError or DeviceError if the message alone is evidence, else None."""
    message = " ".join(str(error).split()) or type(error).__name__
    match classify_exception(error):
        case FailureKind.OUT_OF_MEMORY:
            return OutOfMemoryError(message)
        case FailureKind.INVALID_SIZE:
            return InvalidSizeError(message)
        case FailureKind.DEVICE_FAILURE:
            return DeviceError(f"the device failed: {message}")
        case _:
            return None


@dataclass(frozen=True)
class Peaks:
    """Peak memory of a device since ``reset_peaks``, in bytes; None for figures that the device does not count."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    allocator_retries: int | None = None


class MemoryDevice(ABC):
    """One device, from the view of this process."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.traits = traits_of(torch_device.type)
        self.limit_bytes: int | None = None

    def limit(self, limit_bytes: int, margin: float = 0.0) -> None:
        """Limit the memory of this process on the device. The attribute ``limit_bytes`` is then the effective limit.

        Args:
            limit_bytes: the limit. The effective limit may be lower: a GPU's context and other processes take memory.
            margin: the share of the free memory that must stay free (already deducted from ``limit_bytes``).

        Raises:
            DeviceError: when the limit cannot be set, or was set before.
        """
        if self.limit_bytes is not None:
            raise DeviceError("a limit was already set in this process")
        effective = self._effective_limit(limit_bytes, margin)
        self._set_limit(effective)
        self.limit_bytes = effective

    def lift_limit(self) -> None:
        """Remove the limit, so that a process that reached it can still report its result."""
        if self.limit_bytes is not None:
            self._lift_limit()
            self.limit_bytes = None

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Suspend the limit during the block, such as reading or writing a checkpoint."""
        limit_bytes = self.limit_bytes
        if limit_bytes is None:
            yield
            return
        self._lift_limit()
        try:
            yield
        finally:
            self.release()  # memory left over from the block would count against the limit
            self._set_limit(limit_bytes)

    def translate(self, error: Exception) -> BatchwrightError | None:
        """Translate ``error`` to ``OutOfMemoryError``, ``InvalidSizeError`` or ``DeviceError``; None when it is none.

        Call it after the ``except`` block has ended: the traceback of an error keeps its tensors alive.
        """
        message = " ".join(str(error).split()) or type(error).__name__
        if classify_exception(error) is FailureKind.SUSPECTED_OUT_OF_MEMORY:
            capacity = self.limit_bytes or self.total_bytes()
            if self.peak_bytes() >= NEARLY_FULL * capacity:
                return OutOfMemoryError(f"{message} (with {NEARLY_FULL:.0%} or more of the limit in use)")
        return translate_by_message(error)

    def peak_bytes(self) -> int:
        """Peak memory of this process since ``reset_peaks``: reserved on CUDA, private on the CPU."""
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
        """Total memory of the device."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Memory that this process uses now: in tensors on CUDA, private on the CPU."""

    @abstractmethod
    def peaks(self) -> Peaks:
        """Return the peaks since ``reset_peaks``."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """Reset the peaks to the current use."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""

    @abstractmethod
    def release(self) -> None:
        """Return unused cached memory to the device or the operating system."""

    @abstractmethod
    def other_processes_bytes(self) -> int | None:
        """Memory that other processes use on the device; None if unknown."""

    @abstractmethod
    def context_bytes(self) -> int | None:
        """Memory that this process uses on the device outside the allocator; None if unknown."""
