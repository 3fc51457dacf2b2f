"""Match devices with the hardware that a request names. No torch."""

import fnmatch
from functools import lru_cache

from batchwright.errors import EstimateError, FieldProblem, SpecError
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.schemas.requests import HardwareRequest
from batchwright.schemas.results import DeviceInfo


def is_alike(one: DeviceInfo, other: DeviceInfo) -> bool:
    """Return whether two devices are of one kind: evidence of one counts for the other."""
    return (one.name, one.total_bytes) == (other.name, other.total_bytes)


def with_catalogue_name(hardware: HardwareRequest) -> HardwareRequest:
    """Return the request with the catalogue's name of its GPU, so that equal requests are written equally.

    Raises:
        SpecError: when the catalogue has no such GPU, or several; the message has the remedy.
    """
    if hardware.gpu is None:
        return hardware
    try:
        found = find_gpu(hardware.gpu, other_cards="for another card give `product` or `min_memory_bytes` instead")
    except EstimateError as error:
        raise SpecError([FieldProblem("hardware.gpu", str(error))], "request") from None
    if found.vendor == "unknown":
        message = "is a memory size, not a GPU: give it as `min_memory_bytes`"
        raise SpecError([FieldProblem("hardware.gpu", message, repr(hardware.gpu))], "request")
    return hardware.model_copy(update={"gpu": found.name})


def has_hardware(device: DeviceInfo, hardware: HardwareRequest) -> bool:
    """Return whether one device is what a request names, however many of them it needs."""
    if hardware.min_memory_bytes is not None and device.total_bytes < hardware.min_memory_bytes:
        return False
    if hardware.product is None:
        if not device.traits.is_gpu:
            return False
    else:  # brackets, which are special in file names only, stand for themselves
        pattern = hardware.product.lower().strip().replace("[", "[[]")
        if not fnmatch.fnmatchcase(device.name.lower().strip(), pattern):
            return False
    return hardware.gpu is None or catalogue_name(device.name) == catalogue_name(hardware.gpu)


@lru_cache(maxsize=1024)
def catalogue_name(name: str) -> str | None:
    """Return the catalogue's name of a GPU; None for a card that is not listed, or whose name stands for several."""
    try:
        found = find_gpu(name)
    except EstimateError:
        return None
    return None if found.vendor == "unknown" else found.name


def kind_of(device: DeviceInfo) -> str:
    """Return the kind of a device: product and memory. Evidence of one kind says nothing of another."""
    return f"{device.name}|{device.total_bytes}"
