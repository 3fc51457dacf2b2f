"""Rotary position embeddings (RoPE) whose frequencies depend on the longest sequence of a micro-batch.

transformers picks the frequencies of `longrope` and `dynamic` in each forward pass, by the largest position of all
sequences (``dynamic_rope_update`` in its ``modeling_rope_utils``). Above a length, the logits of a sequence depend on
its neighbours, so that a gradient depends on the division into micro-batches. The check for coupled samples does not
find that: its samples are of one length.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from batchwright.workloads.config_safety import configs_within

TransformersConfig: TypeAlias = Any
"""A ``transformers.PreTrainedConfig``; transformers ships no usable types."""

_MSCALE = "long_mscale"
"""Field of Phi-3.5-MoE, whose embedding scales by length with every type of RoPE but the default."""


def longest_uncoupled(config: TransformersConfig) -> int | None:
    """Most tokens of a micro-batch's sequences with which they share their frequencies with all shorter ones.

    Of several RoPEs, by layer type or of nested configurations, the least counts. None without such a RoPE.
    """
    lengths = [
        int(length)
        for _, inner in configs_within(config)
        for parameters in _rope_parameters(inner)
        if (length := _switches_above(inner, parameters)) is not None
    ]
    return min(lengths, default=None)


def _rope_parameters(config: TransformersConfig) -> list[dict[str, Any]]:
    """The parameters of each RoPE: those of a flat field, or of each type of layer."""
    field = getattr(config, "rope_parameters", None)
    if not isinstance(field, dict):
        return []
    return [field, *(inner for inner in field.values() if isinstance(inner, dict))]


def _switches_above(config: TransformersConfig, parameters: dict[str, Any]) -> int | None:
    kind = str(parameters.get("rope_type", parameters.get("type", "")))
    if kind == "longrope" or _MSCALE in parameters:
        return parameters.get("original_max_position_embeddings")
    return getattr(config, "max_position_embeddings", None) if "dynamic" in kind else None
