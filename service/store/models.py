"""Plain values of the store, without SQL: work, leases, recommendations, filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from pydantic_core import to_json

from service.domain.api_keys import ApiKey
from service.domain.problems import Problem
from service.domain.states import State, WorkKind
from service.domain.work import JobSummary, TuningSummary
from service.domain.workers import ServedDevice
from service.errors import ServiceError
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import Objective
from tuner.schemas.training import TrainingProgress, TrainingResult
from tuner.schemas.workload import Precision


@dataclass(frozen=True)
class NewWork:
    """A tuning or job to queue. ``payload`` is its request as JSON, opaque to the store.

    ``question`` is what a tuning's answer is found by, whatever the versions; ``warm_start_from`` what leads
    it.
    """

    id: str
    kind: WorkKind
    device: str
    model: str
    effective_batch_size: int
    fingerprint: str
    payload: str
    recommendation_id: str | None = None
    priority: int = 0
    question: str | None = None
    warm_start_from: str | None = None
    key_id: str | None = None
    trace_parent: str | None = None
    """W3C ``traceparent`` of the request that made it."""
    hardware: str | None = None
    """The kind of device it needs (``ServedDevice.hardware``); none goes to any device with the id."""


@dataclass(frozen=True)
class Idempotency:
    """An idempotency key, its owner, and a digest of its request. A key never creates twice."""

    owner: str
    """Id of the API key; empty for callers without one."""
    key: str
    digest: str
    """SHA-256 of method, path and body: another digest under the same key is another request."""


@dataclass(frozen=True)
class FirstAnswer:
    """The first response to a request with an idempotency key."""

    digest: str
    work_id: str
    status: int
    body: str
    """The document as it was sent, JSON."""


class AnsweredBeforeError(ServiceError):
    """This idempotency key has a response already: ``first``. Never reaches HTTP."""

    code = "answered-before"

    def __init__(self, first: FirstAnswer) -> None:
        self.first = first
        super().__init__(f"{first.work_id} was answered under this idempotency key already")


@dataclass(frozen=True)
class WorkFilter:
    """Which tunings or jobs to list; a field that is none does not restrict."""

    states: tuple[State, ...] = ()
    """Any of these, each once; none does not restrict."""
    device: str | None = None
    model: str | None = None
    fingerprint: str | None = None


def in_states(states: Iterable[State] | None) -> tuple[State, ...]:
    """States as ``WorkFilter`` takes them: each once, in one order, so that equal questions are equal."""
    return tuple(sorted(set(states or ())))


@dataclass(frozen=True)
class Waiting:
    """A tuning or job in the queue, and its position in the order of its device, from 1.

    ``age_seconds`` counts from when it was queued, or handed back to the queue.
    """

    id: str
    kind: WorkKind
    device: str
    model: str
    priority: int
    position: int
    age_seconds: float
    hardware: str | None = None
    """The kind of device it needs; none goes to any device with the id."""


@dataclass(frozen=True)
class QueueDepth:
    """The work that waits for one device. Ages count from when work was queued, or handed back to the queue."""

    device: str
    waiting: int
    oldest_age_seconds: float


@dataclass(frozen=True)
class Pruned:
    """Counts of deleted work and recommendations."""

    tunings: int
    jobs: int
    recommendations: int
    job_ids: tuple[str, ...]
    """The deleted jobs: their folders can go too."""


@dataclass(frozen=True)
class WorkRow:
    """A tuning or job as a list shows it; cheap to read."""

    id: str
    kind: WorkKind
    state: State
    device: str
    slot: str | None
    model: str
    effective_batch_size: int
    fingerprint: str
    recommendation_id: str | None
    warm_start_from: str | None
    key_id: str | None
    priority: int
    attempts: int
    probes: int
    events: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    updated_at: datetime

    def summary(self) -> dict[str, Any]:
        """Return the fields of a ``TuningSummary`` or ``JobSummary``."""
        return {name: getattr(self, name) for name in _SUMMARY_FIELDS[self.kind]}

    @cached_property
    def summary_json(self) -> bytes:
        """The summary as JSON; made once, since lists show the same row again and again."""
        return to_json(self.summary())


_SUMMARY_FIELDS = {
    WorkKind.TUNING: tuple(TuningSummary.model_fields),
    WorkKind.JOB: tuple(JobSummary.model_fields),
}


@dataclass(frozen=True)
class WorkItem(WorkRow):
    """A tuning or job in full."""

    payload: str
    trace_parent: str | None
    progress: TrainingProgress | None
    result: TrainingResult | None
    problem: Problem | None


@dataclass(frozen=True)
class Lease:
    """The right to run one piece of work in one slot until it expires. ``token`` fences off every earlier owner."""

    work_id: str
    owner: str
    token: int


@dataclass(frozen=True)
class FirstTime:
    """A response to store in one transaction with the work that it reports.

    ``answer`` makes it from the work as stored, within that transaction: it must not use the store.
    """

    idempotency: Idempotency
    answer: Callable[[WorkItem], FirstAnswer]


@dataclass(frozen=True)
class Claim:
    """Work that was claimed. ``lost_leases`` counts owners in a row that vanished without recording anything."""

    lease: Lease
    item: WorkItem
    lost_leases: int


@dataclass(frozen=True)
class Ending:
    """The end of a piece of work, with its results."""

    state: State
    recommendation: Recommendation | None = None
    problem: Problem | None = None
    result: TrainingResult | None = None


@dataclass(frozen=True)
class RecommendationFilter:
    """Which recommendations to list; a field that is none does not restrict. ``device`` is an id or a product name."""

    fingerprint: str | None = None
    model: str | None = None
    device: str | None = None
    precision: Precision | None = None
    objective: Objective | None = None


@dataclass(frozen=True)
class SeenDevice:
    """A served device: the age of its last heartbeat, the work that runs on it, and how much waits for it."""

    served: ServedDevice
    age_seconds: float
    running_id: str | None
    queued: int


@dataclass(frozen=True)
class Quota:
    """The limits of one key. ``None`` does not limit."""

    queued: int | None = None
    """Tunings and jobs that wait."""
    device_seconds: float | None = None
    """Seconds on devices, of everything that runs now or ended within the window."""
    window_seconds: float = 86_400.0
    """The time within which ended work counts."""


UNLIMITED = Quota()
EVERYTHING = WorkFilter()
KEPT_SECONDS = 86_400.0
"""The lifetime of an idempotency key."""
PROVEN_SECONDS = 3.0
"""The time for which a successful write proves that the database can be written."""


@dataclass(frozen=True)
class StoredKey:
    """A key with the digest that verifies it. ``seconds_left`` is until it expires, by the database's clock."""

    key: ApiKey
    digest: str
    seconds_left: float | None


@dataclass(frozen=True)
class StoredSession:
    """A session that has not ended, and the key it rests on. ``seconds_left`` is by the database's clock."""

    stored: StoredKey
    seconds_left: float


@dataclass(frozen=True)
class WorkTotal:
    """The amount of work of one kind and state that ran last in one slot, and its device time."""

    kind: WorkKind
    state: State
    slot: str | None
    count: int
    device_seconds: float


@dataclass(frozen=True)
class FailureGroup:
    """Failures with the same cause."""

    kind: WorkKind
    code: str
    count: int
    message: str
    """The most frequent one among the newest."""
    newest_id: str
    newest_at: datetime


@dataclass(frozen=True)
class Totals:
    """Counts of work that ended within a period, and of all work that has not ended."""

    work: tuple[WorkTotal, ...]
    failures: tuple[FailureGroup, ...]
    """The most frequent cause first."""
    hits: int
    """Submitted tunings that a stored recommendation answered."""
    misses: int
    """Submitted tunings that none answered."""
