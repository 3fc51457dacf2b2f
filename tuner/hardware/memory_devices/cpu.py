"""The CPU as a memory device: a hard budget through RLIMIT_DATA, peaks from the kernel's accounting."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from pathlib import Path

import torch

from tuner.errors import DeviceError
from tuner.hardware.memory_devices.base import MemoryDevice, Peaks


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
