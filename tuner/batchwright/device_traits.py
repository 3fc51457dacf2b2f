"""The kinds of devices that a tuning can run on, and what differs between them: a record each. No torch.

Code that depends on the kind of a device reads a field of its record, and compares no names. A further kind (torch's
`xpu` or `mps`) is a record here, a module in ``batchwright.hardware.memory_devices`` with its line in ``factory``, and
a module like ``batchwright.hardware.nvml`` that lists its devices. ROCm's cards are `cuda` to torch, and need the last
alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

DeviceKind: TypeAlias = Literal["cpu", "cuda"]
"""Torch's name of a type of device, which begins the id of each."""

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

_CPU_LIBRARIES = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Arrow, which transformers and datasets import, otherwise reserves 1 GiB of private addresses, all of which count: an
HF Trainer took 1,288 MiB with that pool and 266 MiB without."""

CUDA_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables from which torch's caching allocator reads its settings; the second name is the older one."""


@dataclass(frozen=True)
class DeviceTraits:
    """What differs between kinds of devices."""

    is_gpu: bool
    """True if a host has any number of them, each with memory and a driver of its own, and a rank takes one. The CPU is
    one device that all ranks share."""
    counts_host_memory: bool
    """True if the limit is on private memory of the process: it is a part of the host's memory that a user chooses, it
    covers code, batches and compilers too, and peaks vary by a few pages."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that probes set, and the jobs made from them."""
    command_environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of those that run a command."""
    allocator_variables: tuple[str, ...] = ()
    """Variables with the user's settings of the allocator, which a job takes from its probes."""
    process_group: str = "gloo"
    """Backend of ``torch.distributed.init_process_group``."""
    gradient_gathering: Literal["scratch", "in-place"] = "scratch"
    """Default way of summing gradients: in place where new memory for each micro-batch takes time."""
    has_foreach: bool = False
    """True if torch's optimizers choose their implementation `foreach` by default."""

    def environment_from(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of probes and jobs, with the user's settings of the allocator in ``environment``."""
        own = {name: environment[name] for name in self.allocator_variables if name in environment}
        return {**self.environment, **own}


_TRAITS: Mapping[str, DeviceTraits] = MappingProxyType(
    {
        "cpu": DeviceTraits(
            is_gpu=False,
            counts_host_memory=True,
            environment=CPU_ENVIRONMENT,
            command_environment=_CPU_LIBRARIES,
            gradient_gathering="in-place",
        ),
        "cuda": DeviceTraits(
            is_gpu=True,
            counts_host_memory=False,
            allocator_variables=CUDA_ALLOCATOR_VARIABLES,
            process_group="cpu:gloo,cuda:nccl",
            has_foreach=True,
        ),
    }
)
_OTHER = DeviceTraits(is_gpu=True, counts_host_memory=False)
"""Those of a type of torch that no tuning runs on, in a loop of a user's own."""


def kind_of_id(device_id: str) -> DeviceKind:
    """Return the kind of a device by its id; that of a GPU for an id without a kind, which stands for any device."""
    return "cpu" if device_id == "cpu" else "cuda"


def traits_of(device: str) -> DeviceTraits:
    """Return the traits of a device, by its kind (``cuda``) or its id (``cuda:0``)."""
    return _TRAITS.get(device.partition(":")[0], _OTHER)


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
