"""The loss of preference pairs, by formulas that are written out here, and the reference policy beside the model."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchwright.errors import SpecError
from batchwright.planning.fingerprint import memory_part
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.coupling.check import check_spec_coupling
from batchwright.workloads.base import IGNORED_LABEL, WeighsLosses
from batchwright.workloads.build import build_model, build_workload, check_workload, summarize
from batchwright.workloads.causal.preference_pairs import PreferenceWorkload
from tests.support.factories import transformers_spec

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

VOCABULARY, LENGTH, PAIRS = 64, 12, 5
LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
LLAMA |= {"num_attention_heads": 2, "vocab_size": VOCABULARY}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY}
"""With a dropout of a tenth."""
GPT2 |= {"n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
LORA = {"kind": "lora", "target_modules": "all-linear"}


def pairs_spec(config: dict[str, Any] | None = None, adapter: Any = None, **preference: Any) -> WorkloadSpec:
    """A spec of a small decoder on preference pairs."""
    changes = {"batch": {"sequence_length": LENGTH}, "adapter": adapter, "preference": {"kind": "dpo", **preference}}
    return transformers_spec("causal-lm", config or LLAMA, **changes)


def built(spec: WorkloadSpec) -> tuple[PreferenceWorkload, nn.Module]:
    """The workload of a spec, and its model after some updates: away from its reference."""
    torch.manual_seed(0)
    workload = build_workload(spec)
    assert isinstance(workload, PreferenceWorkload)
    model = build_model(spec, workload)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return workload, model


def ragged_batch(workload: PreferenceWorkload) -> dict[str, Tensor]:
    """Pairs of prompts of four tokens with completions of several lengths, padded."""
    batch = workload.make_batch(PAIRS)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][..., :4] = IGNORED_LABEL
    for pair in range(PAIRS):
        for side, end in enumerate((6 + pair, 12 - pair)):
            batch["input_ids"][pair, side, end:] = 0
            batch["labels"][pair, side, end:] = IGNORED_LABEL
    return batch


def log_probability(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    """The sum over the completion's tokens of the logarithms of their probabilities, one sequence by itself."""
    count = int((labels != IGNORED_LABEL).sum()) + 4
    shares = model(input_ids=ids[None, :count]).logits[0].log_softmax(-1)
    return sum(float(shares[place - 1, ids[place]]) for place in range(4, count))


def log_ratios(model: nn.Module, reference: nn.Module, batch: dict[str, Tensor]) -> list[list[float]]:
    """For each pair, the log-ratio of the chosen and of the rejected completion."""
    with torch.no_grad():
        return [
            [log_probability(model, *side) - log_probability(reference, *side) for side in zip(*pair, strict=True)]
            for pair in zip(batch["input_ids"], batch["labels"], strict=True)
        ]


def sigmoid(value: float) -> float:
    """The logistic function."""
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(
    "preference", [{}, {"beta": 0.3, "label_smoothing": 0.1}, {"loss": "ipo", "beta": 0.2}], ids=["dpo", "cdpo", "ipo"]
)
@pytest.mark.parametrize("adapter", [None, LORA], ids=["copy", "adapter"])
def test_the_loss_is_the_published_one(preference: dict[str, Any], adapter: Any) -> None:
    """Of sequences that are run one by one and without padding, with the starting weights as the reference."""
    spec = pairs_spec(adapter=adapter, **preference)
    workload, model = built(spec)
    torch.manual_seed(0)
    reference = build_model(pairs_spec().model_copy(update={"preference": None}), build_workload(spec_alone(spec)))
    batch = ragged_batch(workload)
    ratios = log_ratios(model, reference, batch)
    beta, smoothing = preference.get("beta", 0.1), preference.get("label_smoothing", 0.0)
    if "loss" in preference:
        expected = sum(
            (chosen / (2 + pair) - rejected / (8 - pair) - 1 / (2 * beta)) ** 2
            for pair, (chosen, rejected) in enumerate(ratios)
        )
    else:
        margins = [beta * (chosen - rejected) for chosen, rejected in ratios]
        expected = sum(
            -(1 - smoothing) * math.log(sigmoid(margin)) - smoothing * math.log(sigmoid(-margin)) for margin in margins
        )
    scores = workload.score_rewards(model, batch)
    loss, weight = scores.terms["preference"]
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert weight == PAIRS
    torch.testing.assert_close(scores.rewards, beta * torch.tensor(ratios), rtol=1e-4, atol=1e-5)


def spec_alone(spec: WorkloadSpec) -> WorkloadSpec:
    """The spec without an adapter and pairs."""
    return spec.model_copy(update={"preference": None, "adapter": None})


