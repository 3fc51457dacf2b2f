"""List the devices of this host, without importing torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pynvml

from batchwright.errors import DeviceError
from batchwright.hardware.gpu_lookup import allocatable_bytes_of, context_bytes_of
from batchwright.hardware.matching import has_hardware, is_alike, with_catalogue_name
from batchwright.schemas.requests import HardwareRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.system.processes import cgroup_files
from batchwright.units import format_bytes


def devices() -> tuple[DeviceInfo, ...]:
    """Return the GPUs that NVML lists, in torch's order, then the CPU. Does not fail without a GPU or NVML."""
    return (*_gpus(), cpu())


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


def _gpus() -> tuple[DeviceInfo, ...]:
    """Return the GPUs in torch's numbering: those of NVML, filtered by ``CUDA_VISIBLE_DEVICES``."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_device_info(handle, index) for index, handle in enumerate(visible_handles()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def device_failure(device: DeviceInfo) -> str | None:
    """Return NVML's error if a device that was listed before has stopped responding, else None."""
    if device.kind == "cpu":
        return None
    try:
        pynvml.nvmlInit()
        try:
            used_and_total_bytes(visible_handles()[int(device.id.partition(":")[2])])
        finally:
            pynvml.nvmlShutdown()
    except IndexError:
        return f"{device.id} is gone: NVML lists fewer devices"
    except pynvml.NVMLError as error:
        return f"{device.id} does not respond: {error}"
    return None


def visible_handles() -> list[object]:
    """Return the NVML handles of the GPUs that CUDA numbers 0, 1, ... in this environment. NVML must be initialised.

    CUDA sorts by speed unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` is set. Hosts with different GPUs should set it, as
    NVIDIA advises, so that both orders agree.
    """
    handles: list[object] = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return handles
    selected: list[object] = []
    for entry in (part.strip() for part in visible.split(",")):
        handle = _find_handle(entry, handles)
        if handle is None:
            break  # CUDA ignores everything from the first invalid entry on
        selected.append(handle)
    return selected


def _find_handle(entry: str, handles: list[object]) -> object | None:
    if entry.isdigit():
        return handles[int(entry)] if int(entry) < len(handles) else None
    matching = (handle for handle in handles if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(entry))
    return next(matching, None) if entry.startswith(("GPU-", "MIG-")) else None


def used_and_total_bytes(handle: object) -> tuple[int, int]:
    """Return the used and the total memory of a GPU. NVML must be initialised.

    Version 2 of NVML's record does not count the driver's own reserve (hundreds of MB) as used.
    """
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)  # a driver before R510
    return int(memory.used), int(memory.total)


def _device_info(handle: object, index: int) -> DeviceInfo:
    used, total = used_and_total_bytes(handle)
    name = str(pynvml.nvmlDeviceGetName(handle))
    context = context_bytes_of(name)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return DeviceInfo(
        id=f"cuda:{index}",
        kind="cuda",
        name=name,
        total_bytes=total,
        used_bytes=used,
        compute_capability=f"{major}.{minor}",
        driver_version=str(pynvml.nvmlSystemGetDriverVersion()),
        least_context_bytes=context.low,
        expected_context_bytes=context.expected,
        allocatable_bytes=allocatable_bytes_of(name, total),
    )
