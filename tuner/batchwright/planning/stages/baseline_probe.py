"""The third stage: probe the micro-batch size that the user trains with today. Pure, no torch."""

from typing_extensions import override

from batchwright.planning.stages.course import Course
from batchwright.planning.stages.stage import Stage
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import ProbeResult


class BaselineProbe(Stage):
    """Probe the baseline's size, which shows its time and memory. Where plans are timed, its plan is timed instead.

    The result must not change the search.
    """

    @override
    def ask(self, course: Course) -> ProbeRequest | None:
        size = self._size(course)
        return None if size is None else course.conditions.probe(size)

    @override
    def tell(self, course: Course, result: ProbeResult) -> bool:
        return self._size(course) == result.micro_batch_size

    @staticmethod
    def _size(course: Course) -> int | None:
        conditions, baseline, proof = course.conditions, course.conditions.request.baseline, course.proof
        if conditions.objective.times_plans or not conditions.accumulates or baseline is None or proof is None:
            return None
        size = baseline.micro_batch_size
        has_run = any(probe.micro_batch_size == size and not probe.brackets for probe in course.probes)
        if has_run or size >= min(conditions.share, proof.fits) or (conditions.repeats and conditions.share % size):
            return None
        return size
