"""The hardware that work needs, and the nodes of a cluster that have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.dispatch.engine import DeviceKind, Node
from service.domain.hardware import ANY_DEVICE, is_served_by, need_of_lane
from service.domain.workers import ServedDevice
from service.store.models import FleetWork


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
    """Number of devices that the work takes on one node; 0 for a job beside others."""
    nodes: frozenset[str]
    """Ids of the nodes that have the hardware; none for work of several devices, which dispatchers leave to workers."""

    @property
    def missing(self) -> str:
        """The reason why the work waits while ``nodes`` is empty."""
        if self.devices > 1:
            return f"a dispatcher gives work one device, and this takes {self.text}: start `batchwright work` on a host"
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
    count = 1
    text = work.hardware
    if work.device == ANY_DEVICE:
        need = need_of_lane(work.hardware or "")
        count, text = need.devices_per_node, need.in_words
    having = {node: found for node, found in fitting.items() if found and count == 1}
    kind: DeviceKind = "cpu" if work.device == "cpu" else "cuda"
    for found in having.values():
        kind = found[0].device.kind
    nodes = frozenset(node for node, found in having.items() if found[0].device.kind == kind)
    return Lane(work.device, text, (kind,), count, nodes)
