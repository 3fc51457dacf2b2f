"""The words for wrong fields: complete over our schemas, in the units that were typed, with the nearest valid name."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_core._pydantic_core import list_all_errors

import batchwright
import batchwright_service
from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.base import Document, load_document, parse_document
from batchwright.schemas.field_errors import MESSAGES, PATTERN_MESSAGES, described, problems_in, reworded
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.workload import WorkloadSpec, parse_spec
from batchwright.units import TypedSize
from batchwright_service.settings import Settings

_INTEGER = {"int_type", "int_parsing", "int_parsing_size", "int_from_float"}
_TYPES_OF_KINDS: dict[str, set[str]] = {
    "bool": {"bool_type", "bool_parsing"},
    "datetime": {
        "datetime_type",
        "datetime_parsing",
        "datetime_from_date_parsing",
        "datetime_object_invalid",
    },
    "dict": {"dict_type", "mapping_type", "invalid_key"},
    "enum": {"enum"},
    "float": {"float_type", "float_parsing"},
    "function-after": {"value_error", "assertion_error"},
    "function-before": {"value_error", "assertion_error"},
    "int": _INTEGER,
    "is-instance": {"is_instance_of"},
    "list": {"list_type"},
    "literal": {"literal_error"},
    "dataclass": {"dataclass_type"},
    "dataclass-args": set(),  # only in messages between our own processes
    "dataclass-field": {"missing"},
    "model": {"model_type", "model_attributes_type"},
    "model-field": {"missing"},
    "model-fields": {"extra_forbidden"},
    "none": {"none_required"},
    "str": {"string_type", "string_sub_type", "string_unicode"},
    "tagged-union": {"union_tag_invalid", "union_tag_not_found"},
    "tuple": {"tuple_type"},
    "typed-dict": {"dict_type", "extra_forbidden"},
    "typed-dict-field": {"missing"},
}
"""The types of errors that each kind of pydantic's core schemas can produce, its constraints aside."""
_TYPES_OF_CONSTRAINTS: dict[str, set[str]] = {
    "gt": {"greater_than"},
    "ge": {"greater_than_equal"},
    "lt": {"less_than"},
    "le": {"less_than_equal"},
    "allow_inf_nan": {"finite_number"},
    "pattern": {"string_pattern_mismatch"},
}
_WITHOUT_ERRORS = {
    "any",
    "default",
    "definition-ref",
    "definitions",
    "function-plain",  # pydantic's own, for free JSON: it raises `invalid-json-value`
    "json-or-python",
    "lax-or-strict",
    "nullable",
    "union",  # reports the errors of its members
}
_PYDANTIC_WORDS = ("Input should", "Extra inputs", "Field required", "Value should", "Unable to extract", "valid ")


_NOT_IMPORTED = (
    "__main__",
    ".integrations.lightning",
    ".integrations.training_module",
    ".ray_engine",
    ".ray_hosts",
    ".slurm_engine",
)
"""Ends of the names of modules that run something, or need an extra that the tests do without."""


def documents() -> set[type[Any]]:
    """Every document of the packages, and the settings."""
    for package in (batchwright, batchwright_service):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".migrations" not in module.name and not module.name.endswith(_NOT_IMPORTED):
                importlib.import_module(module.name)
    return {*descendants(Document), Settings}


def descendants(kind: type[Any]) -> Iterator[type[Any]]:
    """The classes below a class."""
    for below in kind.__subclasses__():
        if not below.__module__.startswith(("test", "conformance")):
            yield below
            yield from descendants(below)


