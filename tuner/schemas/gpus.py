"""GPUs: memory figures with their uncertainty, one kind of card, and the file that lists the cards. No torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tuner.schemas.base import Document, NonNegativeInt, PositiveInt

MIB = 1024**2


class ByteInterval(Document):
    """A figure with its uncertainty."""

    low: NonNegativeInt
    """Bytes, if the estimate is too high."""
    expected: NonNegativeInt
    """Bytes."""
    high: NonNegativeInt
    """Bytes, if the estimate is too low."""


class KernelProfile(Document):
    """What decides which kernels a card runs: cards of one profile take the same memory for the same update."""

    compute_capability: tuple[int, int]
    """As `torch.cuda.get_device_capability` reports it; on AMD too."""
    kind: Literal["cuda", "rocm"]
    """Which of torch's builds."""


class Gpu(Document):
    """One kind of GPU."""

    name: str
    """Its name here."""
    family: str
    """What it is called when its memory goes without saying, for example `A100`."""
    aliases: tuple[str, ...] = ()
    """Other names: NVML's, torch's, and those of its variants with the same memory."""
    vendor: Literal["nvidia", "amd", "unknown"]
    """Who makes it."""
    marketed_memory: str
    """The memory it is sold with."""
    total_bytes: PositiveInt
    """`total_memory` of torch's device properties, with a recent driver and the ECC setting it is shipped with."""
    least_total_bytes: PositiveInt
    """The least that other drivers, or ECC where it can be switched on, may leave of it."""
    compute_capability: tuple[int, int]
    """As torch reports it."""
    context_bytes: ByteInterval
    """What a training process takes outside of torch's allocator: the CUDA context, loaded kernels, library handles."""
    workspace_bytes: NonNegativeInt
    """What cuBLAS keeps per handle and stream, taken from torch's allocator; part of every trace."""
    evidence: Literal["reported", "derived", "given"]
    """Where ``total_bytes`` comes from: torch's own report, a rule (see the source), or the request."""
    sources: dict[Literal["total", "compute_capability", "context", "workspace"], str]
    """Where each figure comes from."""
    notes: tuple[str, ...] = ()
    """What somebody who takes this card should know."""

    @property
    def profile(self) -> KernelProfile:
        """Which kernels it runs."""
        return KernelProfile(
            compute_capability=self.compute_capability, kind="rocm" if self.vendor == "amd" else "cuda"
        )


ContextKind: TypeAlias = Literal["before 8.0", "8", "9 and later", "rocm", "unknown"]
"""Cards whose processes take the same memory outside of torch's allocator: by compute capability, or AMD's."""


class ContextEntry(Document):
    """The memory a training process takes outside of torch's allocator, as ``gpus.toml`` says it."""

    low_mebibytes: PositiveInt
    """The least."""
    expected_mebibytes: PositiveInt
    """The likely figure."""
    high_mebibytes: PositiveInt
    """The most."""
    source: str
    """The source of the figures."""

    @property
    def interval(self) -> ByteInterval:
        """The figures in bytes."""
        return ByteInterval(
            low=self.low_mebibytes * MIB, expected=self.expected_mebibytes * MIB, high=self.high_mebibytes * MIB
        )


class GpuEntry(Document):
    """One card, as ``gpus.toml`` says it."""

    name: str
    """Its name here."""
    family: str = ""
    """Its name where its memory goes without saying, for example `A100`; its name here when left out."""
    aliases: tuple[str, ...] = ()
    """Other names: NVML's, torch's, and those of its variants with the same memory."""
    vendor: Literal["nvidia", "amd"] = "nvidia"
    """Its maker."""
    marketed_memory: str
    """The memory it is sold with."""
    compute_capability: tuple[int, int]
    """As torch reports it."""
    total_mebibytes: PositiveInt
    """Torch's `total_memory`."""
    evidence: Literal["reported", "derived"] = "reported"
    """The kind of source of the total: torch's own report, or a rule."""
    ecc_is_optional: bool = False
    """True for cards shipped with ECC off, which takes a part of the total when it is switched on."""
    source: str
    """The source of the total, with an address where there is one."""
    notes: tuple[str, ...] = ()
    """Advice to those who take this card."""


class GpuFile(Document):
    """The content of ``gpus.toml``."""

    gpus: tuple[GpuEntry, ...]
    """Every card, in the order in which they are listed."""
    contexts: dict[ContextKind, ContextEntry]
    """The memory outside of torch's allocator."""
