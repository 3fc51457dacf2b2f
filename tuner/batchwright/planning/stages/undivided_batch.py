"""The only stage of a tuning whose loss couples the samples of a batch. Pure, no torch."""

from __future__ import annotations

from typing_extensions import override

from batchwright.planning.stages.course import Course
from batchwright.planning.stages.size_search import SizeSearch
from batchwright.schemas.requests import ProbeRequest


class UndividedBatch(SizeSearch):
    """Probe the whole batch in one micro-batch, which no other plan is equal to."""

    @override
    def ask(self, course: Course) -> ProbeRequest | None:
        whole_batch = course.whole_batch
        has_failed = whole_batch is not None and whole_batch.failed(course.probes) is not None
        is_over = has_failed or course.search.verdict is not None
        return None if is_over else course.conditions.probe(course.conditions.share)
