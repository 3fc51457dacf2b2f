"""The search of a quick tuning: one plan that surely fits, run as it will be trained. Pure, no torch."""

from typing_extensions import override

from batchwright.planning.accumulation import plan_size, steps_of
from batchwright.planning.stages.course import Course
from batchwright.planning.stages.size_search import SizeSearch
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult


class QuickPlan(SizeSearch):
    """Run the plan that the estimate is sure of; after an OOM, others until one is at least half of what does not fit.

    Without an estimate, and after a plan that failed by an error, search.
    """

    @override
    def ask(self, course: Course) -> ProbeRequest | None:
        search, share = course.search, course.conditions.share
        if search.space.expected is None:
            return super().ask(course)
        size = None if course.is_confirmed else search.surest_size()
        if size is None:
            return None
        balanced = plan_size(share, steps_of(share, size))
        ended = {(probe.micro_batch_size, probe.outcome) for probe in course.probes if not probe.brackets}
        if not ended.isdisjoint({(balanced, Outcome.ERROR), (size, Outcome.ERROR)}):  # would be asked for again
            return super().ask(course)
        if (balanced, Outcome.FIT) in ended:  # a larger size would have no fewer steps
            search.stopped_by = "quick"
            return None
        if balanced not in search.space:  # its run would prove no size that is searched
            return course.conditions.probe(size)
        return course.conditions.probe(balanced, runs_plan=True)

    @override
    def tell(self, course: Course, result: ProbeResult) -> bool:
        if course.proof is None and result.micro_batch_size not in course.search.space:
            course.search.stopped_by = "quick"  # by a later stage, before a restart
            return True
        ran_plan = any(probe.runs_plan for probe in (*course.probes, result))
        is_sure = ran_plan or course.search.space.expected is not None  # recorded results precede the estimate
        if course.proof is not None or not is_sure:
            return super().tell(course, result)
        course.search.tell(result)
        is_far = course.search.fits_far_below_failure
        if result.outcome is Outcome.FIT and not is_far and not course.is_confirmed_by(result):
            course.search.stopped_by = "quick"
        return True
