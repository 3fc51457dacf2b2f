"""Queries of tunings and jobs: one in full, or a page of a list."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Row, Select, String, bindparam, cast, func, select, union_all

from batchwright.client.documents.states import State, WorkKind
from batchwright_service.errors import NotFoundError
from batchwright_service.fast_path.row_cache import RowCache
from batchwright_service.store.database import mapping
from batchwright_service.store.database.list_search import counted, found_conditions, searched_page
from batchwright_service.store.database.schema import work_items
from batchwright_service.store.database.transactions import read_transaction
from batchwright_service.store.models import EVERYTHING, NO_SEARCH, WorkFilter, WorkHead, WorkItem, WorkRow

_work = work_items.c
_SEPARATOR = ","

_ITEM = select(work_items, *mapping.RELATED).select_from(mapping.RELATED_WORK).where(_work.id == bindparam("id"))


class WorkStore:
    """Tunings and jobs, read only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listed = RowCache[WorkRow]()

    def get(self, work_id: str) -> WorkItem:
        """Return the work with this id.

        Raises:
            NotFoundError: when there is none.
        """
        with read_transaction(self._engine) as connection:
            return read_item(connection, work_id)

    def heads(self, work_ids: Collection[str]) -> dict[str, WorkHead]:
        """Return the heads of work by their ids; unknown ids are left out."""
        columns = (_work.id, _work.kind, _work.state, _work.key_id)
        with read_transaction(self._engine) as connection:
            found = connection.execute(select(*columns).where(_work.id.in_(work_ids)))
            return {row.id: WorkHead(row.id, WorkKind(row.kind), State(row.state), row.key_id) for row in found}

    def newest(
        self, kind: WorkKind, limit: int, before: str | None = None, wanted: WorkFilter = EVERYTHING
    ) -> list[WorkRow]:
        """Return at most ``limit`` rows of one kind, newest first, older than the id ``before``."""
        if wanted.search != NO_SEARCH:
            return self._searched(kind, limit, before, wanted)
        listing = Listing(kind, limit, before, wanted)
        with read_transaction(self._engine) as connection:
            cached = self._listed.find(listing.versions(connection))
            if cached is not None:
                return cached
            found = listing.rows(connection)
            return [self._listed.get(mapping.version(row), partial(mapping.work_row, row)) for row in found]

    def count(self, kind: WorkKind, wanted: WorkFilter) -> int:
        """Return the number of matching rows, up to a bound."""
        with read_transaction(self._engine) as connection:
            found = found_conditions(connection, work_items, wanted.search)
            return counted(connection, select(_work.id).where(*_conditions(kind, wanted), *found))

    def _searched(self, kind: WorkKind, limit: int, before: str | None, wanted: WorkFilter) -> list[WorkRow]:
        conditions = _conditions(kind, wanted)
        source, columns = mapping.RELATED_WORK, mapping.LISTED_WORK
        with read_transaction(self._engine) as connection:
            rows = searched_page(connection, work_items, source, columns, conditions, wanted.search, before, limit)
            return [self._listed.get(mapping.version(row), partial(mapping.work_row, row)) for row in rows]


def _conditions(kind: WorkKind, wanted: WorkFilter) -> list[ColumnElement[bool]]:
    """Return the conditions of a filter, without those of its search."""
    given = {"device": wanted.device, "model": wanted.model, "fingerprint": wanted.fingerprint}
    conditions = [_work.kind == kind, *(_work[name] == value for name, value in given.items() if value is not None)]
    return [*conditions, _work.state.in_(wanted.states)] if wanted.states else conditions


def read_item(connection: Connection, work_id: str) -> WorkItem:
    """Read one piece of work, within a transaction of the caller.

    Raises:
        NotFoundError: when no work has this id.
    """
    row = connection.execute(_ITEM, {"id": work_id}).first()
    if row is None:
        raise work_not_found(work_id)
    return mapping.work_item(row)


def work_not_found(work_id: str) -> NotFoundError:
    """Return the error for an unknown id."""
    return NotFoundError.of("job" if work_id.startswith("job_") else "tuning", work_id)


@dataclass(frozen=True)
class Listing:
    """A page of a list: work of one kind, newest first.

    Each filter has an index that ends with the id, so that the cost of a page does not depend on the list's length.
    """

    kind: WorkKind
    limit: int
    before: str | None
    wanted: WorkFilter

    def versions(self, connection: Connection) -> list[str]:
        """Return the versions of the rows, newest first, as ``mapping.version`` makes them.

        They are read as one aggregated value: a driver takes the interpreter lock for each row, at four times the cost.
        """
        found: str | None = connection.execute(_versions(*self._form), self._values).scalar_one()
        return sorted(found.split(_SEPARATOR), reverse=True) if found else []

    def rows(self, connection: Connection) -> Sequence[Row[Any]]:
        """Return the rows, of the columns ``mapping.LISTED_WORK``."""
        return connection.execute(_listing(*self._form), self._values).all()

    @property
    def _given(self) -> dict[str, Any]:
        """Return the values of the restricted columns."""
        names = ("device", "model", "fingerprint")
        given = {name: value for name in names if (value := getattr(self.wanted, name)) is not None}
        return {"kind": self.kind, **given}

    @property
    def _form(self) -> tuple[tuple[str, ...], bool, int]:
        return tuple(self._given), self.before is not None, len(self.wanted.states)

    @property
    def _values(self) -> dict[str, Any]:
        states = {f"state_{number}": state for number, state in enumerate(self.wanted.states)}
        return {**self._given, **states, "before": self.before, "limit": self.limit}


# A list has few forms, and building a statement costs as much as executing it.


@cache
def _listing(given: tuple[str, ...], later: bool, states: int) -> Select[Any]:  # noqa: FBT001 - a part of the form
    """Select the rows of the list in this form."""
    return _page(select(*mapping.LISTED_WORK).select_from(mapping.RELATED_WORK), given, later, states)


def _page(
    statement: Select[Any],
    given: tuple[str, ...],
    later: bool,  # noqa: FBT001 - a part of the form
    states: int,
) -> Select[Any]:
    """Restrict a statement to a page of the list: by these columns, and by this number of states.

    With several states, the newest rows of each state are read from the index and merged.
    """
    conditions = [_work[name] == bindparam(name) for name in given]
    if later:
        conditions.append(_work.id < bindparam("before"))
    pages = [
        select(_work.id).where(*conditions, condition).order_by(_work.id.desc()).limit(bindparam("limit"))
        for condition in [_work.state == bindparam(f"state_{number}") for number in range(states)]
    ]
    if states == 1:
        conditions.append(_work.state == bindparam("state_0"))
    elif states:
        conditions = [_work.id.in_(union_all(*(select(page.subquery().c.id) for page in pages)))]
    return statement.where(*conditions).order_by(_work.id.desc()).limit(bindparam("limit"))


@cache
def _versions(given: tuple[str, ...], later: bool, states: int) -> Select[Any]:  # noqa: FBT001 - a part of the form
    """Select the versions of the rows of ``_listing``, as one text."""
    parts = _work.id, _work.updated_at, _work.event_count
    page = _page(select(*parts), given, later, states).subquery().c
    version = page.id + " " + cast(page.updated_at, String) + " " + cast(page.event_count, String)
    return select(func.aggregate_strings(version, _SEPARATOR))
