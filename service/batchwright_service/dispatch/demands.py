"""The hardware that work needs, and the nodes of a cluster that have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchwright.client.documents.workers import ServedDevice
from batchwright.device_traits import DeviceKind, kind_of_id
from batchwright_service.dispatch.cluster_engine import Node
from batchwright_service.dispatch.reconciliation import Places
from batchwright_service.domain.hardware import ANY_DEVICE, is_served_by, need_of_lane
from batchwright_service.store.models import FleetWork


@dataclass(frozen=True)
class Lane:
    """Devices and nodes that a job asks of the engine."""

    device: str
    """The device, as it was requested; empty for hardware on any device."""
    text: str | None
    """The hardware, for people."""
    kinds: tuple[DeviceKind, ...]
    """The kind of the devices; of a node, all kinds."""
    devices: int
    """Number of devices that the work takes on each node; 0 for a job beside others."""
    nodes: frozenset[str]
    """Ids of the nodes that have the hardware; none where there are fewer than ``hosts``."""
    hosts: int = 1
    """Number of nodes that the work takes at once."""

    @property
    def places(self) -> Places:
        """The places that the work takes."""
        return Places(self.nodes, self.devices * self.hosts > 1, self.hosts)

    @property
    def missing(self) -> str:
        """The reason why the work waits while ``nodes`` is empty."""
        if self.hosts > 1:
            return f"there are fewer living nodes than the work takes: {self.text}"
        return f"no living node has {self.text or self.device}"

    @classmethod
    def of_node(cls, node: Node) -> Lane:
        """Return the lane of the job that announces a node's devices."""
        return cls("", None, node.kinds, 0, frozenset({node.id}))


def lane_of(work: FleetWork, devices: Mapping[str, Sequence[ServedDevice]]) -> Lane:
    """Return the lane of a piece of work, given the announced devices of each node."""
    fitting = {
        node: [one for one in found if is_served_by(work.device, work.hardware, one.device)]
        for node, found in devices.items()
    }
    count = hosts = 1
    text = work.hardware
    if work.device == ANY_DEVICE:
        need = need_of_lane(work.hardware or "")
        count, hosts, text = need.devices_per_node, need.nodes, need.in_words
    having = {node: equal for node, found in fitting.items() if len(equal := _of_one_kind(found)) >= count}
    kind = kind_of_id(work.device)
    for found in having.values():
        kind = found[0].device.kind
    nodes = frozenset(node for node, found in having.items() if found[0].device.kind == kind)
    return Lane(work.device, text, (kind,), count, nodes if len(nodes) >= hosts else frozenset(), hosts)


def _of_one_kind(devices: Sequence[ServedDevice]) -> list[ServedDevice]:
    """Return the devices of the product that a node has the most of."""
    kinds: dict[str, list[ServedDevice]] = {}
    for device in devices:
        kinds.setdefault(device.hardware, []).append(device)
    return max(kinds.values(), key=len, default=[])
