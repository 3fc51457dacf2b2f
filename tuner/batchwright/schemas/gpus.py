"""GPUs: memory figures with their uncertainty, the files that list the cards and their workspaces. No torch."""

from typing import Literal, Self, TypeAlias

from pydantic import model_validator

from batchwright.schemas.base import Document, NonNegativeInt, PositiveInt

MIB = 1024**2


class ByteInterval(Document):
    """A number of bytes with its uncertainty."""

    low: NonNegativeInt
    """Lower bound in bytes."""
    expected: NonNegativeInt
    """Expected value in bytes."""
    high: NonNegativeInt
    """Upper bound in bytes."""


class KernelProfile(Document):
    """Properties that select the kernels of a card: cards of one profile take the same memory for the same update."""

    compute_capability: tuple[int, int]
    """Compute capability as `torch.cuda.get_device_capability` reports it, also for AMD."""
    kind: Literal["cuda", "rocm"]
    """The build of torch."""
    resident_threads: PositiveInt | None = None
    """Threads that the card runs at once, by which some kernels divide their work; None where the card is not known."""

    @property
    def has_cudnn(self) -> bool:
        """True if cuDNN has kernels of this card, and not MIOpen."""
        return self.kind == "cuda"


class Gpu(Document):
    """A GPU model."""

    name: str
    """Name in the catalogue."""
    family: str
    """Name without the memory size, for example `A100`."""
    aliases: tuple[str, ...] = ()
    """Other names: NVML's, torch's, and those of its variants with the same memory."""
    vendor: Literal["nvidia", "amd", "unknown"]
    """Vendor of the GPU."""
    marketed_memory: str
    """Marketed memory size."""
    total_bytes: PositiveInt
    """`total_memory` of torch's device properties, with a recent driver and the default ECC setting."""
    least_total_bytes: PositiveInt
    """Least total memory, with other drivers or with optional ECC switched on."""
    compute_capability: tuple[int, int]
    """Compute capability as torch reports it."""
    resident_threads: PositiveInt | None = None
    """Threads that the card runs at once: its multiprocessors times the threads of each. None where unknown."""
    context_bytes: ByteInterval
    """Memory of a process outside of torch's allocator: the CUDA context, loaded kernels, library handles."""
    workspace_bytes: NonNegativeInt
    """Workspace of cuBLAS per handle and stream, taken from torch's allocator; part of every trace."""
    evidence: Literal["reported", "derived", "given"]
    """Origin of ``total_bytes``: reported by torch, derived by a rule (see the source), or given in the request."""
    sources: dict[Literal["total", "compute_capability", "context", "workspace"], str]
    """Source of each figure."""
    notes: tuple[str, ...] = ()
    """Advice on using this card."""

    @property
    def profile(self) -> KernelProfile:
        """The kernel profile of this card."""
        return KernelProfile(
            compute_capability=self.compute_capability,
            kind="rocm" if self.vendor == "amd" else "cuda",
            resident_threads=self.resident_threads,
        )


ContextKind: TypeAlias = Literal["before 8.0", "8", "9", "10 and later", "rocm", "unknown"]
"""Groups of cards whose processes take the same memory outside of torch's allocator."""


class ContextEntry(Document):
    """Memory of a training process outside of torch's allocator: an entry of ``gpus.toml``."""

    low_mebibytes: PositiveInt
    """Lower bound."""
    expected_mebibytes: PositiveInt
    """Expected value."""
    high_mebibytes: PositiveInt
    """Upper bound."""
    source: str
    """The source of the figures."""

    @property
    def interval(self) -> ByteInterval:
        """The figures in bytes."""
        return ByteInterval(
            low=self.low_mebibytes * MIB, expected=self.expected_mebibytes * MIB, high=self.high_mebibytes * MIB
        )


class GpuEntry(Document):
    """A card: an entry of ``gpus.toml``."""

    name: str
    """Name in the catalogue."""
    family: str = ""
    """Name without the memory size, for example `A100`; ``name`` when left out."""
    aliases: tuple[str, ...] = ()
    """Other names: NVML's, torch's, and those of its variants with the same memory."""
    skypilot: str | None = None
    """Name in SkyPilot; None where it has none."""
    vendor: Literal["nvidia", "amd"] = "nvidia"
    """Vendor of the GPU."""
    marketed_memory: str
    """Marketed memory size."""
    compute_capability: tuple[int, int]
    """Compute capability as torch reports it."""
    multiprocessors: PositiveInt | None = None
    """Number of multiprocessors; None for AMD's cards, whose kernels are not followed so far."""
    total_mebibytes: PositiveInt
    """Torch's `total_memory`."""
    evidence: Literal["reported", "derived"] = "reported"
    """The kind of source of the total: torch's own report, or a rule."""
    ecc_is_optional: bool = False
    """True for cards shipped with ECC off, where switching ECC on takes a part of the total."""
    source: str
    """The source of the total, with an address where there is one."""
    notes: tuple[str, ...] = ()
    """Advice on using this card."""


class GpuFile(Document):
    """The content of ``gpus.toml``."""

    gpus: tuple[GpuEntry, ...]
    """Every card, in the order in which they are listed."""
    contexts: dict[ContextKind, ContextEntry]
    """The memory outside of torch's allocator."""


class MeasuredWorkspace(Document):
    """The workspace of one operator at one shape, measured on a card."""

    kind: str
    """The operator, the type and the layout: the ``library_calls`` of ``batchwright.estimation``."""
    shape: str
    """The shape, in words."""
    operand_bytes: PositiveInt
    """Bytes of the operator's tensors."""
    workspace_bytes: NonNegativeInt
    """Bytes that the operator held beside them."""


class WorkspaceTable(Document):
    """The workspaces that the libraries of one card chose: made of the evidence of a card, never by hand."""

    compute_capability: tuple[int, int]
    """Compute capability of the card."""
    gpu: str
    """Name of the card, as torch reports it."""
    virtual: bool = False
    """True for a rehearsal on a virtual card, whose workspaces are invented."""
    date: str
    """Day of the measurement."""
    torch: str
    """Version of torch."""
    cudnn: str
    """Version of cuDNN, which chooses algorithms."""
    driver: str
    """Version of the driver."""
    blas_workspace_bytes: PositiveInt | None = None
    """Workspace that cuBLAS kept after the first matrix product; None when it was not seen."""
    workspaces: tuple[MeasuredWorkspace, ...]
    """The workspaces, by operator and shape."""


class WorkspaceFile(Document):
    """The content of ``workspaces.json``, and of a file of one's own."""

    tables: tuple[WorkspaceTable, ...]
    """At most one table for each compute capability."""

    @model_validator(mode="after")
    def _names_each_capability_once(self) -> Self:
        capabilities = [table.compute_capability for table in self.tables]
        twice = {capability for capability in capabilities if capabilities.count(capability) > 1}
        if twice:
            raise ValueError(f"compute capability {'{}.{}'.format(*min(twice))} has more than one table")
        return self
