"""Requests for estimates of what fits on a GPU, which need not be present, and their results. Pure data, no torch."""

from collections import Counter
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from batchwright.schemas.base import Document, NonNegativeInt, PositiveInt
from batchwright.schemas.gpus import ByteInterval
from batchwright.schemas.plans import Plan
from batchwright.schemas.requests import LARGEST_EFFECTIVE_BATCH_SIZE
from batchwright.schemas.workload import WorkloadSpec

_SHOWN_LENGTH = 60


Loop = Literal["batchwright", "hugging-face", "lightning", "plain"]
"""The training loop whose memory is estimated: see ``EstimateRequest.loop``."""


class EstimateRequest(Document):
    """Estimate the memory of a workload on GPUs, and the plan that would fit."""

    spec: WorkloadSpec
    """The workload to train."""
    gpus: Annotated[tuple[str, ...], Field(min_length=1, max_length=64, examples=[["H100-80GB", "A10G"]])]
    """Names in the catalogue (`GET /v1/gpus`), or a memory size such as `48GiB` for a card that is not listed; each
    once."""
    micro_batch_size: Annotated[int, Field(ge=1, le=LARGEST_EFFECTIVE_BATCH_SIZE)] | None = None
    """Micro-batch size to estimate. The largest size that fits is reported in any case."""
    effective_batch_size: Annotated[int, Field(ge=1, le=LARGEST_EFFECTIVE_BATCH_SIZE)] | None = None
    """Samples per optimizer update over all ranks: plan it around the largest micro-batch."""
    memory_margin: Annotated[float, Field(ge=0.0, le=0.5)] = 0.03
    """Share of a card's memory to leave free."""
    allocator: Literal["default", "expandable-segments"] = "default"
    """Setting of torch's caching allocator: `expandable-segments` is `PYTORCH_ALLOC_CONF=expandable_segments:True`."""
    loop: Loop = "batchwright"
    """Training loop that will run the plan: `batchwright` (`train`, and `GradientAccumulation` in your own loop),
    `hugging-face` (transformers' `Trainer`), `lightning`, or `plain` (the loop of tutorials, which keeps the outputs
    of the model)."""
    timeout_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 120.0
    """Time limit of tracing."""

    @field_validator("gpus")
    @classmethod
    def _each_once(cls, gpus: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted(name for name, times in Counter(gpus).items() if times > 1)
        if repeated:
            names = ", ".join(repr(name[:_SHOWN_LENGTH]) for name in repeated)
            raise ValueError(f"{names} named more than once: name each GPU once, since its estimate would be the same")
        return gpus

    @model_validator(mode="after")
    def _other_loops_have_what_is_traced(self) -> Self:
        spec = self.spec
        has_ranks = spec.parallelism.world_size > 1
        missing = {
            "parallelism": has_ranks and self.loop == "lightning",  # it builds DDP on a stream of its own
            "parallelism.strategy: fsdp": has_ranks and spec.parallelism.strategy == "fsdp",
            "preference": spec.preference is not None,
            "ema_decay": spec.ema_decay is not None,
            "label_smoothing": spec.label_smoothing > 0.0,
        }
        for name in (name for name, is_asked in missing.items() if is_asked and self.loop != "batchwright"):
            raise ValueError(f"`loop` {self.loop} is estimated without `spec.{name}`: leave one of the two out")
        return self

    @model_validator(mode="after")
    def _micro_batch_is_within_share(self) -> Self:
        ranks, batch, size = self.spec.parallelism.world_size, self.effective_batch_size, self.micro_batch_size
        if batch is not None and batch < ranks:
            raise ValueError(f"`effective_batch_size` is {batch}, but {ranks} ranks need a sample each: raise it")
        if batch is not None and size is not None and size > -(-batch // ranks):
            raise ValueError(
                f"`micro_batch_size` is {size}, but a rank has only {-(-batch // ranks)} of the {batch} samples of an "
                "update: lower it, or leave one of the two out"
            )
        return self


Engine = Literal["trace", "virtual"]
"""The maker of an estimate: see ``Estimate.engine``."""


class Verdict(StrEnum):
    """Result of an estimate for one micro-batch size."""

    FITS = "fits"
    """The whole interval of the estimate is within the limit. Of the virtual engine: its updates ran."""
    DOES_NOT_FIT = "does-not-fit"
    """The whole interval of the estimate is above the limit. Of the virtual engine: its updates ran out of memory."""
    UNCERTAIN = "uncertain"
    """The limit lies inside the interval: run `tune` to measure."""


class PeakBreakdown(Document):
    """Use of the allocated memory at its peak; the parts sum to ``PeakEstimate.allocated_bytes``."""

    parameters_bytes: NonNegativeInt
    """Parameters and buffers."""
    gradients_bytes: NonNegativeInt
    """Gradients, and their sums over micro-batches."""
    optimizer_state_bytes: NonNegativeInt
    """The optimizer's state, and moving averages of the weights."""
    activations_bytes: NonNegativeInt
    """Tensors that forward passes save for backward passes, and the batch."""
    temporaries_bytes: NonNegativeInt
    """Tensors that live within one pass or step."""
    workspace_bytes: NonNegativeInt
    """Workspaces that kernels and libraries take from the allocator."""


class PeakEstimate(Document):
    """The memory of one micro-batch size on one GPU: the allocator's, the process's outside of it, and their sum."""

    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    accumulates: bool
    """True if the update has several micro-batches, so that gradients stay while the next one runs."""
    verdict: Verdict
    """Result for this size."""
    allocated_bytes: NonNegativeInt
    """Most bytes held by tensors (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: NonNegativeInt
    """Most bytes held by the caching allocator, without memory pressure (`torch.cuda.max_memory_reserved`)."""
    capacity_bytes: NonNegativeInt
    """Fewest bytes with which a replay of the allocator succeeds, releasing its cache where needed. Of the virtual
    engine: ``reserved_bytes``."""
    outside_allocator_bytes: ByteInterval
    """Memory of the process outside the allocator: the CUDA context, and NCCL's buffers where there are several ranks.
    Neither ``allocated_bytes`` nor ``reserved_bytes`` has it, and it does not depend on the size."""
    device_bytes: ByteInterval
    """Memory that the card needs: the capacity and the memory outside the allocator. ``high`` includes memory that the
    card may lack (by its driver or ECC setting). The size fits surely where ``high`` is at most ``usable_bytes``, and
    does not fit where ``low`` is above."""
    thrashes: bool = False
    """True if the size is expected to fit only if the allocator releases its cache in every update (slow)."""
    breakdown: PeakBreakdown | None = None
    """Use of the allocated memory at its peak. None from the virtual engine, whose allocator does not know the use."""


class GpuEstimate(Document):
    """The estimate for one GPU."""

    gpu: str
    """Name in the catalogue, or the requested memory size."""
    usable_bytes: PositiveInt
    """Expected memory of the card, less the margin."""
    feasible: Verdict
    """Result for any micro-batch; also `uncertain` where the workload cannot be traced for this GPU, with a note."""
    largest_micro_batch_size: NonNegativeInt
    """The largest size expected to fit; 0 when none is, or the workload cannot be traced. Above 128 only even sizes are
    estimated, above 256 every fourth, and so on, besides the whole share of a rank."""
    surely_fits: NonNegativeInt | None = None
    """The largest size whose whole interval fits. None from the virtual engine, which runs sizes under one limit."""
    may_fit: NonNegativeInt | None = None
    """The largest size whose interval begins below the limit. None from the virtual engine."""
    probes: NonNegativeInt = 0
    """Updates of sizes and plans that the virtual engine ran, each in a process of its own; 0 of a trace."""
    peak: PeakEstimate | None = None
    """Memory at the requested size, else at the largest size expected to fit; at size 1 when none is. None where the
    workload cannot be traced for this GPU."""
    plan: Plan | None = None
    """The effective batch around the largest micro-batch, when one was requested and one fits. Left out, with a note
    of its steps, where it has more than 4,096 micro-batches over all ranks."""
    notes: tuple[str, ...] = ()
    """Notes on this estimate."""

    @property
    @override
    def headline(self) -> str:
        """The largest size expected to fit."""
        size = self.largest_micro_batch_size
        return f"{self.gpu}: {f'a micro-batch of {size:,} is' if size else 'no micro-batch is'} expected to fit"


class Estimate(Document):
    """Estimated memory of a workload, not measured."""

    measured: Literal[False] = False
    """Always false: an estimate is not a proof. Run a tuning to measure."""
    engine: Engine = "trace"
    """`trace`: updates were traced without tensors, and replayed in a model of torch's allocator. `virtual`: torch's
    CUDA build ran them on a virtual card, with its own allocator and without kernels. The service only traces."""
    decisions: Literal["cuda", "cpu"]
    """Device whose kernels were traced: `cpu` where this host cannot trace CUDA's (no C++ compiler), with a wider
    interval."""
    parameters: NonNegativeInt
    """Number of parameters."""
    gpus: tuple[GpuEstimate, ...]
    """Estimates by GPU, in the requested order."""
    versions: dict[str, str]
    """Versions of torch, transformers, Batchwright and Python with which the workload was traced: other versions may
    take other memory."""
    seconds: Annotated[float, Field(ge=0.0)]
    """Duration of the estimate."""
    notes: tuple[str, ...] = ()
    """Notes on the whole estimate."""

    @property
    @override
    def headline(self) -> str:
        """The largest size of each GPU."""
        return "; ".join(gpu.headline for gpu in self.gpus)
