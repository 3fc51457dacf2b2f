"""The devices a probe can run on: what they hold, what they may hold, and what their errors mean.

A ``MemoryDevice`` belongs to one process. Setting a limit is for good: the process is meant to end after its probe.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pynvml
import torch

from tuner.errors import BatchwrightError, DeviceError, InvalidSizeError, OutOfMemoryError
from tuner.hardware.failures import FailureKind, classify_exception
from tuner.hardware.inventory import used_and_total_bytes, visible_handles

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


class CudaDevice(MemoryDevice):
    """A CUDA device. A limit is set through the caching allocator, so that one big card can stand for a small one.

    The limit is for all that the process takes: what the allocator may reserve is the limit less the context (0.25 to
    0.45 GiB, ``context_bytes``), which lies outside it.
    """

    def __init__(self, torch_device: torch.device) -> None:
        if not torch.cuda.is_available() or (torch_device.index or 0) >= torch.cuda.device_count():
            raise DeviceError(f"torch {torch.__version__} sees no {torch_device} (CUDA built in: {torch.version.cuda})")
        super().__init__(torch_device)
        self._others_at_start = _nvml_used_bytes(torch_device.index or 0)
        torch.cuda.set_device(torch_device)
        torch.empty(1, device=torch_device)  # creates the context, so that what it takes is known
        torch.cuda.synchronize(torch_device)
        self._context = self._taken_outside_the_allocator()
        self._retries_at_reset = 0

    def _taken_outside_the_allocator(self) -> int | None:
        now = _nvml_used_bytes(self.torch_device.index or 0)
        if self._others_at_start is None or now is None:
            return None
        return max(0, now - self._others_at_start - int(torch.cuda.memory_reserved(self.torch_device)))

    def _effective_limit(self, limit_bytes: int, margin: float) -> int:
        """What the allocator may reserve: the limit less the context, and no more than is free on the card."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        available = int((free + torch.cuda.memory_reserved(self.torch_device)) * (1.0 - margin))
        return max(1, min(limit_bytes - (self._context or 0), available, self.total_bytes()))

    def _set_limit(self, limit_bytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / self.total_bytes(), self.torch_device)

    def _lift_limit(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)

    def total_bytes(self) -> int:
        """Memory of the card, as torch's allocator counts it for its memory fraction."""
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def used_bytes(self) -> int:
        """Bytes in tensors."""
        return int(torch.cuda.memory_allocated(self.torch_device))

    def peaks(self) -> Peaks:
        """The allocator's own counters."""
        stats = torch.cuda.memory_stats(self.torch_device)
        return Peaks(
            allocated_bytes=int(torch.cuda.max_memory_allocated(self.torch_device)),
            reserved_bytes=int(torch.cuda.max_memory_reserved(self.torch_device)),
            allocator_retries=int(stats.get("num_alloc_retries", 0)) - self._retries_at_reset,
        )

    def reset_peaks(self) -> None:
        """Peaks fall to what is held now; retries are counted from here."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._retries_at_reset = int(torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries", 0))

    def synchronize(self) -> None:
        """Wait for every stream."""
        torch.cuda.synchronize(self.torch_device)

    def release(self) -> None:
        """Collect cycles, then give cached blocks back to the driver."""
        gc.collect()
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def other_processes_bytes(self) -> int | None:
        """What NVML counted on the card before this process made its context."""
        return self._others_at_start

    def context_bytes(self) -> int | None:
        """What making the context took."""
        return self._context


def _nvml_used_bytes(index: int) -> int | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return used_and_total_bytes(visible_handles()[index])[0]
    except (pynvml.NVMLError, IndexError):
        return None
    finally:
        pynvml.nvmlShutdown()


class CpuDevice(MemoryDevice):
    """The CPU with a hard budget: ``RLIMIT_DATA`` makes real allocations really fail.

    The budget counts from the moment it is set, so set it before the model is built: it then holds what a card's
    memory would hold. Sizes repeat within a sample or two only with the allocator settings of
    ``tuner.hardware.allocator_env`` in the environment before the process starts, because glibc otherwise keeps freed
    memory in ways that depend on history.

    The budget is per process and does not count shared memory: DataLoader workers are outside it.
    """

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        _start_thread_pools()
        self._mark_start()

    def _effective_limit(self, limit_bytes: int, margin: float) -> int:
        """The budget as it is, from here on: what was taken before does not count."""
        del margin
        self.release()
        self._mark_start()
        return limit_bytes

    def _set_limit(self, limit_bytes: int) -> None:
        _set_data_limit(self._start_data + limit_bytes)

    def _mark_start(self) -> None:
        self._start_data = _status_bytes("VmData")

    def _lift_limit(self) -> None:
        _set_data_limit(resource.RLIM_INFINITY)

    def total_bytes(self) -> int:
        """Memory of the host."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def used_bytes(self) -> int:
        """Bytes of private memory above those at the start."""
        return max(0, _status_bytes("VmData") - self._start_data)

    def peaks(self) -> Peaks:
        """The most private memory above that at the start, of the whole life of the process.

        The kernel keeps a high-water mark of all mappings (``VmPeak``); those that are no private memory (code, the
        stack) hardly change while a workload runs, so what is above them now was above them at the peak. This is the
        very figure ``RLIMIT_DATA`` bounds, which makes it affine in the micro-batch to the page.
        """
        others = _status_bytes("VmSize") - _status_bytes("VmData")
        return Peaks(process_bytes=max(0, _status_bytes("VmPeak") - others - self._start_data))

    def reset_peaks(self) -> None:
        """The kernel's mark cannot be lowered; whatever came before the measured update had to fit as well."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def release(self) -> None:
        """Collect cycles, then have malloc give free pages back."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def other_processes_bytes(self) -> int | None:
        """Not told: the budget is this process's own."""
        return None

    def context_bytes(self) -> int | None:
        """Nothing lies outside."""
        return None


def _status_bytes(field: str) -> int:
    """A ``kB`` field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise DeviceError(f"/proc/self/status has no {field}: a memory budget on the CPU needs Linux")


def _set_data_limit(total: int) -> None:
    """Set the soft limit, which this process may raise again, as far as the hard one allows."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        total = hard if total == resource.RLIM_INFINITY else min(total, hard)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (total, hard))
    except (OSError, ValueError) as error:
        raise DeviceError(f"RLIMIT_DATA cannot be set to {total} bytes: {error}") from error


def _start_thread_pools() -> None:
    """Make the threads of OpenMP, oneDNN and autograd now: under a tight budget their stacks would not fit."""
    inputs = torch.randn(4, 8, 32, 32, requires_grad=True)
    weights = torch.randn(8, 8, 3, 3, requires_grad=True)
    output = torch.nn.functional.conv2d(inputs, weights, padding=1).flatten(1)
    torch.autograd.backward((output @ torch.randn(output.shape[1], 256)).relu().sum())


def open_device(identifier: str) -> MemoryDevice:
    """The device with this id, for this process.

    Raises:
        DeviceError: when torch cannot see it.
    """
    torch_device = torch.device(identifier)
    return CudaDevice(torch_device) if torch_device.type == "cuda" else CpuDevice(torch_device)
