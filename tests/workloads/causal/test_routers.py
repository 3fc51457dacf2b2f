"""Mixtures of experts: their routers' loss is trained as in transformers, found to couple samples, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright.errors import SpecError, TrainingError, WorkloadError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import TrainingProgress
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.assembly import build_run
from batchwright.training.coupling.check import check_coupling, check_spec_coupling
from batchwright.training.data.sources.tokens import PaddedCollation
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.micro_batches.splitting import sliced
from batchwright.training.trainer import Trainer
from batchwright.workloads.build import build_model, build_workload, check_workload
from tests.support.factories import recommendation, transformers_spec

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 32, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROUTED: dict[str, Any] = {"output_router_logits": True}
FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DBRX = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 64,
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
}
JAMBA = {"num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2}
JAMBA |= {"attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False, "mamba_dt_rank": 4}
JETMOE = {name: value for name, value in SMALL.items() if name != "num_attention_heads"}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen2_moe": {**SMALL, **FOUR, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**SMALL, **FOUR, "head_dim": 8},
    "olmoe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    "dbrx": DBRX,
    "jamba": {**SMALL, **JAMBA},
    "phimoe": {**SMALL, "num_local_experts": 4},
    "gpt_oss": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "granitemoe": {**SMALL, "num_local_experts": 4},
    "jetmoe": {**JETMOE, "num_local_experts": 4, "kv_channels": 8},
    "ernie4_5_moe": {
        **SMALL,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 0,
    },
}


def mixture(kind: str = "mixtral", **config: Any) -> WorkloadSpec:
    """A small mixture of experts."""
    return transformers_spec(
        "causal-lm",
        {"model_type": kind, **MIXTURES[kind], **config},
        batch={"sequence_length": 12},
        data={"kind": "synthetic", "samples": 32},
    )


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_loss_of_one_micro_batch_is_that_of_transformers(kind: str) -> None:
    """Cross-entropy and the routers' loss with its coefficient, without padding, are equal in fp32."""
    torch.manual_seed(0)
    spec = mixture(kind, **ROUTED)
    workload = build_workload(spec)
    model: Any = build_model(spec, workload).eval()
    batch = workload.make_batch(3)
    assert (batch["attention_mask"] == 0).any()
    terms = workload.loss_terms(model, batch)
    assert set(terms) == {"next_token", "router_aux_loss"}
    ours = sum(float(total.detach()) / float(weight) for total, weight in terms.values())
    theirs = model(**batch, output_router_logits=True, use_cache=False)
    assert float(theirs.aux_loss.detach()) > 0.5
    assert ours == pytest.approx(float(theirs.loss.detach()), rel=2e-6)
    assert workload.loss_weights(batch) == {name: float(weight) for name, (_, weight) in terms.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["mixtral", "dbrx"])
def test_the_factor_is_the_one_of_the_config(kind: str) -> None:
    """Ten times the coefficient is ten times the term, and the routers get a gradient."""
    torch.manual_seed(0)
    factors = (
        [{"router_aux_loss_coef": 0.1}, {"router_aux_loss_coef": 1.0}]
        if kind == "mixtral"
        else [{"ffn_config": {**DBRX["ffn_config"], "moe_loss_weight": coefficient}} for coefficient in (0.1, 1.0)]  # type: ignore[dict-item]
    )
    terms = []
    for factor in factors:
        torch.manual_seed(0)
        spec = mixture(kind, **ROUTED, **factor)
        workload = build_workload(spec)
        model = build_model(spec, workload)
        total, _ = workload.loss_terms(model, workload.make_batch(2))["router_aux_loss"]
        torch.autograd.backward(total)
        terms.append(float(total.detach()))
        routers = [
            parameter.grad for name, parameter in model.named_parameters() if "router" in name or "gate.weight" in name
        ]
        assert any(grad is not None and bool(grad.abs().max() > 0) for grad in routers)
    assert terms[1] == pytest.approx(10 * terms[0], rel=1e-5)


def test_without_the_switch_there_is_no_term() -> None:
    """The coefficient has no effect until the logits are requested, as in transformers."""
    spec = mixture(output_router_logits=False, router_aux_loss_coef=0.02)
    workload = build_workload(spec)
    assert set(workload.loss_terms(build_model(spec, workload), workload.make_batch(2))) == {"next_token"}


def test_a_factor_without_the_switch_is_refused() -> None:
    """A coefficient without the switch would have no effect, and is refused by name."""
    with pytest.raises(SpecError, match=r"router_aux_loss_coef: has no effect unless `output_router_logits` is true"):
        check_workload(mixture(router_aux_loss_coef=0.02))


