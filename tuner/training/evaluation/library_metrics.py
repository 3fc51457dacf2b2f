"""Metrics of classes by the package ``torchmetrics``, over all batches and ranks.

Each holds counts per class, whose sums over batches and ranks give the figure: it depends on neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

from torch import Tensor

from tuner.errors import FieldProblem, SpecError
from tuner.schemas.dataset import EvaluationSpec
from tuner.schemas.workload import Gpt, ReferenceModel, TransformersModel, WorkloadSpec
from tuner.training.accumulation.collectives import Ranks
from tuner.workloads.base import IGNORED_LABEL, LabelScores

Metrics: TypeAlias = Any
"""A ``torchmetrics.MetricCollection``, imported where a metric is requested."""

_CLASSES = {"f1": "MulticlassF1Score", "precision": "MulticlassPrecision", "recall": "MulticlassRecall"}
"""Classes of ``torchmetrics.classification`` by the names of the spec."""
_MODULE = "torchmetrics.classification"


class LibraryMetrics:
    """The requested metrics of ``torchmetrics``, of one evaluation. All ranks compute them together.

    Args:
        names: the metrics of the spec, others included, which are left out.
        ranks: the ranks whose counts are summed.
    """

    def __init__(self, names: Sequence[str], ranks: Ranks) -> None:
        self._names = [name for name in names if name in _CLASSES]
        self._ranks = ranks
        self._metrics: Metrics | None = None

    def add(self, scores: LabelScores) -> None:
        """Count the labels of a batch. The first batch says how many classes there are.

        Where memory runs out, nothing was counted: the metrics share their counts after the first batch, and are made
        again if that one fails.
        """
        if not self._names:
            return
        logits, labels = scores.logits.flatten(0, -2), scores.labels.flatten()
        metrics = self._metrics or self._made(logits)
        metrics.update(logits, labels)
        self._metrics = metrics

    def _made(self, logits: Tensor) -> Metrics:
        library = import_module(_MODULE)
        made = {
            name: getattr(library, _CLASSES[name])(
                num_classes=logits.shape[-1],
                average="macro",
                ignore_index=IGNORED_LABEL,
                validate_args=False,  # which waits for the device at every batch
                dist_sync_fn=lambda counts, group: self._gathered(counts),  # noqa: ARG005 - named by torchmetrics
                distributed_available_fn=lambda: self._ranks.size > 1,
            )
            for name in self._names
        }
        return import_module("torchmetrics").MetricCollection(made).to(logits.device)

    def _gathered(self, counts: Tensor) -> list[Tensor]:
        return [other.to(counts.device) for other in self._ranks.gather(counts.cpu())]

    def compute(self) -> dict[str, float]:
        """The figures over all ranks. Every rank must call this, and must have added a batch."""
        return {} if self._metrics is None else {name: float(value) for name, value in self._metrics.compute().items()}


def needs_labels(evaluation: EvaluationSpec) -> bool:
    """Return whether a metric compares labels with logits."""
    return any(name == "accuracy" or name in _CLASSES for name in evaluation.metrics)


def require_library(spec: WorkloadSpec) -> None:
    """Check that the requested metrics are of use for the model, and that their package is installed, without torch.

    Raises:
        SpecError: when the model has no classes in the sense of these metrics, or ``torchmetrics`` is missing.
    """
    names = [name for name in (spec.evaluation.metrics if spec.evaluation is not None else ()) if name in _CLASSES]
    if not names:
        return
    if not _classifies(spec):
        message = f"`{names[0]}` is an average over the classes of a classifier, and this model has a vocabulary"
        raise SpecError([FieldProblem("evaluation.metrics", message, names[0])])
    if find_spec("torchmetrics") is None:
        message = f"`{names[0]}` needs the package `torchmetrics`: pip install 'batchwright[metrics]'"
        raise SpecError([FieldProblem("evaluation.metrics", message, names[0])])


def import_library(spec: WorkloadSpec) -> None:
    """Import what the requested metrics need, before memory is limited.

    Raises:
        SpecError: as ``require_library``.
    """
    require_library(spec)
    if spec.evaluation is not None and any(name in _CLASSES for name in spec.evaluation.metrics):
        import_module(_MODULE)


def _classifies(spec: WorkloadSpec) -> bool:
    model = spec.model
    if isinstance(model, TransformersModel):
        return model.task.endswith("-classification")
    return not (isinstance(model, ReferenceModel) and isinstance(model.architecture, Gpt))
