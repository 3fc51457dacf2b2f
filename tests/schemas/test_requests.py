"""Requests of tunings: the memory limit as bytes or as a size."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from batchwright.errors import SpecError
from batchwright.schemas.base import parse_document
from batchwright.schemas.requests import TuningRequest

SPEC = {"model": {"kind": "reference", "architecture": {"name": "mlp"}}}
MIB = 1024**2


def fields(limit: object) -> dict[str, Any]:
    """A request with a memory limit."""
    return {"spec": SPEC, "effective_batch_size": 8, "memory_limit_bytes": limit}


def message(limit: object) -> str:
    """The one problem of a request with this limit."""
    with pytest.raises(SpecError) as caught:
        parse_document(TuningRequest, fields(limit), "request")
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize("limit", [128 * MIB, "128MiB", "128 mib", " 134217728B ", "134217728"])
def test_a_limit_is_bytes_or_a_size(limit: int | str) -> None:
    """Both give the same document, whose limit is an integer, in Python and as strictly parsed JSON."""
    request = TuningRequest.model_validate(fields(limit))
    assert type(request.memory_limit_bytes) is int
    assert request == TuningRequest.model_validate_json(json.dumps(fields(limit)), strict=True)
    assert request.model_dump(mode="json")["memory_limit_bytes"] == 128 * MIB


def test_a_text_that_is_no_size_is_explained() -> None:
    """The message names the field, what to write, and the text, shortened."""
    ending = "is not a size: write for example 8GiB, 800MiB, 800MB or a number of bytes"
    assert message("12 parsecs") == f"memory_limit_bytes: {ending} (got '12 parsecs')"
    for text in ("", "-1GiB", "1e9", "GiB", "Infinity", "9" * 400):
        assert ending in message(text)
    assert len(message("M" * 10_000)) < 250


def test_a_limit_that_is_too_low_is_reported_as_typed() -> None:
    """A size as a size; a number of bytes with its size."""
    assert message("1MiB") == "memory_limit_bytes: must be at least 16.00 MiB (got 1MiB)"
    assert message("0") == "memory_limit_bytes: must be at least 16.00 MiB (got 0)"
    for number in (0, -1, MIB):
        assert message(number) == f"memory_limit_bytes: must be at least 16777216 (16.00 MiB) (got {number})"


@pytest.mark.parametrize("limit", [True, 134217728.5, [1], {"GiB": 1}])
def test_another_type_is_refused(limit: object) -> None:
    """Neither a truth value nor a part of a byte is a limit."""
    assert message(limit).startswith("memory_limit_bytes: must be ")


@pytest.mark.parametrize("limit", [True, 134217728.5, 134217728.0])
def test_a_strict_limit_is_never_converted(limit: object) -> None:
    """Over HTTP a float is no integer, whatever its value."""
    with pytest.raises(ValidationError, match="int_type"):
        TuningRequest.model_validate_json(json.dumps(fields(limit)), strict=True)


@pytest.mark.timeout(60)
def test_a_text_that_makes_a_parser_backtrack_is_refused() -> None:
    """A million spaces inside a size would keep a parser that backtracks for hours."""
    assert "is not a size" in message("1" + " " * 1_000_000 + "x")


def test_the_json_schema_has_both_forms_in_and_out() -> None:
    """One schema for requests and responses, so that the API's document has one component."""
    taken, given = (TuningRequest.model_json_schema(mode=mode) for mode in ("validation", "serialization"))
    limit = taken["properties"]["memory_limit_bytes"]
    assert limit == given["properties"]["memory_limit_bytes"]
    assert [option["type"] for option in limit["anyOf"]] == ["integer", "string", "null"]