@pytest.mark.parametrize(
    ("task", "config", "field"),
    [
        ("sequence-classification", {"model_type": "mixtral", **MIXTURES["mixtral"], **ROUTED}, "output_router_logits"),
        (
            "seq2seq-lm",
            {"model_type": "nllb-moe", "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, **ROUTED},
            "output_router_logits",
        ),
        ("seq2seq-lm", {"model_type": "switch_transformers", "add_router_probs": True}, "add_router_probs"),
        ("causal-lm", {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}, "output_router_logits"),
    ],
)
def test_a_router_loss_that_would_not_be_trained_is_refused(task: str, config: dict[str, Any], field: str) -> None:
    """The router loss is never dropped silently."""
    if config["model_type"] == "gpt2":
        config = {**config, **ROUTED}
    with pytest.raises(SpecError) as caught:
        check_workload(transformers_spec(task, config, batch={"sequence_length": 12}))
    assert caught.value.problems[0].field == f"model.config.{field}"


def test_a_forward_pass_without_the_router_loss_raises() -> None:
    """A release of transformers that computes none is found at the first probe."""
    spec = mixture(**ROUTED)
    workload = build_workload(spec)
    model: Any = build_model(spec, workload)
    model.forward = lambda **_: type("Output", (), {"logits": torch.zeros(2, 12, 64), "aux_loss": None})()
    with pytest.raises(WorkloadError, match="returned no router loss"):
        workload.loss_terms(model, workload.make_batch(2))


def test_the_check_for_coupled_samples_sees_it() -> None:
    """Balancing is a statistic of the batch: only this term is at fault."""
    spec = mixture(**ROUTED, router_aux_loss_coef=1.0)
    report = check_spec_coupling(spec, build_workload(spec), CPU)
    assert report.coupled
    assert [(culprit.kind, culprit.name) for culprit in report.culprits] == [("term", "router_aux_loss")]
    assert "balancing per micro-batch" in report.message
    plain = mixture(output_router_logits=False)
    assert not check_spec_coupling(plain, build_workload(plain), CPU).coupled


def test_a_run_trains_it_where_that_is_allowed(tmp_path: Path) -> None:
    """The run is refused by default; with `allow_batch_coupling` each update reports both terms."""
    spec = mixture(**ROUTED, router_aux_loss_coef=1.0)
    found = recommendation(spec, 8, 4)
    with pytest.raises(TrainingError, match="router_aux_loss"):
        Trainer(build_run(found, TrainingRequest(updates=2), RunPaths(tmp_path / "refused"), open_device("cpu")))
    request = TrainingRequest(updates=2, allow_batch_coupling=True)
    loop = Trainer(build_run(found, request, RunPaths(tmp_path / "allowed"), open_device("cpu")))
    made: list[TrainingProgress] = []
    loop.run(made.append)
    assert [set(progress.terms) for progress in made] == [{"next_token", "router_aux_loss"}] * 2
    assert made[0].terms["router_aux_loss"] == pytest.approx(2.0, rel=0.2)


def test_padding_of_records_is_masked() -> None:
    """A collation of ragged samples and the workload's own make the same mask."""
    samples = [torch.ones(3, dtype=torch.int64), torch.ones(5, dtype=torch.int64)]
    workload: Any = build_workload(mixture(**ROUTED))
    ours, records = workload.collate(samples), PaddedCollation(0, None, masked=workload.takes_mask)(samples)
    assert ours.keys() == records.keys()
    assert all(torch.equal(ours[name], records[name]) for name in ours)
    assert ours["attention_mask"].sum(1).tolist() == [3, 5]


@pytest.mark.parametrize("kind", MIXTURES)
def test_routers_are_compared_in_fp64(kind: str) -> None:
    """In fp32 the rounding of a router's output may choose another expert, which looks like coupling."""
    spec = mixture(kind)
    report = check_spec_coupling(spec, build_workload(spec), CPU)
    assert (report.verdict, report.precision) == ("separate", "fp64"), report.message


def test_the_kernel_of_the_experts_is_restored() -> None:
    """The configuration, which the workload's next model has too, names the kernel that it had."""
    spec = mixture()
    workload = build_workload(spec)
    model: Any = build_model(spec, workload)
    before = model.get_experts_implementation()
    assert "grouped_mm" in before.values()
    check_coupling(model, workload, sliced(workload.make_batch(4)), CPU)
    assert model.get_experts_implementation() == before
