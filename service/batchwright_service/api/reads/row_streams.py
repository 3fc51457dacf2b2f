"""All rows of a filtered list as CSV or JSON Lines, read page by page while they are sent."""

import csv
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from io import StringIO
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool

from batchwright.client.documents.work import JobSummary, RecommendationSummary, TuningSummary
from batchwright.schemas.base import Document
from batchwright.schemas.plans import PlanSummary
from batchwright_service.store.models import WorkRow

Row = TypeVar("Row", bound=WorkRow | RecommendationSummary)
ReadPage = Callable[[int, str | None], tuple[Sequence[Row], str | None]]
"""Read at most so many rows after a cursor, with the cursor of the next page."""

_ROWS_AT_ONCE = 200
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters by which spreadsheets take a text for a formula."""
_PLAN = tuple(PlanSummary.model_fields)


class RowFormat(StrEnum):
    """Format of a list."""

    JSON = "json"
    """One page, with the cursor of the next one."""
    CSV = "csv"
    """All rows, as comma-separated values with a head."""
    JSON_LINES = "jsonl"
    """All rows, a JSON document per line."""


_MEDIA_TYPES = {RowFormat.CSV: "text/csv", RowFormat.JSON_LINES: "application/jsonl"}
ROW_CONTENT: dict[str, Any] = {name: {"schema": {"type": "string"}} for name in _MEDIA_TYPES.values()}
"""The OpenAPI ``content`` of a list beside JSON."""


async def stream_rows(read: ReadPage[Row], cursor: str | None, form: RowFormat, name: str) -> StreamingResponse:
    """Send all rows after ``cursor``. The first page is read before the response begins, so that its errors are told.

    Args:
        read: reads a page.
        cursor: a position in the list; none for its beginning.
        form: CSV or JSON Lines.
        name: the name of the file that browsers save, without its ending.
    """
    first = await run_in_threadpool(read, _ROWS_AT_ONCE, cursor)
    encode = _csv if form is RowFormat.CSV else _json_lines
    headers = {"Content-Disposition": f'attachment; filename="{name}.{form}"', "Cache-Control": "no-store"}
    return StreamingResponse(encode(_pages(read, *first), name), media_type=_MEDIA_TYPES[form], headers=headers)


def _pages(read: ReadPage[Row], rows: Sequence[Row], cursor: str | None) -> Iterator[Sequence[Row]]:
    yield rows
    while cursor is not None:
        rows, cursor = read(_ROWS_AT_ONCE, cursor)
        yield rows


def _json_lines(pages: Iterator[Sequence[Row]], _name: str) -> Iterator[bytes]:
    for rows in pages:
        yield b"".join((row.summary_json if isinstance(row, WorkRow) else to_json(row)) + b"\n" for row in rows)


_KINDS: dict[str, type[Document]] = {
    "tunings": TuningSummary,
    "jobs": JobSummary,
    "recommendations": RecommendationSummary,
}


def _csv(pages: Iterator[Sequence[Row]], name: str) -> Iterator[bytes]:
    fields = tuple(_KINDS[name].model_fields)
    plan = [f"plan_{name}" for name in _PLAN]
    yield _lines([[column for field in fields for column in (plan if field == "plan" else [field])]])
    for rows in pages:
        values = (row.summary() if isinstance(row, WorkRow) else row.model_dump() for row in rows)
        yield _lines([cell for field in fields for cell in _cells(field, row[field])] for row in values)


def _cells(field: str, value: Any) -> list[Any]:  # noqa: ANN401 - any field of a row
    if field == "plan":
        return ["" if value is None else value[name] for name in _PLAN]
    if field == "labels":
        return [_text(" ".join(f"{key}={label}" for key, label in sorted(value.items())))]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value]
    if value is None or isinstance(value, str):
        return [_text(value or "")]
    return [_text(to_json(value).decode().strip('"'))]  # times in ISO 8601


def _text(text: str) -> str:
    """Return a text that no spreadsheet runs as a formula: with an apostrophe before its first character."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _lines(rows: Any) -> bytes:  # noqa: ANN401 - what `csv` takes
    written = StringIO()
    csv.writer(written).writerows(rows)
    return written.getvalue().encode()
