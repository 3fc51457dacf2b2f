"""Names, projects and labels: their bounds, which are those of Kubernetes labels."""

import pytest
from pydantic import ValidationError

from batchwright.errors import SpecError
from batchwright.planning.fingerprint import request_fields
from batchwright.schemas.base import parse_document
from batchwright.schemas.requests import Named
from tests.support.factories import recommendation


@pytest.mark.parametrize("key", ["team", "a", "A.b_c-d", "example.com/team", "k8s.io/part-of", "a" * 63])
@pytest.mark.parametrize("value", ["", "vision", "1", "a.b_c-d", "x" * 63])
def test_labels_are_those_that_kubernetes_takes(key: str, value: str) -> None:
    """Keys with and without a domain, and values that may be empty."""
    assert Named(labels={key: value}).labels == {key: value}


@pytest.mark.parametrize(
    "labels",
    [
        {"": "a"},
        {"-a": "b"},
        {"a-": "b"},
        {"a b": "c"},
        {"a=b": "c"},
        {"Example.com/team": "c"},
        {"example.com/": "c"},
        {"a/b/c": "d"},
        {"a" * 64: "b"},
        {"a": "-"},
        {"a": "b c"},
        {"a": "b\n"},
        {"a": "x" * 64},
        {f"k{number}": "v" for number in range(33)},
    ],
)
def test_other_labels_are_refused(labels: dict[str, str]) -> None:
    """Labels that Kubernetes refuses, and more than 32 of them."""
    with pytest.raises(ValidationError):
        Named(labels=labels)


UNREADABLE = ("", " a", "a\nb", "x" * 121, "a\x9b31m", "a\x85b", "a\u2028b", "\u202eab", "\u200b", "\u3000a")


@pytest.mark.parametrize("fields", [{"project": ""}, {"project": "a b"}, *({"name": name} for name in UNREADABLE)])
def test_unreadable_names_are_refused(fields: dict[str, str]) -> None:
    """Names have no control characters, and nothing that cannot be seen at their ends; a project is a label's value."""
    with pytest.raises(ValidationError):
        Named.model_validate(fields)


def test_a_name_is_any_other_text() -> None:
    """A single character, spaces within, and letters of any alphabet."""
    for name in ("a", "llama-8b, seq 4096", "größtes Modell", "模型", "דגם\u200f 8b", "👩\u200d💻"):
        assert Named(name=name).name == name


def test_a_refusal_of_a_key_is_one_line() -> None:
    """Characters that would break the line, or steer a terminal, are escaped."""
    with pytest.raises(SpecError) as caught:
        parse_document(Named, {"labels": {"a\n\x1b[31m": "b"}}, "names")
    assert [problem.field for problem in caught.value.problems] == ["labels.'a\\n\\x1b[31m'"]


def test_no_fingerprint_depends_on_names() -> None:
    """A request has none of the fields that a fingerprint is made of."""
    assert not set(Named.model_fields) & set(request_fields(recommendation().request))
