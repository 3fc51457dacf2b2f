"""Training on preference pairs is as exact as any other, resumes to the bit, and prefers what was chosen."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchwright.errors import CheckpointError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import EvaluationSummary, RunOutcome, TrainingProgress
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.assembly import build_run
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.trainer import Trainer
from tests.support import rank_scenarios
from tests.support.factories import recommendation
from tests.support.faults import relative_distance
from tests.support.forked import run_two_ranks
from tests.support.whole_runs import weights_of
from tests.training.test_adapters import LLAMA, change_a_bias, logits, stop
from tests.training.test_trained_model import GPT2, UPDATES, spec_of, train

pytestmark = [
    pytest.mark.usefixtures("forked", "own_datasets_cache"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # read by peft
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),  # peft on GPT-2
]

LORA = {"kind": "lora", "rank": 4}
THOROUGH_ADAPTER = pytest.param(LORA, marks=pytest.mark.thorough)
ADAPTERS = pytest.mark.parametrize("adapter", [None, LORA], ids=["whole", "adapter"])
COPY = "reference_policy."
METRICS = ("reward_accuracy", "reward_margin")


def pairs_spec(adapter: Any = None, model: dict[str, Any] | None = None, **changes: Any) -> WorkloadSpec:
    """A small decoder on random preference pairs; the larger beta tells the divisions of a batch apart."""
    return spec_of(
        model or {"config": LLAMA}, adapter=adapter, **{"preference": {"kind": "dpo", "beta": 1.0}, **changes}
    )


@ADAPTERS
def test_training_on_pairs_is_exact(tmp_path: Path, adapter: Any) -> None:
    """The weights are those of undivided batches, however the batch is divided."""
    spec = pairs_spec(adapter)
    for size in (1, 3, 10):
        train(tmp_path / str(size), spec, size)
    whole = weights_of(tmp_path / "10")
    assert not any(COPY in name for name in whole)
    for size in (1, 3):
        assert relative_distance(weights_of(tmp_path / str(size)), whole) < 1e-6


@pytest.mark.parametrize(
    ("adapter", "model"),
    [
        pytest.param(None, "config", id="whole-config"),
        pytest.param(LORA, "pretrained", id="adapter-pretrained"),
        pytest.param(None, "pretrained", id="whole-pretrained", marks=pytest.mark.thorough),
        pytest.param(LORA, "config", id="adapter-config", marks=pytest.mark.thorough),
    ],
)
def test_a_stopped_run_resumes_to_equal_weights(tmp_path: Path, adapter: Any, model: str) -> None:
    """To the bit, with dropout: the reference is the model of the beginning, and not that of the checkpoint."""
    config = {**GPT2, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    source: dict[str, Any] = {"config": config}
    if model == "pretrained":
        train(tmp_path / "base", spec_of(source))
        source = {"pretrained": str(RunPaths(tmp_path / "base").pretrained)}
    spec = pairs_spec(adapter, source, ema_decay=0.5)
    _, undisturbed = train(tmp_path / "undisturbed", spec)
    stop(tmp_path / "run", spec)
    assert train(tmp_path / "run", spec)[1] == undisturbed


def test_another_reference_is_refused(tmp_path: Path) -> None:
    """A run resumes only beside the reference that it began with."""
    train(tmp_path / "base", spec_of({"config": GPT2}))
    folder = RunPaths(tmp_path / "base").pretrained
    spec = pairs_spec(None, {"pretrained": str(folder)})
    stop(tmp_path / "run", spec)
    change_a_bias(folder)
    with pytest.raises(CheckpointError, match=r"was trained beside other frozen weights: SHA-256 [0-9a-f]{64}, and"):
        train(tmp_path / "run", spec)


def test_checkpoints_and_results_hold_the_policy_alone(tmp_path: Path) -> None:
    """The reference has neither weights nor a state of the optimizer in them; transformers loads the result."""
    trainer, _ = train(tmp_path, pairs_spec(optimizer={"name": "adamw"}, ema_decay=0.5))
    weights, state = trainer._checkpoints.load(UPDATES)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    assert len(state["optimizer"]["state"]) == len(state["averages"]) == len(trained) == len(weights)
    run = RunPaths(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(run.pretrained, output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=0.0, atol=0.0)
    average = AutoModelForCausalLM.from_pretrained(run.pretrained_average)
    assert not torch.equal(logits(average), logits(loaded))
    assert not run.base.exists()


def test_peft_loads_the_adapter(tmp_path: Path) -> None:
    """With the logits of the model that was trained."""
    trainer, _ = train(tmp_path, pairs_spec(LORA))
    from peft import AutoPeftModelForCausalLM

    loaded = AutoPeftModelForCausalLM.from_pretrained(RunPaths(tmp_path).pretrained)
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=0.0, atol=0.0)


def of_two_ranks(adapter: Any, strategy: str) -> WorkloadSpec:
    """A spec for two ranks, with an evaluation of the trained weights and of their averages."""
    evaluation = {"count": 5, "metrics": [*METRICS], "weights": "both"}
    parallelism = {"strategy": strategy, "world_size": 2}
    return pairs_spec(adapter, parallelism=parallelism, evaluation=evaluation, ema_decay=0.5)


TWO_RANKS = {
    f"{strategy}-{name}": of_two_ranks(adapter, strategy)
    for strategy, name, adapter in (("ddp", "whole", None), ("fsdp", "whole", None), ("fsdp", "adapter", LORA))
}
TWO_RANKS["fsdp-classifier"] = spec_of(
    {"config": {**GPT2, "num_labels": 3}, "task": "sequence-classification"},
    adapter=LORA,
    parallelism={"strategy": "fsdp", "world_size": 2},
)


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of runs of two ranks, by the names of their specs."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks(folder, rank_scenarios.train, TWO_RANKS, UPDATES)
    return folder


@pytest.mark.parametrize("name", TWO_RANKS)
def test_runs_of_two_ranks_train_as_one(trained_by_two: Path, tmp_path: Path, name: str) -> None:
    """Sharded or not, the weights and the figures of the evaluation equal those of one rank."""
    trainer, _ = train(tmp_path, TWO_RANKS[name].with_world_size(1))
    assert relative_distance(weights_of(trained_by_two / name), weights_of(tmp_path)) < 1e-6
    if trainer.evaluation is not None:
        found = EvaluationSummary.model_validate_json((trained_by_two / name / "evaluation.json").read_bytes())
        equal_figures(found, trainer.evaluation.summary())


def equal_figures(found: EvaluationSummary | None, single: EvaluationSummary | None) -> None:
    """Check the last rewards. A margin is a small difference of log-likelihoods, each of 16 tokens."""
    rounding = 1e-7 * 16 * math.log(256)
    assert found is not None
    assert single is not None
    assert found.last is not None
    assert found.last.trained is not None
    assert single.last is not None
    assert single.last.trained is not None
    assert found.last.metrics == pytest.approx(single.last.metrics, abs=rounding)
    assert found.last.trained.metrics == pytest.approx(single.last.trained.metrics, abs=rounding)


def written_pairs(path: Path) -> None:
    """Pairs of a number with a polite answer, and with a short one."""
    rows = [{"prompt": f"{number}? ", "chosen": "yes, please", "rejected": "no"} for number in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("adapter", "preference"),
    [
        pytest.param(None, {}, id="whole-sigmoid"),
        pytest.param(LORA, {"loss": "ipo"}, id="adapter-ipo"),
        pytest.param(None, {"loss": "ipo"}, id="whole-ipo", marks=pytest.mark.thorough),
        pytest.param(LORA, {}, id="adapter-sigmoid", marks=pytest.mark.thorough),
    ],
)
def test_the_margin_of_the_rewards_rises(tmp_path: Path, adapter: Any, preference: dict[str, Any]) -> None:
    """On held-out pairs too: from zero at the reference to a margin, with the chosen completions ahead."""
    written_pairs(tmp_path / "pairs.jsonl")
    spec = pairs_spec(
        adapter,
        data={"kind": "records", "paths": [str(tmp_path / "pairs.jsonl")]},
        preference={"kind": "dpo", **preference},
        optimizer={"name": "adamw", "learning_rate": 1e-2},
        evaluation={"fraction": 0.2, "every": 10, "metrics": [*METRICS], "monitor": "reward_margin"},
    )
    trainer = Trainer(
        build_run(
            recommendation(spec, 12, 4), TrainingRequest(updates=30), RunPaths(tmp_path / "run"), open_device("cpu")
        )
    )
    made: list[TrainingProgress] = []
    assert trainer.run(made.append) is RunOutcome.SUCCEEDED
    assert trainer.evaluation is not None
    summary = trainer.evaluation.summary()
    assert summary.first is not None
    assert summary.last is not None
    assert summary.first.metrics == {"reward_accuracy": 0.0, "reward_margin": 0.0}
    assert summary.last.metrics["reward_accuracy"] == 1.0
    assert (summary.last.metrics["reward_margin"] or 0.0) > 0.1
    assert summary.best is not None
    assert made[-1].weights == {"preference": 12.0}


def test_precision_of_16_bits_trains(tmp_path: Path) -> None:
    """The copy is in the type of the parameters."""
    trainer, _ = train(tmp_path, pairs_spec(precision="bf16"))
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    assert weights_of(tmp_path)


@pytest.mark.parametrize("adapter", [None, THOROUGH_ADAPTER], ids=["whole", "adapter"])
def test_losses_are_scaled_in_fp16(tmp_path: Path, adapter: Any) -> None:
    """Which changes weights by the precision of fp16 alone, with a division of the batch too."""
    train(tmp_path / "fp32", pairs_spec(adapter), 10)
    train(tmp_path / "fp16", pairs_spec(adapter, precision="fp16-mixed"), 3)
    assert relative_distance(weights_of(tmp_path / "fp16"), weights_of(tmp_path / "fp32")) < 1e-3
