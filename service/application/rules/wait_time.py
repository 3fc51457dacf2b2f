"""How long what is queued may wait, from how long such work took lately. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from service.domain.states import WorkKind
from service.store.models import Waiting, WorkRow

RECENT = 20
"""Of how many that ended last, of each kind, the durations are looked at."""
_FEWEST = 3
"""With fewer durations of a kind nothing is said."""


@dataclass(frozen=True)
class Running:
    """What a worker is at, and since when."""

    kind: WorkKind
    started_at: datetime | None


def expected_waits(
    waiting: Sequence[Waiting],
    workers: Sequence[Running | None],
    recent: Sequence[WorkRow],
    now: datetime | None = None,
) -> dict[str, float | None]:
    """Seconds until each is taken, by its id; none where that cannot be told.

    Args:
        waiting: what waits for one device, in its order.
        workers: what each live worker of the device is at; none for one that is free.
        recent: what ended on the device.
        now: the time, for tests.
    """
    takes = _medians(recent)
    free = [_left(it, takes, now or datetime.now(UTC)) for it in workers]
    known = [seconds for seconds in free if seconds is not None]
    told: dict[str, float | None] = {}
    certain = bool(free) and len(known) == len(free)
    heapq.heapify(known)
    for entry in waiting:
        told[entry.id] = known[0] if certain else None
        duration = takes.get(entry.kind)
        certain = certain and duration is not None
        if certain and duration is not None:
            heapq.heapreplace(known, known[0] + duration)
    return told


def _medians(recent: Sequence[WorkRow]) -> dict[WorkKind, float]:
    """The median duration of each kind that enough of ended. Answers from the store took no device: not counted."""
    lasted: dict[WorkKind, list[float]] = {kind: [] for kind in WorkKind}
    for row in recent:
        if row.attempts and row.started_at is not None and row.ended_at is not None:
            lasted[row.kind].append((row.ended_at - row.started_at).total_seconds())
    return {kind: median(seconds) for kind, seconds in lasted.items() if len(seconds) >= _FEWEST}


def _left(running: Running | None, takes: dict[WorkKind, float], now: datetime) -> float | None:
    """Seconds until a worker is free; none when that cannot be told."""
    if running is None or running.started_at is None:
        return 0.0
    if running.kind not in takes:
        return None
    return max(0.0, takes[running.kind] - (now - running.started_at).total_seconds())
