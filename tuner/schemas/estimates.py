"""Requests for estimates of what fits on a GPU, which need not be there, and their results. Pure data, no torch."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from tuner.schemas.base import Document, NonNegativeInt, PositiveInt
from tuner.schemas.gpus import ByteInterval
from tuner.schemas.plans import Plan
from tuner.schemas.requests import LARGEST_EFFECTIVE_BATCH_SIZE
from tuner.schemas.workload import WorkloadSpec

_SHOWN_LENGTH = 60


class EstimateRequest(Document):
    """Estimate the memory of a workload on GPUs, and the plan that would fit."""

    spec: WorkloadSpec
    """What is trained."""
    gpus: Annotated[tuple[str, ...], Field(min_length=1, max_length=64, examples=[["H100-80GB", "A10G"]])]
    """Names of the catalogue (`GET /v1/gpus`), or a memory size such as `48GiB` for a card that is not in it; each
    once."""
    micro_batch_size: Annotated[int, Field(ge=1, le=LARGEST_EFFECTIVE_BATCH_SIZE)] | None = None
    """Judge this micro-batch size; the largest that fits is found when absent, and reported in any case."""
    effective_batch_size: Annotated[int, Field(ge=1, le=LARGEST_EFFECTIVE_BATCH_SIZE)] | None = None
    """Samples per optimizer update over all ranks: plan it around the largest micro-batch."""
    memory_margin: Annotated[float, Field(ge=0.0, le=0.5)] = 0.03
    """Share of a card's memory to leave free."""
    allocator: Literal["default", "expandable-segments"] = "default"
    """How torch's caching allocator is set: `expandable-segments` is `PYTORCH_ALLOC_CONF=expandable_segments:True`."""
    timeout_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 120.0
    """Time after which tracing is given up."""

    @field_validator("gpus")
    @classmethod
    def _each_once(cls, gpus: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted(name for name, times in Counter(gpus).items() if times > 1)
        if repeated:
            names = ", ".join(repr(name[:_SHOWN_LENGTH]) for name in repeated)
            raise ValueError(f"{names} named more than once: name each GPU once, since its estimate would be the same")
        return gpus

    @model_validator(mode="after")
    def _micro_batch_is_in_the_share(self) -> Self:
        ranks, batch, size = self.spec.parallelism.world_size, self.effective_batch_size, self.micro_batch_size
        if batch is not None and batch < ranks:
            raise ValueError(f"`effective_batch_size` is {batch}, but {ranks} ranks need a sample each: raise it")
        if batch is not None and size is not None and size > -(-batch // ranks):
            raise ValueError(
                f"`micro_batch_size` is {size}, but a rank has only {-(-batch // ranks)} of the {batch} samples of an "
                "update: lower it, or leave one of the two out"
            )
        return self


class Verdict(StrEnum):
    """What an estimate says of a micro-batch size."""

    FITS = "fits"
    """Also if the estimate is as far off as its interval allows."""
    DOES_NOT_FIT = "does-not-fit"
    """Likewise."""
    UNCERTAIN = "uncertain"
    """The limit lies inside the interval: only a probe can tell."""


class PeakBreakdown(Document):
    """What holds the memory at the moment when most is allocated."""

    parameters_bytes: NonNegativeInt
    """Parameters and buffers."""
    gradients_bytes: NonNegativeInt
    """Gradients and the sums that accumulation keeps of them."""
    optimizer_state_bytes: NonNegativeInt
    """The optimizer's state, and moving averages of the weights."""
    activations_bytes: NonNegativeInt
    """What forward passes leave for backward passes, and the batch."""
    temporaries_bytes: NonNegativeInt
    """Alive within one pass or step only."""
    workspace_bytes: NonNegativeInt
    """What kernels and libraries take from the allocator by themselves."""
    outside_allocator_bytes: NonNegativeInt
    """The context and what else is no allocation of torch's."""


class PeakEstimate(Document):
    """The memory of one micro-batch size on one GPU."""

    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    accumulates: bool
    """Whether the update has several micro-batches, so that gradients stay while the next one runs."""
    verdict: Verdict
    """Whether it fits."""
    allocated_bytes: NonNegativeInt
    """Most bytes held by tensors (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: NonNegativeInt
    """Most bytes held by the caching allocator, when nothing presses it (`torch.cuda.max_memory_reserved`)."""
    capacity_bytes: NonNegativeInt
    """Fewest bytes with which a replay of the allocator got through, giving back its cache where it must."""
    device_bytes: ByteInterval
    """The capacity and what lies outside the allocator: what the card needs to have. What it may have less than
    expected (by its driver, its ECC setting) counts as needed in ``high``. It fits surely where ``high`` is within
    ``usable_bytes``, and does not where ``low`` is above."""
    thrashes: bool = False
    """Whether it is expected to fit only because the allocator gives back its cache in every update: that is slow."""
    breakdown: PeakBreakdown
    """At the moment when most is allocated; the parts sum to ``allocated_bytes`` and what is outside."""


class GpuEstimate(Document):
    """The estimate for one GPU."""

    gpu: str
    """Its name in the catalogue, or the requested memory size."""
    usable_bytes: PositiveInt
    """What the card is expected to offer, the margin taken off."""
    feasible: Verdict
    """Whether any micro-batch fits; `uncertain` also where the workload cannot be traced for this GPU, with a note."""
    largest_micro_batch_size: NonNegativeInt
    """The largest size expected to fit; 0 when none is, or nothing is known. Above 128 only even sizes are looked at,
    above 256 every fourth, and so on, beside the whole share of a rank."""
    surely_fits: NonNegativeInt
    """The largest size whose whole interval fits."""
    may_fit: NonNegativeInt
    """The largest size whose interval begins below the limit."""
    peak: PeakEstimate | None = None
    """At the requested size, else at the largest expected to fit; at size 1 when none is. None where the workload
    cannot be traced for this GPU."""
    plan: Plan | None = None
    """The effective batch around the largest micro-batch, when one was requested and one fits. Left out, with a note
    of its steps, where it has more than 4,096 micro-batches over all ranks."""
    notes: tuple[str, ...] = ()
    """What the reader should know of this estimate."""


class Estimate(Document):
    """What a workload would take: estimated, not measured."""

    measured: Literal[False] = False
    """An estimate is no proof: a tuning measures."""
    decisions: Literal["cuda", "cpu"]
    """Whose kernels were followed: `cpu` where this host cannot follow CUDA's (no C++ compiler); the interval is wider
    then."""
    parameters: NonNegativeInt
    """Number of parameters."""
    gpus: tuple[GpuEstimate, ...]
    """By GPU, in the requested order."""
    versions: dict[str, str]
    """Of torch, transformers and Python here: other versions may take other memory."""
    seconds: Annotated[float, Field(ge=0.0)]
    """Time it took."""
    notes: tuple[str, ...] = ()
    """What the reader should know."""
