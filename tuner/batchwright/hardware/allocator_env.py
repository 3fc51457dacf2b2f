"""Environment variables that decide how a probe, and the job made from it, allocate memory. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchwright.device_traits import CUDA_ALLOCATOR_VARIABLES, DeviceKind, traits_of


def allocator_environment(kind: DeviceKind, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that probes set, and that the job must set too.

    On CUDA the allocator's settings are the user's: those of ``environment`` are copied to the job.
    """
    traits = traits_of(kind)
    own = {name: environment[name] for name in traits.allocator_variables if name in environment}
    return {**traits.environment, **own}


def job_environment(recommended: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with the variables of the probes, and without other allocator settings."""
    kept = {name: value for name, value in environment.items() if name not in CUDA_ALLOCATOR_VARIABLES}
    return {**kept, **recommended}


def visible_devices(devices: Sequence[str], outside: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes some GPUs the only ones of a process, numbered in this order.

    Args:
        devices: ids such as ``cuda:2``, as numbered by this process.
        outside: the environment of this process, which may see a part of the host's GPUs itself.
    """
    seen = [part.strip() for part in outside.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    numbers = [int(device.partition(":")[2]) for device in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[number] if number < len(seen) else str(number) for number in numbers)}
