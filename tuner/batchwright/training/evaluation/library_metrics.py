"""Metrics of classes by the package ``torchmetrics``, over all batches and ranks.

Each holds counts per class, whose sums over batches and ranks give the figure, which depends on neither their size nor
their number.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeAlias

from torch import Tensor

from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.accumulation.collectives import Ranks
from batchwright.workloads.base import IGNORED_LABEL, LabelScores
from batchwright.workloads.required_packages import METRIC_CLASSES, require_packages

Metrics: TypeAlias = Any
"""A ``torchmetrics.MetricCollection``, imported where a metric is requested."""

_MODULE = "torchmetrics.classification"


class LibraryMetrics:
    """The requested metrics of ``torchmetrics``, of one evaluation. All ranks compute them together.

    Args:
        names: the metrics of the spec, others included, which are left out.
        ranks: the ranks whose counts are summed.
    """

    def __init__(self, names: Sequence[str], ranks: Ranks) -> None:
        self._names = [name for name in names if name in METRIC_CLASSES]
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
            name: getattr(library, METRIC_CLASSES[name])(
                num_classes=logits.shape[-1],
                average="macro",
                ignore_index=IGNORED_LABEL,
                validate_args=False,  # which waits for the device at every batch
                dist_sync_fn=lambda counts, group: [  # noqa: ARG005 - named by torchmetrics
                    other.to(counts.device) for other in self._ranks.gather(counts.cpu())
                ],
                distributed_available_fn=lambda: self._ranks.size > 1,
            )
            for name in self._names
        }
        return import_module("torchmetrics").MetricCollection(made).to(logits.device)

    def compute(self) -> dict[str, float]:
        """The figures over all ranks. Every rank must call this, and must have added a batch."""
        return {} if self._metrics is None else {name: float(value) for name, value in self._metrics.compute().items()}


def import_metrics(spec: WorkloadSpec) -> None:
    """Import the package of the requested metrics, before memory is limited.

    Raises:
        SpecError: as ``require_packages``.
    """
    require_packages(spec)
    if spec.evaluation is not None and any(name in METRIC_CLASSES for name in spec.evaluation.metrics):
        import_module(_MODULE)
