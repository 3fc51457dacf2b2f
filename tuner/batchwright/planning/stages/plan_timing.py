"""The fourth stage: time plans, for an objective whose choice rests on their times. Pure, no torch."""

from typing_extensions import override

from batchwright.errors import SearchError
from batchwright.planning.accumulation import plan_size, steps_of
from batchwright.planning.stages.course import Course
from batchwright.planning.stages.stage import Stage
from batchwright.schemas.recommendation import Proof
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import ProbeResult


class PlanTiming(Stage):
    """Time the plans that the objective compares, and last the plan of the baseline."""

    @override
    def ask(self, course: Course) -> ProbeRequest | None:
        conditions, proof = course.conditions, course.proof
        if not conditions.objective.times_plans or proof is None or proof.fits == 0:
            return None
        size = conditions.objective.next_to_time(course.candidates(proof))
        size = _baseline_to_time(course, proof) if size is None else size
        return None if size is None else conditions.probe(size, measures_time=True)

    @override
    def tell(self, course: Course, result: ProbeResult) -> bool:
        if not result.measures_time:
            return False
        conditions, size = course.conditions, result.micro_batch_size
        is_of_plan = size == plan_size(conditions.share, steps_of(conditions.share, size))
        if not conditions.objective.times_plans or not is_of_plan:
            raise SearchError(
                f"no plan with micro-batches of {size} is timed: the objective is {conditions.request.objective!r}, "
                f"and a rank has {conditions.share} samples"
            )
        return True


def _baseline_to_time(course: Course, proof: Proof) -> int | None:
    """The largest micro-batch of the plan of as many steps as the baseline's size takes, unless it was timed."""
    conditions, baseline = course.conditions, course.conditions.request.baseline
    share = conditions.share
    if baseline is None or baseline.micro_batch_size > min(share, proof.fits):
        return None
    size = plan_size(share, steps_of(share, baseline.micro_batch_size))
    if conditions.repeats and share % size:
        return None
    return None if any(probe.measures_time and probe.micro_batch_size == size for probe in course.probes) else size
