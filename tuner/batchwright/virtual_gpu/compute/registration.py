"""Put a function before each CUDA kernel of torch's operators."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from batchwright.torch_internals import never_compile, operators_with_kernel, schema_of
from batchwright.virtual_gpu.compute.kernels import ComputedKernel, DynamicKernel, key_of
from batchwright.virtual_gpu.uncomputed import UncomputedLog

FOLDER_VARIABLE = "VIRTUAL_GPU_SESSION"
"""As in ``session``, whose imports a program's Python need not have: the folder of the session."""
LIMIT_VARIABLE = "VIRTUAL_GPU_COMPUTE_LIMIT_BYTES"
"""Likewise: the largest tensor of an operator that is computed, in bytes; 0 computes none."""
_COMPOSITES = ("aten::convolution", "aten::copy_")
"""Operators without a CUDA kernel of their own that no other operator shows: ``copy_`` calls a kernel directly, and a
convolution adds its bias after a cuDNN operator, where the CPU adds it inside."""
_DYNAMIC = {
    "_unique",
    "_unique2",
    "bincount",
    "masked_select",
    "nonzero",
    "repeat_interleave.Tensor",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}
"""Operators whose values decide the shape of their results."""
_UNTOUCHED = {
    "_assert_async",
    "_assert_async.msg",
    "_cudnn_init_dropout_state",
    "_cudnn_rnn_flatten_weight",
    "_efficientzerotensor",
    "_fill_mem_eff_dropout_mask_",
    "_pin_memory",
    "_resize_output_",
    "empty.memory_format",
    "empty_strided",
    "pow.Tensor_Tensor_out",
    "record_stream",
    "resize_",
    "resize_as_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "set_.source_Tensor_storage_offset",
}
"""Operators that write no values, or only by other operators, which are computed. ``pow.Scalar`` calls
``pow.Tensor_Tensor_out`` with its number as a tensor on the card, which torch cannot pass to Python."""
_library: list[torch.library.Library] = []


def register_from_environment() -> None:
    """Register in a process of a session that computes; do nothing in any other, or without torch's CUDA build."""
    limit_bytes = int(os.environ.get(LIMIT_VARIABLE, "0"))
    folder = os.environ.get(FOLDER_VARIABLE)
    if limit_bytes and folder and torch.version.cuda is not None:
        register(limit_bytes, UncomputedLog(Path(folder)))


def register(limit_bytes: int, log: UncomputedLog) -> None:
    """Register a function for each operator whose values a CUDA kernel computes, for the life of the process.

    A dispatch mode would be less: its state belongs to a thread, and autograd takes other paths while one is active
    (it no longer adds gradients in place, for example), which changes the memory that a run takes. Other Python threads
    wait while a real kernel is launched, because torch calls it with the interpreter locked.

    Args:
        limit_bytes: the largest tensor of an operator that is computed.
        log: where operators that are left out are counted.
    """
    never_compile(ComputedKernel.__call__)
    never_compile(DynamicKernel.__call__)
    library = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, operator in _operators():
            kind = DynamicKernel if key_of(schema_of(operator)) in _DYNAMIC else ComputedKernel
            real = torch.library.get_kernel(name, "CUDA")
            library.impl(name, kind(operator, real, limit_bytes, log), with_keyset=True)  # type: ignore[no-untyped-call]
    _library.append(library)


def _operators() -> Iterator[tuple[str, Any]]:
    """Yield the operators to register, with their names."""
    for name in (*operators_with_kernel("CUDA"), *_COMPOSITES):
        namespace, _, key = name.partition("::")
        if namespace != "aten" or key in _UNTOUCHED:
            continue
        packet, _, overload = key.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if _writes_values(schema_of(operator)):
            yield name, operator


def _writes_values(schema: Any) -> bool:  # noqa: ANN401 - the class of schemas is private
    """Return whether an operator computes values: neither a view nor a figure of its arguments."""
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    results = [result for result in schema.returns if "Tensor" in str(result.type)]
    creates = any(result.alias_info is None for result in results)
    return writes or creates or schema.name == "aten::equal"
