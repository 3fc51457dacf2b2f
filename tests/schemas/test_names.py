"""Names, projects and labels: their bounds, which are those of Kubernetes labels."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from batchwright.planning.fingerprint import request_fields
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


@pytest.mark.parametrize(
    "fields", [{"name": ""}, {"name": " a"}, {"name": "a\nb"}, {"name": "x" * 121}, {"project": ""}, {"project": "a b"}]
)
def test_unreadable_names_are_refused(fields: dict[str, str]) -> None:
    """Names have no control characters and no space at their ends; a project is a label's value."""
    with pytest.raises(ValidationError):
        Named.model_validate(fields)


def test_a_name_is_any_other_text() -> None:
    """A single character, spaces within, and letters of any alphabet."""
    for name in ("a", "llama-8b, seq 4096", "größtes Modell", "模型"):
        assert Named(name=name).name == name


def test_no_fingerprint_depends_on_names() -> None:
    """A request has none of the fields that a fingerprint is made of."""
    assert not set(Named.model_fields) & set(request_fields(recommendation().request))
