"""The second stage: search for the largest size that fits. Pure, no torch."""

from __future__ import annotations

from batchwright.errors import SearchError
from batchwright.planning.proofs.plan_proof import longer_as_plan, peak_without_gradients
from batchwright.planning.stages.course import Course
from batchwright.schemas.recommendation import Proof
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult


class SizeSearch:
    """Probe sizes until the largest that fits is proven, and then the whole share where it may fit all the same."""

    def ask(self, course: Course) -> ProbeRequest | None:
        """The probe of the next size."""
        if course.is_confirmed:
            return None
        size = course.search.ask() or _whole_share(course)
        return None if size is None else probe_of_search(course, size)

    def tell(self, course: Course, result: ProbeResult) -> bool:
        """Tell the search, unless it has ended: then the result is of the whole share."""
        size = result.micro_batch_size
        if result.runs_plan:
            raise SearchError(f"no plan with micro-batches of {size} is run in this tuning")
        if course.search.verdict is None:
            course.search.tell(result)
        elif size != _whole_share(course):
            raise SearchError(f"the search has ended: no probe of {size} was requested")
        return True


def probe_of_search(course: Course, size: int, *, is_likely_last: bool = False) -> ProbeRequest:
    """The probe of a size, which runs the plan with this size where that saves a later run of it.

    That is so for a command, where the size is likely the plan's and the probe takes only a few times longer.

    Args:
        course: the course of the tuning.
        size: the micro-batch size.
        is_likely_last: whether the size is expected to be the answer, however long its probe takes.
    """
    return course.conditions.probe(size, counts_plan=_may_prove_plan(course, size, is_likely_last=is_likely_last))


def _may_prove_plan(course: Course, size: int, *, is_likely_last: bool) -> bool:
    conditions = course.conditions
    divides = conditions.accumulates and conditions.share % size == 0
    if not conditions.repeats or conditions.objective.times_plans or not divides:
        return False
    if is_likely_last:
        return True
    fits = [probe for probe in course.searched if probe.outcome is Outcome.FIT]
    if not fits or not course.search.may_end_with(size):
        return False
    return longer_as_plan(fits, size, conditions.share) <= conditions.parameters.longest_as_plan


def _whole_share(course: Course) -> int | None:
    """The rank's whole share, when it is worth one more probe after the search has ended below it.

    An update of a single micro-batch holds no gradients while it runs, so the share may fit although smaller
    micro-batches, of which there are several in an update, do not. The share is probed if its expected peak, by the
    line through the two largest fits less the gradients, is within the limit.
    """
    conditions, proof = course.conditions, course.search.verdict
    share = conditions.share
    if not isinstance(proof, Proof) or proof.stopped_by != "oom" or proof.fits == 0:
        return None
    if not conditions.accumulates or conditions.space.bound != share or course.whole_share_probe is not None:
        return None
    if share % min(conditions.request.granularity, share):
        return None
    expected = peak_without_gradients(course.searched, share, conditions.parameters)
    return share if expected is not None and expected <= conditions.probe_limit_bytes else None
