"""The reads that many callers make at the same time, coalesced."""

from __future__ import annotations

from dataclasses import dataclass

from service.api.etags import Tagged, tagged, tagged_with_aside
from service.application import UseCases
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

    def __init__(self, cases: UseCases) -> None:
        self.events = CoalescedReads[tuple[str, int], list[Event]](lambda key: cases.events(*key))
        self.tuning = CoalescedReads[str, Written](lambda key: _written(cases.tunings.get(key)))
        self.job = CoalescedReads[str, Written](lambda key: _written(cases.jobs.get(key)))
        self.recommendation = BatchedReads[str, str](cases.tunings.recommendation_texts)
        self.tunings = CoalescedReads[Page, bytes](
            lambda page: cases.tunings.page(page.limit, page.cursor, page.wanted)
        )
        self.jobs = CoalescedReads[Page, bytes](lambda page: cases.jobs.page(page.limit, page.cursor, page.wanted))
        self.recommendations = CoalescedReads[AnswersPage, bytes](
            lambda page: cases.tunings.recommendations(page.wanted, page.limit, page.cursor)
        )


def _written(document: Tuning | Job) -> Written:
    body = document.model_dump_json().encode()
    if document.queue is None:
        return document, tagged(body)
    essential = document.model_copy(update={"queue": None}).model_dump_json().encode()
    return document, tagged_with_aside(body, essential, document.queue.model_dump_json().encode())
