"""Find the largest micro-batch that fits, plan the effective batch around it, and accumulate exactly.

This package is the public interface; ``tuner`` and ``service`` behind it may change at any release. Importing it
imports neither torch nor the service::

    import batchwright

    recommendation = batchwright.find_batch_size(build_model, make_batch, loss, effective_batch_size=512)
    accumulation = batchwright.GradientAccumulation(model, optimizer, plan=recommendation.plan)
    for batch in loader:  # of 512 samples, which `update` divides into the plan's micro-batches
        accumulation.update([batch], loss)
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.client import AsyncClient, Client
    from tuner.library.find_batch_size import find_batch_size, with_batch_size
    from tuner.library.recommendation import Recommendation
    from tuner.library.tuning import estimate, plan, tune
    from tuner.schemas.dataset.batch_spec import BatchSpec
    from tuner.schemas.optimizer import OptimizerSpec, ParameterGroup, ScheduleSpec
    from tuner.schemas.plans import Plan
    from tuner.schemas.requests import TuningRequest
    from tuner.schemas.workload import (
        Gpt,
        Mlp,
        ParallelismSpec,
        PythonModel,
        ReferenceModel,
        ResNet,
        TransformersModel,
        WorkloadSpec,
        load_spec,
        parse_spec,
    )
    from tuner.training.accumulation.engine import GradientAccumulation, windows

_MODULES = {
    "service.client": ("AsyncClient", "Client"),
    "tuner.library.find_batch_size": ("find_batch_size", "with_batch_size"),
    "tuner.library.recommendation": ("Recommendation",),
    "tuner.library.tuning": ("estimate", "plan", "tune"),
    "tuner.schemas.dataset.batch_spec": ("BatchSpec",),
    "tuner.schemas.optimizer": ("OptimizerSpec", "ParameterGroup", "ScheduleSpec"),
    "tuner.schemas.plans": ("Plan",),
    "tuner.schemas.requests": ("TuningRequest",),
    "tuner.schemas.workload": (
        "Gpt",
        "Mlp",
        "ParallelismSpec",
        "PythonModel",
        "ReferenceModel",
        "ResNet",
        "TransformersModel",
        "WorkloadSpec",
        "load_spec",
        "parse_spec",
    ),
    "tuner.training.accumulation.engine": ("GradientAccumulation", "windows"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AsyncClient",
    "BatchSpec",
    "Client",
    "Gpt",
    "GradientAccumulation",
    "Mlp",
    "OptimizerSpec",
    "ParallelismSpec",
    "ParameterGroup",
    "Plan",
    "PythonModel",
    "Recommendation",
    "ReferenceModel",
    "ResNet",
    "ScheduleSpec",
    "TransformersModel",
    "TuningRequest",
    "WorkloadSpec",
    "__version__",
    "errors",
    "estimate",
    "find_batch_size",
    "load_spec",
    "parse_spec",
    "plan",
    "tune",
    "windows",
    "with_batch_size",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is public
    """Import a public name at its first use."""
    if name == "__version__":
        return metadata.version("batchwright")
    if name == "errors":
        return import_module("tuner.errors")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'batchwright' has no public name {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
