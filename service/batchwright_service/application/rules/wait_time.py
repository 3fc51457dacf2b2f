"""Expected waits of queued work, from the durations of recent work. Pure."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from batchwright.client.documents.states import WorkKind
from batchwright_service.store.models import WorkRow
from batchwright_service.store.scheduling import Waiting

RECENT = 20
"""Number of the newest ended pieces of work of each kind whose durations count."""
_MIN_DURATIONS = 3
"""With fewer durations of a kind, its waits are unknown."""


@dataclass(frozen=True)
class Running:
    """The running work of a worker, and its start."""

    kind: WorkKind
    started_at: datetime | None


def expected_waits(
    waiting: Sequence[Waiting],
    workers: Sequence[Running | None],
    recent: Sequence[WorkRow],
    now: datetime | None = None,
) -> dict[str, float | None]:
    """Return the expected seconds until each piece of work is taken, by its id; None where unknown.

    Args:
        waiting: the waiting work of one device, in order.
        workers: the running work of each live worker of the device; None for a free worker.
        recent: work that has ended on the device.
        now: the current time, for tests.
    """
    durations = _median_durations(recent)
    remaining = [_seconds_until_free(running, durations, now or datetime.now(UTC)) for running in workers]
    free_in = [seconds for seconds in remaining if seconds is not None]
    waits: dict[str, float | None] = {}
    is_known = bool(remaining) and len(free_in) == len(remaining)
    heapq.heapify(free_in)
    for entry in waiting:
        waits[entry.id] = free_in[0] if is_known else None
        duration = durations.get(entry.kind)
        is_known = is_known and duration is not None
        if is_known and duration is not None:
            heapq.heapreplace(free_in, free_in[0] + duration)
    return waits


def _median_durations(recent: Sequence[WorkRow]) -> dict[WorkKind, float]:
    """Return the median duration of each kind with enough durations. Tunings served from the store do not count."""
    durations: dict[WorkKind, list[float]] = {kind: [] for kind in WorkKind}
    for row in recent:
        if row.attempts and row.started_at is not None and row.ended_at is not None:
            durations[row.kind].append((row.ended_at - row.started_at).total_seconds())
    return {kind: median(seconds) for kind, seconds in durations.items() if len(seconds) >= _MIN_DURATIONS}


def _seconds_until_free(running: Running | None, durations: dict[WorkKind, float], now: datetime) -> float | None:
    """Return the expected seconds until a worker is free, or None where unknown."""
    if running is None or running.started_at is None:
        return 0.0
    if running.kind not in durations:
        return None
    return max(0.0, durations[running.kind] - (now - running.started_at).total_seconds())
