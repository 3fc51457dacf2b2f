"""Losses and weights of an accumulation window, summed on one rank and over all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from batchwright.errors import WorkloadError
from batchwright.html_view import html_view
from batchwright.planning.noise_scale import GradientPart, NoiseMeasurement
from batchwright.schemas.plans import format_sizes
from batchwright.schemas.training import MicroBatchSplit
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.units import counted
from batchwright.workloads.base import Batch, Loss, LossTerms

ONLY_TERM = "loss"
"""Name of the term of a loss that is not named."""
Weigh: TypeAlias = "Callable[[Batch], Mapping[str, float] | float]"
"""The weight that the loss of a micro-batch will have, without a forward pass."""
Weight: TypeAlias = "Tensor | float"
"""A number, or an fp64 scalar on a device, to avoid a synchronization."""
_NEEDS_WEIGHTS = (
    "several loss terms ({terms}) need their weights beforehand, from `weigh` or a workload's loss_weights(batch): "
    "each term is divided by its own weight over the whole window, known before the first backward pass"
)
_WEIGHT_TOLERANCE = 1e-4
"""Relative: weights may have been summed in fp32."""
_NARROWER_THAN_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class UpdateReport:
    """Result of one update, over all ranks. Losses are means over the window's weight."""

    terms: dict[str, float]
    weights: dict[str, float]
    """Weight of the window per term: tokens, samples."""
    gradient_norm: float | None
    """L2 norm of the whole gradient before clipping; None when the norm was not finite."""
    skipped: bool
    """True if no step was made: the scaler saw a gradient that is not finite, or the window weighed nothing."""
    micro_batch_sizes: tuple[int, ...]
    """Sizes of this rank's micro-batches, in the order that they ran in."""
    splits: tuple[MicroBatchSplit, ...] = ()
    """Micro-batches of any rank that did not fit and ran in smaller parts."""
    samples: int = 0
    """Samples of the window over all ranks."""
    gradient_parts: tuple[GradientPart, ...] = ()
    """Parts whose gradients were measured, if the gradient noise was to be measured."""
    noise: NoiseMeasurement | None = None
    """Gradient noise of this update; None where it was not measured, or the update has nothing to compare."""

    @property
    def loss(self) -> float:
        """The sum of the terms' means: the loss that the update minimizes."""
        return sum(self.terms.values())

    def _repr_html_(self) -> str:
        """The view of the report in a notebook."""
        sizes = format_sizes(self.micro_batch_sizes)
        made = "no step was made" if self.skipped else f"loss {self.loss:.4g}"
        return html_view(f"{made}: {sizes} of {counted(self.samples, 'sample')}", vars(self))


@dataclass
class LossWindow:
    """Losses and weights that one rank has summed in an accumulation window so far, in fp64."""

    totals: Mapping[str, float] | None
    """Weight per term of the whole window over all ranks; None if it is only known after the forward passes."""
    weigh: Weigh | None = None
    """Weights without a forward pass, if ``totals`` is known."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Summed loss per term, kept on the device."""
    weights: dict[str, Weight] = field(default_factory=dict)
    """Weight per term that forward passes have reported."""
    provisional: float = 0.0
    """The divisor used until the true one is known: the first weight that is not zero, or a power of two near it."""
    sizes: list[int] = field(default_factory=list)
    """Sizes of the micro-batches that have run."""

    def add(self, terms: Mapping[str, tuple[Tensor, Weight]], size: int) -> None:
        """Add the terms, without their graph, of a micro-batch that has run."""
        for name, (loss_sum, weight) in terms.items():
            if name in self.sums:
                self.sums[name].add_(loss_sum)
            else:
                self.sums[name] = loss_sum.to(torch.float64, copy=True)
            self.weights[name] = self.weights.get(name, 0.0) + weight
        self.sizes.append(size)

    def weight(self, name: str, weight: Tensor | float, micro_batch: MicroBatch) -> tuple[Weight, bool]:
        """The weight that a term has reported, and whether it is zero.

        A tensor on a GPU is only read if the weight is not known beforehand, because reading it waits for the GPU.

        Raises:
            WorkloadError: as ``as_weight``.
        """
        if self.weigh is not None and isinstance(weight, Tensor) and (weight.is_cuda or _is_narrow(weight)):
            known = named_weights(self.weigh(micro_batch.batch)).get(name, 0.0)
            return known if _is_narrow(weight) else weight.detach().double(), not known
        number = as_weight(name, weight)
        return number, not number

    def divisor(self, name: str, weight: Weight, loss_sum: Tensor) -> float:
        """The divisor of the term's sum before the backward pass.

        Args:
            name: the term.
            weight: its weight in the micro-batch, not zero, by which a single term is divided until the total is known.
            loss_sum: a narrow sum is divided by a power of two, which its type has exactly.
        """
        if self.totals is not None:
            return self.totals[name]
        if not self.provisional:
            self.provisional = 2.0 ** round(math.log2(weight)) if _is_narrow(loss_sum) else float(weight)
        return self.provisional

    def reset(self) -> None:
        """Reset all but the divisor."""
        self.sums, self.weights, self.sizes = {}, {}, []


