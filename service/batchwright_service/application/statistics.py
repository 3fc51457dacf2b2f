"""The use cases of statistics: the summary of a period, and the occupancy of devices."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, TypeVar

from cachetools import TLRUCache, cached

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.workers import (
    DeviceOccupancy,
    Gains,
    ModelGain,
    Occupancy,
    OccupancyPeriod,
    Period,
    RecommendationHits,
    SpentSeconds,
    Summary,
    TrendPoint,
)
from batchwright_service.application.hit_counter import HitCounter
from batchwright_service.domain.callers import Caller
from batchwright_service.store.statistics import (
    OccupancyBuckets,
    RecordedGain,
    StatisticsStore,
    Totals,
    TrendBucket,
    WorkTotal,
)

Key = TypeVar("Key")
Value = TypeVar("Value")

_CACHE_SECONDS = 2.0
"""Lifetime of the counts of a period: open pages poll them, and counting 100,000 tunings takes some 50 ms."""

_MOST_MODELS = 20
_OCCUPANCY_CACHE_SECONDS = 10.0
_SHARE_DIGITS = 7
"""A millisecond of a bucket of two hours is a share of 1.4e-7: work is never told as none."""


class SummaryCases:
    """Use cases of statistics. Safe to share between threads: one counts, all get its counts."""

    def __init__(
        self, statistics: StatisticsStore, counter: HitCounter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._statistics = statistics
        self._hit_counter = counter
        self._recent = _recent(self._totals, _CACHE_SECONDS, clock)

    def read(self, period: Period, caller: Caller) -> Summary:
        """Return the summary of a period; its counts are at most two seconds old.

        Failures of jobs are left out for callers who may not read jobs.
        """
        totals, trend = self._recent(period)
        asked = totals.hits + totals.misses
        hit_rate = totals.hits / asked if asked else None
        kinds = set(WorkKind) if caller.may(Scope.JOBS_READ) else {WorkKind.TUNING}
        spent: dict[str, dict[WorkKind, float]] = defaultdict(lambda: dict.fromkeys(WorkKind, 0.0))
        for total in totals.work:
            if total.slot is not None and total.device_seconds > 0:
                spent[total.slot][total.kind] += total.device_seconds
        return Summary(
            period=period,
            tunings=_by_state(totals.work, WorkKind.TUNING),
            infeasible=totals.infeasible,
            jobs=_by_state(totals.work, WorkKind.JOB),
            failures=tuple(group for group in totals.failures if group.kind in kinds),
            device_seconds=tuple(
                SpentSeconds(slot=slot, probes_seconds=by[WorkKind.TUNING], jobs_seconds=by[WorkKind.JOB])
                for slot, by in sorted(spent.items())
            ),
            recommendation_hits=RecommendationHits(hits=totals.hits, misses=totals.misses, hit_rate=hit_rate),
            gains=_gains(totals.gains),
            trend=tuple(
                TrendPoint(
                    start=part.start,
                    tunings=part.tunings,
                    failures=part.failures,
                    speedup=median(part.speedups) if part.speedups else None,
                )
                for part in trend
            ),
        )

    def _totals(self, period: Period) -> tuple[Totals, list[TrendBucket]]:
        self._hit_counter.flush()
        return self._statistics.totals(period.seconds), self._statistics.trend(*period.trend)


class OccupancyCases:
    """The use case of the occupancy of devices. Safe to share between threads: one sums, all get its sums."""

    def __init__(self, statistics: StatisticsStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._statistics = statistics
        self._recent = _recent(self._occupancy, _OCCUPANCY_CACHE_SECONDS, clock)

    def read(self, period: OccupancyPeriod = OccupancyPeriod.DAY) -> Occupancy:
        """Return the occupancy of a period; it is at most ten seconds old."""
        return self._recent(period)

    def _occupancy(self, period: OccupancyPeriod) -> Occupancy:
        return _occupancy(self._statistics.occupancy(period.buckets, period.bucket_seconds), period)


def _recent(compute: Callable[[Key], Value], seconds: float, clock: Callable[[], float]) -> Callable[[Key], Value]:
    """Return ``compute`` with results that are kept for a time: one thread computes, all others wait for its result.

    The time counts from the beginning of the computation.
    """
    cache: TLRUCache[Any, Any, float] = TLRUCache(math.inf, lambda _key, made, _now: made[0] + seconds, clock)
    timed = cached(cache, condition=threading.Condition())(lambda key: (clock(), compute(key)))
    return lambda key: timed(key)[1]


def _occupancy(found: OccupancyBuckets, period: OccupancyPeriod) -> Occupancy:
    total = (found.end - found.start).total_seconds()
    length, buckets = period.bucket_seconds, range(period.buckets)
    lengths = [max(min(length, total - number * length), 0.001) for number in buckets]
    by_slot: dict[str, dict[WorkKind, list[float]]] = defaultdict(
        lambda: {kind: [0.0 for _ in buckets] for kind in WorkKind}
    )
    for busy in found.busy:
        by_slot[busy.slot][busy.kind][busy.bucket] += busy.seconds

    def shares(seconds: list[float]) -> tuple[float, ...]:
        return tuple(
            round(min(each / length, 1.0), _SHARE_DIGITS) for each, length in zip(seconds, lengths, strict=True)
        )

    return Occupancy(
        start=found.start,
        end=found.end,
        bucket_seconds=length,
        devices=tuple(
            DeviceOccupancy(
                slot=slot,
                tunings=shares(seconds[WorkKind.TUNING]),
                jobs=shares(seconds[WorkKind.JOB]),
                busy=round(min(sum(map(sum, seconds.values())) / total, 1.0), _SHARE_DIGITS),
            )
            for slot, seconds in sorted(by_slot.items())
        ),
    )


def _by_state(work: Iterable[WorkTotal], kind: WorkKind) -> dict[State, int]:
    counts = dict.fromkeys(State, 0)
    for total in work:
        if total.kind is kind:
            counts[total.state] += total.count
    return counts


def _gains(recorded: Sequence[RecordedGain]) -> Gains:
    by_model: dict[str, list[RecordedGain]] = defaultdict(list)
    for gain in recorded:
        by_model[gain.model].append(gain)
    most = sorted(by_model.items(), key=lambda item: (-len(item[1]), item[0]))[:_MOST_MODELS]
    models = tuple(ModelGain(model=model, **_figures(gains)) for model, gains in most)
    return Gains(**_figures(recorded), models=models)


def _figures(gains: Sequence[RecordedGain]) -> dict[str, Any]:
    speedups = [gain.speedup for gain in gains if gain.speedup is not None]
    shares = [gain.memory_gain for gain in gains if gain.memory_gain is not None]
    return {
        "recommendations": len(gains),
        "speedup": median(speedups) if speedups else None,
        "speedups": len(speedups),
        "measured": sum(gain.speed_source == "measured" for gain in gains),
        "memory_gain": median(shares) if shares else None,
    }