def schemas_in(part: object) -> Iterator[dict[str, Any]]:
    """Every schema within a core schema."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part
        for name, inner in part.items():
            if name not in {"metadata", "serialization", "config", "cls"}:
                yield from schemas_in(inner)
    elif isinstance(part, list | tuple):
        for inner in part:
            yield from schemas_in(inner)


@pytest.fixture(scope="module")
def schemas() -> list[dict[str, Any]]:
    """Every core schema of every document."""
    found = [schema for kind in documents() for schema in schemas_in(kind.__pydantic_core_schema__)]
    assert len(found) > 1000
    return found


@pytest.mark.torch
def test_every_error_that_our_schemas_can_produce_has_a_message(schemas: list[dict[str, Any]]) -> None:
    """A new kind of schema fails here until its errors are looked up and worded."""
    kinds = {schema["type"] for schema in schemas} - {
        "no-info",
        "with-info",
        "string",
    }  # parts of functions, JSON schemas
    assert kinds - _WITHOUT_ERRORS <= set(_TYPES_OF_KINDS)
    wanted = {name for kind in kinds - _WITHOUT_ERRORS for name in _TYPES_OF_KINDS[kind]}
    wanted |= {name for schema in schemas for word in schema for name in _TYPES_OF_CONSTRAINTS.get(word, ())}
    for schema in schemas:
        prefix = {"str": "string_", "tuple": "", "dict": "", "list": ""}.get(schema["type"], "")
        wanted |= {f"{prefix}too_short" for word in ("min_length",) if word in schema}
        wanted |= {f"{prefix}too_long" for word in ("max_length",) if word in schema}
    assert wanted <= set(MESSAGES), wanted - set(MESSAGES)
    assert len(wanted) > 30


def test_no_message_is_pydantics() -> None:
    """Every worded type, given the example that pydantic documents for it, reads as ours."""
    examples = {one["type"]: one for one in list_all_errors()}
    for name, words in MESSAGES.items():
        if name not in examples or name in {"value_error", "assertion_error"}:
            continue
        example = examples[name]
        context = dict(example["example_context"] or {})
        error = {"type": name, "loc": ("field",), "msg": example["example_message_python"], "input": "x"}
        item: Any = error | {"ctx": context | _readable(context)}
        message = words(item)
        assert not message.startswith(_PYDANTIC_WORDS), (name, message)
        assert message != example["example_message_python"], name


def _readable(context: dict[str, Any]) -> dict[str, Any]:
    """The examples of choices are abbreviated: a choice of ours stands for them."""
    return {name: "'a', 'b'" for name in ("expected", "expected_tags") if name in context}


@pytest.mark.torch
def test_every_pattern_has_a_message(schemas: list[dict[str, Any]]) -> None:
    """No message holds a regular expression."""
    patterns = {str(schema["pattern"]) for schema in schemas if schema["type"] == "str" and "pattern" in schema}
    assert patterns
    assert patterns <= PATTERN_MESSAGES.keys()


def problem_in(document: dict[str, Any]) -> FieldProblem:
    """The one problem of a wrong spec."""
    with pytest.raises(SpecError) as caught:
        parse_spec(document)
    (problem,) = caught.value.problems
    return problem


def spec(**changes: Any) -> dict[str, Any]:
    """A spec, changed."""
    model = {"kind": "reference", "architecture": {"name": "mlp"}}
    return {"model": model, **changes}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (spec(precison="fp32"), "precison: is not a field here; did you mean `precision`? (got 'fp32')"),
        (
            spec(model={"kind": "reference", "architecture": {"name": "mlp", "hidden_feature": 3}}),
            "model.architecture.hidden_feature: is not a field here; did you mean `hidden_features`? (got 3)",
        ),
        (
            spec(model={"kind": "reference", "architecture": {"name": "mpl"}}),
            "model.architecture.name: must be one of 'mlp', 'resnet', 'gpt'; did you mean 'mlp'? (got 'mpl')",
        ),
        (spec(model={"architecture": {}}), "model.kind: is required: one of 'transformers', 'reference', 'python'"),
        (
            spec(optimizer={"name": "adamW"}),
            (
                "optimizer.name: must be one of 'adamw', 'adam', 'sgd', 'adadelta', 'adafactor', 'adagrad', 'adamax', "
                "'adamw8bit', 'asgd', 'lion', 'lion8bit', 'muon', 'nadam', 'radam', 'rmsprop', 'rprop'; did you mean "
                "'adamw'? (got 'adamW')"
            ),
        ),
        (spec(optimizer={"betas": [0.9, 2]}), "optimizer.betas.1: must be below 1.0 (got 2)"),
        (spec(optimizer={"learning_rate": "fast"}), "optimizer.learning_rate: must be a number (got 'fast')"),
        (spec(compile="maybe"), "compile: must be true or false (got 'maybe')"),
        (spec(batch=3), "batch: must be a mapping of fields to values (got 3)"),
        (spec(batch={"image_size": 1.5}), "batch.image_size: must be a whole number (got 1.5)"),
        (spec(data={"kind": "text", "paths": []}), "data.paths: must have at least 1 item"),
        (
            spec(data={"kind": "text", "paths": ["a", 2]}),
            "data.paths.1: must be a text (got 2)",
        ),
    ],
)
def test_a_wrong_field_is_reported_with_our_message(document: dict[str, Any], words: str) -> None:
    """The whole line: the field's path, what is allowed, the nearest name, the value."""
    assert str(problem_in(document)) == words


