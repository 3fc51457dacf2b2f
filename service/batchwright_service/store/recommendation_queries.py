"""Queries of recommendations: one, several, or a page of a list, whose cost does not depend on the list's length."""

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, get_args

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Engine,
    Integer,
    Select,
    and_,
    bindparam,
    exists,
    func,
    not_,
    or_,
    select,
    union,
)

from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import Objective
from batchwright.schemas.workload import Precision
from batchwright_service.errors import NotFoundError
from batchwright_service.store.database import mapping
from batchwright_service.store.database.list_search import counted, found_conditions, page_statement, searched_page
from batchwright_service.store.database.schema import recommendations, work_items
from batchwright_service.store.database.transactions import read_transaction
from batchwright_service.store.models import NO_SEARCH, RecommendationFilter, RecommendationRow, StalenessFilter

_recommendation = recommendations.c
_work = work_items.c
_Conditions = list[ColumnElement[bool]]
_LIMIT: BindParameter[int] = bindparam("limit", type_=Integer)
_TEXTS = select(_recommendation.id, _recommendation.document).where(
    _recommendation.id.in_(bindparam("ids", expanding=True))
)


def _distinct_conditions() -> Select[Any]:
    """Select each of the conditions once, by an index look-up each. They are few; `DISTINCT` reads the whole index."""
    first = select(func.min(_recommendation.conditions).label("text")).cte("first", recursive=True)
    next_one = select(func.min(_recommendation.conditions)).where(_recommendation.conditions > first.c.text)
    further = select(next_one.scalar_subquery()).select_from(first).where(first.c.text.is_not(None))
    found = first.union_all(further)
    return select(found.c.text).where(found.c.text.is_not(None))


_CONDITIONS = _distinct_conditions()

_NO_COLUMNS = {"search", "staleness", "distinct"}
"""Fields of a filter that are no column."""
_RECOMMENDED = ("feasible", "largest_micro_batch_size", "micro_batch_size", "gradient_accumulation_steps")
"""The columns of ``RecommendationRow.recommended``."""


def _conclusive_with(fingerprint: str, column: ColumnElement[str]) -> Select[Any]:
    """Select a column of the newest conclusive recommendation of a fingerprint whose tuning is stored.

    An inconclusive one answers no other request, since a new search may find a larger size.
    """
    return (
        select(column)
        .join(work_items, _work.id == _recommendation.tuning_id)
        .where(_recommendation.fingerprint == fingerprint, _recommendation.conclusive)
        .order_by(_recommendation.id.desc())
        .limit(1)
    )


