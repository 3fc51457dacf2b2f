"""Modules to import before memory is measured, so that a probe and a run measure the same memory. No torch.

Torch and transformers import some of their modules late: the first optimizer takes 1.7 s and 73 MB, the first
transformers model several seconds more. On the CPU this memory would count against the workload's limit.
"""

import gc
import importlib
import importlib.util
import logging
import os
from contextlib import nullcontext, suppress
from pathlib import Path

from batchwright.schemas.workload import PythonModel, TransformersModel, WorkloadSpec

_TORCH = ("torch._dynamo", "torch.profiler")
_TRANSFORMERS = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")
_ADAPTERS = ("peft",)
_KERNELS = ("bitsandbytes",)
"""Packages of kernels, which ask CUDA for its devices when they are imported."""
_MODELS = "transformers.models."
_OWN_TARGETS = ("batchwright.integrations.", "batchwright.library.")
"""Targets of our own, which import cloudpickle or the library that they integrate."""


def late_imports(spec: WorkloadSpec | None = None, *, with_model: bool = True) -> tuple[str, ...]:
    """The modules that a workload will import while it runs, except the user's own.

    Args:
        spec: the workload; None for the modules that any workload imports.
        with_model: whether to include the module of a transformers model, and packages of kernels. Some models import
            such packages, which may initialise CUDA, and a process that did so must not fork others that use CUDA.
    """
    if spec is not None and isinstance(spec.model, PythonModel) and spec.model.target.startswith(_OWN_TARGETS):
        return (*_TORCH, spec.model.target.partition(":")[0])
    if spec is None:
        return _TORCH
    kernels = _KERNELS if with_model and spec.needs_bitsandbytes else ()
    if not isinstance(spec.model, TransformersModel):
        return (*_TORCH, *kernels)
    if not with_model:
        return (*_TORCH, *_TRANSFORMERS)
    adapters = _ADAPTERS if spec.adapter is not None else ()
    return (*_TORCH, *_TRANSFORMERS, *_models_module(spec.model.model_type), *adapters, *kernels)


def _models_module(model_type: str) -> tuple[str, ...]:
    """The module of a type of model in transformers, which imports thirty others; empty if it is not found.

    Most models are in a folder of their own name. The modules of the others are imported late.
    """
    name = model_type.replace("-", "_")
    transformers = importlib.util.find_spec("transformers")
    if transformers is None or transformers.origin is None or not name.isidentifier():
        return ()
    module = Path(transformers.origin).parent / "models" / name / f"modeling_{name}.py"
    return (f"{_MODELS}{name}.modeling_{name}",) if module.is_file() else ()


def forbid_hub_kernels() -> None:
    """Make transformers build models without kernels from a hub, even if the package `kernels` is installed.

    Some models (Mamba, Falcon-H1) download kernels when they are imported, built or run. Must be called before
    transformers is imported. A ``USE_HUB_KERNELS`` in the environment is kept. The advice of bitsandbytes to install
    such kernels is not logged.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    os.environ.setdefault("USE_HUB_KERNELS", "0")


def import_early(modules: tuple[str, ...]) -> None:
    """Import modules. An error in a module of a model, an adapter or kernels is ignored: building these raises it.

    Raises:
        Exception: when another module is missing or broken.
    """
    forbid_hub_kernels()
    gc.disable()  # garbage collection takes a fifth of the time of the imports
    try:
        for module in modules:
            is_for_model = module.startswith(_MODELS) or module in {*_ADAPTERS, *_KERNELS}
            with suppress(Exception) if is_for_model else nullcontext():
                importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()
