"""The interface of the store: what its callers need, and what every implementation promises.

Time is the database's. Every change of state is one conditional update that requires the old state and, for the owner
of a lease, the lease's fencing token: a report that comes after its lease has ended changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from service.domain import (
    Event,
    Problem,
    RecommendationSummary,
    RecordedProbe,
    ServedDevice,
    State,
    WorkKind,
)
from service.keys import ApiKey, NewKey
from tuner.results import ProbeResult, Recommendation
from tuner.training.runs import TrainingProgress, TrainingResult


@dataclass(frozen=True)
class NewWork:
    """A tuning or job to queue. ``payload`` is its request as JSON, opaque to the store.

    ``question`` is what a tuning's answer is found by, whatever the versions; ``earlier_recommendation_id`` what leads
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
    earlier_recommendation_id: str | None = None
    key_id: str | None = None


@dataclass(frozen=True)
class WorkRow:
    """A tuning or job as a list shows it; cheap to read."""

    id: str
    kind: WorkKind
    state: State
    device: str
    place: str | None
    model: str
    effective_batch_size: int
    fingerprint: str
    recommendation_id: str | None
    earlier_recommendation_id: str | None
    key_id: str | None
    attempts: int
    probes: int
    events: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    updated_at: datetime


@dataclass(frozen=True)
class WorkItem(WorkRow):
    """A tuning or job in full."""

    payload: str
    progress: TrainingProgress | None
    result: TrainingResult | None
    problem: Problem | None


@dataclass(frozen=True)
class Lease:
    """The right to run one piece of work on one place until it expires. ``token`` fences off every earlier owner."""

    work_id: str
    owner: str
    token: int


@dataclass(frozen=True)
class Claim:
    """Work that was claimed. ``lost_leases`` counts owners in a row that vanished without recording anything."""

    lease: Lease
    item: WorkItem
    lost_leases: int


@dataclass(frozen=True)
class Ending:
    """How a piece of work ended, with what it left."""

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


@dataclass(frozen=True)
class SeenDevice:
    """A served device, how long ago its worker was heard of, what holds it, and how much waits for it."""

    served: ServedDevice
    age_seconds: float
    held_by: str | None
    queued: int


@dataclass(frozen=True)
class Quota:
    """What one key may take. ``None`` does not limit."""

    queued: int | None = None
    """Tunings and jobs that wait."""
    device_seconds: float | None = None
    """Seconds on devices, of everything that runs now or ended within the window."""
    window_seconds: float = 86_400.0
    """How far back ended work counts."""


UNLIMITED = Quota()


@dataclass(frozen=True)
class StoredKey:
    """A key with what verifying it takes. ``seconds_left`` is until it expires, by the database's clock."""

    key: ApiKey
    digest: str
    seconds_left: float | None


class KeyStore(ABC):
    """API keys. Every method raises StoreUnavailableError when the database cannot be used. Rows are never deleted."""

    @abstractmethod
    def add(self, new: NewKey) -> ApiKey:
        """Store a key.

        Raises:
            ConflictError: when its id is taken.
        """

    @abstractmethod
    def find(self, key_id: str) -> StoredKey | None:
        """The key with this id, whatever has become of it."""

    @abstractmethod
    def list(self) -> list[ApiKey]:
        """Every key there ever was, oldest first."""

    @abstractmethod
    def revoke(self, key_id: str) -> ApiKey:
        """End a key for good. One that is revoked already stays as it is.

        Raises:
            NotFoundError: when there is none with this id.
        """

    @abstractmethod
    def touch(self, key_id: str, at_most_every_seconds: float) -> None:
        """Note that a key is used now, unless that was noted that lately; nothing happens to an unknown one."""

    @abstractmethod
    def exist(self) -> bool:
        """Whether there ever was a key: revoking the last one opens nothing."""


