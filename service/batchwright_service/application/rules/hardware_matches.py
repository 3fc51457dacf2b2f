"""Find the workers that have the hardware of a request, among those that are alive."""

from collections import Counter
from collections.abc import Sequence

from batchwright.client.documents.workers import HardwareStatus, ServedDevice
from batchwright.hardware.matching import catalogue_name
from batchwright_service.domain.hardware import HardwareNeed, fits
from batchwright_service.store.models import AnnouncedDevice


def workers_with(need: HardwareNeed, alive: Sequence[AnnouncedDevice]) -> list[AnnouncedDevice]:
    """Return the live workers that can take work with this need: free ones first, then by their queue."""
    counts = Counter((worker.served.host, worker.served.hardware) for worker in alive)
    found = [
        worker
        for worker in alive
        if fits(worker.served.device, need)
        and counts[worker.served.host, worker.served.hardware] >= need.devices_per_node
    ]
    if len({worker.served.host for worker in found}) < need.nodes:
        return []
    return sorted(found, key=lambda worker: (not _is_free(worker), worker.queued, worker.served.slot))


def one_of_each_kind(workers: Sequence[AnnouncedDevice]) -> list[ServedDevice]:
    """Return the first device of each kind of hardware."""
    return list({worker.served.hardware: worker.served for worker in reversed(workers)}.values())[::-1]


def group_by_hardware(alive: Sequence[AnnouncedDevice]) -> tuple[HardwareStatus, ...]:
    """Return the kinds of devices with a live worker, cards first, and those with the most memory first."""
    kinds: dict[str, list[AnnouncedDevice]] = {}
    for worker in alive:
        kinds.setdefault(worker.served.hardware, []).append(worker)
    groups = sorted(kinds.values(), key=_group_order)
    return tuple(_status(workers) for workers in groups)


def _group_order(workers: Sequence[AnnouncedDevice]) -> tuple[bool, int, str]:
    device = workers[0].served.device
    return not device.traits.is_gpu, -device.total_bytes, device.name


def _status(workers: Sequence[AnnouncedDevice]) -> HardwareStatus:
    device = workers[0].served.device
    free = Counter(worker.served.host for worker in workers if _is_free(worker))
    return HardwareStatus(
        name=device.name,
        gpu=catalogue_name(device.name) if device.traits.is_gpu else None,
        total_bytes=device.total_bytes,
        devices=len(workers),
        free=free.total(),
        most_free_per_host=max(free.values(), default=0),
        hosts=len({worker.served.host for worker in workers}),
    )


def _is_free(worker: AnnouncedDevice) -> bool:
    """Return whether a worker runs nothing and takes work."""
    return worker.running_id is None and worker.served.unready is None
