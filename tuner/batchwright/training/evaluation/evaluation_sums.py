"""Sums of an evaluation: losses, weights and metrics of batches, of a rank, and of all ranks.

A figure is a sum divided by its weight over all held-out samples, so it does not depend on the size of batches or on
the number of ranks, if the loss is a sum over samples. Some are not: contrastive losses, the auxiliary loss of a
mixture of experts, and those of a ``collate`` that draws random numbers. Sums are in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from batchwright.errors import WorkloadError
from batchwright.schemas.dataset.evaluation_spec import REWARD_METRICS, MetricName
from batchwright.schemas.training import MicroBatchSplit
from batchwright.training.evaluation.library_metrics import LibraryMetrics
from batchwright.training.micro_batches.loss_window import check_pairs, finite_or_none, sum_by_name
from batchwright.workloads.base import IGNORED_LABEL, LabelScores, LossTerms, RewardScores

Scores: TypeAlias = LabelScores | RewardScores
"""The result of a batch that metrics are computed from."""
_LARGEST_EXPONENT = math.log(1e300)
"""Mean loss above which a perplexity is infinite for a reader."""


@dataclass(frozen=True)
class EvaluationShare:
    """A rank's part of an evaluation, sent to the other ranks."""

    sums: dict[str, float]
    """Summed loss of each term."""
    weights: dict[str, float]
    """Weight of each term."""
    correct: float
    """Labels that have the highest logit."""
    labels: float
    """Labels that are not ignored."""
    samples: int
    """Samples of this rank that were evaluated."""
    largest: int
    """Samples of the largest batch that may still be tried."""
    splits: tuple[MicroBatchSplit, ...]
    """Batches that did not fit."""
    failure: str | None
    """Message of the device, if a single sample did not fit."""
    is_stopped: bool
    """True if the run must stop, and the evaluation was abandoned."""
    won: float = 0.0
    """Preference pairs whose chosen completion has the larger reward."""
    margin: float = 0.0
    """Sum of the differences of the rewards of preference pairs."""


@dataclass
class BatchSums:
    """Sums over the batches of one rank so far, on the device."""

    library: LibraryMetrics
    """Counts of the metrics by ``torchmetrics``."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    correct: Tensor | float = 0.0
    labels: Tensor | float = 0.0
    won: Tensor | float = 0.0
    margin: Tensor | float = 0.0
    samples: int = 0

    def add(self, terms: LossTerms, scores: Scores | None, samples: int) -> None:
        """Add a batch. All figures are computed before any is added, since computing them may run out of memory.

        Raises:
            WorkloadError: naming the loss term, or the shapes of ``scores``, that break the contract.
        """
        check_pairs(terms, needs_gradient=False)
        if isinstance(scores, LabelScores):
            _check_shapes(scores)
        sums = {name: loss_sum.double().reshape(()) for name, (loss_sum, _) in terms.items()}
        weights = {
            name: torch.as_tensor(weight, dtype=torch.float64, device=sums[name].device)
            for name, (_, weight) in terms.items()
        }
        correct, labels = _correct(scores) if isinstance(scores, LabelScores) else (0.0, 0.0)
        won, margin = _preferred(scores) if isinstance(scores, RewardScores) else (0.0, 0.0)
        if isinstance(scores, LabelScores):
            self.library.add(scores)
        for name, loss_sum in sums.items():  # a batch without weight adds nothing, even if its loss is 0 / 0
            self.sums[name] = self.sums.get(name, 0.0) + torch.where(weights[name] != 0, loss_sum, 0.0)
            self.weights[name] = self.weights.get(name, 0.0) + weights[name]
        self.correct, self.labels = self.correct + correct, self.labels + labels
        self.won, self.margin = self.won + won, self.margin + margin
        self.samples += samples

    def share(
        self, *, largest: int, splits: Sequence[MicroBatchSplit], failure: str | None, is_stopped: bool
    ) -> EvaluationShare:
        """This rank's part, for the other ranks."""
        return EvaluationShare(
            sums={name: float(value) for name, value in self.sums.items()},
            weights={name: float(value) for name, value in self.weights.items()},
            correct=float(self.correct),
            labels=float(self.labels),
            samples=self.samples,
            largest=largest,
            splits=tuple(splits),
            failure=failure,
            is_stopped=is_stopped,
            won=float(self.won),
            margin=float(self.margin),
        )


def _check_shapes(scores: LabelScores) -> None:
    """Check that there is a label for each row of logits, and a logit for each of two classes or more.

    Raises:
        WorkloadError: giving the shapes.
    """
    logits, labels = tuple(scores.logits.shape), tuple(scores.labels.shape)
    if not logits or logits[:-1] != labels or logits[-1] < 2:  # noqa: PLR2004 - classes
        raise WorkloadError(
            f"score() returned logits of shape {logits} and labels of shape {labels}: logits must have the shape of "
            "the labels, and behind it a dimension of at least two classes"
        )


def _correct(scores: LabelScores) -> tuple[Tensor, Tensor]:
    """Numbers of the labels that have the highest logit, and of all labels that are not ignored."""
    counted = scores.labels != IGNORED_LABEL
    return ((scores.logits.argmax(-1) == scores.labels) & counted).sum(), counted.sum()


def _preferred(scores: RewardScores) -> tuple[Tensor, Tensor]:
    """Number of the pairs whose chosen completion has the larger reward, and the sum of the differences."""
    margins = scores.rewards[:, 0] - scores.rewards[:, 1]
    return (margins > 0).sum(), margins.double().sum()


@dataclass(frozen=True)
class EvaluationFigures:
    """Figures of an evaluation over all ranks; None where a figure is not finite, or has no sample."""

    terms: dict[str, float | None]
    weights: dict[str, float]
    loss: float | None
    metrics: dict[str, float | None]


def figures(
    shares: Sequence[EvaluationShare], metrics: Sequence[MetricName], of_library: Mapping[str, float]
) -> EvaluationFigures:
    """Divide the sums of all ranks by their weights.

    Args:
        shares: the parts of all ranks.
        metrics: the requested metrics.
        of_library: the figures of those that ``torchmetrics`` has computed.
    """
    sums, weights = sum_by_name(share.sums for share in shares), sum_by_name(share.weights for share in shares)
    means = {name: total / weights[name] if weights[name] else math.nan for name, total in sums.items()}
    weighed = [mean for name, mean in means.items() if weights[name]]  # the others are zero, as in training
    return EvaluationFigures(
        terms={name: finite_or_none(mean) for name, mean in means.items()},
        weights=weights,
        loss=finite_or_none(sum(weighed)) if weighed else None,
        metrics={name: finite_or_none(_metric(name, means, shares, of_library)) for name in metrics},
    )


def _metric(
    name: MetricName, means: Mapping[str, float], shares: Sequence[EvaluationShare], of_library: Mapping[str, float]
) -> float:
    if name == "accuracy":
        labels = sum(share.labels for share in shares)
        return sum(share.correct for share in shares) / labels if labels else math.nan
    if name in REWARD_METRICS:
        total = sum(share.won if name == "reward_accuracy" else share.margin for share in shares)
        pairs = sum(share.samples for share in shares)
        return total / pairs if pairs else math.nan
    if name != "perplexity":
        return of_library.get(name, math.nan)
    mean = next(iter(means.values()), math.nan)
    return math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf
