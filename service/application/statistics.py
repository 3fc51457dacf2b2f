"""What happened lately, in one document."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from service.application.hit_counter import HitCounter
from service.domain.api_keys import Caller, Scope
from service.domain.states import State, WorkKind
from service.domain.workers import Failures, Period, RecommendationHits, SpentSeconds, Summary
from service.store.interface import StatisticsStore
from service.store.models import Totals, WorkTotal

_SHARED_SECONDS = 2.0
"""Pages that are open ask again and again, and counting 100,000 tunings takes some 50 ms: however many ask, each
period is counted once in this time."""


class SummaryCases:
    """What callers can ask about what happened. Safe to share between threads: one counts, all get its counts.

    Args:
        statistics: counts what happened.
        counter: what counts stored answers.
        clock: seconds that only grow.
    """

    def __init__(
        self, statistics: StatisticsStore, counter: HitCounter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._statistics = statistics
        self._hit_counter = counter
        self._clock = clock
        self._one_counts = {period: threading.Lock() for period in Period}
        self._counted: dict[Period, tuple[float, Totals]] = {}

    def read(self, period: Period, caller: Caller) -> Summary:
        """Counts, causes of failures, device-seconds and stored answers, as they were at most two seconds ago.

        Those who may not read jobs are not told why jobs failed.
        """
        found = self._totals(period)
        told = set(WorkKind) if caller.may(Scope.JOBS_READ) else {WorkKind.TUNING}
        return Summary(
            period=period,
            tunings=_by_state(found.work, WorkKind.TUNING),
            jobs=_by_state(found.work, WorkKind.JOB),
            failures=tuple(Failures(**vars(it)) for it in found.failures if it.kind in told),
            device_seconds=_spent(found.work),
            recommendation_hits=_recommendation_hits(found),
        )

    def _totals(self, period: Period) -> Totals:
        with self._one_counts[period]:
            if period in self._counted and self._clock() - self._counted[period][0] <= _SHARED_SECONDS:
                return self._counted[period][1]
            asked_at = self._clock()
            self._hit_counter.flush()
            found = self._statistics.totals(period.seconds)
            self._counted[period] = asked_at, found
            return found


def _by_state(work: Iterable[WorkTotal], kind: WorkKind) -> dict[State, int]:
    counts = dict.fromkeys(State, 0)
    for it in work:
        if it.kind is kind:
            counts[it.state] += it.count
    return counts


def _spent(work: Iterable[WorkTotal]) -> tuple[SpentSeconds, ...]:
    spent: dict[str, dict[WorkKind, float]] = defaultdict(lambda: dict.fromkeys(WorkKind, 0.0))
    for it in work:
        if it.slot is not None and it.device_seconds > 0:
            spent[it.slot][it.kind] += it.device_seconds
    return tuple(
        SpentSeconds(slot=slot, probes_seconds=by[WorkKind.TUNING], jobs_seconds=by[WorkKind.JOB])
        for slot, by in sorted(spent.items())
    )


def _recommendation_hits(found: Totals) -> RecommendationHits:
    asked = found.hits + found.misses
    return RecommendationHits(hits=found.hits, misses=found.misses, hit_rate=found.hits / asked if asked else None)
