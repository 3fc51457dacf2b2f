"""Tests of the spec of a command."""

from pathlib import Path
from typing import Any

import pytest

from batchwright.errors import SpecError
from batchwright.schemas.base import parse_document
from batchwright.schemas.command import (
    CommandModel,
    CommandSpec,
    load_any_spec,
    placeholders_in,
    replace_placeholders,
)
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.workload import WorkloadSpec

SIZES = ("python", "train.py", "--batch", "{micro_batch_size}", "--accumulate", "{gradient_accumulation_steps}")


def problem(spec: dict[str, Any], **fields: Any) -> str:
    """The message with which a request for this spec is refused."""
    with pytest.raises(SpecError) as caught:
        parse_document(TuningRequest, {"spec": spec, "effective_batch_size": 8, **fields}, "request")
    return str(caught.value)


def command(*argv: str, **fields: Any) -> dict[str, Any]:
    """A spec of a command."""
    return {"model": {"kind": "command", "argv": argv, **fields}}


def test_a_request_takes_a_command() -> None:
    """By the kind of its model."""
    request = TuningRequest.model_validate({"spec": command(*SIZES), "effective_batch_size": 8})
    assert isinstance(request.spec, CommandSpec)
    assert request.command is request.spec


def test_a_command_survives_json() -> None:
    """A request with the command serializes to the same request."""
    request = TuningRequest.model_validate({"spec": command(*SIZES), "effective_batch_size": 8})
    assert TuningRequest.model_validate_json(request.model_dump_json()) == request


def test_a_workload_is_no_command() -> None:
    """And has none."""
    spec = {"model": {"kind": "reference", "architecture": {"name": "mlp"}}}
    assert TuningRequest.model_validate({"spec": spec, "effective_batch_size": 8}).command is None


@pytest.mark.parametrize("field", ["optimizer", "precision", "data", "batch", "gradient_clipping"])
def test_what_a_workload_has_is_no_field_of_a_command(field: str) -> None:
    """The program has it: a field that is ignored would mislead."""
    assert f"spec.{field}: is not a field here" in problem({**command(*SIZES), field: None})


def test_a_misspelt_placeholder_is_an_error_with_the_nearest_one() -> None:
    """And with the way to write the literal text."""
    message = problem(command("python", "{micro_batchsize}"))
    assert "unknown placeholder `{micro_batchsize}`; did you mean `{micro_batch_size}`?" in message
    assert "`{{micro_batchsize}}` for the literal text" in message


def test_a_command_without_its_size_is_an_error_with_the_ways_to_give_it() -> None:
    """In an argument, an environment variable or a template."""
    message = problem(command("python", "train.py"))
    assert "no placeholder `{micro_batch_size}`" in message
    assert "--env BATCH_SIZE={micro_batch_size}" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"environment": {"BATCH": "{micro_batch_size}"}},
        {"files": {"c.json": '{"batch": {micro_batch_size}}'}, "argv": ("python", "{file:c.json}")},
    ],
)
def test_the_size_may_be_in_the_environment_or_a_file(fields: dict[str, Any]) -> None:
    """A program need not take arguments."""
    assert CommandModel.model_validate({"kind": "command", "argv": ("python",), **fields})


def test_a_file_that_nothing_names_is_an_error() -> None:
    """The program would not read it."""
    assert "name it as `{file:a.yaml}` in `argv`" in problem(command(*SIZES, files={"a.yaml": "x"}))


def test_an_unknown_file_is_an_error_with_the_nearest_one() -> None:
    """Such a placeholder is replaced like any other."""
    message = problem(command(*SIZES, "{file:conf.yaml}", files={"config.yaml": "{updates}"}))
    assert "did you mean `{file:config.yaml}`?" in message


def test_braces_that_hold_no_name_are_text() -> None:
    """So that JSON, YAML and format strings need no escapes."""
    assert placeholders_in('{"a": {"b": {updates}}} ${{HOME}} {} {0} {a b}') == ["updates"]


