"""Environment variables that decide how a probe, and the job made from it, allocate memory. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

CPU_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""glibc settings that return freed tensors to the system at once (mallopt(3)). Without them the largest batch of one
process varied by up to 20 % from run to run, and a step of the demo's model took 334 MiB instead of 192; with them
results are repeatable. They must be in the environment before the process starts. They cost time, since every tensor's
pages are mapped anew: 1.4 s became 3.1 s in the demo, of which transparent huge pages (the last setting) save a
quarter."""

CPU_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Idle OpenMP threads sleep instead of spinning. On two cores with other work on them, a step of a small ResNet took
5.7 s with spinning threads and 0.09 s with sleeping ones; alone on the machine the two are alike."""

CPU_MATH = {"MKL_DISABLE_FAST_MM": "1"}
"""MKL frees its packing buffers after each matrix product. On an Intel processor it otherwise keeps one per thread: of
the GPT-2 in README.md, 31 samples fitted in 128 MiB instead of 46, and equal probes differed by up to 36 %. There it
costs 4 to 11 % of an update's CPU time, and 4.3 times as much where a flash attention of many small products maps 4 MiB
anew for each, of which huge pages are the half (benchmarks/README.md)."""

CPU_ENVIRONMENT = {**CPU_ALLOCATOR, **CPU_THREADS, **CPU_MATH}
"""All variables that probes on the CPU set, and the jobs made from them."""

CUDA_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables from which torch's caching allocator reads its settings; the second name is the older one."""


def allocator_environment(kind: Literal["cpu", "cuda"], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that probes set, and that the job must set too.

    On CUDA the allocator's settings are the user's: those of ``environment`` are copied to the job.
    """
    if kind == "cpu":
        return dict(CPU_ENVIRONMENT)
    return {name: environment[name] for name in CUDA_ALLOCATOR_VARIABLES if name in environment}


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
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[number] if seen else str(number) for number in numbers)}
