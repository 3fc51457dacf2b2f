"""Fused attention of a virtual card: flash, memory-efficient and cuDNN, each with the outputs that its kernel has.

Where torch's CPU has a flash kernel for the inputs, it is used, and results equal the CPU's bit by bit; else, and with
dropout, the formula in float32. Backward passes read the logarithm of the sums that the forward pass has saved, and
draw the dropout mask again from the saved state. Causal masks begin at the upper left, as torch defines them.

Signatures: ``native_functions.yaml`` of torch 2.13.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchwright.virtual_gpu.compute.random_numbers import PhiloxState, saved_state

_aten = torch.ops.aten
_DIMENSIONS = 4
_EFFICIENT_ALIGNMENT = 32
"""Queries to whose multiple memory-efficient attention pads its saved sums: ``kAlignLSE`` of its kernel_forward.h."""


@dataclass(frozen=True)
class _Inputs:
    """Tensors of shape (batch, heads, length, head size) on the CPU, and options."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    state: PhiloxState

    @property
    def groups(self) -> int:
        """Heads of queries that share a head of keys and values."""
        return int(self.query.shape[-3] // self.key.shape[-3])

    @property
    def factor(self) -> float:
        return float(self.query.shape[-1]) ** -0.5 if self.scale is None else self.scale

    def repeated(self, tensor: Tensor) -> Tensor:
        """Return keys or values with a head for each head of queries."""
        return tensor.repeat_interleave(self.groups, -3) if self.groups > 1 else tensor

    def summed(self, gradient: Tensor) -> Tensor:
        """Return the gradient of keys or values, from that of the repeated ones."""
        return torch.unflatten(gradient, -3, (-1, self.groups)).sum(-3) if self.groups > 1 else gradient

    def has_cpu_kernel(self) -> bool:
        """Return whether the CPU's flash attention takes these inputs: ``use_flash_attention_cpp`` of torch.

        torch's own choice (``_fused_sdp_choice``) would refuse where the user allows the card another kernel alone.
        """
        tensors = (self.query, self.key, self.value, *([] if self.bias is None else [self.bias]))
        same_size = self.query.shape[-1] == self.key.shape[-1] == self.value.shape[-1]
        is_plain = all(tensor.numel() and tensor.stride(-1) == 1 for tensor in tensors)
        return self.dropout == 0 and self.query.dim() == _DIMENSIONS and same_size and is_plain

    def scores(self) -> Tensor:
        """Return scores before the softmax, in float32."""
        scores = _widened(self.query) @ _widened(self.repeated(self.key)).transpose(-2, -1) * self.factor
        if self.bias is not None:
            scores = scores + _widened(self.bias)
        if self.is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores

    def kept(self, shape: torch.Size) -> Tensor:
        """Return factors of the probabilities: 0 where dropout drops them, and 1 / (1 - dropout) elsewhere."""
        if self.dropout == 0:
            return torch.ones((), device="cpu")
        numbers = torch.rand(shape, generator=self.state.cpu_generator(), device="cpu")
        return (numbers >= self.dropout) / (1 - self.dropout)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _forward(inputs: _Inputs) -> tuple[Tensor, Tensor]:
    """Return the output, and the logarithm of the sums of exponentials: (batch, heads, queries), float32."""
    if inputs.has_cpu_kernel():
        tensors = (inputs.query, inputs.repeated(inputs.key), inputs.repeated(inputs.value))
        output, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            *tensors, 0.0, inputs.is_causal, attn_mask=inputs.bias, scale=inputs.scale
        )
        return output, sums
    scores = inputs.scores()
    probabilities = _aten._safe_softmax(scores, -1)
    output = (probabilities * inputs.kept(probabilities.shape)) @ _widened(inputs.repeated(inputs.value))
    return output.to(inputs.query.dtype), scores.logsumexp(-1)


def _backward(inputs: _Inputs, gradient: Tensor, output: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    if not inputs.has_cpu_kernel():
        return _backward_by_formula(inputs, gradient)[:3]
    tensors = (inputs.query, inputs.repeated(inputs.key), inputs.repeated(inputs.value))
    of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, *tensors, output, sums, 0.0, inputs.is_causal, attn_mask=inputs.bias, scale=inputs.scale
    )
    return of_query, inputs.summed(of_key), inputs.summed(of_value)


def _backward_by_formula(inputs: _Inputs, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and bias."""
    probabilities = _aten._safe_softmax(inputs.scores(), -1)
    kept = inputs.kept(probabilities.shape)
    wide = _widened(gradient)
    of_value = (probabilities * kept).transpose(-2, -1) @ wide
    of_probabilities = wide @ _widened(inputs.repeated(inputs.value)).transpose(-2, -1) * kept
    of_scores = probabilities * (of_probabilities - (of_probabilities * probabilities).sum(-1, keepdim=True))
    of_query = of_scores @ _widened(inputs.repeated(inputs.key)) * inputs.factor
    of_key = of_scores.transpose(-2, -1) @ _widened(inputs.query) * inputs.factor
    of_bias = of_scores if inputs.bias is None else of_scores.sum_to_size(inputs.bias.shape)
    return of_query, inputs.summed(of_key), inputs.summed(of_value), of_bias


def flash_forward(
    state: PhiloxState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute ``_scaled_dot_product_flash_attention``."""
    del return_debug_mask
    output, sums = _forward(_Inputs(query, key, value, None, dropout, is_causal, scale, state))
    words = torch.tensor([state.seed, state.offset], dtype=torch.uint64, device="cpu")
    return output, sums, None, None, None, None, words


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    _first_query: Tensor | None,
    _first_key: Tensor | None,
    _most_queries: int,
    _most_keys: int,
    dropout: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Compute ``_scaled_dot_product_flash_attention_backward``."""
    state = saved_state(seed, offset)
    return _backward(_Inputs(query, key, value, None, dropout, is_causal, scale, state), gradient, output, sums)


def efficient_forward(
    state: PhiloxState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    saves_sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute ``_scaled_dot_product_efficient_attention``."""
    output, sums = _forward(_Inputs(query, key, value, bias, dropout, is_causal, scale, state))
    padded = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % _EFFICIENT_ALIGNMENT))
    words = (torch.tensor(word, dtype=torch.uint64, device="cpu").to(torch.int64) for word in state)
    return output, padded if saves_sums else None, *words


def efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute ``_scaled_dot_product_efficient_attention_backward``."""
    inputs = _Inputs(query, key, value, bias, dropout, is_causal, scale, saved_state(seed, offset))
    if bias is not None and wanted[3]:
        return _backward_by_formula(inputs, gradient)
    return _backward(inputs, gradient, output, sums[..., : query.shape[-2]])


def cudnn_forward(
    state: PhiloxState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    saves_sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute ``_scaled_dot_product_cudnn_attention``."""
    del return_debug_mask
    output, sums = _forward(_Inputs(query, key, value, bias, dropout, is_causal, scale, state))
    words = (torch.tensor(word, dtype=torch.uint64, device="cpu").to(torch.int64) for word in state)
    return output, sums.unsqueeze(-1) if saves_sums else None, None, None, None, None, *words


def cudnn_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    _first_query: Tensor | None,
    _first_key: Tensor | None,
    _most_queries: int,
    _most_keys: int,
    dropout: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Compute ``_scaled_dot_product_cudnn_attention_backward``."""
    inputs = _Inputs(query, key, value, bias, dropout, is_causal, scale, saved_state(seed, offset))
    return _backward(inputs, gradient, output, sums.squeeze(-1))
