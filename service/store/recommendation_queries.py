"""Stored recommendations as they are read: one, several, or a page of a list, which costs what it shows."""

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
from service.store.database.engine import reading
from service.store.database.schema import recommendations, work_items
from service.store.interface import RecommendationStore
from service.store.models import RecommendationFilter
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import Objective
from tuner.schemas.workload import Precision

_answer = recommendations.c
_work = work_items.c
_Conditions = list[ColumnElement[bool]]
_MOST: BindParameter[int] = bindparam("limit", type_=Integer)
_TEXTS = select(_answer.id, _answer.document).where(_answer.id.in_(bindparam("ids", expanding=True)))


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
        with reading(self._engine) as connection:
            found = connection.execute(_TEXTS, {"ids": list(recommendation_ids)})
            return {row.id: row.document for row in found}

    @override
    def tuning_with(self, fingerprint: str) -> str | None:
        statement = (
            select(_answer.tuning_id)
            .join(work_items, _work.id == _answer.tuning_id)
            .where(_answer.fingerprint == fingerprint)
            .order_by(_answer.id.desc())
            .limit(1)
        )
        with reading(self._engine) as connection:
            return connection.execute(statement).scalar_one_or_none()

    @override
    def for_question(self, question: str, limit: int) -> list[Recommendation]:
        latest = (
            select(func.max(_answer.id))
            .join(work_items, _work.recommendation_id == _answer.id)
            .where(and_(_work.question == question, _answer.feasible))
            .group_by(_answer.fingerprint)
        )
        statement = select(_answer.document).where(_answer.id.in_(latest)).order_by(_answer.id.desc()).limit(limit)
        with reading(self._engine) as connection:
            documents = connection.execute(statement).scalars()
            return [Recommendation.model_validate_json(document) for document in documents]

    @override
    def newest(
        self, wanted: RecommendationFilter, limit: int, before: str | None = None
    ) -> list[RecommendationSummary]:
        given = {name: value for name, value in vars(wanted).items() if value is not None}
        values = {**given, "before": before, "limit": limit}
        with reading(self._engine) as connection:
            found = connection.execute(_listing(tuple(given), before is not None), values)
            return [mapping.recommendation_summary(row) for row in found.mappings()]


# There are few forms of a list, and making a statement costs as much as running it.


@cache
def _listing(given: tuple[str, ...], later: bool) -> Select[Any]:  # noqa: FBT001 - a part of the form
    """The list restricted by these fields of the filter.

    A fingerprint names few recommendations, and the whole list is in the order of the ids. Any other list is put
    together from lanes, each of which is a stretch of an index in the order of the list: the newest of all lanes hold
    the newest of the list.
    """
    listed = select(*mapping.SLIM_RECOMMENDATION).order_by(_answer.id.desc())
    if not given or "fingerprint" in given:
        return _newest(listed, [_is(name) for name in given], later)
    lanes = [_newest(select(_answer.id).order_by(_answer.id.desc()), lane, later).subquery() for lane in _lanes(given)]
    found = union(*(select(lane.c.id) for lane in lanes)).subquery()
    return listed.where(_answer.id.in_(select(found.c.id).order_by(found.c.id.desc()).limit(_MOST)))


def _newest(statement: Select[Any], conditions: _Conditions, later: bool) -> Select[Any]:  # noqa: FBT001 - as above
    if later:
        conditions = [*conditions, _answer.id < bindparam("before")]
    return statement.where(*conditions).limit(_MOST)


def _is(name: str) -> ColumnElement[bool]:
    given: BindParameter[str] = bindparam(name)
    return or_(_answer.device == given, _answer.device_name == given) if name == "device" else _answer[name] == given


def _lanes(given: tuple[str, ...]) -> Iterator[_Conditions]:
    """Yield one lane for each requested precision and objective, of an id or a product name each."""
    model = [_answer.model == bindparam("model")] if "model" in given else []
    named = [_answer.device == bindparam("device")], [_answer.device_name == bindparam("device")]
    devices: tuple[_Conditions, ...] = named if "device" in given else ([],)
    for device, precision, objective in product(devices, _each("precision", given), _each("objective", given)):
        yield [*device, *model, precision, objective]


def _each(name: str, given: tuple[str, ...]) -> _Conditions:
    """The one requested value, or every value there is."""
    if name in given:
        return [_answer[name] == bindparam(name)]
    return [_answer[name] == value for value in _VALUES[name]]


_VALUES = {"precision": get_args(Precision), "objective": get_args(Objective)}