@dataclass(frozen=True)
class MeasuredPart:
    """The part of a window whose gradient this rank has measured, sent to the other ranks."""

    squared_norm: float
    """Squared norm of its gradient: of the mean where the window's weights are known beforehand, else of the sum."""
    weights: dict[str, float]
    """Weight of the part per loss term."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a window, sent to the other ranks."""

    sums: dict[str, float]
    weights: dict[str, float]
    present: list[bool]
    """Flags for the parameters: True where a parameter has a gradient."""
    splits: list[MicroBatchSplit]
    samples: int
    """Samples of this rank."""
    measured: MeasuredPart | None
    """The part whose gradient was measured, if it was to be."""


def named_weights(weights: Mapping[str, float] | float) -> dict[str, float]:
    """The weights that ``weigh`` has returned, by term.

    Raises:
        WorkloadError: as ``as_weight``.
    """
    named = weights if isinstance(weights, Mapping) else {ONLY_TERM: weights}
    return {name: as_weight(name, weight) for name, weight in named.items()}


def as_weight(name: str, weight: object) -> float:
    """The weight of a loss term as a number.

    Raises:
        WorkloadError: when the weight is not a finite number of at least 0, or a count in bf16 or fp16 above the last
            whole number that the type has exactly (256 and 2,048).
    """
    if isinstance(weight, Tensor) and (weight.numel() != 1 or weight.is_complex()):
        raise WorkloadError(
            f"the weight of loss term `{name}` is a {weight.dtype} tensor of shape {tuple(weight.shape)}, and must be "
            "one number, such as `mask.sum()`"
        )
    try:
        number = float(weight.detach() if isinstance(weight, Tensor) else weight)  # type: ignore[arg-type] # of any type of numbers
    except (TypeError, ValueError):
        raise WorkloadError(f"the weight of loss term `{name}` is {weight!r}, and must be a number") from None
    if not 0.0 <= number < math.inf:
        raise WorkloadError(f"the weight of loss term `{name}` is {number}, and must be a finite number of at least 0")
    if isinstance(weight, Tensor) and _is_narrow(weight) and number > (last := 2 / torch.finfo(weight.dtype).eps):
        raise WorkloadError(
            f"the weight of loss term `{name}` is {number:g} in {weight.dtype}, which has whole numbers only up to "
            f"{last:g}: count in fp32, as in `mask.sum(dtype=torch.float32)`"
        )
    return number


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize < _NARROWER_THAN_BYTES and tensor.is_floating_point()


def finite_or_none(value: float) -> float | None:
    """``value``; None if it is infinite or NaN."""
    return value if math.isfinite(value) else None


