"""Queries of recommendations: one, several, or a page of a list, whose cost does not depend on the list's length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    func,
    or_,
    select,
    union,
)
from typing_extensions import override

from service.domain.work import RecommendationSummary
from service.errors import NotFoundError
from service.store.database import mapping
from service.store.database.engine import read_transaction
from service.store.database.list_search import searched_page
from service.store.database.schema import recommendations, work_items
from service.store.interface import RecommendationStore
from service.store.models import NO_SEARCH, RecommendationFilter, Search
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import Objective
from tuner.schemas.workload import Precision

_recommendation = recommendations.c
_work = work_items.c
_Conditions = list[ColumnElement[bool]]
_LIMIT: BindParameter[int] = bindparam("limit", type_=Integer)
_TEXTS = select(_recommendation.id, _recommendation.document).where(
    _recommendation.id.in_(bindparam("ids", expanding=True))
)


class SqlRecommendationStore(RecommendationStore):
    """Recommendations on SQLite and PostgreSQL; safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @override
    def get(self, recommendation_id: str) -> Recommendation:
        found = self.texts([recommendation_id])
        if not found:
            raise NotFoundError.of("recommendation", recommendation_id)
        return Recommendation.model_validate_json(found[recommendation_id])

    @override
    def texts(self, recommendation_ids: Sequence[str]) -> dict[str, str]:
        with read_transaction(self._engine) as connection:
            found = connection.execute(_TEXTS, {"ids": list(recommendation_ids)})
            return {row.id: row.document for row in found}

    @override
    def tuning_with(self, fingerprint: str) -> str | None:
        statement = (
            select(_recommendation.tuning_id)
            .join(work_items, _work.id == _recommendation.tuning_id)
            .where(_recommendation.fingerprint == fingerprint)
            .order_by(_recommendation.id.desc())
            .limit(1)
        )
        with read_transaction(self._engine) as connection:
            return connection.execute(statement).scalar_one_or_none()

    @override
    def for_request(self, request_fingerprint: str, limit: int) -> list[Recommendation]:
        latest = (
            select(func.max(_recommendation.id))
            .join(work_items, _work.recommendation_id == _recommendation.id)
            .where(and_(_work.request_fingerprint == request_fingerprint, _recommendation.feasible))
            .group_by(_recommendation.fingerprint)
        )
        statement = (
            select(_recommendation.document)
            .where(_recommendation.id.in_(latest))
            .order_by(_recommendation.id.desc())
            .limit(limit)
        )
        with read_transaction(self._engine) as connection:
            documents = connection.execute(statement).scalars()
            return [Recommendation.model_validate_json(document) for document in documents]

    @override
    def newest(
        self, wanted: RecommendationFilter, limit: int, before: str | None = None
    ) -> list[RecommendationSummary]:
        given = {name: value for name, value in vars(wanted).items() if value is not None and name != "search"}
        if wanted.search != NO_SEARCH:
            return self._searched(given, wanted.search, limit, before)
        values = {**given, "before": before, "limit": limit}
        with read_transaction(self._engine) as connection:
            found = connection.execute(_listing(tuple(given), before is not None), values)
            return [mapping.recommendation_summary(row) for row in found.mappings()]

    def _searched(
        self, given: dict[str, Any], search: Search, limit: int, before: str | None
    ) -> list[RecommendationSummary]:
        conditions = [_is(name) for name in given]
        source, columns = mapping.OWNED_RECOMMENDATIONS, mapping.RECOMMENDATION_COLUMNS
        with read_transaction(self._engine) as connection:
            rows = searched_page(connection, recommendations, source, columns, conditions, search, before, limit, given)
            return [mapping.recommendation_summary(row._mapping) for row in rows]  # noqa: SLF001 - public


# A list has few forms, and building a statement costs as much as executing it.


@cache
def _listing(given: tuple[str, ...], later: bool) -> Select[Any]:  # noqa: FBT001 - a part of the form
    """Select the list restricted by these fields of the filter.

    A fingerprint selects few recommendations, and the whole list is in the order of the ids. Any other list is merged
    from lanes, each of which is a range of an index in the order of the list: the newest of all lanes include the
    newest of the list.
    """
    listed = (
        select(*mapping.RECOMMENDATION_COLUMNS)
        .select_from(mapping.OWNED_RECOMMENDATIONS)
        .order_by(_recommendation.id.desc())
    )
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
