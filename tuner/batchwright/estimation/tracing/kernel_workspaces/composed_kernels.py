"""Kernels that are made of other operators, whose temporaries the rules for fake tensors leave out."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchwright.estimation.tracing.torch_internals import COMPOSED, OpOverload, run_composition, run_kernel_of_cpu
from batchwright.torch_internals import schema_of

_NAMESPACE = "bitsandbytes"
_PRODUCT = "bitsandbytes::gemm_4bit"
_MOST_FUSED_ROWS = 1536
"""Rows above which the product unpacks the weight on an NVIDIA card (``_gemm_4bit_custom_max_m`` of 0.50.2). For fewer
rows the package chooses by card and shape; a trace takes its kernel that unpacks nothing."""


def is_made_of_operators(func: OpOverload, args: Sequence[Any], device_type: str) -> bool:
    """Return whether the kernel of ``func`` runs other operators, which a trace has to record.

    These are operators of torch that have one composition for all devices, and of bitsandbytes an optimizer's steps on
    the CPU, which make fp32 copies, and products with a weight in 4 bits that unpack it. On a card steps change their
    arguments in place.
    """
    if func in COMPOSED:
        return True
    if func.namespace != _NAMESPACE:
        return False
    schema = schema_of(func)
    if schema.name == _PRODUCT:
        rows = args[0].numel() // args[0].shape[-1]
        return device_type == "cpu" or rows > _MOST_FUSED_ROWS
    return device_type == "cpu" and not schema.returns


def run_in_operators(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an operator's results
    """Run the operators that the kernel of ``func`` is made of, where ``is_made_of_operators``."""
    if func in COMPOSED:
        return run_composition(func, args, kwargs)
    if schema_of(func).name == _PRODUCT:
        return _unpacked_product(*args, **kwargs)
    return run_kernel_of_cpu(func, args, kwargs)


def _unpacked_product(  # noqa: PLR0913, PLR0917 - the arguments of ``gemm_4bit``, by its names
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    shapeB: Sequence[int],  # noqa: N803
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """Unpack the scales and the weight, then multiply, as ``_gemm_4bit_default_impl`` of bitsandbytes 0.50.2."""
    operators = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        unpacked = operators.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = unpacked + absmax_offset
    weight = operators.dequantize_4bit.default(B, absmax, blocksize, quant_type, shapeB, A.dtype)
    return torch.nn.functional.linear(A, weight, bias)
