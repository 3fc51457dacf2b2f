"""Frequencies of RoPE that the longest sequence of a micro-batch decides."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

from batchwright.errors import SpecError
from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.schemas.workload import TransformersModel
from batchwright.workloads.build import build_model, build_workload
from batchwright.workloads.causal.decoders import CausalWorkload, PackedWorkload
from batchwright.workloads.causal.rope_scaling import longest_uncoupled
from batchwright.workloads.hugging_face import build_config
from tests.support.factories import transformers_spec
from tests.support.faults import relative_error
from tests.support.sources import built
from tests.workloads.causal.test_document_masks import LLAMA, packed_spec, small

LONGEST = 12
FACTORS: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LONGEST, **FACTORS}
PHI3 = {**small("phi3"), "rope_parameters": LONGROPE, "original_max_position_embeddings": LONGEST}
PHIMOE = {**small("phimoe"), "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}}
PHIMOE |= {"original_max_position_embeddings": LONGEST}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
GEMMA3 = {**small("gemma3_text"), "layer_types": ["sliding_attention", "full_attention"]}
GEMMA3 |= {"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": PLAIN}}
DYNAMIC = {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
YARN = {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}


def workload_of(config: dict[str, Any], length: int = 24) -> CausalWorkload:
    """The workload of a model whose records are not packed."""
    workload = build_workload(transformers_spec("causal-lm", config, batch={"sequence_length": length}))
    assert isinstance(workload, CausalWorkload)
    return workload


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (PHI3, 12),
        (PHIMOE, 12),
        (GEMMA3, 12),
        (DYNAMIC, 32),
        (YARN, None),
        (LLAMA, None),
        ({"model_type": "gpt2"}, None),
    ],
    ids=["phi3", "phimoe", "by-layer", "dynamic", "yarn", "llama", "gpt2"],
)
def test_the_length_above_which_frequencies_change(config: dict[str, Any], longest: int | None) -> None:
    """The original length of `longrope`, of any layer, and the longest of `dynamic`."""
    assert longest_uncoupled(workload_of(config).config) == longest


def test_a_former_name_of_the_parameters_is_read() -> None:
    """`rope_scaling` becomes `rope_parameters`; Phi-3's config has the original length beside them."""
    config = {**PHI3, "rope_scaling": {"type": "longrope", **FACTORS}}
    del config["rope_parameters"]
    assert longest_uncoupled(workload_of(config).config) == LONGEST


@pytest.mark.parametrize("config", [PHI3, PHIMOE, GEMMA3], ids=["phi3", "phimoe", "by-layer"])
def test_logits_depend_on_a_neighbour_above_that_length(config: dict[str, Any]) -> None:
    """The first logits are equal beside a sequence of the length, and others beside one of a token more."""
    workload = workload_of(config)
    torch.manual_seed(0)
    model = workload.build_model().eval()
    ids = torch.randint(3, 64, (1, LONGEST + 1))

    def first(length: int) -> Tensor:
        return workload.logits(model, {"input_ids": ids[:, :length]})[:, :5].detach()

    assert relative_error({"logits": first(LONGEST)}, {"logits": first(5)}) < 1e-5
    assert relative_error({"logits": first(LONGEST + 1)}, {"logits": first(5)}) > 1e-3


@pytest.mark.parametrize("config", [PHI3, PHIMOE, GEMMA3], ids=["phi3", "phimoe", "by-layer"])
def test_packing_above_that_length_is_refused(config: dict[str, Any]) -> None:
    """With the length that is exact."""
    with pytest.raises(SpecError, match=r"batch\.packing.*set batch\.sequence_length to at most 12"):
        build_workload(packed_spec(config))
    short = packed_spec(config, batch={"sequence_length": LONGEST, "packing": "bfd"})
    assert isinstance(build_workload(short), PackedWorkload)


def test_dynamic_frequencies_change_above_the_model_s_positions_alone() -> None:
    """Longer sequences are refused with or without packing."""
    model = TransformersModel(kind="transformers", task="causal-lm", config=DYNAMIC)
    with pytest.raises(SpecError, match=r"max_position_embeddings: is 32 in this config"):
        build_config(model, BatchSpec(sequence_length=33))


@pytest.mark.parametrize(
    ("length", "compiled", "is_noted"), [(24, False, True), (24, True, False), (LONGEST, False, False)]
)
def test_ragged_records_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, *, compiled: bool, is_noted: bool
) -> None:
    """The note stands where the loss of two records is not that of each alone."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("few words", "a text of many more words")))
    data = {"kind": "records", "paths": [str(rows)]}
    config = {**PHI3, "vocab_size": 256}
    spec = transformers_spec("causal-lm", config, batch={"sequence_length": length}, data=data, compile=compiled)
    records, workload = built(spec), build_workload(spec)
    assert [note for note in records.notes if "more than 12 tokens changes the RoPE" in note] == [*records.notes]
    assert bool(records.notes) is is_noted
    model = build_model(spec.model_copy(update={"compile": False}), workload).double()

    def loss(*indices: int) -> float:
        return float(workload.loss_terms(model, records.batch(indices))["next_token"][0].detach())

    assert (abs(loss(0, 1) - loss(0) - loss(1)) > 1e-6) is is_noted