@pytest.mark.parametrize("adapter", [None, LORA], ids=["copy", "adapter"])
def test_a_run_starts_at_its_reference(adapter: Any) -> None:
    """All rewards are zero before the first update, though the model has dropout: the reference has none."""
    spec = pairs_spec(GPT2, adapter)
    workload = build_workload(spec)
    model = build_model(spec, workload)
    batch = workload.make_batch(PAIRS)
    assert isinstance(workload, PreferenceWorkload)
    assert workload.score_rewards(model, batch).rewards.abs().max() > 0  # of dropout
    evaluated = workload.score_rewards(model.eval(), batch)
    assert torch.equal(evaluated.rewards, torch.zeros(PAIRS, 2))
    assert evaluated.terms["preference"][0].item() == pytest.approx(PAIRS * math.log(2))


@pytest.mark.parametrize("adapter", [None, LORA], ids=["copy", "adapter"])
def test_the_reference_leaves_the_model_as_it_was(adapter: Any) -> None:
    """Modes, trained parameters and the adapter's state are those of before, after an error too."""
    workload, model = built(pairs_spec(GPT2, adapter))
    modes = [module.training for module in model.modules()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    batch = workload.make_batch(2)
    workload.loss_terms(model, batch)["preference"][0].backward()  # type: ignore[no-untyped-call]
    with pytest.raises(KeyError):
        workload.loss_terms(model, {"input_ids": batch["input_ids"]})
    with pytest.raises(RuntimeError):
        workload.loss_terms(model, {**batch, "input_ids": batch["input_ids"].float()})
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert all((value.grad is not None) == value.requires_grad for value in model.parameters())
    assert not torch.equal(workload.score_rewards(model.eval(), batch).rewards, torch.zeros(2, 2))


def test_only_the_policy_is_in_the_state() -> None:
    """The names are those of the model alone; those of the copy do not count, but their bytes."""
    spec = pairs_spec()
    _, model = built(spec)
    alone = build_model(spec_alone(spec), build_workload(spec_alone(spec)))
    assert set(model.state_dict()) == set(alone.state_dict())
    summary, of_one = summarize(model), summarize(alone).parameters
    assert summary.parameter_bytes == 2 * summarize(alone).parameter_bytes
    assert (summary.parameters, summary.trainable_parameters) == (of_one, of_one)
    adapted = built(pairs_spec(adapter=LORA))[1]
    assert summarize(adapted).parameters < 1.5 * of_one


@pytest.mark.parametrize("adapter", [None, LORA], ids=["copy", "adapter"])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_pairs_are_separate(adapter: Any, loss: str) -> None:
    """The check for coupled samples finds that the gradient is a sum over pairs."""
    spec = pairs_spec(GPT2, adapter, loss=loss)
    report = check_spec_coupling(spec, build_workload(spec), torch.device("cpu"))
    assert report.problem is None
    assert not report.culprits
    assert report.gradient_error < 1e-12


@pytest.mark.parametrize("adapter", [None, LORA], ids=["copy", "adapter"])
def test_activations_that_are_recomputed_change_no_gradient(adapter: Any) -> None:
    """Blocks are recomputed as those of the policy, when the reference has run before."""
    gradients = []
    for recompute in (False, True):
        spec = pairs_spec(adapter=adapter).model_copy(update={"activation_checkpointing": recompute})
        workload, model = built(spec)
        workload.loss_terms(model, ragged_batch(workload))["preference"][0].backward()  # type: ignore[no-untyped-call]
        gradients.append([value.grad for value in model.parameters() if value.grad is not None])
    assert gradients[0]
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)


def test_a_batch_of_probes_has_completions_of_full_length() -> None:
    """A pair has one prompt, of half the length; its weight is one."""
    workload = built(pairs_spec())[0]
    batch = workload.make_batch(3)
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 2, LENGTH)
    assert torch.equal(batch["input_ids"][:, 0, :6], batch["input_ids"][:, 1, :6])
    assert (batch["labels"][..., :6] == IGNORED_LABEL).all()
    assert torch.equal(batch["labels"][..., 6:], batch["input_ids"][..., 6:])
    assert isinstance(workload, WeighsLosses)
    assert workload.loss_weights(batch) == {"preference": 3.0}


def test_a_router_loss_is_refused() -> None:
    """It would not be trained."""
    experts = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2}
    with pytest.raises(SpecError, match="`preference` has no such term"):
        check_workload(pairs_spec({**experts, "output_router_logits": True}))
    check_workload(pairs_spec(experts))


def test_pairs_take_other_memory_than_texts_and_all_losses_the_same() -> None:
    """A fingerprint tells the first apart, and not the second."""
    one, other = pairs_spec(), pairs_spec(loss="ipo", beta=0.5)
    assert memory_part(one) == memory_part(other)
    assert memory_part(one) != memory_part(spec_alone(one))
