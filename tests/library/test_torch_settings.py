"""The settings of torch that probes have from the caller's process, compared with those that torch has."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch.backends import ContextProp
from torch.overrides import _get_current_function_mode_stack

from batchwright.errors import SpecError
from batchwright.library.torch_settings import SETTINGS, read_settings, restore_settings

EXCEPTED = {
    "torch.set_default_tensor_type": "sets the default dtype and device",
    "torch.use_deterministic_algorithms": "sets the mode of set_deterministic_debug_mode",
    "torch.set_grad_enabled": "the engine sets it",
    "torch.set_rng_state": "the seed of a probe is no matter of memory",
    "torch.set_printoptions": "takes no memory",
    "torch.set_warn_always": "takes no memory",
    "torch.set_flush_denormal": "has no getter, and takes no memory",
    "torch.backends.set_flags": "sets the attributes of its module",
    "torch.backends.cudnn.set_flags": "sets the attributes of its module",
    "torch.backends.miopen.set_flags": "sets the attributes of its module",
    "torch.backends.mkldnn.set_flags": "sets the attributes of its module",
    "torch.backends.opt_einsum.set_flags": "sets the attributes of its module",
    "torch.backends.nnpack.set_flags": "has no getter",
    "torch.backends.mkldnn.fp32_precision": "its setter sets that of all backends",
    "torch.backends.cuda.blas_workspace_size": "sets the size of one of the two libraries",
}
"""What a process keeps for itself, and why."""
DEPRECATED = ("_cpu_dtype", "_cpu_enabled", "_gpu_dtype", "_ipu_dtype", "_ipu_enabled", "_xla_dtype", "_xla_enabled")
"""Ends of names that are older forms of the settings of autocast, or of devices that are not supported."""


def settable() -> Iterator[str]:
    """The names of torch's functions that set something, and of the attributes of its backends that can be set."""
    yield from (f"torch.{name}" for name in dir(torch) if name.startswith(("set_", "use_")))
    yield from (f"torch.__future__.{name}" for name in dir(torch.__future__) if name.startswith("set_"))
    found = [info.name for info in pkgutil.walk_packages(torch.backends.__path__, "torch.backends.")]
    for name in ["torch.backends", *(name for name in found if "._" not in name and not name.endswith("run_cpu"))]:
        importlib.import_module(name)
        module = sys.modules[name]
        properties = [key for key, value in vars(type(module)).items() if isinstance(value, ContextProp)]
        inner = vars(getattr(module, "m", module))
        functions = [
            key for key in inner if key.startswith(("set_", "enable_", "allow_", "preferred_")) or key.endswith("_size")
        ]
        yield from (f"{name}.{key}" for key in (*properties, *functions))


def test_every_setting_of_torch_is_carried_or_excepted() -> None:
    """A new version of torch may have more."""
    known = {name.partition("(")[0] for name in SETTINGS} | {*EXCEPTED}
    unknown = {name for name in settable() if not name.endswith(DEPRECATED)} - known
    assert unknown == set()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Every setting is as it was after the test."""
    before = read_settings()
    yield
    restore_settings(before)


def other_than(value: Any, name: str) -> Any:
    """Another value that a setting takes."""
    others = {
        "torch.set_default_device": torch.device("meta"),
        "torch.set_float32_matmul_precision": "medium",
        "torch.backends.cudnn.depthwise_kernel": "native",
        "torch.set_num_threads": 1 if value != 1 else 2,
    }
    if name in others:
        return others[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(not part for part in value)
    if isinstance(value, torch.dtype):
        return torch.float64 if value is torch.float32 else torch.float16 if value is torch.bfloat16 else torch.bfloat16
    return value + 1 if isinstance(value, int) else "tf32" if value == "ieee" else "ieee"


NOT_CHANGED = {
    "torch.set_num_interop_threads": "once a process",
    "torch.backends.opt_einsum.enabled": "needs the package opt_einsum",
    "torch.backends.opt_einsum.strategy": "needs the package opt_einsum",
    "torch.backends.cuda.preferred_linalg_library": "needs a build with the library",
    "torch.backends.cuda.cublas_workspace_size": "needs a build with CUDA",
    "torch.backends.cuda.cublaslt_workspace_size": "needs a build with CUDA",
    "torch.backends.mkldnn.allow_tf32": "None at first, which cannot be set",
    "torch.backends.quantized.engine": "needs a build with another engine",
    "torch.backends.cuda.preferred_blas_library": "needs a build with the library",
    "torch.backends.cuda.preferred_rocm_fa_library": "needs a build for ROCm",
    "torch.backends.cudnn.benchmark_limit": "needs a build with cuDNN",
}


@pytest.mark.parametrize("name", sorted({*SETTINGS} - {*NOT_CHANGED}))
def test_a_setting_is_restored(name: str) -> None:
    """What was set in one process is set in another one, and nothing else changes."""
    before = read_settings()
    SETTINGS[name][1](other_than(before[name], name))
    changed = read_settings()
    assert changed[name] != before[name]
    restore_settings(before)
    assert read_settings() == before

    restore_settings(changed)

    assert read_settings() == changed


def test_the_default_device_is_restored_without_a_mode() -> None:
    """A default of the CPU that is set has torch call a function in Python before each of its own."""
    before = read_settings()
    torch.set_default_device("meta")

    restore_settings(before)

    assert _get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]


def test_the_config_of_the_compiler_is_restored() -> None:
    """A memory budget of activations is one of its values."""
    config = torch._functorch.config
    with config.patch(activation_memory_budget=0.25):
        settings = read_settings()
    assert config.activation_memory_budget == 1.0
    with config.patch(activation_memory_budget=0.5):
        restore_settings(settings)
        assert config.activation_memory_budget == 0.25


def test_a_setting_that_cannot_be_set_is_named() -> None:
    """With the error of torch."""
    with pytest.raises(
        SpecError, match=r"torch\.set_num_threads: cannot be set in a process of its own: .*\(got many\)"
    ):
        restore_settings({"torch.set_num_threads": "many"})


def test_the_names_are_those_of_torch() -> None:
    """Each setter is there in the version of the lock file; a getter may be of another build."""
    for name in SETTINGS:
        assert resolve_name(name.partition("(")[0].rpartition(".")[0]) is not None
