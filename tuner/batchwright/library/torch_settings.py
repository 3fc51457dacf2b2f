"""The settings of torch that hold for a whole process: read in the caller's process, restored in those of the probes.

Everything here names torch's objects as text, so that importing this module imports no torch. A test walks ``torch``
and ``torch.backends`` and fails for a setting that is neither here nor excepted there with its reason. Gradient mode is
none of them: the engine sets what it needs. Nobody can list the settings of other installed libraries: a function that
needs one has to set it.
"""

import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from batchwright.errors import FieldProblem, SpecError

_INVARIANTS = "torch.sparse.check_sparse_tensor_invariants"
_DEVICE = "torch.get_default_device"
_MATMUL = "torch.backends.cuda.matmul"
_DEVICE_KINDS = ("cpu", "cuda")
_CONFIG_MODULES = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config", "torch.compiler.config")
"""Modules of ``torch.compile``, of which torch prints what differs from the defaults as a program."""

_GETTERS = {
    "torch.set_default_dtype": "torch.get_default_dtype",
    "torch.set_float32_matmul_precision": "torch.get_float32_matmul_precision",
    "torch.set_deterministic_debug_mode": "torch.get_deterministic_debug_mode",
    "torch.set_num_threads": "torch.get_num_threads",
    "torch.set_num_interop_threads": "torch.get_num_interop_threads",
    "torch.set_autocast_cache_enabled": "torch.is_autocast_cache_enabled",
    "torch.__future__.set_overwrite_module_params_on_conversion": (
        "torch.__future__.get_overwrite_module_params_on_conversion"
    ),
    "torch.__future__.set_swap_module_params_on_conversion": "torch.__future__.get_swap_module_params_on_conversion",
    "torch.backends.mha.set_fastpath_enabled": "torch.backends.mha.get_fastpath_enabled",
    "torch.backends.cuda.enable_flash_sdp": "torch.backends.cuda.flash_sdp_enabled",
    "torch.backends.cuda.enable_mem_efficient_sdp": "torch.backends.cuda.mem_efficient_sdp_enabled",
    "torch.backends.cuda.enable_math_sdp": "torch.backends.cuda.math_sdp_enabled",
    "torch.backends.cuda.enable_cudnn_sdp": "torch.backends.cuda.cudnn_sdp_enabled",
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": (
        "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed"
    ),
    "torch.backends.cuda.preferred_linalg_library": "torch.backends.cuda.preferred_linalg_library",
    "torch.backends.cuda.preferred_blas_library": "torch.backends.cuda.preferred_blas_library",
    "torch.backends.cuda.preferred_rocm_fa_library": "torch.backends.cuda.preferred_rocm_fa_library",
    "torch.backends.cuda.cublas_workspace_size": "torch.backends.cuda.cublas_workspace_size",
    "torch.backends.cuda.cublaslt_workspace_size": "torch.backends.cuda.cublaslt_workspace_size",
}
"""The function that reads each setting, by the function that sets it."""

_ATTRIBUTES = (
    "torch.utils.deterministic.fill_uninitialized_memory",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.benchmark_limit",
    "torch.backends.cudnn.depthwise_kernel",
    "torch.backends.miopen.immediate",
    "torch.backends.mkldnn.enabled",
    "torch.backends.mkldnn.deterministic",
    "torch.backends.quantized.engine",
    "torch.backends.opt_einsum.enabled",
    "torch.backends.opt_einsum.strategy",
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "torch.backends.cuda.matmul.allow_tf32",  # the older names of what follows
    "torch.backends.cudnn.allow_tf32",
    "torch.backends.mkldnn.allow_tf32",
    "torch.backends.fp32_precision",  # sets those below it
    "torch.backends.cudnn.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.cudnn.rnn.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.mkldnn.matmul.fp32_precision",
    "torch.backends.mkldnn.conv.fp32_precision",
    "torch.backends.mkldnn.rnn.fp32_precision",
)
"""Settings that are attributes, in the order in which they are restored."""

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def _attribute(name: str) -> _Setting:
    owner, _, attribute = name.rpartition(".")
    return lambda: resolve_name(name), lambda value: setattr(resolve_name(owner), attribute, value)


def _call(getter: str, setter: str, *arguments: object) -> _Setting:
    return lambda: resolve_name(getter)(*arguments), lambda value: resolve_name(setter)(*arguments, value)


def _reduction(dtype: str) -> _Setting:
    """Whether cuBLAS may reduce in a narrow type, and in parts: the two values of one setting."""
    name = f"{_MATMUL}.allow_{dtype}_reduced_precision_reduction"
    _, write = _attribute(name)
    return lambda: (resolve_name(name), resolve_name(f"{name}_split_k")), write


def _set_default_device(device: Any) -> None:  # noqa: ANN401 - this module imports no torch
    """Set it, or none for the CPU: with one, torch calls a function in Python before each of its own."""
    resolve_name("torch.set_default_device")(None if str(device) == "cpu" else device)


def _all_settings() -> dict[str, _Setting]:
    anomaly = ("torch.is_anomaly_enabled", "torch.is_anomaly_check_nan_enabled")
    return {
        "torch.set_default_device": (lambda: resolve_name(_DEVICE)(), _set_default_device),  # noqa: PLW0108 - no import
        **{setter: _call(getter, setter) for setter, getter in _GETTERS.items()},
        **{
            f"torch.set_autocast_{name}({kind!r})": _call(
                f"torch.{verb}_autocast_{name}", f"torch.set_autocast_{name}", kind
            )
            for kind in _DEVICE_KINDS
            for verb, name in (("get", "dtype"), ("is", "enabled"))
        },
        **{f"{_MATMUL}.allow_{it}_reduced_precision_reduction": _reduction(it) for it in ("fp16", "bf16")},
        **{name: _attribute(name) for name in _ATTRIBUTES},
        "torch.set_anomaly_enabled": (
            lambda: tuple(resolve_name(name)() for name in anomaly),
            lambda value: resolve_name("torch.set_anomaly_enabled")(*value),
        ),
        _INVARIANTS: (
            lambda: resolve_name(_INVARIANTS).is_enabled(),
            lambda value: getattr(resolve_name(_INVARIANTS), "enable" if value else "disable")(),
        ),
    }


SETTINGS = _all_settings()
"""How each setting is read and set, by its name, in the order in which they are restored."""


def read_settings() -> dict[str, Any]:
    """Return the settings of this process by name, which another one restores; empty if torch was not imported."""
    if "torch" not in sys.modules:
        return {}
    found: dict[str, Any] = {}
    for name, (read, _) in SETTINGS.items():
        try:
            found[name] = read()
        except (AttributeError, RuntimeError):  # not in this version or build of torch, or replaced by a newer name
            continue
    configs = {name: module.codegen_config() for name in _CONFIG_MODULES if (module := sys.modules.get(name))}
    return found | {name: program for name, program in configs.items() if program}


def restore_settings(settings: dict[str, Any]) -> None:
    """Make the settings of this process those that ``read_settings`` returned in another one.

    Raises:
        SpecError: when one cannot be set here, naming it.
    """
    here = read_settings()
    for name, value in settings.items():
        try:
            if name in _CONFIG_MODULES:
                exec(f"import {name}\n{value}", {})  # noqa: S102 - the program that torch wrote in the parent process
            elif name not in here or SETTINGS[name][0]() != value:
                SETTINGS[name][1](value)
        except Exception as error:
            message = f"cannot be set in a process of its own: {type(error).__name__}: {error}"
            raise SpecError([FieldProblem(name, message, str(value))], "settings of torch") from error
