"""What a window gathers: summed losses and their weights, on one rank and over all of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from tuner.errors import WorkloadError
from tuner.schemas.training import MicroBatchSplit
from tuner.workloads.base import LossTerms

_NEEDS_WEIGHTS = (
    "several loss terms ({terms}) need their weights beforehand, from `weigh` or a workload's loss_weights(batch): "
    "each term is divided by its own weight over the whole window, known before the first backward pass"
)
_WEIGHT_TOLERANCE = 1e-4
"""Relative: weights may have been summed in fp32."""


@dataclass(frozen=True)
class UpdateReport:
    """What one update did, over all ranks. Losses are means over the window's weight."""

    terms: dict[str, float]
    weights: dict[str, float]
    """Per term what the window weighed: tokens, samples."""
    gradient_norm: float | None
    """L2 norm of the whole gradient before clipping; none when it was not finite."""
    skipped: bool
    """Whether no step was made: the scaler saw a gradient that is not finite, or the window weighed nothing."""
    micro_batch_sizes: tuple[int, ...]
    """Sizes of this rank's micro-batches, in the order they went through."""
    splits: tuple[MicroBatchSplit, ...] = ()
    """Micro-batches of any rank that did not fit and went through in smaller parts."""

    @property
    def loss(self) -> float:
        """The sum of the terms' means: what the update descended."""
        return sum(self.terms.values())


@dataclass
class Window:
    """What one rank has gathered of a window so far."""

    totals: Mapping[str, float] | None
    """Weight per term of the whole window over all ranks; none while only forward passes can tell."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Per term the summed loss, kept on the device."""
    weights: dict[str, Tensor | float] = field(default_factory=dict)
    """Per term the weight that forward passes have told; tensors stay on the device, so that nothing waits for it."""
    provisional: float = 0.0
    """The divisor in use while the true one is not known: the first weight seen that is not zero."""
    sizes: list[int] = field(default_factory=list)
    splits: list[MicroBatchSplit] = field(default_factory=list)

    def add(self, terms: LossTerms, size: int) -> None:
        """One more micro-batch has gone through; ``terms`` are without their graph."""
        for name, (loss_sum, weight) in terms.items():
            self.sums[name] = self.sums[name] + loss_sum if name in self.sums else loss_sum
            self.weights[name] = self.weights.get(name, 0.0) + weight
        self.sizes.append(size)

    def divisor(self, name: str, weight: Tensor | float) -> float:
        """What the term's sum is divided by before the backward pass."""
        if self.totals is not None:
            return self.totals[name]
        self.provisional = self.provisional or float(weight)
        return self.provisional

    def forget(self) -> None:
        """Back to the beginning; the splits stay."""
        self.sums, self.weights, self.sizes = {}, {}, []


@dataclass(frozen=True)
class Share:
    """What a rank tells the others of its part of a window."""

    sums: dict[str, float]
    weights: dict[str, float]
    present: list[bool]
    splits: list[MicroBatchSplit]


def sum_by_name(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each name's figures."""
    total: dict[str, float] = defaultdict(float)
    for named in figures:
        for name, value in named.items():
            total[name] += float(value)
    return dict(total)


def agreed_weights(beforehand: Mapping[str, float] | None, told: Mapping[str, float]) -> Mapping[str, float]:
    """The weight of each term over the whole window, from before the first forward pass and from all of them.

    Raises:
        WorkloadError: when the two differ, or when terms without weights beforehand have different names.
    """
    if beforehand is None:
        if len(told) > 1:
            raise WorkloadError(_NEEDS_WEIGHTS.format(terms=", ".join(told)))
        return told
    for name, weight in told.items():
        if not math.isclose(weight, beforehand[name], rel_tol=_WEIGHT_TOLERANCE):
            raise WorkloadError(
                f"loss_weights() gives `{name}` a weight of {beforehand[name]:g} over the window, loss_terms() one of "
                f"{weight:g}: they must be the same"
            )
    return beforehand


def check_terms(terms: LossTerms, totals: Mapping[str, float] | None) -> None:
    """Check what a loss returned, against the weights known beforehand.

    Raises:
        WorkloadError: naming the term that breaks the contract.
    """
    check_pairs(terms)
    if totals is None and len(terms) > 1:
        raise WorkloadError(_NEEDS_WEIGHTS.format(terms=", ".join(terms)))
    if totals is not None and set(terms) - set(totals):
        raise WorkloadError(f"loss_weights() names {sorted(totals)}, but the loss returned {sorted(terms)}")


def check_pairs(terms: LossTerms) -> None:
    """Check that each term is a summed loss with its weight.

    Raises:
        WorkloadError: naming the term that is not.
    """
    if not isinstance(terms, (dict, Mapping)) or not terms:
        raise WorkloadError("the loss returned no term: it must be (loss_sum, weight), or named terms of such pairs")
    for name, pair in terms.items():
        if not isinstance(pair, tuple) or len(pair) != 2:  # noqa: PLR2004 - (loss_sum, weight)
            raise WorkloadError(f"loss term `{name}` must be (loss_sum, weight), got {type(pair).__name__}")
        if not isinstance(pair[0], Tensor) or pair[0].numel() != 1 or not pair[0].requires_grad:
            raise WorkloadError(f"the loss sum of `{name}` must be a scalar tensor with a gradient")
