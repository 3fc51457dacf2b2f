"""Private names of torch that models, training and traces use, each with the reason why no public name is enough.

Tested with torch 2.13.0 (CPU build). Read this module first when another version of torch behaves differently. Names
that only traces of fake tensors need take longer to import, and are in
``batchwright.estimation.tracing.torch_internals``.

Attributes of tensors and modules are read by ``attrgetter``, which adds no Python call where they are read often.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves as tree_leaves, tree_map as tree_map

# TorchDispatchMode: documented as the way to see every operator, and exported by no public module.
# is_traceable_wrapper_subclass: a tensor subclass shows in no public way that it wraps other tensors.
# tree_leaves, tree_map: torch's functions over nested containers have no public module in Python.

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm  # noqa: SLF001
"""Operations on lists of tensors, which torch's optimizers use: a public operation takes a call per parameter."""

clear_blas_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)  # noqa: SLF001
"""Free cuBLAS's workspaces, which lie in the caching allocator: nothing public does."""

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""A module's own parameters by name: ``named_parameters()`` takes five times as long, in every update."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Number of writes to a tensor, counted by autograd: only ``_version`` shows it."""


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name, to restore what a forward pass has replaced: ``named_buffers()`` is read-only.

    Those of a scripted module are in no dictionary, and are only written to.
    """
    buffers = module._buffers  # noqa: SLF001
    return buffers if isinstance(buffers, dict) else dict(module.named_buffers(recurse=False))


def gradient_hooks(parameter: Any) -> list[dict[int, Callable[[Tensor], object]]]:  # noqa: ANN401 - a Tensor, whose attributes have other types
    """The hooks on a parameter's gradient, before and after it is accumulated, by key: in public, torch only adds."""
    found = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)  # noqa: SLF001
    return [hooks for hooks in found if hooks]


Schema: TypeAlias = Any
schema_of: Callable[[Any], Schema] = attrgetter("_schema")
"""Schema of an operator: argument names and mutability, which an ``OpOverload`` shows nowhere else."""

BatchNorm: type[nn.Module] = nn.modules.batchnorm._BatchNorm  # noqa: SLF001
"""Base class of the BatchNorms, which have no public one."""

Dropout: type[nn.Module] = nn.modules.dropout._DropoutNd  # noqa: SLF001
"""Base class of the dropouts, which have no public one."""

Kernel: TypeAlias = Any
"""Class of what ``torch.library.get_kernel`` returns, for annotations; torch 2.8 has neither."""

DispatchKeySet: TypeAlias = torch._C.DispatchKeySet  # noqa: SLF001
"""Class of the dispatch keys of a call, which a kernel passes on, for annotations."""

CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # noqa: SLF001
"""Dispatch keys of a call of the CPU's kernels."""

TorchFunctionOff = torch._C.DisableTorchFunction  # noqa: SLF001
"""Context in which no torch function mode sees calls: kernels run below a user's ``with torch.device(...)``."""

operators_with_kernel: Callable[[str], list[str]] = torch._C._dispatch_get_registrations_for_dispatch_key  # noqa: SLF001
"""Names of all operators with a kernel for a dispatch key: public functions look at one operator."""

storage_at: Callable[[int, torch.device, int], Any] = torch._C._construct_storage_from_data_pointer  # noqa: SLF001
"""Storage of memory that another owns, at an address and of a size in bytes: public functions take a Python buffer."""


def fake_store() -> Any:  # noqa: ANN401 - a class of torch's own tests
    """Create the store of a process group with the backend ``fake``, which importing its module registers.

    No public backend makes a group whose other ranks do not exist.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - imports slowly, for few probes

    return FakeStore()


def never_compile(function: Callable[..., object]) -> None:
    """Keep a function, and all that it calls, out of ``torch.compile``.

    The public ``torch.compiler.disable`` imports the compiler, which takes seconds and memory in each process.
    """
    frames = torch._C._dynamo.eval_frame  # noqa: SLF001
    skip = frames._FrameAction.SKIP  # noqa: SLF001
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # noqa: SLF001


def apply_to_own(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace a module's own tensors, as ``Module.to`` does: that public method visits the modules inside as well."""
    module._apply(change, recurse=False)  # type: ignore[no-untyped-call] # noqa: SLF001


def apply_to_all(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors of a module through its class's own ``_apply``, which has no public equivalent."""
    module._apply(change)  # type: ignore[no-untyped-call] # noqa: SLF001


def fsdp_parameter_groups(module: Any) -> Iterator[Any]:  # noqa: ANN401 - importing FSDPModule takes long
    """The groups of parameters of an ``FSDPModule``: their gradient divisor has a public setter and no getter.

    A module without parameters of its own has no group. Earlier versions of torch have one group per module.
    """
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # noqa: SLF001
    return (group for group in groups if group is not None)


def shut_down_loader(iterator: Any) -> None:  # noqa: ANN401 - its class is private
    """End the workers of a ``DataLoader``'s iterator: in public they end when the last reference is dropped."""
    iterator._shutdown_workers()  # noqa: SLF001


def loader_queues(iterator: Any) -> Iterable[Any]:  # noqa: ANN401 - its class is private
    """The queues to the workers of a ``DataLoader``'s iterator: public names reach none of them."""
    queues: Iterable[Any] = iterator._index_queues  # noqa: SLF001
    return queues


@contextmanager
def numbers_as_tensors() -> Iterator[None]:
    """Let a kernel's ``call_boxed`` in this thread take Python numbers where its schema has tensors.

    A kernel in Python is given a number where the call had one (``tensor / 6``). Only ``torch.ops`` turns such a number
    back into the tensor that promotes types as a number does, by this class of C++.
    """
    library, guard = _libtorch_python(), ctypes.c_bool()
    library._ZN5torch3jit29ToIValueAllowNumbersAsTensorsC1Eb(ctypes.byref(guard), ctypes.c_bool(True))  # noqa: SLF001
    try:
        yield
    finally:
        library._ZN5torch3jit29ToIValueAllowNumbersAsTensorsD1Ev(ctypes.byref(guard))  # noqa: SLF001


@cache
def _libtorch_python() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_python.so"))


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills the memory between its first and its last element, each element once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
