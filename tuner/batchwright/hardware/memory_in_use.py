"""Read how much of a device's memory is in use now, and how much of that by this process and its descendants."""

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchwright.errors import DeviceError
from batchwright.hardware.nvml import CardMemory, read_memory
from batchwright.schemas.results import DeviceInfo
from batchwright.system.processes import cgroup_files

_PROC = Path("/proc")
_KIB = 1024
_HOSTS_PID_NAMESPACE = "pid:[4026531836]"
"""The initial namespace of process ids: `PROC_PID_INIT_INO` of Linux's `include/linux/proc_ns.h`."""


@dataclass(frozen=True)
class MemoryInUse:
    """Memory of a device at one moment."""

    used_bytes: int
    """Memory in use by all processes; of the CPU, what the host or its container could not hand out."""
    own_bytes: int | None
    """The part of this process and its descendants; None where it cannot be told."""


def memory_in_use(device: DeviceInfo) -> MemoryInUse | None:
    """Return the memory in use on a device of this host; None when it cannot be read."""
    return _card_memory(device) if device.traits.is_gpu else _host_memory(device.total_bytes)


def _card_memory(device: DeviceInfo) -> MemoryInUse | None:
    try:
        card = read_memory(device.id)
    except DeviceError:
        return None
    return MemoryInUse(card.used_bytes, None if card.by_process is None else _own_card_bytes(card, card.by_process))


def _own_card_bytes(card: CardMemory, listed: Mapping[int, int | None]) -> int | None:
    """Return what this process and its descendants hold of a card.

    NVML may name processes by the ids of the host. In a container these match ours only by chance, so that a sum of
    nothing is taken as known only outside of one.
    """
    own = [listed[pid] for pid in descendants() if pid in listed]
    known = [held for held in own if held is not None]
    if len(known) < len(own) or (not own and not _has_ids_of_host()):
        return None
    return min(sum(known), card.used_bytes)


def _has_ids_of_host() -> bool:
    try:
        return str((_PROC / "self/ns/pid").readlink()) == _HOSTS_PID_NAMESPACE
    except OSError:
        return False


def _host_memory(total_bytes: int) -> MemoryInUse | None:
    used = _container_used_bytes(total_bytes)
    if used is None:
        try:
            available = _figures(_PROC / "meminfo")["MemAvailable"] * _KIB
        except (OSError, KeyError):
            return None
        used = max(0, total_bytes - available)
    return MemoryInUse(used, min(sum(map(_resident_bytes, descendants())), used))


def _container_used_bytes(total_bytes: int) -> int | None:
    """Return the memory in use of the cgroup whose limit is the device's memory, without its cache; None if none is."""
    names = (("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes"))
    limits, used = (cgroup_files(*pair) for pair in names)
    for limit, current in zip(limits, used, strict=True):
        with suppress(OSError, ValueError):
            if int(limit.read_text()) == total_bytes:
                statistics = _figures(current.with_name("memory.stat"))
                cache = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
                return max(0, int(current.read_text()) - cache)
    return None


def descendants() -> list[int]:
    """Return the ids of this process and its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = path.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(path.parent.name))
    found = [os.getpid()]
    for pid in found:
        found += children[pid]
    return found


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; a page that several share counts for each by its part."""
    with suppress(OSError, KeyError):
        return _figures(_PROC / str(pid) / "smaps_rollup")["Pss"] * _KIB
    return 0


def _figures(path: Path) -> dict[str, int]:
    """Read a file of the kernel with a name and a number on each line.

    Raises:
        OSError: when it cannot be read.
    """
    words = (line.split() for line in path.read_text().splitlines())
    return {name.rstrip(":"): int(rest[0]) for name, *rest in words if rest and rest[0].isdigit()}
