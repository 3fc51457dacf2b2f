"""Specs: what is accepted, and how a wrong one is reported."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from batchwright.errors import SpecError
from batchwright.schemas.workload import TransformersModel, WorkloadSpec, load_spec, parse_spec
from batchwright.yaml_loader import Loader
from tests.support.factories import gpt_spec, mlp_spec

GPT: dict[str, Any] = {"kind": "reference", "architecture": {"name": "gpt"}}
GPT2: dict[str, Any] = {
    "kind": "transformers",
    "task": "causal-lm",
    "config": {"model_type": "gpt2", "n_positions": 64},
}


def pairs(**changes: Any) -> dict[str, Any]:
    """The document of a spec of preference pairs."""
    return {"model": GPT2, "batch": {"sequence_length": 8}, "preference": {"kind": "dpo"}, **changes}


@pytest.mark.parametrize(
    ("document", "field", "words"),
    [
        ({}, "model", "required"),
        ({"model": {"kind": "transformer"}}, "model.kind", "'transformers', 'reference', 'python'"),
        ({"model": {"kind": "transformers", "task": "causal-lm", "config": {}}}, "model.config", "model_type"),
        (
            {"model": GPT2 | {"config": {"model_type": "a" * 301}}},
            "model.config",
            "301 characters, 'aaaa",
        ),
        ({"model": GPT2 | {"config": {"model_type": "gpt2\x00"}}}, "model.config", "300 printable ASCII characters"),
        ({"model": {"kind": "python", "target": "a:" + "b" * 299}}, "model.target", "at most 300 characters"),
        ({"model": {"kind": "transformers", "task": "chat", "config": {}}}, "model.task", "'causal-lm'"),
        (
            {"model": {"kind": "reference", "architecture": {"name": "mlp", "classes": 1}}},
            "model.architecture.classes",
            "2",
        ),
        ({"model": {"kind": "reference", "architecture": {"name": "gpt", "heads": 3}}}, "model.architecture", "256"),
        ({"model": {"kind": "python", "target": "no colon"}}, "model.target", "package.module:factory"),
        (
            {"model": {"kind": "python", "target": "a:b", "arguments": {"c": ["\ud800"]}}},
            "model.arguments",
            "contains half of a surrogate pair",
        ),
        ({"model": GPT}, "(document)", "batch.sequence_length"),
        ({"model": {"kind": "reference", "architecture": {"name": "resnet"}}}, "(document)", "batch.image_size"),
        ({"model": GPT2, "batch": {"sequence_length": 65}}, "(document)", "65"),
        ({"model": GPT, "batch": {"sequence_length": 8}, "precison": "fp32"}, "precison", "did you mean `precision`?"),
        ({"model": GPT, "batch": {"sequence_length": 0}}, "batch.sequence_length", "at least 1"),
        ({"model": GPT, "optimizer": {"learning_rate": "fast"}}, "optimizer.learning_rate", "number"),
        ({"model": GPT, "gradient_clipping": -1.0}, "gradient_clipping", "above 0"),
        ({"model": GPT, "data": {"kind": "files"}}, "data.kind", "'records', 'images', 'arrays'"),
        ({"model": GPT, "data": {"kind": "text", "paths": ["a"], "tokenizer": "gpt2"}}, "data.tokenizer", "`bytes`"),
        ({"model": GPT, "data": {"kind": "arrays", "path": "a.npy"}}, "data.path", "`.safetensors`"),
        ({"model": GPT, "evaluation": {}}, "evaluation", "exactly one of `fraction`, `count` and `data`"),
        ({"model": GPT, "evaluation": {"count": 5, "fraction": 0.1}}, "evaluation", "exactly one of"),
        ({"model": GPT, "evaluation": {"fraction": 1.0}}, "evaluation.fraction", "below 1"),
        (
            {"model": GPT, "evaluation": {"count": 5, "early_stopping": {"patience": 2}}},
            "evaluation",
            "`early_stopping` needs `every`",
        ),
        ({"model": GPT, "evaluation": {"count": 5, "monitor": "accuracy"}}, "evaluation", "also be one of `metrics`"),
        ({"model": GPT, "evaluation": {"count": 5, "metrics": ["bleu"]}}, "evaluation.metrics.0", "'perplexity'"),
        (
            {"model": GPT2, "batch": {"sequence_length": 8}, "evaluation": {"count": 5, "metrics": ["accuracy", "f1"]}},
            "(document)",
            "`f1` is an average over the classes of a classifier, and this model has a vocabulary",
        ),
        (
            {"model": GPT, "batch": {"sequence_length": 8}, "evaluation": {"count": 5, "metrics": ["recall"]}},
            "(document)",
            "`recall` is an average over the classes",
        ),
        (
            {"model": GPT2 | {"task": "contrastive"}, "evaluation": {"count": 5, "metrics": ["perplexity"]}},
            "(document)",
            "`perplexity` is for a cross-entropy over labels, which contrastive does not have",
        ),
        ({"model": GPT, "evaluation": {"data": {"kind": "synthetic"}}}, "evaluation.data.kind", "'text'"),
        (
            {"model": GPT2 | {"task": "ctc"}, "evaluation": {"count": 5, "metrics": ["accuracy"]}},
            "(document)",
            "ctc does not have",
        ),
        (pairs(model=GPT), "(document)", "`causal-lm` models of transformers, and this is a `reference` model"),
        (pairs(model=GPT2 | {"task": "masked-lm"}), "(document)", "and this is masked-lm"),
        (pairs(batch={"sequence_length": 8, "packing": "bfd"}), "(document)", "whose samples are pairs"),
        (pairs(batch={"sequence_length": 1}), "(document)", "a prompt with a completion needs at least 2"),
        (pairs(data={"kind": "text", "paths": ["a"]}), "(document)", "`data` is of the kind `text`: use `records`"),
        (
            pairs(evaluation={"data": {"kind": "text", "paths": ["a"]}}),
            "(document)",
            "`evaluation.data` is of the kind `text`",
        ),
        (pairs(label_smoothing=0.1), "(document)", "use `preference.label_smoothing`"),
        (
            pairs(adapter={"kind": "lora", "bias": "all"}),
            "(document)",
            "must be `none`: the model itself is the reference",
        ),
        (pairs(preference={"kind": "dpo", "loss": "ipo", "label_smoothing": 0.1}), "preference", "`sigmoid`"),
        (pairs(preference={"kind": "dpo", "label_smoothing": 0.5}), "preference.label_smoothing", "below 0.5"),
        (pairs(preference={"kind": "dpo", "beta": 0.0}), "preference.beta", "above 0"),
        (pairs(preference={"kind": "ppo"}), "preference.kind", "'dpo'"),
        (pairs(preference={"kind": "ipo"}), "preference.kind", "must be 'dpo', with `loss: ipo`"),
        (pairs(preference={"kind": "dpo", "loss_type": "ipo"}), "preference.loss_type", "did you mean `loss`?"),
        (
            pairs(evaluation={"count": 5, "metrics": ["perplexity"]}),
            "(document)",
            "`reward_accuracy` and `reward_margin` are the only metrics of `preference`",
        ),
        (
            {"model": GPT2, "batch": {"sequence_length": 8}, "evaluation": {"count": 5, "metrics": ["reward_margin"]}},
            "(document)",
            "`reward_margin` is not available",
        ),
        ({"model": GPT, "parallelism": {"world_size": 65_537}}, "parallelism.world_size", "at most 65536"),
        ([], "(document)", "mapping"),
    ],
)
def test_a_wrong_spec_names_the_field_and_what_is_allowed(document: object, field: str, words: str) -> None:
    """The report has the dotted path as the user wrote it, without pydantic's union tags."""
    with pytest.raises(SpecError) as caught:
        parse_spec(document)
    problem = caught.value.problems[0]
    assert problem.field == field
    assert words in problem.message