class RecommendationStore:
    """Stored recommendations, read only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get(self, recommendation_id: str) -> Recommendation:
        """Return the stored recommendation.

        Raises:
            NotFoundError: when there is none.
        """
        found = self.texts([recommendation_id])
        if not found:
            raise NotFoundError.of("recommendation", recommendation_id)
        return Recommendation.from_stored(found[recommendation_id])

    def texts(self, recommendation_ids: Sequence[str]) -> dict[str, str]:
        """Return stored recommendations as JSON, by their ids; unknown ids are left out."""
        with read_transaction(self._engine) as connection:
            found = connection.execute(_TEXTS, {"ids": list(recommendation_ids)})
            return {row.id: row.document for row in found}

    def tuning_with(self, fingerprint: str) -> str | None:
        """Return the id of the stored tuning with the newest conclusive recommendation of this fingerprint."""
        with read_transaction(self._engine) as connection:
            found: str | None = connection.execute(_conclusive_with(fingerprint, _recommendation.tuning_id)).scalar()
            return found

    def with_fingerprint(self, fingerprint: str) -> Recommendation | None:
        """Return the newest conclusive recommendation of this fingerprint whose tuning is stored, or None."""
        with read_transaction(self._engine) as connection:
            found = connection.execute(_conclusive_with(fingerprint, _recommendation.document)).scalar()
        return next(iter(Recommendation.readable([] if found is None else [found])), None)

    def for_request(self, request_fingerprint: str, limit: int) -> list[Recommendation]:
        """Return at most ``limit`` feasible recommendations of tunings with this request fingerprint.

        They come newest first: of each fingerprint the newest, and the newest that is conclusive.
        """
        latest = (
            select(func.max(_recommendation.id))
            .join(work_items, _work.recommendation_id == _recommendation.id)
            .where(and_(_work.request_fingerprint == request_fingerprint, _recommendation.feasible))
            .group_by(_recommendation.fingerprint, _recommendation.conclusive)
        )
        statement = (
            select(_recommendation.document)
            .where(_recommendation.id.in_(latest))
            .order_by(_recommendation.id.desc())
            .limit(limit)
        )
        with read_transaction(self._engine) as connection:
            documents = connection.execute(statement).scalars()
            return Recommendation.readable(documents)

    def newest(self, wanted: RecommendationFilter, limit: int, before: str | None = None) -> list[RecommendationRow]:
        """Return at most ``limit`` recommendations, newest first, older than the id ``before``."""
        given = _given(wanted)
        if wanted.search != NO_SEARCH or wanted.staleness is not None or wanted.distinct:
            return self._searched(given, wanted, limit, before)
        values = {**given, "before": before, "limit": limit}
        with read_transaction(self._engine) as connection:
            found = connection.execute(_listing(tuple(given), before is not None), values)
            return [mapping.recommendation_row(row) for row in found.mappings()]

    def count(self, wanted: RecommendationFilter) -> int:
        """Return the number of matching recommendations, or of their fingerprints, up to a bound."""
        each = select(_recommendation.fingerprint).distinct() if wanted.distinct else select(_recommendation.id)
        with read_transaction(self._engine) as connection:
            found = found_conditions(connection, recommendations, wanted.search)
            return counted(connection, each.where(*_conditions(wanted), *found), _given(wanted))

    def row(self, recommendation_id: str) -> RecommendationRow:
        """Return a recommendation as a list has it.

        Raises:
            NotFoundError: when there is none.
        """
        statement = _listed().where(_recommendation.id == recommendation_id)
        with read_transaction(self._engine) as connection:
            row = connection.execute(statement).mappings().first()
        if row is None:
            raise NotFoundError.of("recommendation", recommendation_id)
        return mapping.recommendation_row(row)

    def conditions(self) -> list[str]:
        """Return the conditions of all recommendations, each once (``Conditions.text``)."""
        with read_transaction(self._engine) as connection:
            return list(connection.execute(_CONDITIONS).scalars())

    def newest_of_requests(
        self, request_digests: Collection[str], conditions: Collection[str]
    ) -> dict[str, RecommendationRow]:
        """Return the newest conclusive recommendation for each request under one of these conditions, by digest."""
        newest = (
            select(func.max(_recommendation.id))
            .where(
                _recommendation.request_digest.in_(request_digests),
                _recommendation.conditions.in_(conditions),
                _recommendation.conclusive,
            )
            .group_by(_recommendation.request_digest)
        )
        with read_transaction(self._engine) as connection:
            found = connection.execute(_listed().where(_recommendation.id.in_(newest))).mappings()
            rows = [mapping.recommendation_row(row) for row in found]
        return {row.request_digest: row for row in rows}

    def _searched(
        self, given: dict[str, Any], wanted: RecommendationFilter, limit: int, before: str | None
    ) -> list[RecommendationRow]:
        conditions, search = _conditions(wanted), wanted.search
        source, columns = mapping.OWNED_RECOMMENDATIONS, mapping.RECOMMENDATION_COLUMNS
        with read_transaction(self._engine) as connection:
            if wanted.distinct:
                conditions = [*conditions, *found_conditions(connection, recommendations, search)]
                newest = (func.max(_recommendation.id).label("newest"), func.count().label("uses"))
                answers = select(*newest).where(*conditions).group_by(_recommendation.fingerprint).subquery()
                listed = select(*columns, answers.c.uses).select_from(
                    source.join(answers, answers.c.newest == _recommendation.id)
                )
                statement = page_statement(connection, recommendations, listed, search, before, limit)
                return [mapping.recommendation_row(row) for row in connection.execute(statement, given).mappings()]
            rows = searched_page(connection, recommendations, source, columns, conditions, search, before, limit, given)
            return [mapping.recommendation_row(row._mapping) for row in rows]  # noqa: SLF001 - public


def _given(wanted: RecommendationFilter) -> dict[str, Any]:
    """Return the values of the restricted columns."""
    return {name: value for name, value in vars(wanted).items() if value is not None and name not in _NO_COLUMNS}


def _conditions(wanted: RecommendationFilter) -> _Conditions:
    """Return the conditions of a filter, without those of its search."""
    conditions = [_is(name) for name in _given(wanted)]
    return conditions if wanted.staleness is None else [*conditions, _is_of(wanted.staleness)]


def _listed() -> Select[Any]:
    return select(*mapping.RECOMMENDATION_COLUMNS).select_from(mapping.OWNED_RECOMMENDATIONS)


def _is_of(wanted: StalenessFilter) -> ColumnElement[bool]:
    """Return the condition of the recommendations that are stale, or of those that hold."""
    changed = _recommendation.conditions.in_(wanted.stale_conditions)
    latest, newer = recommendations.alias(), recommendations.alias()
    newest = (
        select(func.max(newer.c.id))
        .where(
            newer.c.request_digest == _recommendation.request_digest,
            newer.c.conditions.in_(wanted.current),
            newer.c.conclusive,
        )
        .correlate(recommendations)
        .scalar_subquery()
    )
    same = [latest.c[name].is_not_distinct_from(_recommendation[name]) for name in _RECOMMENDED]
    is_confirmed = exists().where(latest.c.id == newest, *same).correlate(recommendations)
    if wanted.stale:
        return and_(changed, not_(is_confirmed))
    return or_(_recommendation.conditions.in_(wanted.current), and_(changed, is_confirmed))


# A list has few forms, and building a statement costs as much as executing it.


@cache
def _listing(given: tuple[str, ...], later: bool) -> Select[Any]:  # noqa: FBT001 - a part of the form
    """Select the list restricted by these fields of the filter.

    A fingerprint selects few recommendations, and the whole list is in the order of the ids. Any other list is merged
    from lanes, each of which is a range of an index in the order of the list: the newest of all lanes include the
    newest of the list.
    """
    listed = _listed().order_by(_recommendation.id.desc())
    if not given or "fingerprint" in given:
        return _newest(listed, [_is(name) for name in given], later)
    lanes = [
        _newest(select(_recommendation.id).order_by(_recommendation.id.desc()), lane, later).subquery()
        for lane in _lanes(given)
    ]
    found = union(*(select(lane.c.id) for lane in lanes)).subquery()
    return listed.where(_recommendation.id.in_(select(found.c.id).order_by(found.c.id.desc()).limit(_LIMIT)))


def _newest(statement: Select[Any], conditions: _Conditions, later: bool) -> Select[Any]:  # noqa: FBT001 - as above
    if later:
        conditions = [*conditions, _recommendation.id < bindparam("before")]
    return statement.where(*conditions).limit(_LIMIT)


def _is(name: str) -> ColumnElement[bool]:
    given: BindParameter[str] = bindparam(name)
    return (
        or_(_recommendation.device == given, _recommendation.device_name == given)
        if name == "device"
        else _recommendation[name] == given
    )


def _lanes(given: tuple[str, ...]) -> Iterator[_Conditions]:
    """Yield the conditions of one lane for each requested precision and objective, by device id and by product name."""
    model = [_recommendation.model == bindparam("model")] if "model" in given else []
    named = [_recommendation.device == bindparam("device")], [_recommendation.device_name == bindparam("device")]
    devices: tuple[_Conditions, ...] = named if "device" in given else ([],)
    for device, precision, objective in product(devices, _each("precision", given), _each("objective", given)):
        yield [*device, *model, precision, objective]


def _each(name: str, given: tuple[str, ...]) -> _Conditions:
    """Return the condition for the requested value, or one condition for each possible value."""
    if name in given:
        return [_recommendation[name] == bindparam(name)]
    return [_recommendation[name] == value for value in _VALUES[name]]


_VALUES = {"precision": (*get_args(Precision), mapping.PRECISION_OF_COMMANDS), "objective": get_args(Objective)}
