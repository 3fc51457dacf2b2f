"""Problem documents (RFC 9457) and the faults of fields. Pure data."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tuner.schemas.base import Document, PositiveInt

PROBLEM_TYPE_PREFIX = "urn:batchwright:problem:"


class FieldFault(Document):
    """One thing wrong in a request."""

    field: str
    """Dotted path of the field, for example `spec.model.architecture.heads`."""
    message: str
    """What is allowed there."""
    value: str = ""
    """What was given, shortened; empty when the field is missing or is a whole object."""


class Problem(Document):
    """What went wrong (RFC 9457). Sent as `application/problem+json`."""

    type: Annotated[str, Field(examples=["urn:batchwright:problem:not-found"])]
    """A stable name of this kind of problem: `urn:batchwright:problem:` and the code."""
    title: str
    """The kind of problem in words; the same for every occurrence."""
    status: Annotated[int, Field(ge=100, le=599)] | None = None
    """The HTTP status; none in the stored problem of a tuning or job that failed later."""
    detail: str
    """What happened this time, with the values, the limit and the remedy."""
    code: Annotated[str, Field(examples=["not-found"])]
    """The stable word a program decides by."""
    errors: tuple[FieldFault, ...] = ()
    """The fields at fault, for an invalid request: the first twenty."""
    error_count: PositiveInt | None = None
    """How many fields are at fault, when `errors` does not list them all."""
