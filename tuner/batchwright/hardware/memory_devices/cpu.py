"""The CPU as a memory device: a hard limit through RLIMIT_DATA, peaks from the kernel's accounting."""

import ctypes
import gc
import os
import resource
import sys
from functools import partial
from pathlib import Path

import torch

from batchwright.errors import DeviceError
from batchwright.hardware.memory_devices.base import MemoryDevice, Peaks

_FILLING_BLOCK, _MOST_FILLED = 2048, 64 * 1024**2
"""Bytes of each block that fills the heap, and of all at most; a fork server's heap has 2 to 4 MiB free."""

_ARENA, _RESERVED = 1024**2, 16 * 1024**2
_OBJECT_BYTES = 512
"""The largest object in an arena (``SMALL_REQUEST_THRESHOLD``)."""
_in_arenas: list[bytes] = []


class CpuDevice(MemoryDevice):
    """The CPU with a hard memory budget: under ``RLIMIT_DATA`` allocations really fail.

    The budget counts from the moment it is set. Set it before the model is built, so that it covers what a GPU's memory
    would hold. The largest size is repeatable within a sample or two only if the allocator settings of
    ``batchwright.device_traits`` are in the environment before the process starts: otherwise glibc keeps freed
    memory in ways that depend on history.

    The budget is per process and does not count shared memory. DataLoader workers are outside it.
    """

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        _start_thread_pools()
        self._mark_start()

    def _effective_limit(self, limit_bytes: int, margin: float) -> int:
        """Return the budget unchanged; memory that is in use already does not count."""
        del margin
        self.release()
        _reserve_arenas()
        _fill_heap()
        self._mark_start()
        return limit_bytes

    def _set_limit(self, limit_bytes: int) -> None:
        _set_data_limit(self._start_data + limit_bytes)

    def _mark_start(self) -> None:
        self._start_data = status_bytes("VmData")

    def _lift_limit(self) -> None:
        _set_data_limit(resource.RLIM_INFINITY)

    def total_bytes(self) -> int:
        """Total memory of the host."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def used_bytes(self) -> int:
        """Private memory above that at the start."""
        return max(0, status_bytes("VmData") - self._start_data)

    def peaks(self) -> Peaks:
        """Return the peak of private memory above that at the start, over the whole life of the process.

        The kernel keeps a high-water mark of all mappings (``VmPeak``). Mappings that are not private memory (code, the
        stack) hardly change while a workload runs, so their current size is subtracted. The result is the figure that
        ``RLIMIT_DATA`` bounds, and is affine in the micro-batch size to the page.
        """
        others = status_bytes("VmSize") - status_bytes("VmData")
        return Peaks(process_bytes=max(0, status_bytes("VmPeak") - others - self._start_data))

    def reset_peaks(self) -> None:
        """Do nothing: the kernel's mark cannot be lowered, and all earlier updates had to fit as well."""

    def synchronize(self) -> None:
        """Return at once: the CPU has no queue."""

    def release(self) -> None:
        """Collect cycles, then have malloc return free pages to the system."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def other_processes_bytes(self) -> int | None:
        """Return None: the budget is this process's own."""
        return None

    def context_bytes(self) -> int | None:
        """Return None: the CPU has no context."""
        return None


def status_bytes(field: str) -> int:
    """Read a ``kB`` field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise DeviceError(f"/proc/self/status has no {field}: a memory budget on the CPU needs Linux")


def _set_data_limit(total: int) -> None:
    """Set the soft limit, bounded by the hard one, so that this process may raise it again."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        total = hard if total == resource.RLIM_INFINITY else min(total, hard)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (total, hard))
    except (OSError, ValueError) as error:
        raise DeviceError(f"RLIMIT_DATA cannot be set to {total} bytes: {error}") from error


def _start_thread_pools() -> None:
    """Start the threads of OpenMP, oneDNN and autograd now: under a tight budget their stacks would not fit.

    Draws no random numbers, and does not depend on the modes and defaults of the caller.
    """
    ones = partial(torch.ones, device="cpu", dtype=torch.float32)
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        inputs = ones(4, 8, 32, 32, requires_grad=True)
        weights = ones(8, 8, 3, 3, requires_grad=True)
        output = torch.nn.functional.conv2d(inputs, weights, padding=1).flatten(1)
        torch.autograd.backward((output @ ones(output.shape[1], 256)).relu().sum())


def _fill_heap() -> None:
    """Fill the free memory of the C library's heap until it grows, so that every process has the same to start with.

    The heap grows in steps of 2 MiB (``glibc.malloc.hugetlb=1``). What is left of the last step differs between
    processes, because addresses are random: of 32 MiB the largest size of one model was between 125 and 159, and is
    between 156 and 160 with a full heap. The blocks are kept, as long as the process.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.sbrk.restype = [ctypes.c_size_t], ctypes.c_void_p
    end = libc.sbrk(0)
    for _ in range(_MOST_FILLED // _FILLING_BLOCK):
        libc.malloc(_FILLING_BLOCK)
        if libc.sbrk(0) != end:
            return


def _reserve_arenas() -> None:
    """Have Python's own allocator hold free memory, so that its objects take none of the limit.

    It takes arenas of 1 MiB (``ARENA_BITS``, ``Objects/obmalloc.c``), and how full the last one was is random: probes
    of one size took 1 MiB more in one process of two. An arena stays while one of its objects does.
    """
    global _in_arenas  # noqa: PLW0603 - kept as long as the process
    size = _OBJECT_BYTES - sys.getsizeof(b"")
    objects = [bytes(size) for _ in range(_RESERVED // _OBJECT_BYTES)]
    _in_arenas = objects[:: _ARENA // _OBJECT_BYTES // 2]
