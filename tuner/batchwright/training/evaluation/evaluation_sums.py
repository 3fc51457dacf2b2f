"""Sums of an evaluation: losses, weights and metrics of batches, of a rank, and of all ranks.

A figure is a sum divided by its weight over all held-out samples, so it does not depend on the size of batches or on
the number of ranks, if the loss is a sum over samples. Some are not: contrastive losses, the auxiliary loss of a
mixture of experts, and those of a ``collate`` that draws random numbers. Sums are in fp64.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from batchwright.errors import WorkloadError
from batchwright.schemas.dataset.evaluation_spec import REWARD_METRICS, MetricName
from batchwright.schemas.training import MicroBatchSplit, TrainedFigures
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
    counts: dict[str, float]
    """What metrics are computed from: sums over labels or preference pairs, by name."""
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


@dataclass
class BatchSums:
    """Sums over the batches of one rank so far, on the device."""

    library: LibraryMetrics
    """Counts of the metrics by ``torchmetrics``."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
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
        counts = _counts(scores)
        if isinstance(scores, LabelScores):
            self.library.add(scores)
        for name, loss_sum in sums.items():  # a batch without weight adds nothing, even if its loss is 0 / 0
            self.sums[name] = self.sums.get(name, 0.0) + torch.where(weights[name] != 0, loss_sum, 0.0)
            self.weights[name] = self.weights.get(name, 0.0) + weights[name]
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + count
        self.samples += samples

    def share(
        self, *, largest: int, splits: Sequence[MicroBatchSplit], failure: str | None, is_stopped: bool
    ) -> EvaluationShare:
        """This rank's part, for the other ranks."""
        return EvaluationShare(
            sums={name: float(value) for name, value in self.sums.items()},
            weights={name: float(value) for name, value in self.weights.items()},
            counts={name: float(value) for name, value in self.counts.items()},
            samples=self.samples,
            largest=largest,
            splits=tuple(splits),
            failure=failure,
            is_stopped=is_stopped,
        )


def _check_shapes(scores: LabelScores) -> None:
    """Check that there is a label for each row of logits, and a logit for each of two classes or more."""
    logits, labels = tuple(scores.logits.shape), tuple(scores.labels.shape)
    if not logits or logits[:-1] != labels or logits[-1] < 2:  # noqa: PLR2004 - classes
        raise WorkloadError(
            f"score() returned logits of shape {logits} and labels of shape {labels}: logits must have the shape of "
            "the labels, and behind it a dimension of at least two classes"
        )


def _counts(scores: Scores | None) -> dict[str, Tensor]:
    """Labels that count, and those that have the highest logit; pairs whose chosen side wins, and their margins."""
    if isinstance(scores, LabelScores):
        counted = scores.labels != IGNORED_LABEL
        return {"labels": counted.sum(), "correct": ((scores.logits.argmax(-1) == scores.labels) & counted).sum()}
    if scores is None:
        return {}
    margins = scores.rewards[:, 0] - scores.rewards[:, 1]
    return {"reward_accuracy": (margins > 0).sum(), "reward_margin": margins.double().sum()}


def figures(
    shares: Sequence[EvaluationShare], metrics: Sequence[MetricName], of_library: Mapping[str, float]
) -> TrainedFigures:
    """Divide the sums of all ranks by their weights; None where a figure is not finite, or has no sample."""
    sums, weights = sum_by_name(share.sums for share in shares), sum_by_name(share.weights for share in shares)
    means = {name: total / weights[name] if weights[name] else math.nan for name, total in sums.items()}
    weighed = [mean for name, mean in means.items() if weights[name]]  # the others are zero, as in training
    return TrainedFigures(
        loss=finite_or_none(sum(weighed)) if weighed else None,
        terms={name: finite_or_none(mean) for name, mean in means.items()},
        metrics={name: finite_or_none(_metric(name, means, shares, of_library)) for name in metrics},
    )


def _metric(
    name: MetricName, means: Mapping[str, float], shares: Sequence[EvaluationShare], of_library: Mapping[str, float]
) -> float:
    counts = sum_by_name(share.counts for share in shares)
    if name == "accuracy":
        return counts["correct"] / counts["labels"] if counts.get("labels") else math.nan
    if name in REWARD_METRICS:
        pairs = sum(share.samples for share in shares)
        return counts[name] / pairs if pairs else math.nan
    if name != "perplexity":
        return of_library.get(name, math.nan)
    mean = next(iter(means.values()), math.nan)
    return math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf
