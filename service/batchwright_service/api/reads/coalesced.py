"""The coalesced reads of the API: concurrent equal reads are made once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from batchwright.client.documents.work import Event, Job, Tuning
from batchwright_service.api.etags import Tagged, tagged, tagged_with_volatile_part
from batchwright_service.application.jobs import JobCases
from batchwright_service.application.tunings import TuningCases
from batchwright_service.fast_path.coalescing import BatchedReads, CoalescedReads
from batchwright_service.store.models import RecommendationFilter, WorkFilter


@dataclass(frozen=True)
class WorkListQuery:
    """The parameters of one page of a list of tunings or jobs."""

    limit: int
    cursor: str | None
    filters: WorkFilter
    total: bool = False
    """True to count the matching rows."""


@dataclass(frozen=True)
class RecommendationListQuery:
    """The parameters of one page of the list of recommendations."""

    limit: int
    cursor: str | None
    filters: RecommendationFilter
    stale: bool | None = None
    """True for stale recommendations, False for those that hold; None for all."""
    total: bool = False
    """True to count the matching recommendations."""


TaggedWork = tuple[Tuning | Job, Tagged]
"""A tuning or job, and its tagged representation."""


class Reads:
    """The coalesced reads of the API. Belongs to one event loop."""

    def __init__(self, tunings: TuningCases, jobs: JobCases, read_events: Callable[[str, int], list[Event]]) -> None:
        self.events = CoalescedReads[tuple[str, int], list[Event]](lambda key: read_events(*key))
        self.work = {
            cases.kind: CoalescedReads[str, TaggedWork](partial(_tagged_work, cases)) for cases in (tunings, jobs)
        }
        self.pages = {cases.kind: _page_reads(cases) for cases in (tunings, jobs)}
        self.recommendation = BatchedReads[str, str](tunings.recommendation_texts)
        self.recommendations = CoalescedReads[RecommendationListQuery, bytes](
            lambda page: tunings.recommendations(
                page.filters, page.limit, page.cursor, stale=page.stale, total=page.total
            )
        )


def _page_reads(cases: TuningCases | JobCases) -> CoalescedReads[WorkListQuery, bytes]:
    return CoalescedReads(lambda page: cases.page(page.limit, page.cursor, page.filters, total=page.total))


def _tagged_work(cases: TuningCases | JobCases, work_id: str) -> TaggedWork:
    document = cases.get(work_id)
    body = document.model_dump_json().encode()
    volatile = {name: None for name in ("queue", "activity") if getattr(document, name, None) is not None}
    if not volatile:
        return document, tagged(body)
    stable = document.model_copy(update=volatile).model_dump_json().encode()
    return document, tagged_with_volatile_part(body, stable, document.model_dump_json(include={*volatile}).encode())
