"""The first two stages: confirm a stored recommendation, and search for the largest size that fits. No torch."""

from typing_extensions import override

from batchwright.errors import SearchError
from batchwright.planning.accumulation import plan_window, steps_of
from batchwright.planning.parameters import PARAMETERS
from batchwright.planning.proofs.plan_proof import format_window, longer_as_plan, peak_without_gradients
from batchwright.planning.stages.course import Course
from batchwright.planning.stages.stage import Stage
from batchwright.schemas.recommendation import Proof
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, Phase, ProbeResult


class Confirmation(Stage):
    """Probe the size of the stored recommendation, until it is known whether that still fits."""

    @override
    def ask(self, course: Course) -> ProbeRequest | None:
        start = course.warm_start
        if start is None or start.size is None or course.search.verdict is not None:
            return None
        if any(probe.outcome is not Outcome.LOST for probe in course.probes):
            return None
        proves_plan = _can_prove_plan(course, start.size)
        runs_plan = start.ran_plan and not course.has_unclear_plan_run
        return course.conditions.probe(start.size, counts_plan=proves_plan, runs_plan=runs_plan)


class SizeSearch(Stage):
    """Probe sizes until the largest that fits is proven, and then the whole share where it may fit all the same.

    Args:
        runs_plans: whether the size that likely ends the search is probed by a run of its plan, where that shows both.
    """

    def __init__(self, *, runs_plans: bool = False) -> None:
        self._runs_plans = runs_plans

    @override
    def ask(self, course: Course) -> ProbeRequest | None:
        size = None if course.is_confirmed else course.search.ask() or _whole_share(course)
        if size is None:
            return None
        conditions = course.conditions
        if conditions.request.command is not None:
            is_useful = _likely_proves_plan(course, size) or _may_refuse_small_updates(course)
            return conditions.probe(size, counts_plan=is_useful and _can_prove_plan(course, size))
        may_end = course.search.may_end_with(size)
        if may_end and self._window_of_both(course, size) and not course.has_unclear_plan_run:
            return conditions.probe(size, runs_plan=True)
        is_part = course.search.verdict is None and course.search.may_bracket and size < conditions.share
        return conditions.probe(size, brackets=is_part and not may_end)

    @override
    def tell(self, course: Course, result: ProbeResult) -> bool:
        size = result.micro_batch_size
        window = result.micro_batch_sizes
        if result.runs_plan and window != self._window_of_both(course, size):
            raise SearchError(f"the plan in micro-batches of {format_window(window)} is not the one to run now")
        if course.search.verdict is None:
            if result.shows_size:
                course.search.tell(result)
        elif size != _whole_share(course):
            raise SearchError(f"the search has ended: no probe of {size} was requested")
        return True

    def _window_of_both(self, course: Course, size: int) -> tuple[int, ...] | None:
        """The window of the size's plan, if its run also shows whether the size fits; None otherwise.

        It does if the plan begins with two micro-batches of the size, and then has smaller ones.
        """
        conditions = course.conditions
        if not self._runs_plans or not conditions.accumulates or conditions.objective.times_plans:
            return None
        window = plan_window(conditions.share, steps_of(conditions.share, size))
        return window if window[:2] == (size, size) and len(set(window)) > 1 else None


def _can_prove_plan(course: Course, size: int) -> bool:
    """Return whether a probe of a command may run the plan with this size, which then needs no run of its own."""
    conditions = course.conditions
    divides = conditions.accumulates and conditions.share % size == 0
    return conditions.repeats and divides and not conditions.objective.times_plans


def _likely_proves_plan(course: Course, size: int) -> bool:
    """Return whether the size is likely the plan's, and running that plan takes only a few times longer."""
    fits = [probe for probe in course.searched if probe.outcome is Outcome.FIT]
    if not fits or not course.search.may_end_with(size):
        return False
    return longer_as_plan(fits, size, course.conditions.share) <= PARAMETERS.longest_as_plan


def _may_refuse_small_updates(course: Course) -> bool:
    """Return whether the first probe failed before training: some programs refuse fewer samples than 16 in an update.

    Its two micro-batches of one sample were no update of the request. The updates of a plan are.
    """
    first = next(iter(course.searched), None)
    return first is not None and first.outcome is Outcome.ERROR and first.phase is Phase.BUILD


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
    expected = peak_without_gradients(course.searched, share)
    return share if expected is not None and expected <= conditions.probe_limit_bytes else None
