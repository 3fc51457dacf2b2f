"""Operators that the CPU computes by another function than its operator of the same name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchwright.virtual_gpu.compute import attention, normalization, recurrent
from batchwright.virtual_gpu.compute.random_numbers import PhiloxState

_aten = torch.ops.aten


@dataclass(frozen=True)
class Substitute:
    """A function of the operator's arguments, on CPU tensors.

    A result of None, or a missing one at the end, leaves the card's as the real kernel has left it.

    Attributes:
        function: what computes the results.
        draws: whether the first argument is the state of the device's generator before the call.
    """

    function: Callable[..., Any]
    draws: bool = False


def _dropout(state: PhiloxState, tensor: Tensor, probability: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or probability == 0:
        return tensor, torch.ones_like(tensor, dtype=torch.bool)
    numbers = torch.rand(tensor.shape, generator=state.cpu_generator(), device="cpu")
    kept = numbers >= probability
    return tensor * kept * (0.0 if probability == 1 else 1 / (1 - probability)), kept


def _convolution(
    tensor: Tensor,
    weight: Tensor,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *_: object,
) -> Tensor:
    return torch.convolution(tensor, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)


def _product(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a matrix product that takes the dtype of its result as the last tensor's successor (``mm.dtype``)."""

    def compute(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - arguments of an operator
        tensors = [value.float() for value in args if isinstance(value, Tensor)]
        return operator(*tensors, **kwargs)

    return compute


SUBSTITUTES = {
    "_cudnn_rnn": Substitute(recurrent.cudnn_forward),
    "_cudnn_rnn_backward": Substitute(recurrent.cudnn_backward),
    "_fused_rms_norm": Substitute(normalization.rms_norm),
    "_fused_rms_norm_backward": Substitute(normalization.rms_norm_backward),
    "_log_softmax": Substitute(normalization.softmax(_aten._log_softmax)),
    "_log_softmax_backward_data": Substitute(normalization.softmax_backward(_aten._log_softmax_backward_data)),
    "_scaled_dot_product_cudnn_attention": Substitute(attention.cudnn_forward, draws=True),
    "_scaled_dot_product_cudnn_attention_backward": Substitute(attention.cudnn_backward),
    "_scaled_dot_product_efficient_attention": Substitute(attention.efficient_forward, draws=True),
    "_scaled_dot_product_efficient_attention_backward": Substitute(attention.efficient_backward),
    "_scaled_dot_product_flash_attention": Substitute(attention.flash_forward, draws=True),
    "_scaled_dot_product_flash_attention_backward": Substitute(attention.flash_backward),
    "_softmax": Substitute(normalization.softmax(_aten._softmax)),
    "_softmax_backward_data": Substitute(normalization.softmax_backward(_aten._softmax_backward_data)),
    "_thnn_fused_lstm_cell": Substitute(recurrent.lstm_cell),
    "_thnn_fused_lstm_cell_backward_impl": Substitute(recurrent.lstm_cell_backward),
    "bmm.dtype": Substitute(_product(torch.bmm)),
    "cudnn_batch_norm": Substitute(normalization.batch_norm),
    "cudnn_batch_norm_backward": Substitute(normalization.cudnn_batch_norm_backward),
    "cudnn_convolution": Substitute(_convolution),
    "mm.dtype": Substitute(_product(torch.mm)),
    "native_batch_norm": Substitute(normalization.batch_norm),
    "native_dropout": Substitute(_dropout, draws=True),
}
"""By name and overload, without the namespace."""

IN_FLOAT = frozenset(
    {"native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"}
    | {"native_batch_norm_backward"}
)
"""Operators that save statistics in float32 on CUDA and in the input's dtype on the CPU: computed in float32."""
