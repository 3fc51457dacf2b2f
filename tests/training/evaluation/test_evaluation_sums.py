"""Sums of an evaluation: terms without a weight, and scores that break the contract."""

import pytest
import torch
from torch import Tensor

from batchwright.errors import WorkloadError
from batchwright.schemas.training import TrainedFigures
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.evaluation.evaluation_sums import BatchSums, figures
from batchwright.training.evaluation.library_metrics import LibraryMetrics
from batchwright.workloads.base import LabelScores, LossTerms, RewardScores


def sums_of(terms: LossTerms, scores: LabelScores | RewardScores | None = None) -> BatchSums:
    """The sums of a batch of four samples."""
    sums = BatchSums(LibraryMetrics((), Ranks()))
    sums.add(terms, scores, 4)
    return sums


def figures_of(terms: LossTerms) -> TrainedFigures:
    """The figures of a batch."""
    share = sums_of(terms).share(largest=4, splits=(), failure=None, is_stopped=False)
    return figures([share], ("perplexity",), {})


def test_a_term_without_a_weight_is_left_out_of_the_loss() -> None:
    """As it is zero in training; where no term has one, there is no loss."""
    empty = (torch.tensor(0.0), 0)
    found = figures_of({"next_token": (torch.tensor(6.0), 4), "auxiliary": empty})
    assert found.loss == 1.5
    assert found.terms == {"next_token": 1.5, "auxiliary": None}
    found = figures_of({"next_token": empty, "auxiliary": empty})
    assert (found.loss, found.metrics) == (None, {"perplexity": None})


def test_a_batch_without_a_weight_adds_nothing_to_the_others() -> None:
    """Its loss is 0 / 0, before or after a batch with a weight."""
    nothing, counted = (torch.tensor(torch.nan), torch.tensor(0)), (torch.tensor(6.0), torch.tensor(4))
    for batches in ((nothing, counted), (counted, nothing)):
        sums = BatchSums(LibraryMetrics((), Ranks()))
        for batch in batches:
            sums.add({"next_token": batch}, None, 4)
        share = sums.share(largest=4, splits=(), failure=None, is_stopped=False)
        assert figures([share], (), {}).loss == 1.5


def test_equal_rewards_are_no_preference() -> None:
    """A pair counts as won where the chosen completion has the larger reward; margins are of all pairs and ranks."""
    terms = {"preference": (torch.tensor(4.0), 4.0)}
    rewards = torch.tensor([[1.0, 0.0], [0.5, 0.5], [-1.0, 2.0], [3.0, 1.0]])
    sums = sums_of(terms, RewardScores(terms, rewards))
    share = sums.share(largest=4, splits=(), failure=None, is_stopped=False)
    found = figures([share, share], ("reward_accuracy", "reward_margin"), {})
    assert found.metrics == {"reward_accuracy": 0.5, "reward_margin": 0.0}
    empty = BatchSums(LibraryMetrics((), Ranks())).share(
        largest=1, splits=(), failure="out of memory", is_stopped=False
    )
    nothing = figures([empty, empty], ("reward_accuracy", "reward_margin"), {})
    assert nothing.metrics == {"reward_accuracy": None, "reward_margin": None}


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 1)),
        (torch.zeros(4, 1), torch.zeros(4)),
        (torch.zeros(4, 5, 3), torch.zeros(4, 4)),
        (torch.zeros(()), torch.zeros(())),
    ],
)
def test_scores_of_other_shapes_are_refused(logits: Tensor, labels: Tensor) -> None:
    """Their shapes are named: broadcast against each other they would give a wrong accuracy."""
    terms = {"loss": (torch.tensor(1.0), 4)}
    with pytest.raises(WorkloadError, match="logits of shape"):
        sums_of(terms, LabelScores(terms, logits, labels.long()))
