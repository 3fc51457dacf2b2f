"""CUDA devices: limits through the caching allocator, peaks from its statistics."""

import gc

import torch

from batchwright.errors import DeviceError
from batchwright.hardware.memory_devices.base import MemoryDevice, Peaks
from batchwright.hardware.nvml import read_memory
from batchwright.torch_internals import clear_blas_workspaces
from batchwright.units import format_bytes

_LEAST_BYTES = 2 * 1024**2
"""The smallest segment of torch's caching allocator (`kSmallBuffer`, `c10/core/AllocatorConfig.h`): under a limit below
it no tensor can be allocated."""
_MATRIX_SIZE = 64
"""Rows and columns of the matrices that load kernels: any size does."""


class CudaDevice(MemoryDevice):
    """A CUDA device. The limit is set through the caching allocator, so that a large GPU can simulate a small one.

    The limit covers all memory of the process. The allocator may therefore reserve the limit less the context (0.25 to
    0.8 GiB, ``context_bytes``), which is outside the allocator.
    """

    def __init__(self, torch_device: torch.device) -> None:
        if not torch.cuda.is_available() or (torch_device.index or 0) >= torch.cuda.device_count():
            raise DeviceError(f"torch {torch.__version__} sees no {torch_device} (CUDA built in: {torch.version.cuda})")
        super().__init__(torch_device)
        self._other_processes_bytes = _used_bytes_of_card(torch_device)
        torch.cuda.set_device(torch_device)
        _load_kernels(torch_device)  # creates the context, so that its size is known
        self._context_bytes = self._bytes_outside_allocator()
        self._retries_at_reset = 0

    def _bytes_outside_allocator(self) -> int | None:
        now = _used_bytes_of_card(self.torch_device)
        if self._other_processes_bytes is None or now is None:
            return None
        return max(0, now - self._other_processes_bytes - int(torch.cuda.memory_reserved(self.torch_device)))

    def _effective_limit(self, limit_bytes: int, margin: float) -> int:
        """Bytes that the allocator may reserve: the limit less the context, at most the free memory of the GPU."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        available = int((free + torch.cuda.memory_reserved(self.torch_device)) * (1.0 - margin))
        within = limit_less_context(limit_bytes, self._context_bytes or 0, str(self.torch_device))
        if available < _LEAST_BYTES:
            raise DeviceError(
                f"{self.torch_device} has {format_bytes(available)} of free memory, too little for any tensor: other "
                f"processes hold {format_bytes(self._other_processes_bytes or 0)} of its "
                f"{format_bytes(self.total_bytes())}. End them, or choose another device"
            )
        return min(within, available, self.total_bytes())

    def _set_limit(self, limit_bytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / self.total_bytes(), self.torch_device)

    def _lift_limit(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)

    def total_bytes(self) -> int:
        """Total memory of the GPU, as torch's allocator counts it for its memory fraction."""
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def used_bytes(self) -> int:
        """Bytes in tensors."""
        return int(torch.cuda.memory_allocated(self.torch_device))

    def peaks(self) -> Peaks:
        """Return the allocator's own counters."""
        stats = torch.cuda.memory_stats(self.torch_device)
        return Peaks(
            allocated_bytes=int(torch.cuda.max_memory_allocated(self.torch_device)),
            reserved_bytes=int(torch.cuda.max_memory_reserved(self.torch_device)),
            allocator_retries=int(stats.get("num_alloc_retries", 0)) - self._retries_at_reset,
        )

    def reset_peaks(self) -> None:
        """Reset the peaks to the current use, and the count of retries to 0."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._retries_at_reset = int(torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries", 0))

    def synchronize(self) -> None:
        """Wait for every stream."""
        torch.cuda.synchronize(self.torch_device)

    def release(self) -> None:
        """Collect what a failed step has left, then return cached blocks to the driver.

        Autograd's thread of the device drops the graph of a failed backward pass only after the error was raised. It
        has done so when it has run another backward pass; one of empty tensors allocates nothing.
        """
        with torch.inference_mode(mode=False), torch.enable_grad():
            empty = torch.empty(0, device=self.torch_device, requires_grad=True)
            torch.autograd.backward(empty.clone(), empty.detach())
        gc.collect()
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def other_processes_bytes(self) -> int | None:
        """Memory in use, by NVML, before this process created its context."""
        return self._other_processes_bytes

    def context_bytes(self) -> int | None:
        """Memory that the context takes."""
        return self._context_bytes


def _load_kernels(torch_device: torch.device) -> None:
    """Create the context with what every training step adds to it; nothing stays in the allocator.

    CUDA loads kernels when they are first used, and each thread has a cuBLAS handle, that of the backward pass too. On
    an H100 with torch 2.11 and CUDA 13 a bare context takes 527 MiB, torch's kernels 92 MiB more, a handle 66 MiB and
    that of the backward pass 64 MiB; cuDNN adds 16 MiB, and attention, sorting and optimizers nothing
    (``benchmarks/gpu_evidence.py``).
    """
    weight = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, device=torch_device, requires_grad=True)
    torch.autograd.backward((weight @ weight).sum())
    del weight
    torch.cuda.synchronize(torch_device)
    clear_blas_workspaces()
    torch.cuda.empty_cache()


def limit_less_context(limit_bytes: int, context_bytes: int, device: str) -> int:
    """Return the bytes of a memory limit that are left for torch's allocator.

    Raises:
        DeviceError: when the context takes the whole limit, or leaves less than the allocator's smallest segment.
    """
    left = limit_bytes - context_bytes
    if left < _LEAST_BYTES:
        raise DeviceError(
            f"the memory limit of {format_bytes(limit_bytes)} (after the margin) leaves no memory for "
            f"tensors: the context of a process on {device} takes {format_bytes(context_bytes)} of it. Raise "
            "the limit, or leave it out to use the whole device"
        )
    return left


def _used_bytes_of_card(device: torch.device) -> int | None:
    """Return the memory in use by all processes; None if it cannot be read."""
    try:
        return read_memory(f"{device.type}:{device.index or 0}").used_bytes
    except DeviceError:
        return None
