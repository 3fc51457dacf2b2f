"""Open the memory device of an identifier such as cuda:0 or cpu."""

import torch

from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.hardware.memory_devices.cpu import CpuDevice
from batchwright.hardware.memory_devices.cuda import CudaDevice

_DEVICES: dict[str, type[MemoryDevice]] = {"cpu": CpuDevice, "cuda": CudaDevice}


def open_device(identifier: str) -> MemoryDevice:
    """Open the device with this id in this process.

    Raises:
        DeviceError: when torch does not see the device.
    """
    torch_device = torch.device(identifier)
    return _DEVICES[torch_device.type](torch_device)
