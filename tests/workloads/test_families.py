"""Families of models with published configurations: each is probed on the CPU, and estimated for a card."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from batchwright.estimation.pool import EstimatePool
from batchwright.hardware.inventory import cpu
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.estimates import EstimateRequest, Verdict
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome
from batchwright.schemas.workload import Precision, WorkloadSpec
from tests.support.factories import transformers_spec, tuning_request
from tests.workloads.test_published_configs import PUBLISHED

pytestmark = pytest.mark.usefixtures("tracing")

WIDE = {"hidden_size": 64, "intermediate_size": 64}
TEXT = {"sequence_length": 16}
RAW_AUDIO = {"sequence_length": 8, "audio_length": 1600}
LAYER_NORMALISED: dict[str, Any] = {**PUBLISHED["wav2vec2"], "feat_extract_norm": "layer"}
MASKED_FEATURES: dict[str, Any] = {**PUBLISHED["wav2vec2"], "mask_feature_prob": 0.1, "mask_feature_length": 4}
MAMBA2 = {"model_type": "mamba2", "num_heads": 8, "head_dim": 4, "hidden_size": 16, "state_size": 8, "n_groups": 1}
MAMBA2 |= {"num_hidden_layers": 1, "vocab_size": 64, "chunk_size": 8}


def family(task: str, config: dict[str, Any], precision: Precision, **batch: int) -> WorkloadSpec:
    """A small model of a family."""
    return transformers_spec(task, config, batch=batch or TEXT, precision=precision)


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, **WIDE}
ATTENTION_LORA = {"kind": "lora", "target_modules": ["q_proj", "v_proj"], "dropout": 0.1}
LORA = {"kind": "lora", "target_modules": "all-linear", "dropout": 0.1}

FAMILIES = {
    "deberta-v3": family("masked-lm", PUBLISHED["deberta-v3"], "bf16-mixed"),
    "mixtral": family("causal-lm", {**PUBLISHED["mixtral"], **WIDE}, "bf16-mixed"),
    "qwen3-moe": family("causal-lm", {**PUBLISHED["qwen3-moe"], **WIDE}, "bf16-mixed"),
    "deepseek-v3": family("causal-lm", {**PUBLISHED["deepseek-v3"], **WIDE}, "bf16-mixed"),
    "gpt-oss": family("causal-lm", {**PUBLISHED["gpt-oss"], **WIDE}, "bf16-mixed"),
    "mamba": family("causal-lm", PUBLISHED["mamba"], "bf16-mixed"),
    "mamba2": family("causal-lm", MAMBA2, "fp32"),
    "whisper": family("speech-seq2seq", PUBLISHED["whisper"], "bf16-mixed"),
    "wav2vec2": family("ctc", PUBLISHED["wav2vec2"], "bf16-mixed", **RAW_AUDIO),
    "wav2vec2, normalised by layer": family("ctc", LAYER_NORMALISED, "fp32", **RAW_AUDIO),
    "wav2vec2 with masked features": family("ctc", MASKED_FEATURES, "fp32", **RAW_AUDIO),
    "clip": family("contrastive", PUBLISHED["clip"], "bf16-mixed"),
    "llama in shards of bf16": transformers_spec(
        "causal-lm",
        LLAMA,
        batch=TEXT,
        precision="bf16",
        parallelism={"world_size": 2, "strategy": "fsdp"},
    ),
    "adapter of llama in bf16, checkpointed": transformers_spec(
        "causal-lm", LLAMA, batch=TEXT, precision="bf16", adapter=LORA, activation_checkpointing=True
    ),
    "adapter of llama in shards": transformers_spec(
        "causal-lm", LLAMA, batch=TEXT, adapter=LORA, parallelism={"world_size": 2, "strategy": "fsdp"}
    ),
    "adapter of a mixture of experts": transformers_spec(
        "causal-lm", {**PUBLISHED["qwen3-moe"], **WIDE}, batch=TEXT, adapter=ATTENTION_LORA, precision="bf16-mixed"
    ),
    "adapter of vit": transformers_spec(
        "image-classification",
        {"model_type": "vit", "num_labels": 3, "image_size": 32, "patch_size": 16, "num_hidden_layers": 1, **WIDE}
        | {"num_attention_heads": 2},
        adapter={"kind": "lora", "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]},
    ),
}


LONG = {
    "mixtral",
    "deepseek-v3",
    "gpt-oss",
    "mamba2",
    "wav2vec2, normalised by layer",
    "wav2vec2 with masked features",
    "adapter of llama in shards",
    "adapter of a mixture of experts",
    "adapter of vit",
}
"""Families beside which another of the same kind is always tried."""
ESTIMATED = {"mamba"}
"""A family whose estimate takes the most of the code; the tests of tracing have the layers of the others."""


def families(tried: set[str]) -> pytest.MarkDecorator:
    """All families. `make test` runs only some of them."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in tried else pytest.mark.thorough) for name in FAMILIES]
    )


@pytest.fixture(scope="module")
def pool(tracing: None) -> Iterator[EstimatePool]:
    """A process that traces."""
    del tracing
    with closing(EstimatePool()) as running:
        yield running


@pytest.fixture(scope="module")
def supervisor(forked: None) -> Iterator[ProbeSupervisor]:
    """A process that probes, and has imported transformers."""
    del forked
    with ProbeSupervisor(cpu()) as running:
        running.check(tuning_request(FAMILIES["clip"]))
        yield running


@families(ESTIMATED)
def test_a_family_is_estimated_for_a_card(name: str, pool: EstimatePool) -> None:
    """An estimate succeeds, and the requested size fits."""
    (found,) = pool.estimate(EstimateRequest(spec=FAMILIES[name], gpus=("A10G",), micro_batch_size=8)).gpus
    assert found.feasible is Verdict.FITS, found.notes
    assert found.peak is not None
    assert found.peak.verdict is Verdict.FITS


@families(FAMILIES.keys() - LONG)
def test_a_family_is_probed_on_the_cpu(name: str, supervisor: ProbeSupervisor) -> None:
    """Two updates of real micro-batches, within a budget."""
    request = ProbeRequest(
        spec=FAMILIES[name],
        micro_batch_size=2,
        samples_per_window=4,
        device="cpu",
        limit_bytes=1024**3,
        timeout_seconds=300.0,
    )
    result = supervisor.run(request)
    assert result.outcome is Outcome.FIT, result.message
