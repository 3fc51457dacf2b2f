"""Models that keep packed documents apart: a document has the logits, the loss and the gradient that it has alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchwright.errors import SpecError
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.sources.packing import pack
from batchwright.training.data.sources.tokens import PaddedCollation
from batchwright.workloads.build import build_model, build_workload, check_workload
from batchwright.workloads.causal.decoders import PackedWorkload
from batchwright.workloads.causal.document_masks import SEPARATE_DOCUMENTS
from tests.support.factories import transformers_spec

VOCABULARY, LENGTH = 64, 24
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "sliding_window": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_channels": 8,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SOME = ("gemma3_text", "gpt_neox", "mistral", "phi3", "qwen3", "qwen3_moe")
WITHOUT_SDPA = {"gemma2", "gptj", "vaultgemma"}
TYPES = [
    pytest.param(kind, attention, marks=[] if kind in SOME else [pytest.mark.thorough])
    for kind in sorted(SEPARATE_DOCUMENTS)
    for attention in ("eager", "sdpa")
    if attention == "eager" or kind not in WITHOUT_SDPA
]


def packed_spec(config: dict[str, Any], **changes: Any) -> WorkloadSpec:
    """A spec of packed documents."""
    return transformers_spec("causal-lm", config, **{"batch": {"sequence_length": LENGTH, "packing": "bfd"}, **changes})


def small(kind: str) -> dict[str, Any]:
    """Fields of a small config of a type, of those in ``SIZES`` that it has."""
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[kind]()
    return {"model_type": kind, **{name: size for name, size in SIZES.items() if hasattr(default, name)}}


def documents(*lengths: int) -> list[list[int]]:
    """Random documents of these lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def batch_of(texts: list[list[int]], packing: Any = "bfd") -> dict[str, Tensor]:
    """All sequences of packed documents."""
    packed = pack(texts, LENGTH, packing)
    return PaddedCollation(0, None, masked=False)([packed[index] for index in range(len(packed))])


def double(spec: WorkloadSpec) -> tuple[PackedWorkload, nn.Module]:
    """The workload, and its model in fp64."""
    workload = build_workload(spec)
    assert isinstance(workload, PackedWorkload)
    torch.manual_seed(0)
    return workload, build_model(spec, workload).double()


def gradient_of(workload: PackedWorkload, model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[float, Tensor]:
    """The mean loss over all labels of batches, and its gradient."""
    weight = sum(workload.loss_weights(batch)["next_token"] for batch in batches)
    model.zero_grad()
    total = 0.0
    for batch in batches:
        ((loss, _),) = workload.loss_terms(model, batch).values()
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach()) / weight
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("config", "attention", "error"),
    [(GPT2, "eager", 1e-12), (GPT2, "sdpa", 1e-12), (LLAMA, "eager", 1e-6), (LLAMA, "sdpa", 1e-12)],
    ids=["gpt2-eager", "gpt2-sdpa", "llama-eager", "llama-sdpa"],
)
def test_packed_documents_train_as_alone(config: dict[str, Any], attention: str, error: float) -> None:
    """Loss and gradient are those of the documents one by one, in fp64, and so are the numbers of labels.

    Llama's softmax of `eager` is in fp32 whatever the model is in.
    """
    workload, model = double(packed_spec({**config, "attn_implementation": attention}))
    texts = documents(11, 5, 24, 2, 7, 13, 3, 9)
    packed, alone = batch_of(texts), [batch_of([text]) for text in texts]
    assert len(packed["input_ids"]) == 4
    assert workload.loss_weights(packed)["next_token"] == sum(len(text) - 1 for text in texts)
    loss, gradient = gradient_of(workload, model, [packed])
    loss_alone, gradient_alone = gradient_of(workload, model, alone)
    assert loss == pytest.approx(loss_alone, rel=error)
    assert float((gradient - gradient_alone).abs().max()) < error * float(gradient_alone.abs().max())


@pytest.mark.parametrize("size", [1, 3])
def test_the_division_of_packed_sequences_changes_nothing(size: int) -> None:
    """A sequence of one document has no mask when it is alone, and one beside others; the gradient is equal."""
    workload, model = double(packed_spec({**LLAMA, "attn_implementation": "sdpa"}))
    batch = batch_of(documents(24, 24, 5, 6, 7, 19, 20))
    parts = [{name: value[start : start + size] for name, value in batch.items()} for start in range(0, 7, size)]
    parts = [part for part in parts if len(part["input_ids"])]
    loss, gradient = gradient_of(workload, model, [batch])
    loss_of_parts, gradient_of_parts = gradient_of(workload, model, parts)
    assert loss == pytest.approx(loss_of_parts, rel=1e-12)
    assert float((gradient - gradient_of_parts).abs().max()) < 1e-12 * float(gradient_of_parts.abs().max())


def test_a_batch_without_masks_between_documents_would_differ() -> None:
    """With positions that do not restart, documents see each other: the tests above would notice."""
    workload, model = double(packed_spec(LLAMA))
    batch = batch_of(documents(11, 13))
    plain = {**batch, "position_ids": torch.arange(LENGTH)[None]}
    assert gradient_of(workload, model, [batch])[0] != pytest.approx(gradient_of(workload, model, [plain])[0], rel=1e-6)


@pytest.mark.parametrize(("kind", "attention"), TYPES)
def test_each_listed_model_keeps_documents_apart(kind: str, attention: str) -> None:
    """The logits of a document are those that it has alone; windows of attention are shorter than the document."""
    workload = build_workload(packed_spec({**small(kind), "attn_implementation": attention}))
    assert isinstance(workload, PackedWorkload)
    torch.manual_seed(0)
    model = workload.build_model().eval()
    first, second = documents(14, 10)
    with torch.no_grad():
        packed, alone = (workload.logits(model, batch_of(texts)) for texts in ([first, second], [second]))
    torch.testing.assert_close(packed[0, len(first) :], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bloom", "opt", "falcon", "mamba", "qwen3_next"])
def test_other_models_are_refused(kind: str) -> None:
    """Their documents would see each other without a word."""
    with pytest.raises(SpecError, match=rf"batch\.packing.*does for {kind}: leave packing out"):
        build_workload(packed_spec({"model_type": kind}))


def test_an_attention_that_was_not_tried_is_refused() -> None:
    """With the ones to use."""
    with pytest.raises(SpecError, match=r"batch\.packing.*use sdpa or eager"):
        build_workload(packed_spec({**LLAMA, "attn_implementation": "flex_attention"}))


def test_a_router_loss_is_refused() -> None:
    """Its mask of padding would replace the mask of documents."""
    spec = packed_spec({**small("mixtral"), "output_router_logits": True})
    with pytest.raises(SpecError, match=r"batch\.packing.*output_router_logits to false"):
        check_workload(spec)
