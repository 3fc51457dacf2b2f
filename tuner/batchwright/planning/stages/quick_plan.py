"""The search of a quick tuning: one plan that surely fits, run as it will be trained. Pure, no torch."""

from typing_extensions import override

from batchwright.planning.accumulation import plan_size, steps_of
from batchwright.planning.stages.course import Course
from batchwright.planning.stages.size_search import SizeSearch
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult


class QuickPlan(SizeSearch):
    """Run the plan that the estimate is sure of, or a smaller one after an OOM.

    Without an estimate, and after a plan that failed by an error, search.
    """

    @override
    def ask(self, course: Course) -> ProbeRequest | None:
        has_error = any(probe.runs_plan and probe.outcome is Outcome.ERROR for probe in course.probes)
        if course.search.space.expected is None or has_error:  # the estimate would lead to the same plan again
            return super().ask(course)
        size = None if course.is_confirmed else course.search.surest_size()
        if size is None:
            return None
        share = course.conditions.share
        balanced = plan_size(share, steps_of(share, size))
        if balanced not in course.search.space:  # its run would prove no size that is searched
            return course.conditions.probe(size)
        return course.conditions.probe(balanced, runs_plan=True)

    @override
    def tell(self, course: Course, result: ProbeResult) -> bool:
        is_sure = result.runs_plan or course.search.space.expected is not None  # a restart has no estimate
        if course.proof is not None or not is_sure:
            return super().tell(course, result)
        if result.runs_plan and result.micro_batch_size not in course.search.space:  # by PlanRun, before a restart
            course.search.stopped_by = "quick"
            return True
        course.search.tell(result)
        if result.outcome is Outcome.FIT and not course.is_confirmed_by(result):
            course.search.stopped_by = "quick"
        return True
