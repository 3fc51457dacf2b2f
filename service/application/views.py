"""Stored rows as the documents that the API returns, pages of them as JSON, and cursors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from service.domain.states import WorkKind
from service.domain.work import Job, JobRequest, JobSummary, QueuePosition, RecommendationSummary, Tuning, TuningSummary
from service.errors import InvalidCursorError, NotFoundError
from service.store.interface import WorkItem, WorkRow
from tuner.schemas.base import Document
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import TuningRequest

PREFIXES = {WorkKind.TUNING: "tun", WorkKind.JOB: "job"}
"""What identifiers begin with."""

_IDENTIFIER = re.compile(r"(tun|job|rec)_[0-9a-f]{32}")
_CURSOR = re.compile(r"[tjr][0-9a-f]{32}")


def is_identifier(text: str) -> bool:
    """Whether this service could have made it."""
    return _IDENTIFIER.fullmatch(text) is not None


def check_identifier(text: str, kind: str) -> None:
    """Refuse what this service cannot have made.

    Raises:
        NotFoundError: naming it.
    """
    if not is_identifier(text):
        raise NotFoundError.of(kind, text)


# --- documents -------------------------------------------------------------------------------------------------------


def tuning(item: WorkItem, recommendation: Recommendation | None, queue: QueuePosition | None = None) -> Tuning:
    """A tuning in full."""
    return Tuning(
        **_tuning_row(item),
        slot=item.slot,
        queue=queue,
        problem=item.problem,
        request=TuningRequest.model_validate_json(item.payload),
        recommendation=recommendation,
    )


def job(item: WorkItem, directory: Path | None, queue: QueuePosition | None = None) -> Job:
    """A job in full, with its folder where that is on this host."""
    request = JobRequest.model_validate_json(item.payload)
    return Job(
        **_job_row(item),
        slot=item.slot,
        queue=queue,
        problem=item.problem,
        progress=item.progress,
        result=item.result,
        training=request.training,
        recommendation=request.recommendation,
        directory=None if directory is None else str(directory),
    )


# --- pages, as JSON --------------------------------------------------------------------------------------------------


def _row(document: type[Document]) -> Callable[[WorkRow], dict[str, Any]]:
    """What takes the fields of a document from a row."""
    names = tuple(document.model_fields)
    values = attrgetter(*names)
    return lambda row: dict(zip(names, values(row), strict=True))


_tuning_row = _row(TuningSummary)
_job_row = _row(JobSummary)


class _WrittenRows:
    """Rows as JSON, kept while they are asked for: most have ended, and will never change.

    Whatever changes a row adds an event or at least a later time, so what is kept is never out of date.
    """

    def __init__(self, fields: Callable[[WorkRow], dict[str, Any]]) -> None:
        self._fields = fields
        self._written: dict[tuple[str, datetime, int], bytes] = {}

    def page(self, rows: Sequence[WorkRow], next_cursor: str | None) -> bytes:
        """A page of them."""
        if len(self._written) > _MOST_WRITTEN_ROWS:
            self._written = {}
        items = b",".join(map(self._row, rows))
        return b'{"items":[%b],"next_cursor":%b}' % (items, to_json(next_cursor))

    def _row(self, row: WorkRow) -> bytes:
        version = row.id, row.updated_at, row.events
        if (written := self._written.get(version)) is None:
            written = self._written[version] = to_json(self._fields(row))
        return written


_MOST_WRITTEN_ROWS = 8192
"""Of each kind, about half a kilobyte each."""
_written_tunings = _WrittenRows(_tuning_row)
_written_jobs = _WrittenRows(_job_row)


def tuning_page(rows: Sequence[WorkRow], next_cursor: str | None) -> bytes:
    """A ``TuningPage``. Rows of the store need no checking."""
    return _written_tunings.page(rows, next_cursor)


def job_page(rows: Sequence[WorkRow], next_cursor: str | None) -> bytes:
    """A ``JobPage``."""
    return _written_jobs.page(rows, next_cursor)


def recommendation_page(rows: Sequence[RecommendationSummary], next_cursor: str | None) -> bytes:
    """A ``RecommendationPage``."""
    return to_json({"items": rows, "next_cursor": next_cursor})


# --- cursors ---------------------------------------------------------------------------------------------------------


def cursor_after(rows: Sequence[WorkRow] | Sequence[RecommendationSummary], limit: int) -> str | None:
    """The cursor of what follows the first ``limit`` rows; none when nothing does."""
    return encode_cursor(rows[limit - 1].id) if len(rows) > limit else None


def encode_cursor(identifier: str) -> str:
    """A position in a list, opaque to callers."""
    prefix, _, number = identifier.partition("_")
    return prefix[0] + number


def decode_cursor(cursor: str | None, prefix: str) -> str | None:
    """The identifier that a cursor stands for, in the list of what has this prefix.

    Raises:
        InvalidCursorError: when it is not one of this list.
    """
    if cursor is None:
        return None
    if not _CURSOR.fullmatch(cursor) or cursor[0] != prefix[0]:
        raise InvalidCursorError("cursor: pass `next_cursor` of the page before, unchanged")
    return f"{prefix}_{cursor[1:]}"
