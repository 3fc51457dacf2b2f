"""What happened lately, in one document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from service.fleet import Failures, Period, SpentSeconds, StoredAnswers, Summary
from service.keys import Caller, Scope
from service.states import State, WorkKind
from service.store.base import Store, Totals, WorkTotal
from service.tally import Tally


class SummaryCases:
    """What callers can ask about what happened. Safe to share between threads."""

    def __init__(self, store: Store, tally: Tally) -> None:
        self._store = store
        self._tally = tally

    def read(self, period: Period, caller: Caller) -> Summary:
        """Counts, causes of failures, device-seconds and stored answers.

        Those who may not read jobs are not told why jobs failed.
        """
        self._tally.flush()
        found = self._store.totals(period.seconds)
        told = set(WorkKind) if caller.may(Scope.JOBS_READ) else {WorkKind.TUNING}
        return Summary(
            period=period,
            tunings=_by_state(found.work, WorkKind.TUNING),
            jobs=_by_state(found.work, WorkKind.JOB),
            failures=tuple(Failures(**vars(it)) for it in found.failures if it.kind in told),
            device_seconds=_spent(found.work),
            stored_answers=_stored_answers(found),
        )


def _by_state(work: Iterable[WorkTotal], kind: WorkKind) -> dict[State, int]:
    counts = dict.fromkeys(State, 0)
    for it in work:
        if it.kind is kind:
            counts[it.state] += it.count
    return counts


def _spent(work: Iterable[WorkTotal]) -> tuple[SpentSeconds, ...]:
    spent: dict[str, dict[WorkKind, float]] = defaultdict(lambda: dict.fromkeys(WorkKind, 0.0))
    for it in work:
        if it.place is not None and it.device_seconds > 0:
            spent[it.place][it.kind] += it.device_seconds
    return tuple(
        SpentSeconds(place=place, probes_seconds=by[WorkKind.TUNING], jobs_seconds=by[WorkKind.JOB])
        for place, by in sorted(spent.items())
    )


def _stored_answers(found: Totals) -> StoredAnswers:
    asked = found.hits + found.misses
    return StoredAnswers(hits=found.hits, misses=found.misses, hit_rate=found.hits / asked if asked else None)
