"""The watch over a device's memory, and its way to the list of devices."""

import pytest

from batchwright.client.documents.workers import DeviceMemory
from batchwright.hardware.memory_in_use import MemoryInUse
from batchwright_service.worker.device_worker import MemoryWatch
from tests.support.service.running import StartService
from tests.support.service.scripted import ScriptedRunner

TOTAL_BYTES = 512_000


@pytest.mark.parametrize(
    ("after", "is_announced"),
    [
        (MemoryInUse(5999, 2000), False),
        (MemoryInUse(6000, 2000), True),
        (MemoryInUse(5000, 3000), True),
        (MemoryInUse(5000, None), True),
        (None, True),
    ],
)
def test_a_small_change_is_not_announced(after: MemoryInUse | None, *, is_announced: bool) -> None:
    """One by less than a five-hundredth of the memory leaves the reading, and the row of the store, as they are."""
    readings = [MemoryInUse(5000, 2000), after]
    watch = MemoryWatch(lambda: readings.pop(0), TOTAL_BYTES)
    watch.update()
    assert watch.latest == (before := DeviceMemory(used_bytes=5000, own_bytes=2000))
    watch.update()
    assert (watch.latest is not before and watch.latest != before) == is_announced


def test_devices_have_their_memory_in_use(start_service: StartService) -> None:
    """The list of devices has the reading of the executor from the first announcement on."""
    runner = ScriptedRunner(37)
    runner.memory = MemoryInUse(2**30, 2**20)
    service = start_service(runner)
    with service.client as client:
        (device,) = client.devices.list()
    assert device.memory == DeviceMemory(used_bytes=2**30, own_bytes=2**20)