def test_a_wrong_value_is_quoted() -> None:
    """The report says what was found as well as what is allowed."""
    with pytest.raises(SpecError, match=r"got -1\.0"):
        parse_spec({"model": GPT, "batch": {"sequence_length": 8}, "gradient_clipping": -1.0})


def test_every_problem_is_reported_at_once() -> None:
    """A user mends a spec in one go."""
    with pytest.raises(SpecError) as caught:
        parse_spec({"model": GPT, "precision": "fp8", "optimizer": {"name": "sophia"}})
    assert {problem.field for problem in caught.value.problems} == {"precision", "optimizer.name"}


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_a_classifier_of_texts_has_the_metrics_of_classes(task: str) -> None:
    """Other than a model of texts whose classes are tokens."""
    metrics = ["accuracy", "perplexity", "f1", "precision", "recall"]
    evaluation = {"count": 5, "metrics": metrics}
    spec = parse_spec({"model": GPT2 | {"task": task}, "batch": {"sequence_length": 8}, "evaluation": evaluation})
    assert spec.evaluation is not None
    assert list(spec.evaluation.metrics) == metrics


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_spec_survives_a_file(tmp_path: Path, suffix: str) -> None:
    """What is written as JSON is read back equal, JSON being YAML too."""
    path = tmp_path / f"spec{suffix}"
    path.write_text(gpt_spec().model_dump_json())
    assert load_spec(path) == gpt_spec()


