"""Fields of published configurations that transformers no longer reads, with the values that change nothing.

A ``config.json`` keeps fields of earlier releases, of other libraries and of the code it was trained with. They are
accepted if the model is the same without them. Another value of such a field describes another model, and is refused.
The names were read from the configurations of the models in ``tests/workloads/test_published_configs.py``; no code of
transformers 5.23 reads them for these types of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias


class _Repeats(NamedTuple):
    """The value of another field, which this one repeats."""

    field: str


_ANY: Final = object()
"""Any value: the field never described the model."""
_Values: TypeAlias = Mapping[str, object]

_OF_TRANSFORMERS_4: _Values = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "finetuning_task": _ANY,
    "forced_decoder_ids": _ANY,
    "is_decoder": False,
    "output_past": _ANY,
    "position_embedding_type": "absolute",
    "prefix": _ANY,
    "pruned_heads": {},
    "sep_token_id": _ANY,
    "task_specific_params": _ANY,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": _ANY,
    "torchscript": False,
    "unk_token_id": _ANY,
    "use_bfloat16": False,
}
"""Fields that transformers 4 wrote into configurations of every type."""
_DEEPSEEK: _Values = {
    "aux_loss_alpha": _ANY,
    "ep_size": _ANY,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "seq_aux": _ANY,
    "topk_method": "noaux_tc",
}
_BY_TYPE: Mapping[str, _Values] = {
    "albert": {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0},
    "bart": {
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "classif_dropout": _ANY,
        "normalize_before": False,
        "normalize_embedding": True,
    },
    "bert": {
        "directionality": "bidi",
        "pooler_fc_size": _ANY,
        "pooler_num_attention_heads": _ANY,
        "pooler_num_fc_layers": _ANY,
        "pooler_size_per_head": _ANY,
        "pooler_type": "first_token_transform",
    },
    "bloom": {
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": _ANY,
        "masked_softmax_fusion": _ANY,
        "n_inner": None,
        "offset_alibi": _ANY,
        "seq_length": _ANY,
        "skip_bias_add": _ANY,
        "skip_bias_add_qkv": _ANY,
    },
    "clip_text_model": {"dropout": 0.0},
    "clip_vision_model": {"dropout": 0.0},
    "deepseek_v3": _DEEPSEEK,
    "distilbert": {"tie_weights_": True},
    "gemma2": {"hidden_act": _Repeats("hidden_activation")},
    "gpt2": {"n_ctx": _Repeats("n_positions")},
    "gpt_oss": {"experts_per_token": _Repeats("num_experts_per_tok"), "initial_context_length": _ANY},
    "mamba": {
        "d_inner": _Repeats("intermediate_size"),
        "d_model": _Repeats("hidden_size"),
        "fused_add_norm": _ANY,
        "n_layer": _Repeats("num_hidden_layers"),
        "pad_vocab_size_multiple": _ANY,
        "rms_norm": True,
        "ssm_cfg": {},
    },
    "opt": {"activation_dropout": 0.0},
    "qwen3_moe": {"max_window_layers": _ANY},
    "t5": {"n_positions": _ANY},
    "wav2vec2": {"feat_extract_dropout": 0.0, "hidden_dropout_prob": _Repeats("hidden_dropout")},
}
"""Further fields, by type of model."""


def is_published(name: str, model_type: str) -> bool:
    """Return whether it is known of a field, which transformers does not read, what it says of a model of that type."""
    return name in _OF_TRANSFORMERS_4 or name in _BY_TYPE.get(model_type, {})


def changes_nothing(name: str, value: object, model_type: str, value_of: Callable[[str], object]) -> bool:
    """Return whether a field that transformers does not read leaves the model as it is.

    Args:
        name: name of the field.
        value: the field's value.
        model_type: the type of the configuration.
        value_of: returns the value that another field of the configuration will have.
    """
    known = {**_OF_TRANSFORMERS_4, **_BY_TYPE.get(model_type, {})}
    if name not in known:
        return False
    accepted = known[name]
    if isinstance(accepted, _Repeats):
        accepted = value_of(accepted.field)
    return accepted is _ANY or value == accepted
