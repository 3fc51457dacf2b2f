"""What to import before memory is counted, so that a probe and a run count the same. No torch.

Torch and transformers import parts of themselves late: with the first optimizer 1.7 s and 73 MB, with the first
transformers model several seconds more. On the CPU that would be taken out of the workload's budget.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

from tuner.schemas.workload import TransformersModel, WorkloadSpec
from tuner.workloads.transformers_import import import_transformers

_TORCH = ("torch._dynamo", "torch.profiler")
_TRANSFORMERS = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")
_MODELS = "transformers.models."


def late_imports(spec: WorkloadSpec | None = None, *, with_model: bool = True) -> tuple[str, ...]:
    """The modules that any workload, or this one, will import while it runs. Never the user's own.

    Args:
        spec: the workload.
        with_model: whether the module of a transformers model is among them. Some import packages of kernels, which may
            start CUDA: not for a process that forks others which use it.
    """
    if spec is None or not isinstance(spec.model, TransformersModel):
        return _TORCH
    module = _models_module(str(spec.model.config["model_type"])) if with_model else ()
    return (*_TORCH, *_TRANSFORMERS, *module)


def _models_module(model_type: str) -> tuple[str, ...]:
    """Where transformers keeps a kind of model, which brings thirty other modules; none where it is not found.

    Most lie in a folder of their own name, and what little is missed is imported late, as before.
    """
    name = model_type.replace("-", "_")
    transformers = importlib.util.find_spec("transformers")
    if transformers is None or transformers.origin is None or not name.isidentifier():
        return ()
    module = Path(transformers.origin).parent / "models" / name / f"modeling_{name}.py"
    return (f"{_MODELS}{name}.modeling_{name}",) if module.is_file() else ()


def import_early(modules: tuple[str, ...]) -> None:
    """Import them now. What is wrong with one kind of model is left for the workload to tell that builds it.

    Raises:
        Exception: when another module is missing or broken.
    """
    gc.disable()  # what is imported is not looked through for garbage, now or later: that takes a fifth of the time
    try:
        for module in modules:
            if module.startswith("transformers.") and "transformers" not in sys.modules:
                import_transformers()
            with suppress(Exception) if module.startswith(_MODELS) else nullcontext():
                importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()
