"""List NVIDIA's cards and read their memory through NVML, the library of their driver. No torch.

No other module calls NVML. AMD's cards would have a module beside this one, with the same two functions over `amdsmi`;
``inventory``, ``memory_in_use`` and ``memory_devices.cuda`` call them.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pynvml

from batchwright.errors import DeviceError
from batchwright.hardware.gpu_lookup import allocatable_bytes_of, context_bytes_of
from batchwright.schemas.results import DeviceInfo


@dataclass(frozen=True)
class CardMemory:
    """Memory of a card at one moment."""

    used_bytes: int
    """Memory in use by all processes."""
    total_bytes: int
    by_process: Mapping[int, int | None] | None
    """Memory by id of process, None where the driver does not say how much; None if it lists no processes.

    The ids may be those of the host, which in a container match others only by chance.
    """


def list_cards() -> tuple[DeviceInfo, ...]:
    """Return the cards in torch's numbering: those of NVML, filtered by ``CUDA_VISIBLE_DEVICES``; () without NVML."""
    try:
        with _session():
            return tuple(_device_info(handle, index) for index, handle in enumerate(_visible_handles()))
    except pynvml.NVMLError:
        return ()


def read_memory(device_id: str) -> CardMemory:
    """Read the memory of a card.

    Args:
        device_id: such as ``cuda:0``, by torch's numbering.

    Raises:
        DeviceError: when the card is gone, or does not respond.
    """
    try:
        with _session():
            handle = _visible_handles()[int(device_id.partition(":")[2])]
            return CardMemory(*_used_and_total_bytes(handle), _bytes_by_process(handle))
    except IndexError:
        raise DeviceError(f"{device_id} is gone: NVML lists fewer devices") from None
    except pynvml.NVMLError as error:
        raise DeviceError(f"{device_id} does not respond: {error}") from None


@contextmanager
def _session() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _visible_handles() -> list[object]:
    """Return the handles of the cards that CUDA numbers 0, 1, ... in this environment.

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


def _used_and_total_bytes(handle: object) -> tuple[int, int]:
    """Return the used and the total memory of a card.

    Version 2 of NVML's record does not count the driver's own reserve (hundreds of MB) as used.
    """
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)  # a driver before R510
    return int(memory.used), int(memory.total)


def _bytes_by_process(handle: object) -> dict[int, int | None] | None:
    try:
        return {entry.pid: entry.usedGpuMemory for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except pynvml.NVMLError:
        return None


def _device_info(handle: object, index: int) -> DeviceInfo:
    used, total = _used_and_total_bytes(handle)
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
