"""List the devices of this host, without importing torch."""

import os
import platform
from pathlib import Path

from batchwright.errors import DeviceError
from batchwright.hardware.matching import has_hardware, is_alike, with_catalogue_name
from batchwright.hardware.nvml import list_cards, read_memory
from batchwright.schemas.requests import HardwareRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.system.processes import cgroup_files
from batchwright.units import format_bytes


def devices() -> tuple[DeviceInfo, ...]:
    """Return the GPUs that NVML lists, in torch's order, then the CPU. Does not fail without a GPU or NVML."""
    return (*list_cards(), cpu())


def find_device(identifier: str | None) -> DeviceInfo:
    """Find the device with this id; the first GPU, else the CPU, when ``identifier`` is None.

    Raises:
        DeviceError: when there is no such device; the message lists the available ones.
    """
    available = devices()
    if identifier is None:
        return available[0]
    found = next((device for device in available if device.id == identifier), None)
    if found is None:
        listed = ", ".join(f"{device.id} ({device.name})" for device in available)
        raise DeviceError(f"there is no device {identifier}; this host has {listed}")
    return found


def device_of(request: TuningRequest) -> DeviceInfo:
    """Find the device of this host for a request, which names a device, hardware or neither.

    Raises:
        DeviceError: as ``find_hardware`` and ``find_device``.
        SpecError: as ``with_catalogue_name``.
    """
    return find_device(request.device) if request.hardware is None else find_hardware(request.hardware)


def find_hardware(hardware: HardwareRequest) -> DeviceInfo:
    """Find the first device of this host that is what a request names, with as many like it as the request needs.

    Raises:
        DeviceError: when this host has none; the message lists its devices.
        SpecError: as ``with_catalogue_name``.
    """
    wanted = with_catalogue_name(hardware)
    available = devices()
    for device in available:
        count = sum(is_alike(device, other) for other in available)
        if has_hardware(device, wanted) and count >= wanted.devices_per_node:
            return device
    listed = ", ".join(f"{device.id} ({device.name}, {format_bytes(device.total_bytes)})" for device in available)
    raise DeviceError(f"this host does not have {wanted.in_words}; it has {listed}")


def cpu() -> DeviceInfo:
    """Return the host's processor, with the memory of the host, or of this container if that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceInfo(id="cpu", kind="cpu", name=_processor_name(), total_bytes=min([physical, *_cgroup_limits()]))


def _cgroup_limits() -> list[int]:
    limits = []
    for path in cgroup_files("memory.max", "memory.limit_in_bytes"):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) > 0:
            limits.append(int(text))
    return limits


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def device_failure(device: DeviceInfo) -> str | None:
    """Return the driver's error if a device that was listed before has stopped responding, else None."""
    if not device.traits.is_gpu:
        return None
    try:
        read_memory(device.id)
    except DeviceError as error:
        return str(error)
    return None
