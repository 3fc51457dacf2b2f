"""Descriptions of fields in a JSON schema."""

from typing import Annotated

from pydantic import Field

from batchwright.schemas.base import Document


class Base(Document):
    """A model with a docstring below each field."""

    size: int
    """Samples of a micro-batch,
    at least one."""
    name: Annotated[str, Field(description="Given to the field.")] = ""
    """Not shown."""


class Derived(Base):
    """A model that replaces a field, and has one without a docstring."""

    size: int = 2
    """Samples, two by default."""
    other: int = 0


class Holder(Document):
    """A model with a model as a field."""

    held: Derived = Derived()
    """Held."""


def test_a_schema_has_the_docstrings_where_no_description_was_given() -> None:
    """Fields of nested models have their docstrings too; a description given to a field stays."""
    schema = Holder.model_json_schema()
    assert schema["properties"]["held"]["description"] == "Held."
    fields = schema["$defs"]["Derived"]["properties"]
    assert fields["size"]["description"] == "Samples, two by default."
    assert Base.model_json_schema()["properties"]["size"]["description"] == "Samples of a micro-batch,\nat least one."
    assert fields["name"]["description"] == "Given to the field."
    assert "description" not in fields["other"]
