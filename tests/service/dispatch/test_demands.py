"""The nodes that have the hardware of some work."""

from batchwright.client.documents.states import State
from batchwright.client.documents.workers import ServedDevice
from batchwright.schemas.results import DeviceInfo
from batchwright_service.dispatch.dispatcher import Lane, lane_of
from batchwright_service.domain.hardware import ANY_DEVICE, HardwareNeed
from batchwright_service.store.models import FleetWork
from tests.support.factories import CPU, CUDA


def served(node: str, *devices: DeviceInfo) -> list[ServedDevice]:
    """The devices of a node."""
    numbered = [device.model_copy(update={"id": f"{device.kind}:{n}"}) for n, device in enumerate(devices)]
    return [
        ServedDevice(slot=f"{node}/{device.id}", owner=f"ray:{node}", device=device, environment={}, versions={})
        for device in numbered
    ]


OTHER = CUDA.model_copy(update={"name": "Another card"})
NODES = {
    "four": served("four", CUDA, CUDA, CUDA, CUDA),
    "two": served("two", CUDA, CUDA),
    "mixed": served("mixed", OTHER, CUDA, OTHER),
    "cpu": served("cpu", CPU),
}


def lane(device: DeviceInfo, devices_per_node: int, nodes: int = 1) -> Lane:
    """The lane of a job."""
    need = HardwareNeed.of_kind(device, devices_per_node, nodes)
    work = FleetWork("job_1", State.QUEUED, ANY_DEVICE, need.lane, 0, has_live_lease=False, seconds=0.0)
    return lane_of(work, NODES)


def test_work_of_several_devices_goes_where_a_node_has_as_many() -> None:
    """Devices of one product count."""
    assert lane(CUDA, 1).nodes == {"four", "two", "mixed"}
    assert (lane(CUDA, 2).nodes, lane(CUDA, 2).devices) == (frozenset({"four", "two"}), 2)
    assert lane(OTHER, 2).nodes == {"mixed"}
    assert lane(CUDA, 5).nodes == set()
    assert "no living node has 5 x" in lane(CUDA, 5).missing


def test_work_of_several_nodes_needs_as_many() -> None:
    """All of them have the devices, or it waits and says so."""
    pair = lane(CUDA, 2, 2)
    assert (pair.nodes, pair.hosts, pair.places.gathers) == (frozenset({"four", "two"}), 2, True)
    assert lane(CUDA, 2, 3).nodes == set()
    assert lane(CUDA, 2, 3).missing.startswith("there are fewer living nodes than the work takes: 3 hosts with 2 x")
    assert not lane(CUDA, 1).places.takes_several
