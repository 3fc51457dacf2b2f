"""What to import before memory is counted, so that a probe and a run count the same. No torch.

Torch and transformers import parts of themselves late: with the first optimizer 1.7 s and 73 MB, with the first
transformers model several seconds more. On the CPU that would be taken out of the workload's budget.
"""

from __future__ import annotations

import gc
import importlib

from tuner.specs import TransformersModel, WorkloadSpec

_TORCH = ("torch._dynamo", "torch.profiler")
_TRANSFORMERS = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def late_imports(spec: WorkloadSpec | None = None) -> tuple[str, ...]:
    """The modules that any workload, or this one, will import while it runs. Never the user's own."""
    return (*_TORCH, *_TRANSFORMERS) if spec is not None and isinstance(spec.model, TransformersModel) else _TORCH


def import_early(modules: tuple[str, ...]) -> None:
    """Import them now, and leave them out of every later garbage collection, which would walk them all (0.3 s)."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
