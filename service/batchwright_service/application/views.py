"""Conversion of stored rows to the documents of the API, pages as JSON, and cursors."""

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic_core import to_json

from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import Job, JobRequest, QueuePosition, RecommendationSummary, Tuning
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TuningRequest
from batchwright_service.errors import InvalidCursorError, NotFoundError
from batchwright_service.store.database.list_search import is_sort_value, sort_value
from batchwright_service.store.models import NO_SEARCH, Search, WorkItem, WorkRow

PREFIXES = {WorkKind.TUNING: "tun", WorkKind.JOB: "job"}
"""Prefixes of identifiers."""

_IDENTIFIER = re.compile(r"(tun|job|rec)_[0-9a-f]{32}")
_WRONG_CURSOR = "cursor: pass `next_cursor` of the previous page, with the same `sort`, unchanged"
_CURSOR = re.compile(r"[tjr][0-9a-f]{32}")


def is_identifier(text: str) -> bool:
    """Return whether the text has the format of an identifier."""
    return _IDENTIFIER.fullmatch(text) is not None


def check_identifier(text: str, kind: str) -> None:
    """Refuse a text that has not the format of an identifier.

    Raises:
        NotFoundError: naming the text.
    """
    if not is_identifier(text):
        raise NotFoundError.of(kind, text)


# --- documents -------------------------------------------------------------------------------------------------------


def tuning(item: WorkItem, recommendation: Recommendation | None, queue: QueuePosition | None = None) -> Tuning:
    """Return a tuning in full."""
    return Tuning(
        **item.summary(),
        queue=queue,
        activity=item.activity if item.state is State.RUNNING else None,
        request=TuningRequest.from_stored(item.payload),
        recommendation=recommendation,
    )


def job(item: WorkItem, directory: Path | None, queue: QueuePosition | None = None) -> Job:
    """Return a job in full, with its folder if that is on this host."""
    request = JobRequest.from_stored(item.payload)
    return Job(
        **item.summary(),
        queue=queue,
        progress=item.progress,
        result=item.result,
        training=request.training,
        recommendation=request.recommendation,
        directory=None if directory is None else str(directory),
    )


# --- pages, as JSON --------------------------------------------------------------------------------------------------


def work_page(rows: Sequence[WorkRow], next_cursor: str | None, total: int | None = None) -> bytes:
    """Return a ``TuningPage`` or ``JobPage`` as JSON; rows of the store need no validation."""
    items = b",".join(row.summary_json for row in rows)
    return b'{"items":[%b],"next_cursor":%b,"total":%b}' % (items, to_json(next_cursor), to_json(total))


def recommendation_page(
    rows: Sequence[RecommendationSummary], next_cursor: str | None, total: int | None = None
) -> bytes:
    """Return a ``RecommendationPage`` as JSON."""
    return to_json({"items": rows, "next_cursor": next_cursor, "total": total})


# --- cursors ---------------------------------------------------------------------------------------------------------


def cursor_after(
    rows: Sequence[WorkRow] | Sequence[RecommendationSummary], limit: int, search: Search = NO_SEARCH
) -> str | None:
    """Return the cursor after the first ``limit`` rows, or None on the last page."""
    if len(rows) <= limit:
        return None
    last = rows[limit - 1]
    cursor = encode_cursor(last.id)
    if search.sort == "created":
        return cursor
    return f"{cursor}.{urlsafe_b64encode(to_json([search.sort, sort_value(last, search)])).decode().rstrip('=')}"


def position_after(cursor: str | None, prefix: str, search: Search) -> tuple[str | None, Search]:
    """Return the identifier of a cursor, and the search with the value of its row.

    Raises:
        InvalidCursorError: when the cursor does not belong to this list, or to another order of it.
    """
    if cursor is None or search.sort == "created":
        return decode_cursor(cursor, prefix), search
    name, _, rest = cursor.partition(".")
    try:
        sort, value = json.loads(urlsafe_b64decode(rest + "=" * (-len(rest) % 4)))
    except (TypeError, ValueError):
        raise InvalidCursorError(_WRONG_CURSOR) from None
    if sort != search.sort or not is_sort_value(value, sort):
        raise InvalidCursorError(_WRONG_CURSOR)
    return decode_cursor(name, prefix), replace(search, after=value)


def encode_cursor(identifier: str) -> str:
    """Return the cursor of a position in a list, opaque to callers."""
    prefix, _, number = identifier.partition("_")
    return prefix[0] + number


def decode_cursor(cursor: str | None, prefix: str) -> str | None:
    """Return the identifier of a cursor, in the list of identifiers with this prefix.

    Raises:
        InvalidCursorError: when the cursor does not belong to this list.
    """
    if cursor is None:
        return None
    if not _CURSOR.fullmatch(cursor) or cursor[0] != prefix[0]:
        raise InvalidCursorError(_WRONG_CURSOR)
    return f"{prefix}_{cursor[1:]}"
