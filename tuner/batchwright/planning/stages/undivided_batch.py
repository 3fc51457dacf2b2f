"""The only stage of a tuning whose loss couples the samples of a batch. Pure, no torch."""

from collections.abc import Sequence

from typing_extensions import override

from batchwright.errors import TuningFailedError
from batchwright.planning.stages.course import Course
from batchwright.planning.stages.size_search import SizeSearch
from batchwright.planning.tuning_conditions import TuningConditions
from batchwright.schemas.recommendation import CouplingCheck
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult

_REASON = "coupled-loss"


class UndividedBatch(SizeSearch):
    """Probe the whole batch in one micro-batch, the only plan that is exact.

    Args:
        conditions: the conditions of the tuning.
        check: the check that found the coupling.

    Raises:
        TuningFailedError: when several ranks, or several micro-batches, share an update.
    """

    def __init__(self, conditions: TuningConditions, check: CouplingCheck) -> None:
        super().__init__()
        self._share = conditions.share
        self._check = check
        ranks, largest = conditions.request.spec.parallelism.world_size, conditions.space.size(conditions.space.count)
        if ranks > 1:
            raise self._error(f"An update on {ranks} ranks")
        if largest < self._share:
            raise self._error(f"An update of {self._share} samples in micro-batches of at most {largest}")

    @override
    def ask(self, course: Course) -> ProbeRequest | None:
        is_over = self._too_large(course.probes) is not None or course.search.verdict is not None
        return None if is_over else course.conditions.probe(self._share)

    def require_fit(self, probes: Sequence[ProbeResult]) -> None:
        """Refuse a tuning whose whole batch did not fit.

        Raises:
            TuningFailedError: when the whole batch did not fit.
        """
        too_large = self._too_large(probes)
        if too_large is not None:
            raise self._error(
                f"{self._share} samples do not fit in one micro-batch ({too_large.message}), and a plan of several"
            )

    def _too_large(self, probes: Sequence[ProbeResult]) -> ProbeResult | None:
        """The probe that did not fit the whole batch, if there is one."""
        stopped = (Outcome.OOM, Outcome.INVALID_SIZE)
        return next((each for each in probes if each.micro_batch_size == self._share and each.outcome in stopped), None)

    def _error(self, plan: str) -> TuningFailedError:
        remedy = "To plan and train nevertheless, set allow_batch_coupling (--allow-batch-coupling)."
        return TuningFailedError(_REASON, f"{self._check.message} {plan} would not be exact. {remedy}")
