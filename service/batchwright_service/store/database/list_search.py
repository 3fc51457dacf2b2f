"""Search, sort and page the lists by keysets, with an index of trigrams for substrings."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    String,
    Table,
    and_,
    column,
    func,
    literal_column,
    not_,
    or_,
    select,
    text,
    true,
    tuple_,
)

from batchwright.client.documents.states import State, WorkOutcome
from batchwright.client.documents.work import RecommendationSummary
from batchwright_service.store.database.schema import api_keys, is_failed, is_infeasible, recommendations, work_items
from batchwright_service.store.models import Search, WorkRow

_MOST_COUNTED = 10_000
"""Rows that a total counts: enough to tell how many match, at a bounded cost."""
SHORTEST_INDEXED = 3
"""Characters of the shortest word that an index of trigrams finds; shorter ones are looked for in every row."""

_SEARCHED = {
    "work_items": ("name", "project", "labels", "model", "device", "hardware", "fingerprint", "id"),
    "recommendations": ("name", "project", "labels", "model", "device", "device_name", "fingerprint", "id"),
}
"""The searched columns. The index has the same expression: see revision 0001."""

_NUMBERS = {"priority", "probes", "ended", "samples_per_second", "speedup", "uses", "peak", "effective_batch_size"}
"""Sorts whose values are numbers; the others sort texts."""
_LARGEST_NUMBER = 2**63 - 1
"""Largest number that both databases compare with a column."""
_COLUMNS: dict[str, ColumnElement[Any]] = {
    "probes": work_items.c.probe_count,
    "ended": work_items.c.ended_at,
    "peak": recommendations.c.peak_bytes,
    "uses": column("uses"),
}
"""The columns of sorts that differ from a column of the table with the name of the sort."""
_OF_RECOMMENDATIONS = {"samples_per_second": work_items.c.sorted_rate, "peak": work_items.c.sorted_peak}
"""Sorts of work by a figure of its recommendation, which the row has too, so that an index has the order."""


_FIELDS = {"created": "id", "ended": "ended_at", "peak": "peak_bytes"}
"""The fields of a row by sort, where the names differ."""


def searched_page(  # noqa: PLR0913, PLR0917 - the parts of a statement
    connection: Connection,
    table: Table,
    source: FromClause,
    columns: Sequence[ColumnElement[Any]],
    conditions: Sequence[ColumnElement[bool]],
    search: Search,
    before: str | None,
    limit: int,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> Sequence[Row[Any]]:
    """Return a page of a searched or sorted list.

    ``before`` is the id of the last row of the previous page, and ``values`` are the parameters of the conditions.
    """
    ids = select(table.c.id).where(*conditions)
    page = page_statement(connection, table, ids, search, before, limit).subquery()
    statement = select(*columns).select_from(source).where(table.c.id.in_(select(page.c.id)))
    return connection.execute(statement.order_by(*_order(table, search)), values).all()


def counted(connection: Connection, found: Select[Any], values: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Return the number of rows that a statement selects, at most ``_MOST_COUNTED``."""
    rows = found.limit(_MOST_COUNTED).subquery()
    total: int = connection.execute(select(func.count()).select_from(rows), values).scalar_one()
    return total


def page_statement(  # noqa: PLR0913, PLR0917 - as above
    connection: Connection, table: Table, statement: Select[Any], search: Search, before: str | None, limit: int
) -> Select[Any]:
    """Restrict a statement to a page of a searched or sorted list."""
    statement = statement.where(*found_conditions(connection, table, search))
    if before is not None and search.sort == "created":
        statement = statement.where(table.c.id < before if search.descending else table.c.id > before)
    elif before is not None:
        here, there = tuple_(_sorted_column(table, search.sort), table.c.id), tuple_(search.after, before)
        statement = statement.where(here < there if search.descending else here > there)
    return statement.order_by(*_order(table, search)).limit(limit)


def _order(table: Table, search: Search) -> list[ColumnElement[Any]]:
    columns = [table.c.id] if search.sort == "created" else [_sorted_column(table, search.sort), table.c.id]
    return [part.desc() if search.descending else part.asc() for part in columns]


