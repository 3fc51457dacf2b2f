"""Open the memory device of an identifier such as cuda:0 or cpu."""

from __future__ import annotations

import torch

from tuner.hardware.memory_devices.base import MemoryDevice
from tuner.hardware.memory_devices.cpu import CpuDevice
from tuner.hardware.memory_devices.cuda import CudaDevice


def open_device(identifier: str) -> MemoryDevice:
    """The device with this id, for this process.

    Raises:
        DeviceError: when torch cannot see it.
    """
    torch_device = torch.device(identifier)
    return CudaDevice(torch_device) if torch_device.type == "cuda" else CpuDevice(torch_device)