def test_an_unknown_field_lists_the_known_fields() -> None:
    """A name that resembles none is answered with all."""
    message = problem_in(spec(batch={"x": 1})).message
    assert message == "is not a field here (known: sequence_length, packing, image_size, audio_length)"


def test_sizes_are_reported_in_the_units_that_were_typed() -> None:
    """A number of bytes over HTTP; a size on the command line."""
    typed = [TypedSize(1024**2, "1MiB"), 1024**2]
    messages = []
    for size in typed:
        fields = {"spec": parse_spec(spec()), "effective_batch_size": 8, "memory_limit_bytes": size}
        with pytest.raises(SpecError) as caught:
            parse_document(TuningRequest, fields, "request")
        messages.append(str(caught.value.problems[0]))
    assert messages == [
        "memory_limit_bytes: must be at least 16.00 MiB (got 1MiB)",
        "memory_limit_bytes: must be at least 16777216 (16.00 MiB) (got 1048576)",
    ]


def test_a_device_is_explained_without_a_regular_expression() -> None:
    """A device that is called as nobody calls it."""
    fields = {"spec": parse_spec(spec()), "effective_batch_size": 8, "device": "gpu"}
    with pytest.raises(SpecError, match=r"device: must be `cpu`, or `cuda:` and a number, .* \(got 'gpu'\)"):
        parse_document(TuningRequest, fields, "request")


def test_rewritten_errors_keep_their_messages_and_locations() -> None:
    """The framework wraps them once more, and nothing is worded twice."""
    wrong = spec(precison="fp32", model={"kind": "nothing"})
    with pytest.raises(ValidationError) as caught:
        WorkloadSpec.model_validate(wrong)
    plain = problems_in(caught.value, wrong, WorkloadSpec)
    again = problems_in(reworded(caught.value, WorkloadSpec, 10), wrong)
    assert again == plain
    assert len(plain) == 2
    assert [bool(item.message) for item in problems_in(reworded(caught.value, WorkloadSpec, 1), wrong)] == [True, False]


def test_a_type_without_a_message_keeps_its_own() -> None:
    """A validator may raise a custom error: its message is passed on."""
    item: Any = {"type": "own", "loc": (), "msg": "is odd", "input": 1}
    assert described(item) == "is odd"
    assert PydanticCustomError("own", "is odd").message() == "is odd"


class Choice(Document):
    """One value is allowed."""

    kind: Literal["only"] = Field(description="Only.")


def test_a_single_choice_is_no_list() -> None:
    """`must be 'only'`."""
    with pytest.raises(SpecError, match="kind: must be 'only' "):
        parse_document(Choice, {"kind": "other"}, "choice")


def test_a_document_of_another_kind_is_called_that() -> None:
    """A spec in the place of a recommendation has one problem, and not one for each field of either."""
    data = {"model": {"kind": "python", "target": "a:b"}, "batch": {}, "optimizer": {"name": "sgd"}}
    with pytest.raises(SpecError, match="is another kind of document: it has model, batch, optimizer") as raised:
        parse_document(Recommendation, data, "recommendation spec.yaml")
    assert len(raised.value.problems) == 1


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    """It has no field at fault."""
    (tmp_path / "spec.yaml").write_text("\n")
    with pytest.raises(SpecError, match=r"spec\.yaml: is empty"):
        load_document(WorkloadSpec, tmp_path / "spec.yaml", "spec")
