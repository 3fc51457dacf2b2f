"""The reads that many make at the same time, gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.api.etags import Tagged, tagged, tagged_with_aside
from service.api.reads.coalescing import Gathered, GatheredByKey
from service.application.jobs import JobCases
from service.application.tunings import TuningCases
from service.domain.work import Event, Job, Tuning
from service.store.interface import RecommendationFilter, WorkFilter


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

    def __init__(self, tunings: TuningCases, jobs: JobCases, read_events: Callable[[str, int], list[Event]]) -> None:
        self.events = GatheredByKey[tuple[str, int], list[Event]](lambda it: read_events(*it))
        self.work = {cases.kind: _document_reads(cases) for cases in (tunings, jobs)}
        self.pages = {cases.kind: _page_reads(cases) for cases in (tunings, jobs)}
        self.recommendation = Gathered[str, str](tunings.recommendation_texts)
        self.recommendations = GatheredByKey[AnswersPage, bytes](
            lambda it: tunings.recommendations(it.wanted, it.limit, it.cursor)
        )


def _document_reads(cases: TuningCases | JobCases) -> GatheredByKey[str, Written]:
    return GatheredByKey(lambda work_id: _written(cases.get(work_id)))


def _page_reads(cases: TuningCases | JobCases) -> GatheredByKey[Page, bytes]:
    return GatheredByKey(lambda page: cases.page(page.limit, page.cursor, page.wanted))


def _written(document: Tuning | Job) -> Written:
    body = document.model_dump_json().encode()
    if document.queue is None:
        return document, tagged(body)
    essential = document.model_copy(update={"queue": None}).model_dump_json().encode()
    return document, tagged_with_aside(body, essential, document.queue.model_dump_json().encode())
