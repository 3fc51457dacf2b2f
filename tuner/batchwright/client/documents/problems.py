"""Problem documents (RFC 9457) and the faults of fields. Pure data."""

from typing import Annotated

from pydantic import Field

from batchwright.schemas.base import Document, PositiveInt

PROBLEM_TYPE_PREFIX = "urn:batchwright:problem:"


class FieldFault(Document):
    """An invalid field of a request."""

    field: str
    """Dotted path of the field, for example `spec.model.architecture.heads`."""
    message: str
    """Values that the field allows."""
    value: str = ""
    """The given value, shortened; empty when the field is missing or is an object."""


class Problem(Document):
    """A problem document (RFC 9457), sent as `application/problem+json`."""

    type: Annotated[str, Field(examples=["urn:batchwright:problem:not-found"])]
    """Stable name of the kind of problem: `urn:batchwright:problem:` and the code."""
    title: str
    """Description of the kind of problem, equal for every occurrence."""
    status: Annotated[int, Field(ge=100, le=599)] | None = None
    """HTTP status; none in the stored problem of a tuning or job that failed later."""
    detail: str
    """Description of this occurrence, with the values, the limit and the remedy."""
    code: Annotated[str, Field(examples=["not-found"])]
    """Stable code, by which programs tell kinds of problems apart."""
    errors: tuple[FieldFault, ...] = ()
    """The first twenty invalid fields of an invalid request."""
    error_count: PositiveInt | None = None
    """Number of invalid fields, when `errors` does not list them all."""
