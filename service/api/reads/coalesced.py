"""The reads that many make at the same time, gathered."""

from __future__ import annotations

from dataclasses import dataclass

from service.api.etags import Tagged, tagged, tagged_with_aside
from service.api.reads.coalescing import Gathered, GatheredByKey
from service.application import UseCases
from service.domain.work import Event, Job, Tuning
from service.store.models import RecommendationFilter, WorkFilter


@dataclass(frozen=True)
class Page:
    """Which page of a list."""

    limit: int
    cursor: str | None
    wanted: WorkFilter


@dataclass(frozen=True)
class AnswersPage:
    """Which page of the list of recommendations."""

    limit: int
    cursor: str | None
    wanted: RecommendationFilter


Written = tuple[Tuning | Job, Tagged]
"""A tuning or job, and how it is sent."""


class Reads:
    """Answers reads that many make at the same time. Belongs to one event loop."""

    def __init__(self, cases: UseCases) -> None:
        self.events = GatheredByKey[tuple[str, int], list[Event]](lambda it: cases.events(*it))
        self.tuning = GatheredByKey[str, Written](lambda it: _written(cases.tunings.get(it)))
        self.job = GatheredByKey[str, Written](lambda it: _written(cases.jobs.get(it)))
        self.recommendation = Gathered[str, str](cases.tunings.recommendation_texts)
        self.tunings = GatheredByKey[Page, bytes](lambda it: cases.tunings.page(it.limit, it.cursor, it.wanted))
        self.jobs = GatheredByKey[Page, bytes](lambda it: cases.jobs.page(it.limit, it.cursor, it.wanted))
        self.recommendations = GatheredByKey[AnswersPage, bytes](
            lambda it: cases.tunings.recommendations(it.wanted, it.limit, it.cursor)
        )


def _written(document: Tuning | Job) -> Written:
    body = document.model_dump_json().encode()
    if document.queue is None:
        return document, tagged(body)
    essential = document.model_copy(update={"queue": None}).model_dump_json().encode()
    return document, tagged_with_aside(body, essential, document.queue.model_dump_json().encode())
