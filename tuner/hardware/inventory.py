"""Which devices this host has, without importing torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pynvml

from tuner.errors import DeviceError
from tuner.schemas.results import DeviceInfo
from tuner.system.processes import cgroup_files


def devices() -> tuple[DeviceInfo, ...]:
    """The GPUs NVML can see, in torch's order of ids, then the CPU. Never fails for want of a GPU or of NVML."""
    return (*_gpus(), cpu())


def find_device(identifier: str | None) -> DeviceInfo:
    """The device with this id; the first GPU, else the CPU, when ``identifier`` is none.

    Raises:
        DeviceError: when there is no such device; the message lists those there are.
    """
    available = devices()
    if identifier is None:
        return available[0]
    found = next((device for device in available if device.id == identifier), None)
    if found is None:
        listed = ", ".join(f"{device.id} ({device.name})" for device in available)
        raise DeviceError(f"there is no device {identifier}; this host has {listed}")
    return found


def cpu() -> DeviceInfo:
    """The host's processor, with the memory of the host or of this container if that is less."""
    return DeviceInfo(id="cpu", kind="cpu", name=_processor_name(), total_bytes=_host_memory_bytes())


def _host_memory_bytes() -> int:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits()])


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
    """The GPUs as torch numbers them: NVML's, through ``CUDA_VISIBLE_DEVICES``."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(handle, index) for index, handle in enumerate(visible_handles()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def lost(device: DeviceInfo) -> str | None:
    """Say that a device which was there does not answer any more, in NVML's words; none for one that does."""
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
        return f"{device.id} does not answer: {error}"
    return None


def visible_handles() -> list[object]:
    """NVML handles of the GPUs that CUDA will number 0, 1, ... in this environment. NVML must be initialised.

    CUDA sorts by speed unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; hosts with unlike GPUs should set that, as NVIDIA
    advises, so that both number them alike.
    """
    handles: list[object] = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return handles
    chosen: list[object] = []
    for entry in (part.strip() for part in visible.split(",")):
        handle = _named_handle(entry, handles)
        if handle is None:
            break  # CUDA ignores everything from the first invalid entry on
        chosen.append(handle)
    return chosen


def _named_handle(entry: str, handles: list[object]) -> object | None:
    if entry.isdigit():
        return handles[int(entry)] if int(entry) < len(handles) else None
    matching = (handle for handle in handles if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(entry))
    return next(matching, None) if entry.startswith(("GPU-", "MIG-")) else None


def used_and_total_bytes(handle: object) -> tuple[int, int]:
    """What processes hold on a GPU, and its memory. NVML must be initialised.

    The second version of NVML's record leaves the driver's own reserve (hundreds of MB) out of what is used.
    """
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)  # a driver before R510
    return int(memory.used), int(memory.total)


def _gpu(handle: object, index: int) -> DeviceInfo:
    used, total = used_and_total_bytes(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return DeviceInfo(
        id=f"cuda:{index}",
        kind="cuda",
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=total,
        used_bytes=used,
        compute_capability=f"{major}.{minor}",
        driver_version=str(pynvml.nvmlSystemGetDriverVersion()),
    )
