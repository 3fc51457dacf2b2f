"""Decoders that keep the documents of a packed sequence apart.

transformers masks the attention between documents by positions that restart, in models that make their masks with
``create_causal_mask`` and hand it the positions. Others ignore them, without a word: models with positions of their own
(BLOOM, OPT), those that hand over none (Falcon, GPT-OSS), and layers with a state that goes on to the next document
(Mamba, Jamba, Qwen3-Next). Hence a list of those that were tried.
"""

from batchwright.errors import FieldProblem, SpecError
from batchwright.workloads.causal.rope_scaling import longest_uncoupled
from batchwright.workloads.causal.routers import wants_router_loss
from batchwright.workloads.config_fields import TransformersConfig

SEPARATE_DOCUMENTS = frozenset(
    """
    apertus arcee bitnet cohere cohere2 cwm doge ernie4_5 ernie4_5_moe exaone4 flex_olmo gemma gemma2
    gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoeshared helium
    hunyuan_v1_dense jetmoe llama minimax_m2 ministral mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma
    """.split()  # noqa: SIM905 - a list would be fifty lines
)
"""Types of models whose logits of a document are equal in a packed sequence and alone, with `eager` attention, and with
`sdpa` where they have it. Tried with transformers 5.23 (``tests/workloads/causal/test_document_masks.py``)."""


def require_separate_documents(config: TransformersConfig, length: int) -> None:
    """Refuse to pack documents for a model that would not keep them apart.

    Args:
        config: the model's configuration.
        length: tokens of a sequence.

    Raises:
        SpecError: naming the type of the model, an attention that was not tried, a router loss, whose mask of
            padding replaces that of documents, or the length above which the frequencies of RoPE depend on the longest
            document of a micro-batch.
    """
    if config.model_type not in SEPARATE_DOCUMENTS:
        message = (
            f"keeps documents apart for {', '.join(sorted(SEPARATE_DOCUMENTS))}; it is not known whether it "
            f"does for {config.model_type}: leave packing out"
        )
        raise SpecError([FieldProblem("batch.packing", message)])
    if config._attn_implementation == "flex_attention":  # noqa: SLF001 - transformers has no public name for it
        message = "was not tried with flex_attention: use sdpa or eager, or leave packing out"
        raise SpecError([FieldProblem("batch.packing", message, "flex_attention")])
    if wants_router_loss(config):
        message = (
            "cannot be combined with a router loss, which counts the tokens of a micro-batch by a mask of its own: set "
            "model.config.output_router_logits to false, or leave packing out"
        )
        raise SpecError([FieldProblem("batch.packing", message)])
    longest = longest_uncoupled(config)
    if longest is not None and length > longest:
        message = (
            "would let the longest record of a micro-batch choose the RoPE frequencies of all others, as "
            f"this config does above {longest} tokens: set batch.sequence_length to at most {longest}, or "
            "leave packing out"
        )
        raise SpecError([FieldProblem("batch.packing", message)])