def test_arithmetic_with_a_figure_is_a_placeholder() -> None:
    """Braces that hold no figure, or no operator, are text; double braces keep the expression."""
    text = '{"a": {updates*2}} {{updates*2}} {a-b} { updates } {updates, 2} {updates: 2*3} {x_updates-1} {output_dir/2}'
    assert placeholders_in(text) == ["updates"]
    replaced = replace_placeholders(text, {"updates": "3"})
    assert replaced == (
        '{"a": 6} {updates*2} {a-b} { updates } {updates, 2} {updates: 2*3} {x_updates-1} {output_dir/2}'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{effective_batch_size*1024}", "65536"),
        ("{micro_batch_size + 2 * updates - 1}", "19"),
        ("{(micro_batch_size+2)*-3}", "-54"),
        ("{effective_batch_size/gradient_accumulation_steps/2}", "8"),
        ("{micro_batch_size/3*3}:{4*updates}", "16:8"),
    ],
)
def test_arithmetic_has_the_usual_precedence(text: str, expected: str) -> None:
    """And is exact."""
    figures = {"micro_batch_size": 16, "gradient_accumulation_steps": 4, "effective_batch_size": 64, "updates": 2}
    assert replace_placeholders(text, {name: str(figure) for name, figure in figures.items()}) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{micro_batch_size*length}", "`length` is not a figure (known: {micro_batch_size}, "),
        ("{micro_batch_size**2}", "has more than whole numbers, names, `+ - * /` and parentheses"),
        ("{micro_batch_size(2)}", "has more than whole numbers"),
        ("{micro_batch_size*}", "`argv.6` has `{micro_batch_size*}`, which is not an arithmetic expression"),
        ("{" + "(" * 180 + "updates}", "is not an arithmetic expression"),
        ("{updates*x}", "Write `{{updates*x}}` for the literal text."),
    ],
)
def test_what_is_no_arithmetic_is_refused(text: str, words: str) -> None:
    """With the way to write the literal text."""
    assert words in problem(command(*SIZES, text))


@pytest.mark.parametrize(
    ("text", "fields", "words"),
    [
        ("{effective_batch_size/7}", {"effective_batch_size": 64}, "effective batch of 64 (nearest: 63 and 70)"),
        ("{micro_batch_size/4}", {"effective_batch_size": 3}, "effective batch of 3 (nearest: 4)"),
        ("{(micro_batch_size+1)/2}", {}, "a fraction for some updates"),
        ("{micro_batch_size/2}", {}, "multiples of 2: set `granularity` to 2"),
        ("{gradient_accumulation_steps/2}", {"granularity": 2}, "a fraction for some updates"),
        ("{48/micro_batch_size}", {"effective_batch_size": 7}, "a fraction for some updates"),
        ("{32/micro_batch_size}", {"uniform_only": False}, "a fraction for some updates"),
    ],
)
def test_a_division_that_is_not_exact_is_refused(text: str, fields: dict[str, int], words: str) -> None:
    """For every size that may be searched, with the nearest effective batches or the granularity."""
    assert words in problem(command(*SIZES, text), **fields)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("{effective_batch_size/gradient_accumulation_steps}", {}),
        ("{micro_batch_size/2}", {"granularity": 4}),
        ("{effective_batch_size/7}", {"effective_batch_size": 63, "granularity": 7}),
        ("{48/micro_batch_size}", {}),
        ("{48/(3*micro_batch_size)}", {"effective_batch_size": 16, "granularity": 2}),
    ],
)
def test_an_exact_division_is_taken(text: str, fields: dict[str, int]) -> None:
    """Where every size that is searched has a whole number."""
    TuningRequest.model_validate({"spec": command(*SIZES, text), "effective_batch_size": 8, **fields})


def test_an_inexact_value_of_a_single_run_is_refused_with_its_figures() -> None:
    """As for the updates of a job, which no request knows."""
    with pytest.raises(SpecError, match=r"\{updates/2\}: is 5/2, which is not a whole number: updates 5"):
        replace_placeholders("{updates/2}", {"updates": "5"})


@pytest.mark.parametrize("name", ["what_if", "allow_batch_coupling"])
def test_a_request_refuses_what_a_command_cannot_do(name: str) -> None:
    """Instead of ignoring it."""
    assert f"`{name}`" in problem(command(*SIZES), **{name: True})


def test_uniform_only_is_for_commands() -> None:
    """A workload has `uniform`."""
    spec = {"model": {"kind": "reference", "architecture": {"name": "mlp"}}}
    assert "`uniform_only` is for commands" in problem(spec, uniform_only=True)


def test_a_misspelt_kind_is_taken_for_the_nearest() -> None:
    """The message is about the kind, and not about missing fields of another one."""
    assert "must be 'command'" in problem({"model": {"kind": "comand", "argv": SIZES}})


def test_the_accumulation_may_follow_from_the_effective_batch() -> None:
    """Some programs derive their steps."""
    model = CommandModel(kind="command", argv=("python", "{micro_batch_size}", "{effective_batch_size}"))
    assert model.takes_accumulation
    assert not CommandModel(kind="command", argv=("python", "{micro_batch_size}")).takes_accumulation


def test_a_file_describes_a_workload_or_a_command(tmp_path: Path) -> None:
    """By the kind of its model."""
    path = tmp_path / "spec.yaml"
    path.write_text('model: {kind: command, argv: [python, "{micro_batch_size}"]}\nparallelism: {world_size: 2}\n')
    spec = load_any_spec(path)
    assert isinstance(spec, CommandSpec)
    assert spec.parallelism.world_size == 2
    path.write_text("model: {kind: reference, architecture: {name: mlp}}\n")
    assert isinstance(load_any_spec(path), WorkloadSpec)
