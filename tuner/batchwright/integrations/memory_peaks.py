"""Peaks of memory in a training process, against the memory limit of a recommendation."""

import os
import shlex
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from batchwright.device_traits import CPU_ALLOCATOR, CPU_THREADS, traits_of
from batchwright.hardware.memory_devices.cpu import status_bytes
from batchwright.schemas.recommendation import Recommendation
from batchwright.units import format_bytes


class PeakMeter:
    """Measures the peak memory of this process on its device, and warns once when the peak is above the limit.

    On CUDA the peak is what torch's allocator has reserved since the process began, with the context that the probes
    measured. On the CPU the peak is the resident memory of the process since the meter was made, less what was resident
    then, and with the model: interpreter, libraries and data that were loaded before are not counted, as in a probe.
    It warns where the process lacks variables of the allocator that the probes ran with.

    Args:
        recommendation: a feasible recommendation, whose limit (before the margin) is the one to keep.
        model: the model, built and on its device.
        device: the device of the model.
    """

    def __init__(self, recommendation: Recommendation, model: nn.Module, device: torch.device) -> None:
        self.limit_bytes = recommendation.headroom.limit_bytes if recommendation.headroom else None
        self._device = device
        self._on_gpu = traits_of(device.type).is_gpu
        self._context_bytes = (recommendation.headroom.context_bytes or 0) if recommendation.headroom else 0
        self._warned = False
        _warn_of_other_allocator(recommendation)
        if not self._on_gpu:
            with suppress(OSError):  # has the kernel forget the peak so far (proc_pid_clear_refs(5)), if allowed
                Path("/proc/self/clear_refs").write_text("5")
            tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}  # tied ones once
            self._bytes_before_model = status_bytes("VmRSS") - sum(tensor.nbytes for tensor in tensors.values())

    def peak_bytes(self) -> int:
        """Peak memory that counts against the limit, in bytes."""
        if self._on_gpu:
            return int(torch.cuda.max_memory_reserved(self._device)) + self._context_bytes
        return max(0, status_bytes("VmHWM") - self._bytes_before_model)

    def figures(self) -> dict[str, float]:
        """Return the peaks and the limit, in bytes, under the names that they are logged with.

        `memory/peak_reserved_bytes`, `memory/peak_allocated_bytes` and `memory/context_bytes` (as the probes measured
        it) on CUDA, `memory/peak_resident_bytes` on the CPU; `memory/limit_bytes`, and `memory/peak_fraction`: what is
        reserved and the context, or what is resident, as a share of that limit.
        """
        peak = self.peak_bytes()
        if self._on_gpu:
            figures: dict[str, float] = {
                "memory/peak_reserved_bytes": peak - self._context_bytes,
                "memory/peak_allocated_bytes": int(torch.cuda.max_memory_allocated(self._device)),
                "memory/context_bytes": self._context_bytes,
            }
        else:
            figures = {"memory/peak_resident_bytes": peak}
        if self.limit_bytes is not None:
            figures |= {"memory/limit_bytes": self.limit_bytes, "memory/peak_fraction": peak / self.limit_bytes}
        return figures

    def warn_above_limit(self) -> None:
        """Warn if the peak is above the limit; only once in the life of the meter."""
        peak = self.peak_bytes()
        if self._warned or self.limit_bytes is None or peak <= self.limit_bytes:
            return
        self._warned = True
        warnings.warn(
            f"peak memory of {format_bytes(peak)} on {self._device} is above the limit of "
            f"{format_bytes(self.limit_bytes)} that the micro-batch was found for: this run differs from what was "
            "probed (longer samples, another model, or memory of other code). Tune again with the run's worst case.",
            stacklevel=2,
        )


def _warn_of_other_allocator(recommendation: Recommendation) -> None:
    """Warn of variables that differ from those of the probes. glibc reads its own only when a process starts."""
    started = dict(
        part.partition("=")[::2] for part in Path("/proc/self/environ").read_text(errors="surrogateescape").split("\0")
    )
    present = {**os.environ, **{name: started.get(name) for name in CPU_ALLOCATOR}}
    missing = {
        name: value
        for name, value in recommendation.environment.items()
        if name not in CPU_THREADS and present.get(name) != value
    }
    if missing:
        settings = shlex.join(f"{name}={value}" for name, value in missing.items())
        warnings.warn(
            "this process was started without the environment variables of the probes, so it may take more "
            f"memory than was measured. Start it with: env {settings} python ...",
            stacklevel=3,
        )
