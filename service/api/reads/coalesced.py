"""The reads that many callers make at the same time, coalesced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.api.etags import Tagged, tagged, tagged_with_aside
from service.application.jobs import JobCases
from service.application.tunings import TuningCases
from service.domain.work import Event, Job, Tuning
from service.fast_path.coalescing import BatchedReads, CoalescedReads
from service.store.models import RecommendationFilter, WorkFilter


@dataclass(frozen=True)
class Page:
    """One page of a list."""

    limit: int
    cursor: str | None
    wanted: WorkFilter


@dataclass(frozen=True)
class AnswersPage:
    """One page of the list of recommendations."""

    limit: int
    cursor: str | None
    wanted: RecommendationFilter


Written = tuple[Tuning | Job, Tagged]
"""A tuning or job, and its representation."""


class Reads:
    """The coalesced reads of the API. Belongs to one event loop."""

    def __init__(self, tunings: TuningCases, jobs: JobCases, read_events: Callable[[str, int], list[Event]]) -> None:
        self.events = CoalescedReads[tuple[str, int], list[Event]](lambda key: read_events(*key))
        self.work = {cases.kind: _document_reads(cases) for cases in (tunings, jobs)}
        self.pages = {cases.kind: _page_reads(cases) for cases in (tunings, jobs)}
        self.recommendation = BatchedReads[str, str](tunings.recommendation_texts)
        self.recommendations = CoalescedReads[AnswersPage, bytes](
            lambda page: tunings.recommendations(page.wanted, page.limit, page.cursor)
        )


def _document_reads(cases: TuningCases | JobCases) -> CoalescedReads[str, Written]:
    return CoalescedReads(lambda work_id: _written(cases.get(work_id)))


def _page_reads(cases: TuningCases | JobCases) -> CoalescedReads[Page, bytes]:
    return CoalescedReads(lambda page: cases.page(page.limit, page.cursor, page.wanted))


def _written(document: Tuning | Job) -> Written:
    body = document.model_dump_json().encode()
    if document.queue is None:
        return document, tagged(body)
    essential = document.model_copy(update={"queue": None}).model_dump_json().encode()
    return document, tagged_with_aside(body, essential, document.queue.model_dump_json().encode())
