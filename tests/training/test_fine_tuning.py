"""Fine-tuning for real: a model trained on English learns Python, with LoRA and without, as held-out code shows."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from transformers import AutoModelForCausalLM

from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import EvaluationReport, EvaluationSummary, RunOutcome, TrainingProgress
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from tests.support.factories import recommendation
from tests.support.whole_runs import ENVIRONMENT, run_to_end
from tests.training.test_trained_model import spec_of

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # read by peft
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),  # peft on GPT-2
]

LENGTH = 64
MODEL = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": LENGTH}
LORA = {"kind": "lora", "rank": 8, "alpha": 32, "target_modules": ["c_attn", "c_fc", "c_proj"]}
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
ENGLISH = "pydoc_data/topics.py"
"""The reference manual."""
CODE = "email/*.py"
HELD_OUT_CODE = "json/*.py"
FIGURES = {"every": 30, "metrics": ["accuracy", "perplexity"]}


@dataclass(frozen=True)
class Trained:
    """A run that has ended."""

    paths: RunPaths
    evaluation: EvaluationSummary
    progress: list[TrainingProgress]

    @property
    def best(self) -> EvaluationReport:
        """The best evaluation."""
        assert self.evaluation.best is not None
        return self.evaluation.best

    @property
    def first(self) -> EvaluationReport:
        """The evaluation before the first update."""
        assert self.evaluation.first is not None
        return self.evaluation.first


def text(pattern: str) -> dict[str, Any]:
    """Files of the standard library as bytes."""
    return {"kind": "text", "paths": [str(STANDARD_LIBRARY / pattern)]}


def train(directory: Path, model: dict[str, Any], updates: int, **fields: Any) -> Trained:
    """Train with an effective batch of 32, in micro-batches of 8."""
    adam = {"name": "adamw", "learning_rate": 0.003}
    spec = spec_of(model, **{"batch": {"sequence_length": LENGTH}, "optimizer": adam, **fields})
    result = run_to_end(
        directory, recommendation(spec, 32, 8, environment=ENVIRONMENT), TrainingRequest(updates=updates)
    )
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    assert result.evaluation is not None
    return Trained(RunPaths(directory), result.evaluation, ProgressLog(RunPaths(directory).progress).new_lines())


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A small model, trained on the reference manual of Python."""
    evaluation = {"count": 64, **FIGURES}
    return train(tmp_path_factory.mktemp("english"), {"config": MODEL}, 90, data=text(ENGLISH), evaluation=evaluation)


@pytest.fixture(scope="module", params=["whole", "lora"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, english: Trained) -> Trained:
    """Run that trains the same model further on code: all of it, or an adapter."""
    fields: dict[str, Any] = {}
    updates = 60
    if request.param == "lora":  # which has few numbers to train
        fields, updates = {"adapter": LORA}, 150
    return train(
        tmp_path_factory.mktemp(request.param),
        {"pretrained": str(english.paths.pretrained_best)},
        updates,
        data=text(CODE),
        evaluation={"data": text(HELD_OUT_CODE), **FIGURES},
        **fields,
    )


def held_out_loss(model: torch.nn.Module) -> float:
    """The loss over the held-out code, by transformers and torch alone."""
    content = b"\n".join(path.read_bytes() for path in sorted(STANDARD_LIBRARY.glob(HELD_OUT_CODE)))
    total, tokens = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(content), LENGTH):
            ids = torch.tensor(list(content[start : start + LENGTH]))
            if len(ids) > 1:
                logits = model.eval()(input_ids=ids[None]).logits[0, :-1]
                total += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
                tokens += len(ids) - 1
    return total / tokens


def improves(run: Trained, gain: float) -> None:
    """Check that the losses of training and of held-out samples fall, and that the metrics improve."""
    losses = [progress.loss for progress in run.progress if progress.loss is not None]
    assert sum(losses[-10:]) < sum(losses[:10]) - 10 * gain
    first, best = run.first, run.best
    assert first.loss is not None
    assert best.loss is not None
    assert best.loss < first.loss - gain
    figures = [(before, best.metrics[name]) for name, before in first.metrics.items()]
    assert None not in [value for pair in figures for value in pair]
    assert (best.metrics["accuracy"] or 0.0) > (first.metrics["accuracy"] or 0.0) + gain / 10
    assert (best.metrics["perplexity"] or 0.0) < (first.metrics["perplexity"] or 0.0)


def test_the_first_training_learns(english: Trained) -> None:
    """From random weights, as documents that it has not read show."""
    improves(english, gain=1.0)


def test_fine_tuning_improves_on_held_out_code(python: Trained, english: Trained) -> None:
    """Further than what it came from, which is better than random weights on code too."""
    assert python.first.loss is not None
    assert english.first.loss is not None
    assert python.first.loss < english.first.loss - 0.5
    improves(python, gain=0.1)


def test_transformers_and_peft_load_the_best_model(python: Trained, english: Trained) -> None:
    """With the loss that the run has reported for it."""
    folder = python.paths.pretrained_best
    if (folder / "adapter_config.json").exists():
        base = AutoModelForCausalLM.from_pretrained(english.paths.pretrained_best)
        from peft import PeftModel

        model = PeftModel.from_pretrained(base, folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert held_out_loss(model) == pytest.approx(python.best.loss, rel=1e-4)
