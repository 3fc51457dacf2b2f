"""The first stage: confirm a stored recommendation by one probe. Pure, no torch."""

from __future__ import annotations

from batchwright.planning.stages.course import Course
from batchwright.planning.stages.size_search import probe_of_search
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult


class Confirmation:
    """Probe the size of the stored recommendation, until a probe has shown whether it still fits."""

    def ask(self, course: Course) -> ProbeRequest | None:
        """The probe of that size, if a single probe may confirm it."""
        start = course.warm_start
        if start is None or start.size is None or course.search.verdict is not None:
            return None
        if any(probe.outcome is not Outcome.LOST for probe in course.probes):
            return None
        return probe_of_search(course, start.size, is_likely_last=True)

    def tell(self, course: Course, result: ProbeResult) -> bool:
        """Leave the result to the search, which it is a part of."""
        del course, result
        return False
