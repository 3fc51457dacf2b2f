"""Describe virtual GPUs and their host: memory, limits of kernels, other processes, failures to inject. No torch."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from batchwright.errors import VirtualGpuError
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.hardware.gpu_table import threads_per_multiprocessor
from batchwright.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt, load_document, typed_size
from batchwright.schemas.field_errors import described_pattern
from batchwright.schemas.gpus import MIB

MOST_GPUS = 16
"""GPUs of a host: ``kMostGpus`` of ``sources/ledger.h``."""
_FIGURES = tomllib.loads(Path(__file__).with_name("figures.toml").read_text(encoding="utf-8"))
KNOWN_MODELS: tuple[str, ...] = tuple(_FIGURES["gpus"])
"""The catalogued cards that `figures.toml` has, by their names in the catalogue."""

_ONE_LINE = described_pattern(r"^[^\n]+$", "must be one line")
ByteSize = Annotated[int, Field(ge=0), BeforeValidator(typed_size), PlainSerializer(int)]
"""A number of bytes, which a file may also give as a size such as ``24GiB``."""
GpuIndex = Annotated[int, Field(ge=0, lt=MOST_GPUS)]
"""A GPU of the host, counted from 0, whatever ``CUDA_VISIBLE_DEVICES`` leaves visible."""


class VirtualGpu(Document):
    """A GPU as CUDA and NVML report it.

    In a file, the name of a catalogued card (``T4``) stands for its description, and ``model: T4`` beside other fields
    for the fields that are left out.
    """

    name: Annotated[str, Field(min_length=1, max_length=95, pattern=_ONE_LINE)]
    """Name as `torch.cuda.get_device_name` reports it; NVML allows 95 characters."""
    compute_capability: tuple[Annotated[int, Field(ge=5, le=12)], Annotated[int, Field(ge=0, le=9)]]
    """Compute capability."""
    total_bytes: Annotated[ByteSize, Field(ge=256 * MIB, le=4 * 1024**2 * MIB)]
    """`total_memory` of torch's device properties."""
    nvml_total_bytes: ByteSize
    """Total memory as NVML reports it: ``total_bytes`` and what the driver reserves."""
    context_bytes: ByteSize
    """Memory that the context of a process takes."""
    multiprocessors: PositiveInt
    """Number of multiprocessors."""
    clock_khz: PositiveInt
    """Highest clock of the multiprocessors."""
    l2_cache_bytes: ByteSize
    """Size of the L2 cache."""
    threads_per_multiprocessor: PositiveInt
    """Most resident threads of a multiprocessor."""
    blocks_per_multiprocessor: PositiveInt
    """Most resident blocks of a multiprocessor."""
    shared_memory_per_multiprocessor_bytes: ByteSize
    """Shared memory of a multiprocessor."""
    shared_memory_per_block_bytes: ByteSize
    """Most shared memory of a block, which its kernel has to opt in to."""
    cudnn_workspace_bytes: ByteSize = 0
    """Workspace that each plan of cuDNN requests: the real ones are known to cuDNN alone."""

    @classmethod
    def of(cls, model: str) -> Self:
        """Return the description of a catalogued card, by any of its names.

        Raises:
            EstimateError: when no card has this name.
            VirtualGpuError: when the figures of its multiprocessors are not in `figures.toml`.
        """
        return cls.model_validate(_catalogued(model))

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: object) -> object:
        """Complete the name of a catalogued card, alone or as the field ``model``."""
        if isinstance(data, str):
            return _catalogued(data)
        if isinstance(data, dict) and isinstance(data.get("model"), str):
            return _catalogued(data["model"]) | {key: value for key, value in data.items() if key != "model"}
        return data

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.context_bytes >= self.total_bytes:
            raise ValueError(f"context_bytes ({self.context_bytes}) must be less than total_bytes ({self.total_bytes})")
        if self.nvml_total_bytes < self.total_bytes:
            raise ValueError(
                f"nvml_total_bytes ({self.nvml_total_bytes}) must be at least total_bytes ({self.total_bytes})"
            )
        return self


