"""Contrastive pairs: the loss of transformers, found to couple the samples of a micro-batch."""

from typing import Any

import pytest
import torch

from batchwright.errors import SpecError
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.coupling.check import check_spec_coupling
from batchwright.workloads.base import WeighsLosses
from batchwright.workloads.build import build_model, build_workload, check_workload
from tests.support.factories import transformers_spec
from tests.workloads.test_published_configs import PUBLISHED

PART: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT: dict[str, Any] = {**PART, "vocab_size": 64}
IMAGE: dict[str, Any] = {**PART, "image_size": 16, "patch_size": 8}
PAIRS: dict[str, Any] = {"text_config": TEXT, "vision_config": IMAGE}
CONFIGS: dict[str, dict[str, Any]] = {
    "clip": PUBLISHED["clip"],
    "siglip": {
        "text_config": {**TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        "vision_config": IMAGE,
    },
    "chinese_clip": PAIRS,
    "altclip": {"text_config": {**TEXT, "project_dim": 8}, "vision_config": IMAGE},
    "metaclip_2": PAIRS,
    "clipseg": PAIRS,
}


def pairs(kind: str, length: int = 8) -> WorkloadSpec:
    """Small pairs of an image and a text."""
    return transformers_spec("contrastive", {"model_type": kind, **CONFIGS[kind]}, batch={"sequence_length": length})


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_update_of_one_micro_batch_is_that_of_transformers(kind: str) -> None:
    """The term is the model's own loss, times the pairs that it is the mean of; both parts get a gradient."""
    torch.manual_seed(0)
    spec = pairs(kind)
    workload = build_workload(spec)
    model: Any = build_model(spec, workload).eval()
    batch = workload.make_batch(4)
    ((loss, weight),) = workload.loss_terms(model, batch).values()
    assert float(loss.detach()) / float(weight) == pytest.approx(float(model(**batch, return_loss=True).loss.detach()))
    assert isinstance(workload, WeighsLosses)
    assert workload.loss_weights(batch) == {"contrastive": 4.0}
    torch.autograd.backward(loss)
    for part in (model.text_model, model.vision_model):
        assert any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in part.parameters())


def test_the_check_for_coupled_samples_sees_it() -> None:
    """Each pair is told from the others of its micro-batch, so several micro-batches have another loss."""
    report = check_spec_coupling(pairs("clip"), build_workload(pairs("clip")), torch.device("cpu"))
    assert report.verdict == "coupled"


def test_a_text_or_a_model_that_does_not_fit_is_named() -> None:
    """The positions are those of the inner configuration; models without such a loss need a `python` workload."""
    with pytest.raises(
        SpecError, match=r"text_config\.max_position_embeddings: is 77 .* below batch\.sequence_length 78"
    ):
        check_workload(pairs("clip", 78))
    spec = transformers_spec("contrastive", {"model_type": "bert"}, batch={"sequence_length": 8})
    with pytest.raises(SpecError, match=r"contrastive trains .*for bert write a `python` workload"):
        check_workload(spec)