@pytest.mark.parametrize("rate", ["1e-5", "1E-5", "+1.e-5", ".01e-3", "1.0e-5", "0.00001"])
def test_numbers_in_yaml_are_numbers(tmp_path: Path, rate: str) -> None:
    """Also without a point, which YAML 1.1 takes for a word: a model's configuration would be given one."""
    path = tmp_path / "spec.yaml"
    model = f"{{kind: transformers, task: causal-lm, config: {{model_type: gpt2, layer_norm_epsilon: {rate}}}}}"
    path.write_text(f"model: {model}\nbatch: {{sequence_length: 8}}\n")
    read = load_spec(path)
    assert isinstance(read.model, TransformersModel)
    assert read.model.config["layer_norm_epsilon"] == 1e-5


@pytest.mark.parametrize("text", ["1e", "e5", "1e5x", "'1e-5'", "1_0e3"])
def test_texts_in_yaml_stay_texts(text: str) -> None:
    """Whatever looks much like a number."""
    assert yaml.load(text, Loader) == text.strip("'")  # noqa: S506 - a safe one


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("model: [", "not valid"), ("{", "not valid")]
)
def test_an_unreadable_file_is_a_spec_error(tmp_path: Path, content: str | None, words: str) -> None:
    """A missing or broken file is reported like any other wrong input."""
    path = tmp_path / ("spec.json" if content == "{" else "spec.yaml")
    if content is not None:
        path.write_text(content)
    with pytest.raises(SpecError, match=words):
        load_spec(path)


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_deeply_nested_file_is_a_spec_error(tmp_path: Path, suffix: str) -> None:
    """Nesting deeper than the parser can follow is reported like any other wrong input."""
    path = tmp_path / f"spec{suffix}"
    path.write_text("[" * 100_000)
    with pytest.raises(SpecError, match="nested too deeply"):
        load_spec(path)


def test_specs_are_frozen() -> None:
    """A spec that crossed a boundary cannot change under whoever holds it."""
    with pytest.raises(ValueError, match="frozen"):
        mlp_spec().compile = True  # type: ignore[misc]


def test_every_field_is_described() -> None:
    """The schema that users and forms read has a description on every field."""
    schema = WorkloadSpec.model_json_schema()
    models = [schema, *schema["$defs"].values()]
    missing = [
        f"{model['title']}.{name}"
        for model in models
        for name, field in model.get("properties", {}).items()
        if "description" not in field
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", "model:\n  kind: [", "a.yaml: is not valid YAML: line 2, column 10: while parsing a flow node"),
        ("a.yaml", "a: b: c", "a.yaml: is not valid YAML: line 1, column 5: mapping values are not allowed here"),
        ("a.json", '{"a": 1,}', "a.json: is not valid JSON: line 1, column 9: "),
    ],
)
def test_a_broken_file_is_named_with_line_and_column(tmp_path: Path, name: str, content: str, words: str) -> None:
    """An editor opens it there."""
    (tmp_path / name).write_text(content)
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / name)
    message = str(caught.value)
    assert words in message
    assert "<unicode string>" not in message