class Store(ABC):
    """Durable work with leases. Every method raises StoreUnavailableError when the database cannot be used."""

    @property
    @abstractmethod
    def keys(self) -> KeyStore:
        """The API keys, in the same database."""

    # --- anyone ---

    @abstractmethod
    def add(self, work: NewWork, quota: Quota = UNLIMITED) -> WorkItem:
        """Queue a piece of work, if its key may have more of it.

        Raises:
            ConflictError: when its id is taken.
            QuotaExceededError: when its key has used its quota; work without a key has none.
        """

    @abstractmethod
    def add_answered(self, work: NewWork, recommendation: Recommendation) -> WorkItem:
        """Store a tuning that needs no run, since its answer is known: it begins, and ends, SUCCEEDED.

        Raises:
            ConflictError: when its id or the recommendation's is taken.
        """

    @abstractmethod
    def get(self, work_id: str) -> WorkItem:
        """The work with this id.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def newest(self, kind: WorkKind, limit: int, before: str | None = None) -> list[WorkRow]:
        """At most ``limit`` rows of one kind, newest first, older than the id ``before``."""

    @abstractmethod
    def cancel(self, work_id: str) -> WorkItem:
        """QUEUED becomes CANCELLED, RUNNING becomes CANCELLING, anything else stays. Idempotent.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def probes(self, work_id: str) -> list[RecordedProbe]:
        """Every recorded probe, in order; empty for unknown work."""

    @abstractmethod
    def events(self, work_id: str, after: int = 0, limit: int = 1000) -> list[Event]:
        """Events with a larger id than ``after``, in order; empty for unknown work."""

    @abstractmethod
    def event_counts(self, work_ids: Sequence[str]) -> dict[str, int]:
        """The id of the newest event of each; unknown ones are left out. What followers poll."""

    @abstractmethod
    def recommendation(self, recommendation_id: str) -> Recommendation:
        """The stored recommendation.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def tuning_with_answer(self, fingerprint: str) -> str | None:
        """Id of the tuning that made the newest recommendation with this fingerprint."""

    @abstractmethod
    def answers_to(self, question: str, limit: int) -> list[Recommendation]:
        """At most ``limit`` feasible recommendations of tunings with this question, newest first."""

    @abstractmethod
    def recommendations(
        self, wanted: RecommendationFilter, limit: int, before: str | None = None
    ) -> list[RecommendationSummary]:
        """At most ``limit`` recommendations, newest first, older than the id ``before``."""

    # --- owners ---

    @abstractmethod
    def claim(self, served: ServedDevice, lease_seconds: float) -> Claim | None:
        """The next piece of work for this device: first what was left there, then what is queued longest.

        Work whose lease has expired is taken over, in whatever state it was left. None when nothing waits, or when
        something runs at that place.
        """

    @abstractmethod
    def renew(self, lease: Lease, lease_seconds: float) -> State:
        """Hold the lease ``lease_seconds`` from now; the answer tells CANCELLING from RUNNING.

        Raises:
            StaleLeaseError: when it has ended.
        """

    @abstractmethod
    def record_probe(self, lease: Lease, ordinal: int, result: ProbeResult) -> None:
        """Add a probe, and its event.

        Raises:
            StaleLeaseError: when the lease has ended.
            ConflictError: when that ordinal is recorded already.
        """

    @abstractmethod
    def record_progress(self, lease: Lease, progress: Sequence[TrainingProgress]) -> None:
        """Add updates, one event each; the last becomes the job's progress.

        Raises:
            StaleLeaseError: when the lease has ended.
        """

    @abstractmethod
    def finish(self, lease: Lease, ending: Ending) -> None:
        """End the work, storing what it left, and free its place.

        Raises:
            StaleLeaseError: when the lease has ended.
        """

    @abstractmethod
    def hand_back(self, lease: Lease) -> None:
        """Back to the queue with all that was recorded (to CANCELLED, if it was cancelled meanwhile).

        Raises:
            StaleLeaseError: when the lease has ended.
        """

    @abstractmethod
    def release_place(self, place: str, owner_prefix: str) -> None:
        """Expire the leases of a place whose earlier owners, named by the start of their name, are known dead."""

    # --- workers and health ---

    @abstractmethod
    def announce(self, served: ServedDevice) -> None:
        """Say that a worker serves a device, or that it still does."""

    @abstractmethod
    def withdraw(self, served: ServedDevice) -> None:
        """Say that this worker serves its device no more; nothing happens when another took the place over."""

    @abstractmethod
    def devices(self) -> list[SeenDevice]:
        """Every announced device."""

    @abstractmethod
    def check(self) -> None:
        """Write something."""

    @abstractmethod
    def close(self) -> None:
        """Give back every connection. Idempotent."""
