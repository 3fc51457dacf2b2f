"""Rotary position embeddings (RoPE) whose frequencies depend on the longest sequence of a micro-batch.

transformers picks the frequencies of `longrope` and `dynamic` in each forward pass, by the largest position of all
sequences (``dynamic_rope_update`` in its ``modeling_rope_utils``). Above a length, the logits of a sequence depend on
its neighbours, so that a gradient depends on the division into micro-batches. The check for coupled samples does not
find that: its samples are of one length.
"""

from typing import Any

from batchwright.workloads.config_fields import TransformersConfig
from batchwright.workloads.config_safety import configs_within

_MSCALE = "long_mscale"
"""Field of Phi-3.5-MoE, whose embedding scales by length with every type of RoPE but the default."""


def longest_uncoupled(config: TransformersConfig) -> int | None:
    """Most tokens of a micro-batch's sequences with which they share their frequencies with all shorter ones.

    Of several RoPEs, by layer type or of nested configurations, the least counts. None without such a RoPE.
    """
    lengths: list[int] = []
    for _, inner in configs_within(config):
        field = getattr(inner, "rope_parameters", None)
        ropes = [field, *field.values()] if isinstance(field, dict) else []  # a flat field, or one by type of layer
        found = (_switches_above(inner, rope) for rope in ropes if isinstance(rope, dict))
        lengths += [int(length) for length in found if length is not None]
    return min(lengths, default=None)


def _switches_above(config: TransformersConfig, parameters: dict[str, Any]) -> int | None:
    kind = str(parameters.get("rope_type", parameters.get("type", "")))
    if kind == "longrope" or _MSCALE in parameters:
        return parameters.get("original_max_position_embeddings")
    return getattr(config, "max_position_embeddings", None) if "dynamic" in kind else None
