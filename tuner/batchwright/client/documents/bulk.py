"""One act on several tunings or jobs, with a result for each. Pure data."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State
from batchwright.schemas.base import Document

MOST_IDS = 100
"""Pieces of work of one request, which changes all of them in one transaction."""

WorkId = Annotated[str, Field(min_length=1, max_length=64)]


class BulkAction(StrEnum):
    """An act on several tunings or jobs."""

    CANCEL = "cancel"
    """Cancel each; one that has ended is not changed."""
    DELETE = "delete"
    """Delete each that has ended, with its records, and the folder of a job."""


class BulkSubmission(Document):
    """An act on several tunings or jobs."""

    action: BulkAction
    """The act."""
    ids: Annotated[tuple[WorkId, ...], Field(min_length=1, max_length=MOST_IDS)]
    """Identifiers of at most 100 tunings or jobs. An identifier that is repeated has one result."""


class BulkResult(Document):
    """The result for one tuning or job."""

    id: str
    """Identifier, as it was sent."""
    status: Annotated[int, Field(ge=200, le=599)]
    """HTTP status that the same act on this tuning or job alone would have had: 200 cancelled, 204 deleted, 403 of
    another API key, 404 not found, 409 not ended."""
    state: State | None = None
    """Its state now; none where it was deleted or not changed."""
    problem: Problem | None = None
    """Reason why it was not changed."""


class BulkResponse(Document):
    """The results of an act on several tunings or jobs."""

    items: tuple[BulkResult, ...]
    """A result for each identifier, in the order of the request."""
