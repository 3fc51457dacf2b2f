"""A traced model calls attention as the real one does: with the same shapes, mask, and grouping of heads."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from batchwright.estimation.tracing.session import trace
from batchwright.workloads.build import build_model, build_workload
from tests.support.factories import transformers_spec

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
GROUPED = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
DECODERS = {
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 64, "vocab_size": 128},
    "gpt_neox": {**SMALL, "intermediate_size": 64, "max_position_embeddings": 64},
    "opt": {**SMALL, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 64},
    "falcon": SMALL,
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 8},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "olmo2": {**GROUPED, "eos_token_id": 1, "pad_token_id": 0},
    "phi": GROUPED,
}


class AttentionCalls(TorchFunctionMode):
    """Notes the arguments of each call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, ...]] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            self.noted.append(_described(*args, **named))
        return func(*args, **named)


def _described(  # noqa: PLR0913, PLR0917 - the arguments of attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - as torch passes it
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002 - as above
) -> tuple[Any, ...]:
    mask = None if attn_mask is None else (attn_mask.shape, attn_mask.dtype)
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    return (*shapes, mask, dropout_p, is_causal, scale, enable_gqa)


def _calls_of_a_run_and_of_a_trace(family: str, **batch: Any) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The calls of attention in a run and in a trace of two samples of the worst case."""
    spec = transformers_spec("causal-lm", {"model_type": family, **DECODERS[family]}, batch=batch)
    workload = build_workload(spec)
    torch.manual_seed(0)
    with AttentionCalls() as real:
        workload.loss_terms(build_model(spec, workload), workload.make_batch(2))
    with AttentionCalls() as traced:
        trace(spec, 2, accumulates=False, warm_up=False)
    return real.noted, traced.noted


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_is_traced_with_the_attention_of_a_run(family: str) -> None:
    """No mask where a run has none, and no copies of keys and values where a run groups heads."""
    real, traced = _calls_of_a_run_and_of_a_trace(family, sequence_length=32)
    assert real
    assert traced == real


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen3"])
def test_packed_records_are_traced_with_the_mask_of_a_run(family: str) -> None:
    """A mask for each sample, for which grouped keys and values are copied."""
    real, traced = _calls_of_a_run_and_of_a_trace(family, sequence_length=32, packing="bfd")
    assert traced == real
    assert {call[3] for call in real} == {((2, 1, 32, 32), torch.bool)}
    assert {call[7] for call in real} == {False}
