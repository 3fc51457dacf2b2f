"""The optional packages that a spec and the trackers of a run require. No torch.

They are checked when a job is submitted, before a process with torch is started, and when a workload is built.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import get_args

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.dataset.evaluation_spec import EvaluationSpec
from batchwright.schemas.optimizer import OptimizerSpec
from batchwright.schemas.requests import TrackerName
from batchwright.schemas.workload import WorkloadSpec

METRIC_CLASSES = {"f1": "MulticlassF1Score", "precision": "MulticlassPrecision", "recall": "MulticlassRecall"}
"""Classes of ``torchmetrics.classification`` by the names of the spec."""
_TORCHMETRICS = "torchmetrics"
_BITSANDBYTES = "bitsandbytes"
_OLDEST = {_BITSANDBYTES: (0, 50)}
"""Oldest versions, as the extras require: earlier ones of bitsandbytes have no 8-bit optimizers for the CPU."""


def needs_labels(evaluation: EvaluationSpec) -> bool:
    """Return whether a metric compares labels with logits."""
    return any(name == "accuracy" or name in METRIC_CLASSES for name in evaluation.metrics)


@dataclass(frozen=True)
class MissingPackage:
    """A metric, an optimizer, a quantisation or a tracker that a run requests, whose package is missing."""

    field: str
    """Field with the request: of the request of the training for a tracker, else of the spec."""
    name: str
    """The metric, optimizer, quantisation or tracker."""
    package: str
    """The package."""
    extra: str
    """The extra of Batchwright that installs the package."""

    @property
    def message(self) -> str:
        """The need, and the remedy."""
        oldest = _OLDEST.get(self.package)
        suffix = "" if oldest is None else f" (version {'.'.join(map(str, oldest))} or newer)"
        return f"`{self.name}` needs the package `{self.package}`: pip install 'batchwright[{self.extra}]'{suffix}"


def installed_packages() -> tuple[str, ...]:
    """Return the optional packages of specs and trackers that are installed here."""
    wanted = (_TORCHMETRICS, _BITSANDBYTES, *get_args(TrackerName))
    return tuple(name for name in wanted if _is_installed(name))


def missing_packages(
    spec: WorkloadSpec | None, trackers: Sequence[TrackerName], installed: Collection[str]
) -> list[MissingPackage]:
    """Return what a run requests and cannot have where only ``installed`` of these packages are."""
    evaluation = None if spec is None else spec.evaluation
    of_model = [] if spec is None else _of_model(spec)
    metrics = [name for name in (() if evaluation is None else evaluation.metrics) if name in METRIC_CLASSES]
    wanted = [
        *(missing for missing in of_model if missing.package == _BITSANDBYTES),  # all others come with torch's extra
        *(MissingPackage("evaluation.metrics", name, _TORCHMETRICS, "metrics") for name in metrics),
        *(MissingPackage(f"trackers.{index}", name, name, name) for index, name in enumerate(trackers)),
    ]
    return [missing for missing in wanted if missing.package not in installed]


def _of_model(spec: WorkloadSpec) -> list[MissingPackage]:
    """Return what the base of the adapter and the optimizer of a spec need."""
    quantization = None if spec.adapter is None else spec.adapter.quantization
    base = [] if quantization is None else [("adapter.quantization", quantization.kind)]
    return [*(MissingPackage(*named, _BITSANDBYTES, _BITSANDBYTES) for named in base), *_of_optimizer(spec.optimizer)]


def _of_optimizer(spec: OptimizerSpec) -> list[MissingPackage]:
    named = [] if spec.package == "torch" else [spec.name]
    return [MissingPackage("optimizer.name", name, spec.package, spec.extra) for name in named]


def require_model_packages(spec: WorkloadSpec) -> None:
    """Check that the packages of a spec's model and optimizer can be imported, whatever else its runs need.

    Raises:
        SpecError: naming the first that is missing, or fails here, for example as its libraries are for other cards.
    """
    wanted = _of_model(spec)
    _refuse(_not_installed(wanted), "spec")
    for needed in wanted:
        try:
            import_module(needed.package)
        except Exception as error:
            message = (
                f"`{needed.name}` needs the package `{needed.package}`, which is installed but cannot be imported "
                f"({type(error).__name__}: {error})"
            )
            raise SpecError([FieldProblem(needed.field, message, needed.name)], "spec") from error


def require_optimizer_package(spec: OptimizerSpec) -> None:
    """Check that the package of an optimizer is installed.

    Raises:
        SpecError: when it is missing.
    """
    _refuse(_not_installed(_of_optimizer(spec)), "spec")


def _not_installed(wanted: Sequence[MissingPackage]) -> list[MissingPackage]:
    return [missing for missing in wanted if not _is_installed(missing.package)]


def _is_installed(package: str) -> bool:
    """Return whether a package is there, in a version that is not too old; one without metadata is taken as new."""
    if find_spec(package) is None:
        return False
    oldest = _OLDEST.get(package)
    if oldest is None:
        return True
    try:
        parts = version(package).split(".")[: len(oldest)]
    except PackageNotFoundError:
        return True
    return tuple(int(part) if part.isdecimal() else 0 for part in parts) >= oldest


def require_packages(spec: WorkloadSpec) -> None:
    """Check that the packages of what a spec requests are installed.

    Raises:
        SpecError: naming the first that is missing.
    """
    _refuse(missing_packages(spec, (), installed_packages()), "spec")


def require_trackers(names: Sequence[TrackerName]) -> None:
    """Check that the packages of trackers are installed.

    Raises:
        SpecError: naming the first tracker whose package is missing.
    """
    _refuse(missing_packages(None, names, installed_packages()), "request")


def _refuse(missing: Sequence[MissingPackage], document: str) -> None:
    if missing:
        raise SpecError([FieldProblem(missing[0].field, missing[0].message, missing[0].name)], document)