def sort_value(row: WorkRow | RecommendationSummary, search: Search) -> str | float | None:
    """Return the value by which a row is sorted, for the cursor after it; None for the order of creation."""
    if search.sort == "created":
        return None
    name = "device_name" if search.sort == "device" and not isinstance(row, WorkRow) else search.sort
    value = getattr(row, _FIELDS.get(search.sort, name))
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    return _nothing(search.sort) if value is None else value


def is_sort_value(value: object, sort: str) -> bool:
    """Return whether a cursor may hold this value for this sort."""
    if sort == "created":
        return value is None
    if sort not in _NUMBERS:
        return isinstance(value, str) and "\0" not in value and value.encode(errors="ignore").decode() == value
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER


def _nothing(sort: str) -> str | int:
    return -1 if sort in _NUMBERS else ""


def _sorted_column(table: Table, sort: str) -> ColumnElement[Any]:
    if sort == "created":
        return table.c.id
    if sort == "device" and table is recommendations:
        return recommendations.c.device_name
    if sort in _OF_RECOMMENDATIONS and table is work_items:
        return _OF_RECOMMENDATIONS[sort]
    found = _COLUMNS[sort] if sort in _COLUMNS else table.c[sort]
    return func.coalesce(found, _nothing(sort))


def found_conditions(connection: Connection, table: Table, search: Search) -> list[ColumnElement[bool]]:
    """Return the conditions of a search."""
    conditions: list[ColumnElement[bool]] = []
    if search.created_after is not None:
        conditions.append(table.c.created_at > round(search.created_after.timestamp() * 1000))
    labels = [f"{key}={value}" for key, value in search.labels]
    conditions += [func.replace(table.c.labels, f"\n{label}\n", "") != table.c.labels for label in labels]
    projects = [] if search.project is None else [search.project]
    conditions += [table.c.project == project for project in projects]
    if search.owner is not None:
        owners = select(api_keys.c.id).where(or_(api_keys.c.name == search.owner, api_keys.c.id == search.owner))
        conditions.append(table.c.key_id.in_(owners))
    if search.problem_code is not None:
        conditions.append(and_(is_failed, work_items.c.problem_code == search.problem_code))
    if search.outcome is not None:
        infeasible = work_items.c.recommendation_id.in_(select(recommendations.c.id).where(is_infeasible))
        is_success = search.outcome in {WorkOutcome.SUCCEEDED, WorkOutcome.INFEASIBLE}
        conditions.append(work_items.c.state == (State.SUCCEEDED if is_success else search.outcome.upper()))
        if is_success:
            conditions.append(
                infeasible if search.outcome is WorkOutcome.INFEASIBLE else func.coalesce(not_(infeasible), true())
            )
    if search.slot is not None:
        conditions.append(work_items.c.slot == search.slot)
    words = [word.lower() for word in (*search.words, *labels, *projects)]
    if connection.dialect.name == "postgresql":
        return conditions + [_text(table).contains(word, autoescape=True) for word in words]
    indexed = [word for word in words if len(word) >= SHORTEST_INDEXED]
    if indexed:
        entries = text("search_entries JOIN search_index ON search_index.rowid = search_entries.number")
        phrases = " AND ".join('"' + word.replace('"', '""') + '"' for word in indexed)
        matches = select(column("id", String)).select_from(entries)
        conditions.append(
            table.c.id.in_(matches.where(text("search_index MATCH :phrases").bindparams(phrases=phrases)))
        )
    short = [word for word in words if len(word) < SHORTEST_INDEXED]
    return conditions + [func.instr(_text(table), word) > 0 for word in short]


def _text(table: Table) -> ColumnElement[str]:
    """Return the searched text of a row, as the index of PostgreSQL has it."""
    parts = " || ' ' || ".join(f"coalesce({table.name}.{name}, '')" for name in _SEARCHED[table.name])
    return literal_column(f"lower({parts})", String)