def sum_by_name(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each name's figures."""
    total: dict[str, float] = defaultdict(float)
    for named in figures:
        for name, value in named.items():
            total[name] += float(value)
    return dict(total)


def agreed_weights(beforehand: Mapping[str, float] | None, reported: Mapping[str, float]) -> Mapping[str, float]:
    """The weight of each term over the whole window.

    Args:
        beforehand: weights known before the first forward pass, if any were.
        reported: weights that the forward passes have reported.

    Raises:
        WorkloadError: when the two differ, or when several terms have no weights beforehand.
    """
    if beforehand is None:
        if len(reported) > 1:
            raise WorkloadError(_NEEDS_WEIGHTS.format(terms=", ".join(reported)))
        return reported
    for name, weight in reported.items():
        if not math.isclose(weight, beforehand[name], rel_tol=_WEIGHT_TOLERANCE):
            raise WorkloadError(
                f"loss_weights() gives `{name}` a weight of {beforehand[name]:g} over the window, loss_terms() one of "
                f"{weight:g}: the two must be equal"
            )
    return beforehand


def check_terms(terms: LossTerms, totals: Mapping[str, float] | None) -> None:
    """Check the terms that a loss returned against the weights known beforehand.

    Raises:
        WorkloadError: naming the term that breaks the contract.
    """
    check_pairs(terms)
    if totals is None and len(terms) > 1:
        raise SeveralTermsError(_NEEDS_WEIGHTS.format(terms=", ".join(terms)))
    if totals is not None and set(terms) - set(totals):
        raise WorkloadError(f"loss_weights() names {sorted(totals)}, but the loss returned {sorted(terms)}")


class SeveralTermsError(WorkloadError):
    """Several loss terms, whose weights over the window are not known yet."""


def named_terms(loss: Loss, samples: int | None) -> LossTerms:
    """The terms of what a loss returned for a micro-batch.

    Args:
        loss: a mean over the samples, a pair of a sum and its weight, or such pairs by name.
        samples: samples of the micro-batch, which are the weight of a mean; None if they are not known.

    Raises:
        WorkloadError: when it is a value for each sample, something else, or a mean of an unknown number of samples.
    """
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], Tensor):  # noqa: PLR2004 - (loss_sum, weight)
        return {ONLY_TERM: loss}
    if not isinstance(loss, Tensor) and isinstance(getattr(loss, "loss", None), Tensor):
        raise WorkloadError(
            f"loss(model, batch) returned the model's output ({type(loss).__name__}): return its `.loss` if that is "
            "the mean over the samples; if it is a mean over tokens, return (loss_sum, tokens)"
        )
    if isinstance(loss, (dict, Mapping)):
        return loss
    if not isinstance(loss, Tensor):
        raise WorkloadError(
            "loss(model, batch) must return the mean loss, or (loss_sum, weight), or a dict of such pairs by name, "
            f"not {type(loss).__name__}"
        )
    if loss.dim():  # one value for each sample, which a batch of one sample would hide
        raise WorkloadError(
            f"loss(model, batch) returned a tensor of shape {tuple(loss.shape)}: return a scalar, such as its mean "
            "over the samples, or (loss_sum, weight)"
        )
    if samples is None:
        raise WorkloadError(
            "the loss returned a mean, and the number of samples of the batch is not known: return (loss_sum, weight), "
            "or pass `samples=`, a function that returns the number of samples of a batch"
        )
    return {ONLY_TERM: (loss.to(torch.promote_types(loss.dtype, torch.float32)) * samples, samples)}


def check_pairs(terms: LossTerms, *, needs_gradient: bool = True) -> None:
    """Check that each term is a summed loss with its weight.

    Args:
        terms: the terms that a loss returned.
        needs_gradient: whether the sums must have a gradient, as in training.

    Raises:
        WorkloadError: naming the first term that is not.
    """
    if not isinstance(terms, (dict, Mapping)) or not terms:
        returned = "no term" if isinstance(terms, Mapping) else f"a {type(terms).__name__}"
        raise WorkloadError(f"the loss returned {returned}: it must be (loss_sum, weight), or such pairs by name")
    for name, pair in terms.items():
        if not isinstance(pair, tuple) or len(pair) != 2:  # noqa: PLR2004 - (loss_sum, weight)
            raise WorkloadError(f"loss term `{name}` must be (loss_sum, weight), got {type(pair).__name__}")
        if not isinstance(pair[0], Tensor) or pair[0].numel() != 1 or (needs_gradient and not pair[0].requires_grad):
            described = "a scalar tensor with a gradient" if needs_gradient else "a scalar tensor"
            raise WorkloadError(f"the loss sum of `{name}` must be {described}")
        if pair[0].is_complex():
            raise WorkloadError(
                f"the loss sum of `{name}` is complex ({pair[0].dtype}): return its `.real` or `.abs()`"
            )
