"""What is read, each within a transaction of the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Connection, Row, Select, String, and_, bindparam, cast, func, select, union_all

from service.domain.states import WorkKind
from service.domain.work import Event, RecordedProbe
from service.domain.workers import ServedDevice
from service.errors import NotFoundError
from service.store.database import mapping
from service.store.database.schema import (
    events,
    is_held,
    is_queued,
    now_ms,
    probes,
    recommendations,
    work_items,
    workers,
)
from service.store.models import SeenDevice, WorkFilter, WorkItem
from tuner.schemas.recommendation import Recommendation

_work = work_items.c
_answer = recommendations.c


_ITEM = select(work_items).where(_work.id == bindparam("id"))


def read_item(connection: Connection, work_id: str) -> WorkItem:
    """One piece of work.

    Raises:
        NotFoundError: when there is none.
    """
    row = connection.execute(_ITEM, {"id": work_id}).first()
    if row is None:
        raise no_work(work_id)
    return mapping.work_item(row)


def no_work(work_id: str) -> NotFoundError:
    """The error for an id that names nothing."""
    return NotFoundError.of("job" if work_id.startswith("job_") else "tuning", work_id)


@dataclass(frozen=True)
class Listing:
    """A page of a list: work of one kind, newest first.

    Each filter has an index that goes on with the id: a page costs what it shows.
    """

    kind: WorkKind
    limit: int
    before: str | None
    wanted: WorkFilter

    def versions(self, connection: Connection) -> str | None:
        """Which rows there are, in which version each, as ``rows.KeptRows`` takes them; none when there are none.

        A driver hands over row by row, each time waiting for its turn among the threads: one value costs a quarter.
        """
        found: str | None = connection.execute(_versions(*self._form), self._values).scalar_one()
        return found

    def rows(self, connection: Connection) -> Sequence[Row[Any]]:
        """The rows, of the columns ``rows.LISTED_WORK``."""
        return connection.execute(_listing(*self._form), self._values).all()

    @property
    def _given(self) -> dict[str, Any]:
        """The restricted columns."""
        wanted = {name: value for name, value in vars(self.wanted).items() if value is not None and name != "states"}
        return {"kind": self.kind, **wanted}

    @property
    def _form(self) -> tuple[tuple[str, ...], bool, int]:
        return tuple(self._given), self.before is not None, len(self.wanted.states)

    @property
    def _values(self) -> dict[str, Any]:
        states = {f"state_{number}": state for number, state in enumerate(self.wanted.states)}
        return {**self._given, **states, "before": self.before, "limit": self.limit}


# There are few forms of a list, and making a statement costs as much as running it.


@cache
def _listing(given: tuple[str, ...], later: bool, states: int) -> Select[Any]:  # noqa: FBT001 - a part of the form
    """The list restricted by these columns, and by this number of states.

    With several states the newest of each are looked up in the index, and the newest of these are the list.
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
    return select(*mapping.LISTED_WORK).where(*conditions).order_by(_work.id.desc()).limit(bindparam("limit"))


@cache
def _versions(given: tuple[str, ...], later: bool, states: int) -> Select[Any]:  # noqa: FBT001 - a part of the form
    """The versions of the same rows, as one text."""
    parts = _work.id, _work.updated_at, _work.event_count
    page = _listing(given, later, states).with_only_columns(*parts).subquery().c
    version = page.id + " " + cast(page.updated_at, String) + " " + cast(page.event_count, String)
    return select(func.aggregate_strings(version, mapping.BETWEEN_VERSIONS))


def read_probes(connection: Connection, work_id: str) -> list[RecordedProbe]:
    """Every recorded probe, in order."""
    statement = select(probes).where(probes.c.work_id == work_id).order_by(probes.c.ordinal)
    return [mapping.recorded_probe(row) for row in connection.execute(statement).mappings()]


def read_events(connection: Connection, work_id: str, after: int, limit: int) -> list[Event]:
    """Events with a larger id, in order."""
    newer = and_(events.c.work_id == work_id, events.c.id > after)
    found = connection.execute(select(events).where(newer).order_by(events.c.id).limit(limit))
    return [mapping.event(row) for row in found.mappings()]


def event_counts(connection: Connection, work_ids: Sequence[str]) -> dict[str, int]:
    """The id of the newest event of each."""
    found = connection.execute(select(_work.id, _work.event_count).where(_work.id.in_(work_ids)))
    return {row.id: row.event_count for row in found}


# --- recommendations ---


_TEXTS = select(_answer.id, _answer.document).where(_answer.id.in_(bindparam("ids", expanding=True)))


def recommendation_texts(connection: Connection, recommendation_ids: Sequence[str]) -> dict[str, str]:
    """The stored JSON of each; unknown ones are left out."""
    found = connection.execute(_TEXTS, {"ids": list(recommendation_ids)})
    return {row.id: row.document for row in found}


def tuning_with_answer(connection: Connection, fingerprint: str) -> str | None:
    """The tuning of the newest recommendation with this fingerprint, of those that are still there."""
    statement = (
        select(_answer.tuning_id)
        .join(work_items, _work.id == _answer.tuning_id)
        .where(_answer.fingerprint == fingerprint)
        .order_by(_answer.id.desc())
        .limit(1)
    )
    return connection.execute(statement).scalar_one_or_none()


def answers_to(connection: Connection, question: str, limit: int) -> list[Recommendation]:
    """Feasible recommendations, newest first, of each fingerprint the newest."""
    asked = and_(_work.question == question, _answer.feasible)
    latest = (
        select(func.max(_answer.id))
        .join(work_items, _work.recommendation_id == _answer.id)
        .where(asked)
        .group_by(_answer.fingerprint)
    )
    statement = select(_answer.document).where(_answer.id.in_(latest)).order_by(_answer.id.desc()).limit(limit)
    return [Recommendation.model_validate_json(it) for it in connection.execute(statement).scalars()]


# --- devices ---


def seen_devices(connection: Connection) -> list[SeenDevice]:
    """Every announced device, with what holds it and what waits for it."""
    found = connection.execute(select(workers, now_ms().label("now")).order_by(workers.c.slot)).all()
    holding = connection.execute(select(_work.slot, _work.id).where(is_held))
    holders: dict[str | None, str] = {row.slot: row.id for row in holding}
    queued = _queued(connection)
    return [
        SeenDevice(
            served=served,
            age_seconds=max(0.0, (row.now - row.heartbeat_at) / 1000),
            running_id=holders.get(served.slot),
            queued=sum(queued.get((served.device.id, kind), 0) for kind in (None, served.hardware)),
        )
        for served, row in ((ServedDevice.model_validate_json(row.document), row) for row in found)
    ]


def _queued(connection: Connection) -> dict[tuple[str, str | None], int]:
    """How much waits, by the device and the hardware it needs."""
    lane: tuple[Any, ...] = (_work.device, _work.hardware)
    found = connection.execute(select(*lane, func.count().label("queued")).where(is_queued).group_by(*lane))
    return {(row.device, row.hardware): row.queued for row in found}
