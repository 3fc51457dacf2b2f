"""The callback of Hugging Face's Trainer, in runs of the Trainer itself."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright.errors import ExportError, SpecError
from batchwright.schemas.recommendation import Evidence, Headroom, Proof, Recommendation
from batchwright.workloads.build import summarize
from tests.support.exports.plans import infeasible
from tests.support.factories import CPU, probe_result, recommendation, transformers_spec

pytestmark = [pytest.mark.exports, pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

CONFIG: dict[str, Any] = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32}
LENGTH = 8


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library, as far from the network as it can be."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return importlib.import_module("transformers")


@pytest.fixture
def integration() -> Any:
    """The module under test, imported only where the library is installed."""
    return importlib.import_module("batchwright.integrations.hugging_face")


def language_model(transformers: Any, **changes: Any) -> torch.nn.Module:
    """A tiny GPT-2 with random weights."""
    made: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**{**CONFIG, **changes})
    )
    return made


def found(
    transformers: Any, effective_batch_size: int = 8, limit_bytes: int = 4 * 1024**3, **changes: Any
) -> Recommendation:
    """The recommendation of the tiny GPT-2 on the CPU, with micro-batches of at most 4."""
    spec = transformers_spec("causal-lm", CONFIG, batch={"sequence_length": LENGTH}, **changes)
    probe = probe_result(4, model=summarize(language_model(transformers)))
    return recommendation(
        spec,
        effective_batch_size,
        4,
        device=CPU,
        evidence=Evidence(probes=(probe,), proof=Proof(fits=4, stopped_by="bound", statement="for a test")),
        headroom=Headroom(limit_bytes=limit_bytes, peak_bytes=0, free_bytes=0, free_fraction=0.0),
    )


def trainer(
    transformers: Any, folder: Path, arguments: dict[str, Any], callbacks: list[Any], samples: int = 32, **changes: Any
) -> Any:
    """A Trainer of the tiny GPT-2 that logs every update."""
    own = {"output_dir": str(folder), "max_steps": 2, "report_to": [], "save_strategy": "no", "logging_steps": 1}
    data = [{"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)} for _ in range(samples)]
    return transformers.Trainer(
        **{
            "model": language_model(transformers),
            "args": transformers.TrainingArguments(**{**own, "disable_tqdm": True, **arguments}),
            "train_dataset": data,
            "callbacks": callbacks,
            **changes,
        }
    )


def refusal(transformers: Any, integration: Any, folder: Path, arguments: dict[str, Any], **changes: Any) -> SpecError:
    """The error of a run whose arguments differ from those of the recommendation in this way."""
    recommended = found(transformers)
    callback = integration.BatchPlanCallback(recommended)
    planned = integration.training_arguments(recommended)
    made = trainer(transformers, folder, {**planned, **arguments}, [callback], **changes)
    with pytest.raises(SpecError) as refused:
        made.train()
    assert made.state.global_step == 0
    return refused.value


def fields(refused: SpecError) -> dict[str, str]:
    """The fields at fault, with the values that the run had."""
    return {problem.field: problem.value for problem in refused.problems}


def test_the_limits_of_the_export_are_warned_of(transformers: Any, integration: Any) -> None:
    """With their remedies: the arguments alone do not say them."""
    with pytest.warns(UserWarning, match="tail-window: .*dataloader_drop_last"):
        integration.training_arguments(found(transformers))


def test_a_run_that_follows_the_plan_trains_and_logs_its_peaks(
    transformers: Any, integration: Any, tmp_path: Path
) -> None:
    """Every line of the log history has the peak, the limit and their ratio."""
    recommended = found(transformers)
    callback = integration.BatchPlanCallback(recommended)
    made = trainer(transformers, tmp_path, integration.training_arguments(recommended), [callback])

    made.train()

    assert made.state.global_step == 2
    for line in made.state.log_history:
        assert 0 < line["memory/peak_resident_bytes"] < line["memory/limit_bytes"] == 4 * 1024**3
        assert line["memory/peak_fraction"] == line["memory/peak_resident_bytes"] / 4 / 1024**3


def test_every_argument_of_the_batch_that_contradicts_is_named(
    transformers: Any, integration: Any, tmp_path: Path
) -> None:
    """With the value of the run, what the plan has, and the effective batch that would have come of it."""
    refused = refusal(
        transformers,
        integration,
        tmp_path,
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "dataloader_drop_last": False},
        samples=30,
    )

    assert fields(refused) == {
        "per_device_train_batch_size": "8",
        "gradient_accumulation_steps": "4",
        "effective batch size": "32",
        "dataloader_drop_last": "False",
    }
    assert "per_device_train_batch_size: must be 4 (got 8)" in str(refused)
    assert "effective batch size: must be 8 samples per update (got 32)" in str(refused)


def test_a_short_micro_batch_matters_only_where_the_data_has_one(
    transformers: Any, integration: Any, tmp_path: Path
) -> None:
    """32 samples are eight micro-batches of four, dropped or not."""
    recommended = found(transformers)
    callback = integration.BatchPlanCallback(recommended)
    planned = integration.training_arguments(recommended)
    made = trainer(transformers, tmp_path, {**planned, "dataloader_drop_last": False}, [callback], samples=32)

    made.train()

    assert made.state.global_step == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"bf16": True}, {"bf16": "True"}),
        ({"activation_checkpointing": True}, {"activation_checkpointing": "True"}),
        ({"gradient_checkpointing": True, "activation_checkpointing": None}, {"activation_checkpointing": "True"}),
        ({"optim": "adamw_torch_fused"}, {"optim": "adamw_torch_fused"}),
        ({"optim": "sgd"}, {"optim": "sgd"}),
        ({"auto_find_batch_size": True}, {"auto_find_batch_size": "True"}),
        ({"accelerator_config": {"split_batches": True}}, {"accelerator_config.split_batches": "True"}),
    ],
)
def test_an_argument_that_changes_memory_or_batch_is_refused(
    transformers: Any, integration: Any, tmp_path: Path, arguments: dict[str, Any], expected: dict[str, str]
) -> None:
    """By its name and value."""
    assert fields(refusal(transformers, integration, tmp_path, arguments)) == expected


def test_compiling_that_was_not_measured_is_refused(transformers: Any, integration: Any, tmp_path: Path) -> None:
    """Nothing is compiled before that."""
    assert fields(refusal(transformers, integration, tmp_path, {"torch_compile": True})) == {"torch_compile": "True"}


def test_parameters_of_another_type_are_refused(transformers: Any, integration: Any, tmp_path: Path) -> None:
    """As ``from_pretrained`` loads them from a checkpoint in bf16."""
    model = language_model(transformers).to(torch.bfloat16)

    refused = refusal(transformers, integration, tmp_path, {}, model=model)

    assert fields(refused) == {"model": "torch.bfloat16"}


def test_a_larger_model_is_refused(transformers: Any, integration: Any, tmp_path: Path) -> None:
    """By its number of parameters."""
    refused = refusal(transformers, integration, tmp_path, {}, model=language_model(transformers, n_layer=2))

    counts = [problem.field for problem in refused.problems]
    assert counts == ["model", "model"]
    assert "trainable parameters, as the model that was probed" in str(refused)


def test_an_optimizer_of_ones_own_is_what_counts(transformers: Any, integration: Any, tmp_path: Path) -> None:
    """One that was measured passes, whatever the unused `optim` says."""
    recommended = found(transformers)
    callback = integration.BatchPlanCallback(recommended)
    model = language_model(transformers)
    optimizer = torch.optim.AdamW(model.parameters())
    arguments = {**integration.training_arguments(recommended), "optim": "adafactor"}
    made = trainer(transformers, tmp_path, arguments, [callback], model=model, optimizers=(optimizer, None))

    made.train()

    assert made.state.global_step == 2


def test_the_ranks_of_the_plan_have_to_be_started(transformers: Any, integration: Any, tmp_path: Path) -> None:
    """One process is refused a plan for two."""
    recommended = found(transformers, 16, parallelism={"world_size": 2})
    callback = integration.BatchPlanCallback(recommended)
    made = trainer(transformers, tmp_path, integration.training_arguments(recommended), [callback])

    with pytest.raises(SpecError) as refused:
        made.train()

    assert fields(refused.value) == {"world_size": "1", "effective batch size": "8"}


def test_a_peak_above_the_limit_is_warned_of_once(transformers: Any, integration: Any, tmp_path: Path) -> None:
    """With both figures."""
    recommended = found(transformers, limit_bytes=1000)
    callback = integration.BatchPlanCallback(recommended)
    made = trainer(transformers, tmp_path, integration.training_arguments(recommended), [callback])

    with pytest.warns(UserWarning, match=r"is above the limit of 1000 B") as warned:
        made.train()

    assert sum("above the limit" in str(warning.message) for warning in warned) == 1


def test_an_attached_callback_gives_reporters_the_peaks(transformers: Any, integration: Any, tmp_path: Path) -> None:
    """A reporter is called before the callbacks of a user."""

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc] # not typed
        lines: list[dict[str, float]] = []  # noqa: RUF012 - of one test

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            self.lines.append(dict(logs))

    recommended = found(transformers)
    made = trainer(transformers, tmp_path, integration.training_arguments(recommended), [Reporter()])

    integration.BatchPlanCallback(recommended).attach(made)
    made.train()

    assert len(Reporter.lines) == 3
    assert all("memory/peak_fraction" in line for line in Reporter.lines)


def test_a_recommendation_that_nothing_fits_makes_no_callback(integration: Any) -> None:
    """With the reason."""
    with pytest.raises(ExportError, match="Not even one sample fits"):
        integration.BatchPlanCallback(infeasible())
