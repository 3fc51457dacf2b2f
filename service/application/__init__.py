"""Hold the use cases: each thing that a caller can do is one method, with its rules.

The API, the workers and the command line share them. The pipeline of a submission, in ``tunings`` or ``jobs``:

1. ``context`` checks what holds for all work: priority, ownership, a device that a live worker serves.
2. ``rules`` decides: may this code run (``rules.policy``), was this request answered before (``rules.idempotency``),
   may a stored recommendation warm-start it (``rules.warm_start``), does the job fit the device (``rules.placement``).
3. The store queues the work, or the stored recommendation of the same fingerprint is the answer.
4. ``views`` turns stored rows into documents; ``service.fast_path.queue_positions`` adds the position in the queue.

``queue`` lists devices and waiting work, ``exports`` writes a recommendation for a framework, ``estimates`` bounds and
caches estimates, ``api_keys`` manages keys, ``statistics`` sums up a period, ``job_files`` reads what a job left,
``retention`` deletes old work, and ``readiness`` says whether the service can do its work.

Where a new thing goes:

- a use case: a method of the module of its resource; a rule that two of them share: ``rules``;
- a health check: ``readiness``; a limit that the operator sets: ``service.settings`` and ``rules.policy``;
- a filter of a list: ``service.store.models``, its query in ``service.store``, and ``service.api.dependencies``.

The package may import ``service.auth``, ``service.observability``, ``service.store.interface`` and the layers below,
and the torch-free parts of ``tuner``; no FastAPI and no SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from service.application.api_keys import KeyCases
from service.application.context import ApplicationContext
from service.application.exports import ExportCases
from service.application.jobs import JobCases
from service.application.queue import FleetCases
from service.application.rules.policy import Policy
from service.application.statistics import SummaryCases
from service.application.tunings import TuningCases
from service.domain.work import Event
from service.fast_path.queue_positions import QueuePositions
from service.store.hit_counter import HitCounter
from service.store.store import Store


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
        context = ApplicationContext(store, policy, runs_dir, lease_seconds, notify)
        self._evidence = store.evidence
        self.hit_counter = HitCounter(store.statistics.count_hits)
        self.fleet = FleetCases(context)
        positions = QueuePositions(self.fleet.queue)
        self.tunings = TuningCases(context, self.hit_counter, positions)
        self.jobs = JobCases(context, positions)
        self.exports = ExportCases(store.recommendations)
        self.keys = KeyCases(store.keys)
        self.summary = SummaryCases(store.statistics, self.hit_counter)

    def events(self, work_id: str, after: int) -> list[Event]:
        """Events of a tuning or job that are newer than the id ``after``; a bounded number of them."""
        return self._evidence.events(work_id, after)

    def event_counts(self, work_ids: Sequence[str]) -> dict[str, int]:
        """The id of the newest event of each tuning or job."""
        return self._evidence.event_counts(work_ids)