def _catalogued(model: str) -> dict[str, Any]:
    """Return the fields of a catalogued card: memory from the table of GPUs, the other figures from `figures.toml`."""
    gpu = find_gpu(model)
    own = _FIGURES["gpus"].get(gpu.name)
    if own is None or gpu.resident_threads is None:
        raise VirtualGpuError(
            f"no figures of the multiprocessors of {gpu.name} are known, only of NVIDIA's cards: "
            "describe the card in a file"
        )
    limits = _FIGURES["compute_capabilities"]["{}.{}".format(*gpu.compute_capability)]
    threads = threads_per_multiprocessor(gpu.compute_capability)
    return {
        "name": own["name"],
        "compute_capability": gpu.compute_capability,
        "total_bytes": gpu.total_bytes,
        "nvml_total_bytes": own["nvml_total_mebibytes"] * MIB,
        "context_bytes": gpu.context_bytes.expected,
        "multiprocessors": gpu.resident_threads // threads,
        "clock_khz": own["clock_megahertz"] * 1000,
        "l2_cache_bytes": own["l2_cache_mebibytes"] * MIB,
        "threads_per_multiprocessor": threads,
        "blocks_per_multiprocessor": limits["blocks_per_multiprocessor"],
        "shared_memory_per_multiprocessor_bytes": limits["shared_memory_per_multiprocessor_kibibytes"] * 1024,
        "shared_memory_per_block_bytes": limits["shared_memory_per_block_kibibytes"] * 1024,
    }


class OtherProcess(Document):
    """A process outside of the session that holds memory of a GPU, as NVML lists it."""

    gpu: GpuIndex = 0
    """The GPU."""
    used_bytes: Annotated[ByteSize, Field(ge=1)]
    """The memory that the process holds, its context included."""


class _Failure(Document):
    """A failure of one GPU."""

    gpu: GpuIndex = 0
    """The GPU."""
    at_allocation: NonNegativeInt = 0
    """The failure happens at this allocation of device memory on the GPU, counted from 1 over all processes of the
    session from the moment of the injection; 0: at once."""


class AllocationFailure(_Failure):
    """An allocation fails for want of memory, though there is memory.

    torch's allocator returns its cached blocks and tries again, so a single failure is a retry (`num_alloc_retries`);
    only a lasting one is an out-of-memory error.
    """

    kind: Literal["allocation-failure"] = "allocation-failure"
    """The kind of failure."""
    lasting: bool = False
    """Every later allocation fails too."""


class MemoryTaken(_Failure):
    """Another process takes memory: as much as it requests, or all that is free."""

    kind: Literal["memory-taken"] = "memory-taken"
    """The kind of failure."""
    taken_bytes: Annotated[ByteSize, Field(ge=1)]
    """The requested memory."""


class DeviceLost(_Failure):
    """The GPU falls off the bus: CUDA reports `cudaErrorDevicesUnavailable`, NVML `NVML_ERROR_GPU_IS_LOST`."""

    kind: Literal["device-lost"] = "device-lost"
    """The kind of failure."""


class EccError(_Failure):
    """An uncorrectable ECC error.

    Processes with a context on the GPU get `cudaErrorECCUncorrectable` from every call; later processes can use it.
    """

    kind: Literal["ecc-error"] = "ecc-error"
    """The kind of failure."""


class SlowKernels(_Failure):
    """Every launch of a kernel pauses the process."""

    kind: Literal["slow-kernels"] = "slow-kernels"
    """The kind of failure."""
    seconds: Annotated[NonNegativeFloat, Field(le=3600)]
    """The pause; 0 ends an earlier one."""


Failure = AllocationFailure | MemoryTaken | DeviceLost | EccError | SlowKernels
"""What can be injected."""


class VirtualHost(Document):
    """A host with virtual GPUs."""

    gpus: Annotated[tuple[VirtualGpu, ...], Field(min_length=1, max_length=MOST_GPUS)]
    """The GPUs, in the order in which NVML and CUDA number them."""
    processes: Annotated[tuple[OtherProcess, ...], Field(max_length=64)] = ()
    """Processes outside of the session that hold memory."""
    failures: Annotated[tuple[Annotated[Failure, Field(discriminator="kind")], ...], Field(max_length=64)] = ()
    """Failures to inject at the beginning."""
    host_memory_bytes: ByteSize = 4096 * MIB
    """Memory of this host with which each process may back the memory of the GPUs. Copies and fills beyond are left
    out, and the contents of the memory are then undefined."""

    @classmethod
    def of(cls, *models: str) -> Self:
        """Return a host with catalogued cards.

        Raises:
            EstimateError: when no card has this name.
            VirtualGpuError: when the figures of its multiprocessors are not known.
        """
        return cls(gpus=tuple(VirtualGpu.of(model) for model in models))

    @model_validator(mode="after")
    def _names_its_gpus(self) -> Self:
        for index in (entry.gpu for entry in (*self.processes, *self.failures)):
            if index >= len(self.gpus):
                raise ValueError(f"there is no GPU {index}: the host has {len(self.gpus)}, counted from 0")
        return self


def load_host(path: Path) -> VirtualHost:
    """Read a YAML or JSON file.

    Raises:
        SpecError: when the file cannot be read, or does not describe a host.
        EstimateError: when it names a card that is not in the catalogue.
        VirtualGpuError: when the figures of a card's multiprocessors are not known.
    """
    return load_document(VirtualHost, path, "virtual host")
