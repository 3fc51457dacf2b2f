"""Which devices this host has, without importing torch."""

from __future__ import annotations

from tuner.results import DeviceInfo


def devices() -> tuple[DeviceInfo, ...]:
    """The GPUs NVML can see, in torch's order of ids, then the CPU. Never fails for want of a GPU or of NVML."""
    raise NotImplementedError


def find_device(identifier: str | None) -> DeviceInfo:
    """The device with this id; the first GPU, else the CPU, when ``identifier`` is none.

    Raises:
        DeviceError: when there is no such device; the message lists those there are.
    """
    raise NotImplementedError
