"""Metrics of ``torchmetrics``: equal for any batch size and number of ranks, and refused where they are of no use."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchwright.cli.running import check_run
from batchwright.errors import SpecError
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.evaluation.library_metrics import LibraryMetrics
from batchwright.workloads.base import IGNORED_LABEL, LabelScores
from tests.support.factories import mlp_spec, recommendation
from tests.support.whole_runs import ENVIRONMENT, run_to_end

pytestmark = pytest.mark.usefixtures("forked")
NAMES = ("accuracy", "f1", "precision", "recall")


def labelled(count: int) -> tuple[Tensor, Tensor]:
    """Logits of four classes, and labels of which some are ignored and class 3 is rare."""
    generator = torch.Generator().manual_seed(5)
    logits, labels = torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    labels[::7] = IGNORED_LABEL
    labels[1] = 3
    return logits, labels


def expected(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The means over the classes by their definition, from counts of each."""
    kept = labels != IGNORED_LABEL
    guessed, labels = logits.argmax(-1)[kept], labels[kept]
    figures = []
    for number in range(logits.shape[-1]):
        hits = int(((guessed == number) & (labels == number)).sum())
        said, there = int((guessed == number).sum()), int((labels == number).sum())
        precision, recall = hits / said if said else 0.0, hits / there if there else 0.0
        figures.append((2 * hits / (said + there), precision, recall))
    return {name: sum(column) / len(column) for name, column in zip(NAMES[1:], zip(*figures, strict=True), strict=True)}


@pytest.mark.parametrize("size", [1, 8, 60])
def test_figures_are_those_of_all_labels_together(size: int) -> None:
    """Ignored labels do not count, and classes count alike."""
    logits, labels = labelled(60)
    metrics = LibraryMetrics(NAMES, Ranks())
    for start in range(0, 60, size):
        metrics.add(LabelScores({}, logits[start : start + size], labels[start : start + size]))
    assert metrics.compute() == pytest.approx(expected(logits, labels), rel=1e-6)


def test_labels_of_tokens_count_one_by_one() -> None:
    """Logits of any shape before the classes."""
    logits, labels = labelled(60)
    metrics = LibraryMetrics(NAMES, Ranks())
    metrics.add(LabelScores({}, logits.view(4, 15, 4), labels.view(4, 15)))
    assert metrics.compute() == pytest.approx(expected(logits, labels), rel=1e-6)


def test_without_such_a_metric_nothing_is_computed() -> None:
    """Nor imported."""
    metrics = LibraryMetrics(("accuracy",), Ranks())
    metrics.add(LabelScores({}, *labelled(60)))
    assert metrics.compute() == {}


class TwoRanks(Ranks):
    """The first of two ranks; the second one has counts of its own, or those of this one."""

    def __init__(self, others: list[Tensor] | None = None) -> None:
        super().__init__()
        self.size, self._others = 2, others
        self.given: list[Tensor] = []

    def gather(self, value: Any) -> list[Any]:
        """Return the value of both ranks."""
        self.given.append(value)
        return [value, value if self._others is None else self._others[len(self.given) - 1]]


def test_the_counts_of_two_ranks_are_summed() -> None:
    """Each has counted its own labels."""
    (logits, labels), second = labelled(60), TwoRanks()
    for ranks, part in ((second, slice(25, 60)), (TwoRanks(second.given), slice(25))):
        metrics = LibraryMetrics(NAMES, ranks)
        metrics.add(LabelScores({}, logits[part], labels[part]))
        found = metrics.compute()
    assert found == pytest.approx(expected(logits, labels), rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_count_what_one_does(tmp_path: Path, strategy: str) -> None:
    """The counts of each rank's share are summed, also where ranks share the model."""
    found = []
    for ranks in (1, 2):
        parallelism = {"world_size": ranks, "strategy": strategy}
        spec = mlp_spec(evaluation={"count": 21, "metrics": list(NAMES)}, parallelism=parallelism)
        result = run_to_end(
            tmp_path / str(ranks),
            recommendation(spec, 16, 3, world_size=ranks, environment=ENVIRONMENT),
            TrainingRequest(updates=1),
        )
        assert result.outcome is RunOutcome.SUCCEEDED, result.message
        assert result.evaluation is not None
        assert result.evaluation.first is not None
        found.append(result.evaluation.first.metrics)
    assert found[0] == pytest.approx(found[1])
    assert set(found[0]) == set(NAMES)


def test_the_missing_package_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the remedy, where the metric needs it; others do not."""
    monkeypatch.setitem(sys.modules, "torchmetrics", None)

    def check(*metrics: str) -> Any:
        found = recommendation(mlp_spec(evaluation={"count": 5, "metrics": metrics}))
        check_run(found.request, TrainingRequest(), "cpu")

    with pytest.raises(SpecError, match=r"pip install 'batchwright\[metrics\]'"):
        check("accuracy", "recall")
    check("accuracy", "perplexity")
