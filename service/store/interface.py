"""The interface of the store: what its callers need, and what every implementation promises.

Time is the database's. Every change of state is one conditional update that requires the old state and, for the owner
of a lease, the lease's fencing token: a report that comes after its lease has ended changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from service.domain.api_keys import ApiKey, NewKey
from service.domain.states import State, WorkKind
from service.domain.work import Event, RecommendationSummary, RecordedProbe
from service.domain.workers import ServedDevice
from service.store.models import (
    EVERYTHING,
    KEPT_SECONDS,
    PROVEN_SECONDS,
    UNLIMITED,
    AnsweredBeforeError,
    Claim,
    Ending,
    FirstAnswer,
    FirstTime,
    Idempotency,
    Lease,
    NewWork,
    Pruned,
    QueueDepth,
    Quota,
    RecommendationFilter,
    SeenDevice,
    StoredKey,
    StoredSession,
    Totals,
    Waiting,
    WorkFilter,
    WorkItem,
    WorkRow,
    WorkTotal,
    in_states,
)
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.results import ProbeResult
from tuner.schemas.training import TrainingProgress

__all__ = [
    "EVERYTHING",
    "KEPT_SECONDS",
    "PROVEN_SECONDS",
    "UNLIMITED",
    "AnsweredBeforeError",
    "Claim",
    "Ending",
    "FirstAnswer",
    "FirstTime",
    "Idempotency",
    "KeyStore",
    "Lease",
    "NewWork",
    "Pruned",
    "QueueDepth",
    "Quota",
    "RecommendationFilter",
    "SeenDevice",
    "SessionStore",
    "Store",
    "StoredKey",
    "StoredSession",
    "Totals",
    "Waiting",
    "WorkFilter",
    "WorkItem",
    "WorkRow",
    "WorkTotal",
    "in_states",
]


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


class SessionStore(ABC):
    """Who is signed in. Every method raises StoreUnavailableError when the database cannot be used."""

    @abstractmethod
    def open(self, digest: str, key_id: str, seconds: float) -> None:
        """Store a session of that key, known by the digest of its token; forget some that are over.

        Raises:
            ConflictError: when the digest is taken.
        """

    @abstractmethod
    def find(self, digest: str) -> StoredSession | None:
        """The session with its key, whatever has become of the key; none when it is over or was closed."""

    @abstractmethod
    def close(self, digest: str) -> None:
        """End a session; nothing happens to an unknown one."""


class Store(ABC):
    """Durable work with leases. Every method raises StoreUnavailableError when the database cannot be used."""

    @property
    @abstractmethod
    def keys(self) -> KeyStore:
        """The API keys, in the same database."""

    @property
    @abstractmethod
    def sessions(self) -> SessionStore:
        """Who is signed in, in the same database."""

    # --- anyone ---

    @abstractmethod
    def add(self, work: NewWork, quota: Quota = UNLIMITED, first: FirstTime | None = None) -> WorkItem:
        """Queue a piece of work, if its key may have more of it; with ``first``, remember the answer with it.

        What was answered under the idempotency key before counts first: it is found also when the quota is used.

        Raises:
            ConflictError: when its id is taken.
            QuotaExceededError: when its key has used its quota; work without a key has none.
            AnsweredBeforeError: when something was answered under this idempotency key already; nothing is added.
        """

    @abstractmethod
    def add_answered(self, work: NewWork, recommendation: Recommendation, first: FirstTime | None = None) -> WorkItem:
        """Store a tuning that needs no run, since its answer is known: it begins, and ends, SUCCEEDED.

        It waits for no device and uses none, so no quota limits it.

        Raises:
            ConflictError: when its id or the recommendation's is taken.
            AnsweredBeforeError: as ``add``.
        """

    @abstractmethod
    def remember(self, idempotency: Idempotency, answer: FirstAnswer) -> None:
        """Remember an answer that created nothing (a stored tuning).

        Raises:
            AnsweredBeforeError: as ``add``.
        """

    @abstractmethod
    def first_answer(self, owner: str, key: str) -> FirstAnswer | None:
        """What was answered under an idempotency key; none when it is new, or older than ``KEPT_SECONDS``."""

    @abstractmethod
    def delete(self, work_id: str) -> None:
        """Delete work that has ended, with its probes and events. Its recommendation stays.

        The time it took on devices still counts against the quota of its key.

        Raises:
            NotFoundError: when there is none.
            NotEndedError: when it has not ended.
        """

    @abstractmethod
    def prune(self, ended_before_seconds: float, *, recommendations: bool = False) -> Pruned:
        """Delete work that ended longer ago than that, in short transactions.

        With ``recommendations``, answers go too that are as old and that no remaining work names. What keys used of
        devices that long ago is forgotten with it.
        """

    @abstractmethod
    def prunable(self, ended_before_seconds: float, *, recommendations: bool = False) -> Pruned:
        """What ``prune`` would delete now."""

    @abstractmethod
    def queue(self, limit: int) -> list[Waiting]:
        """At most ``limit`` pieces of work that wait, in the order in which each device would take them.

        The first of every device comes first, then the second of every device, and so on. Each device's order is as if
        it alone took work from now on.
        """

    @abstractmethod
    def queue_depths(self) -> list[QueueDepth]:
        """How much waits for each device, and for how long; devices for which nothing waits are left out."""

    @abstractmethod
    def get(self, work_id: str) -> WorkItem:
        """The work with this id.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def newest(
        self, kind: WorkKind, limit: int, before: str | None = None, wanted: WorkFilter = EVERYTHING
    ) -> list[WorkRow]:
        """At most ``limit`` rows of one kind, newest first, older than the id ``before``."""

    @abstractmethod
    def cancel(self, work_id: str) -> WorkItem:
        """QUEUED becomes CANCELLED, RUNNING becomes CANCELLING, anything else stays. Idempotent.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def resume(self, work_id: str, quota: Quota = UNLIMITED) -> WorkItem:
        """Queue a job again that was FAILED or CANCELLED; what was recorded of it is kept, how it ended is not.

        Raises:
            NotFoundError: when there is none.
            NotResumableError: when it is in another state, or no job.
            QuotaExceededError: when its key has used its quota.
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
    def recommendation_texts(self, recommendation_ids: Sequence[str]) -> dict[str, str]:
        """Stored recommendations as the JSON that they are kept as, by their ids; unknown ones are left out."""

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

    @abstractmethod
    def totals(self, seconds: float | None) -> Totals:
        """What ended within that time, to the millisecond, and what has not ended; all there is for none.

        Hits and misses are kept by the hour: those of the hour in which the period began count too.
        """

    @abstractmethod
    def count_answers(self, hits: int, misses: int) -> None:
        """Add to the hits and misses of this hour."""

    # --- owners ---

    @abstractmethod
    def claim(self, served: ServedDevice, lease_seconds: float) -> Claim | None:
        """The next piece of work for this device: first what was left there or elsewhere, then the queue in its order.

        The order of the queue: the highest priority first; among equals the API key whose work was started least
        recently, on whatever device (callers without a key count as one); then the oldest. Work whose lease has
        expired is taken over, in whatever state it was left. None when nothing waits, or when something runs at that
        place.
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
        """End the work, storing what it left, and free its slot.

        Raises:
            StaleLeaseError: when the lease has ended.
        """

    @abstractmethod
    def hand_back(self, lease: Lease) -> None:
        """Back to the queue with all that was recorded (to CANCELLED, if it was cancelled meanwhile).

        An owner that could not reach the store in time may do so later, and no lease counts as lost.

        Raises:
            StaleLeaseError: when the work was taken over, or has ended.
        """

    @abstractmethod
    def release_slot(self, slot: str, owner_prefix: str) -> None:
        """Expire the leases of a slot whose earlier owners, named by the start of their name, are known dead."""

    # --- workers and health ---

    @abstractmethod
    def announce(self, served: ServedDevice) -> None:
        """Say that a worker serves a device, or that it still does."""

    @abstractmethod
    def withdraw(self, served: ServedDevice) -> None:
        """Say that this worker serves its device no more; nothing happens when another took the slot over."""

    @abstractmethod
    def devices(self) -> list[SeenDevice]:
        """Every announced device."""

    @abstractmethod
    def check(self) -> None:
        """Prove that the database can be written; a proof counts for ``PROVEN_SECONDS`` in its process."""

    @abstractmethod
    def close(self) -> None:
        """Give back every connection. Idempotent."""
