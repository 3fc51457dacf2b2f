"""The optional packages that a training requires, checked before a process with torch is started. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from tuner.errors import FieldProblem, SpecError
from tuner.schemas.dataset import EvaluationSpec
from tuner.schemas.requests import TrackerName
from tuner.schemas.workload import WorkloadSpec

METRIC_CLASSES = {"f1": "MulticlassF1Score", "precision": "MulticlassPrecision", "recall": "MulticlassRecall"}
"""Classes of ``torchmetrics.classification`` by the names of the spec."""


def needs_labels(evaluation: EvaluationSpec) -> bool:
    """Return whether a metric compares labels with logits."""
    return any(name == "accuracy" or name in METRIC_CLASSES for name in evaluation.metrics)


def require_metrics(spec: WorkloadSpec) -> None:
    """Check that the package of the requested metrics is installed.

    Raises:
        SpecError: when ``torchmetrics`` is missing.
    """
    names = [
        name for name in (spec.evaluation.metrics if spec.evaluation is not None else ()) if name in METRIC_CLASSES
    ]
    if names and find_spec("torchmetrics") is None:
        message = f"`{names[0]}` needs the package `torchmetrics`: pip install 'batchwright[metrics]'"
        raise SpecError([FieldProblem("evaluation.metrics", message, names[0])])


def require_trackers(names: Iterable[TrackerName]) -> None:
    """Check that the packages of trackers are installed.

    Raises:
        SpecError: naming the first tracker whose package is missing.
    """
    for index, name in enumerate(names):
        if find_spec(name) is None:
            message = f"`{name}` needs the package `{name}`: pip install 'batchwright[{name}]'"
            raise SpecError([FieldProblem(f"trackers.{index}", message, name)], "request")
