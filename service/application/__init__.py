"""What callers can do, each as one method: the rules are here, not in the routes and not in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from service.application.api_keys import KeyCases
from service.application.context import Desk
from service.application.exports import ExportCases
from service.application.jobs import JobCases
from service.application.queue import FleetCases
from service.application.queue_positions import QueuePlaces
from service.application.rules.policy import Policy
from service.application.statistics import SummaryCases
from service.application.tunings import TuningCases
from service.domain.work import Event
from service.store.hit_counter import Tally
from service.store.interface import Store


class UseCases:
    """Everything the API offers. Safe to share between threads.

    Args:
        store: where work is kept.
        policy: what the operator allows.
        runs_dir: where jobs run.
        lease_seconds: a worker not heard of for longer is not counted as serving its device.
        notify: called after work was queued or cancelled, so that workers of this process look at once.
    """

    def __init__(
        self, store: Store, policy: Policy, runs_dir: Path, lease_seconds: float, notify: Callable[[], None]
    ) -> None:
        desk = Desk(store, policy, runs_dir, lease_seconds, notify)
        self._store = store
        self.tally = Tally(store.count_answers)
        self.fleet = FleetCases(desk)
        places = QueuePlaces(self.fleet.queue)
        self.tunings = TuningCases(desk, self.tally, places)
        self.jobs = JobCases(desk, places)
        self.exports = ExportCases(desk)
        self.keys = KeyCases(store.keys)
        self.summary = SummaryCases(store, self.tally)

    def events(self, work_id: str, after: int) -> list[Event]:
        """Events of a tuning or job that are newer than the id ``after``; a bounded number of them."""
        return self._store.events(work_id, after)

    def event_counts(self, work_ids: Sequence[str]) -> dict[str, int]:
        """The id of the newest event of each tuning or job."""
        return self._store.event_counts(work_ids)
