"""Devices that are the hardware of a request."""

import pytest

from batchwright.errors import DeviceError, SpecError
from batchwright.hardware import inventory
from batchwright.hardware.inventory import find_hardware
from batchwright.hardware.matching import has_hardware, with_catalogue_name
from batchwright.schemas.requests import HardwareRequest
from batchwright.schemas.results import DeviceInfo

GIB = 1024**3
CPU = DeviceInfo(id="cpu", kind="cpu", name="AMD EPYC 9654", total_bytes=512 * GIB)


def card(name: str, memory: int = 80, index: int = 0) -> DeviceInfo:
    """A card as NVML reports it."""
    return DeviceInfo(id=f"cuda:{index}", kind="cuda", name=name, total_bytes=memory * GIB)


@pytest.mark.parametrize(
    ("wanted", "device", "matches"),
    [
        ({"gpu": "h100 sxm"}, card("NVIDIA H100 80GB HBM3"), True),
        ({"gpu": "H100-80GB"}, card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10), False),
        ({"gpu": "A100-40GB"}, card("NVIDIA A100-SXM4-80GB"), False),
        ({"product": "nvidia a100*"}, card("NVIDIA A100-SXM4-80GB"), True),
        ({"product": "NVIDIA A100"}, card("NVIDIA A100-SXM4-80GB"), False),
        ({"product": "*[E]PYC*"}, CPU, False),
        ({"product": "AMD*"}, CPU, True),
        ({"min_memory_bytes": "80GiB"}, card("anything"), True),
        ({"min_memory_bytes": "81GiB"}, card("anything"), False),
        ({"min_memory_bytes": "1GiB"}, CPU, False),
        ({"gpu": "H100-80GB", "min_memory_bytes": "81GiB"}, card("NVIDIA H100 80GB HBM3"), False),
    ],
)
def test_hardware_is_found_by_name_pattern_and_memory(
    wanted: dict[str, str], device: DeviceInfo, *, matches: bool
) -> None:
    """Only a pattern of a product finds processors, and a slice of a card is not the card."""
    hardware = with_catalogue_name(HardwareRequest.model_validate(wanted))
    assert has_hardware(device, hardware) is matches


def test_an_unknown_card_has_the_remedy_of_a_request_for_hardware() -> None:
    """A memory size is the name of a card in an estimate only."""
    with pytest.raises(
        SpecError, match=r"hardware\.gpu: no GPU is called 'H9000'.*give `product` or `min_memory_bytes`"
    ):
        with_catalogue_name(HardwareRequest(gpu="H9000"))


def test_a_host_has_hardware_that_is_there_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first device of a kind that the host has as many of; the error lists what there is."""
    devices = (card("NVIDIA L4", 24), card("NVIDIA A10G", 24, 1), card("NVIDIA A10G", 24, 2), CPU)
    monkeypatch.setattr(inventory, "devices", lambda: devices)
    assert find_hardware(HardwareRequest(min_memory_bytes=20 * GIB)).id == "cuda:0"
    assert find_hardware(HardwareRequest(min_memory_bytes=20 * GIB, devices_per_node=2)).id == "cuda:1"
    with pytest.raises(DeviceError, match=r"does not have 3 x a GPU .*cuda:2 \(NVIDIA A10G, 24.00 GiB\)"):
        find_hardware(HardwareRequest(min_memory_bytes=20 * GIB, devices_per_node=3))
