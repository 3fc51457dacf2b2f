"""The interfaces of the store, one for each kind of caller, and the promises of every implementation.

Every method raises StoreUnavailableError when the database cannot be used. Time is the database's. Every change of
state is one conditional update that requires the old state and, for the owner of a lease, the lease's fencing token: a
report that comes after its lease has ended changes nothing.
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
    UNLIMITED,
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
)
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.results import ProbeResult
from tuner.schemas.training import TrainingProgress


class SubmissionStore(ABC):
    """Work as its submitter sees it: queued once, cancelled, resumed."""

    @abstractmethod
    def add(self, work: NewWork, quota: Quota = UNLIMITED, first: FirstTime | None = None) -> WorkItem:
        """Queue a piece of work, if its key may have more of it; with ``first``, store the response with the work.

        An earlier response under the idempotency key counts first: it is found even when the quota is used.

        Raises:
            ConflictError: when its id is taken.
            QuotaExceededError: when its key has used its quota; work without a key has none.
            AnsweredBeforeError: when this idempotency key has a response already; nothing is added.
        """

    @abstractmethod
    def add_answered(self, work: NewWork, recommendation: Recommendation, first: FirstTime | None = None) -> WorkItem:
        """Store a tuning that needs no run, since its recommendation is known: it begins, and ends, SUCCEEDED.

        It waits for no device and uses none, so no quota limits it.

        Raises:
            ConflictError: when its id or the recommendation's is taken.
            AnsweredBeforeError: as ``add``.
        """

    @abstractmethod
    def remember(self, idempotency: Idempotency, answer: FirstAnswer) -> None:
        """Store a response that created nothing (a stored tuning).

        Raises:
            AnsweredBeforeError: as ``add``.
        """

    @abstractmethod
    def first_answer(self, owner: str, key: str) -> FirstAnswer | None:
        """The first response under an idempotency key; none when the key is new, or older than ``KEPT_SECONDS``."""

    @abstractmethod
    def cancel(self, work_id: str) -> WorkItem:
        """QUEUED becomes CANCELLED, RUNNING becomes CANCELLING, anything else stays. Idempotent.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def resume(self, work_id: str, quota: Quota = UNLIMITED) -> WorkItem:
        """Queue a FAILED or CANCELLED job again; its recorded evidence is kept, its ending is not.

        Raises:
            NotFoundError: when there is none.
            NotResumableError: when it is in another state, or no job.
            QuotaExceededError: when its key has used its quota.
        """


class LeaseStore(ABC):
    """The queue as workers see it: work is claimed under a lease, which is renewed, and ends or is handed back."""

    @abstractmethod
    def claim(self, served: ServedDevice, lease_seconds: float) -> Claim | None:
        """Take the next piece of work for this device: first abandoned work, of this slot or others, then the queue.

        The order of the queue: the highest priority first; among equals the API key whose work was started least
        recently, on whatever device (callers without a key count as one); then the oldest. Work whose lease has
        expired is taken over, in whatever state it was left. None when nothing waits, or when something runs in that
        slot.
        """

    @abstractmethod
    def renew(self, lease: Lease, lease_seconds: float) -> State:
        """Extend the lease to ``lease_seconds`` from now; the result tells CANCELLING from RUNNING.

        Raises:
            StaleLeaseError: when it has ended.
        """

    @abstractmethod
    def finish(self, lease: Lease, ending: Ending) -> None:
        """End the work, storing its ending, and free its slot.

        Raises:
            StaleLeaseError: when the lease has ended.
            ConflictError: when the work's state does not lead to that end.
        """

    @abstractmethod
    def hand_back(self, lease: Lease) -> None:
        """Return work to the queue with its evidence (to CANCELLED, if it was cancelled meanwhile).

        An owner that could not reach the store in time may do so later, and no lease counts as lost.

        Raises:
            StaleLeaseError: when the work was taken over, or has ended.
        """

    @abstractmethod
    def release_slot(self, slot: str, owner_prefix: str) -> None:
        """Expire the leases of a slot whose earlier owners, named by the start of their name, are known dead."""


class EvidenceStore(ABC):
    """Recorded probes, training progress and the events that report them."""

    @abstractmethod
    def record_probe(self, lease: Lease, ordinal: int, result: ProbeResult) -> None:
        """Add a probe, and its event. The same result under the same ordinal is recorded once.

        Raises:
            StaleLeaseError: when the lease has ended.
            ConflictError: when that ordinal has another result already.
        """

    @abstractmethod
    def record_progress(self, lease: Lease, progress: Sequence[TrainingProgress]) -> None:
        """Add updates, one event each; the last becomes the job's progress.

        Raises:
            StaleLeaseError: when the lease has ended.
        """

    @abstractmethod
    def probes(self, work_id: str) -> list[RecordedProbe]:
        """Every recorded probe, in order; empty for unknown work."""

    @abstractmethod
    def events(self, work_id: str, after: int = 0, limit: int = 1000) -> list[Event]:
        """Events with a larger id than ``after``, in order; empty for unknown work."""

    @abstractmethod
    def event_counts(self, work_ids: Sequence[str]) -> dict[str, int]:
        """The id of the newest event of each, for polling; unknown work is left out."""


class QueueStore(ABC):
    """The waiting work of all devices."""

    @abstractmethod
    def waiting(self, limit: int) -> list[Waiting]:
        """At most ``limit`` pieces of work that wait, in the order in which each device would take them.

        The first of every device comes first, then the second of every device, and so on. Each device's order is as if
        it alone took work from now on.
        """

    @abstractmethod
    def depths(self) -> list[QueueDepth]:
        """How much waits for each device, and for how long; devices for which nothing waits are left out."""

    @abstractmethod
    def check(self) -> None:
        """Prove that the database can be written; a proof counts for ``PROVEN_SECONDS`` in its process."""


class WorkStore(ABC):
    """Tunings and jobs, read only."""

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


class RecommendationStore(ABC):
    """Stored recommendations, read only."""

    @abstractmethod
    def get(self, recommendation_id: str) -> Recommendation:
        """The stored recommendation.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def texts(self, recommendation_ids: Sequence[str]) -> dict[str, str]:
        """Stored recommendations as JSON, by their ids; unknown ones are left out."""

    @abstractmethod
    def tuning_with(self, fingerprint: str) -> str | None:
        """Id of the stored tuning that made the newest recommendation with this fingerprint."""

    @abstractmethod
    def for_question(self, question: str, limit: int) -> list[Recommendation]:
        """At most ``limit`` feasible recommendations of tunings with this question.

        They come newest first, and only the newest of each fingerprint.
        """

    @abstractmethod
    def newest(
        self, wanted: RecommendationFilter, limit: int, before: str | None = None
    ) -> list[RecommendationSummary]:
        """At most ``limit`` recommendations, newest first, older than the id ``before``."""


class StatisticsStore(ABC):
    """Counts of what happened."""

    @abstractmethod
    def totals(self, seconds: float | None) -> Totals:
        """Work that ended within that time, to the millisecond, and work that has not ended; everything for none.

        Hits and misses are kept by the hour: those of the hour in which the period began count too.
        """

    @abstractmethod
    def count_hits(self, hits: int, misses: int) -> None:
        """Add submitted tunings that a stored recommendation answered, and such as none did."""


class RetentionStore(ABC):
    """Deletion of work that has ended."""

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

        With ``recommendations``, recommendations as old go too unless remaining work names them. The device time that
        keys used that long ago is forgotten.
        """

    @abstractmethod
    def prunable(self, ended_before_seconds: float, *, recommendations: bool = False) -> Pruned:
        """The result that ``prune`` would have now."""


class DeviceStore(ABC):
    """Served devices, as their workers announce them."""

    @abstractmethod
    def announce(self, served: ServedDevice) -> None:
        """Record that a worker serves a device now."""

    @abstractmethod
    def withdraw(self, served: ServedDevice) -> None:
        """Remove a worker's device; nothing happens when another worker took the slot over."""

    @abstractmethod
    def list(self) -> list[SeenDevice]:
        """Every announced device."""


class KeyStore(ABC):
    """API keys. Rows are never deleted."""

    @abstractmethod
    def add(self, new: NewKey) -> ApiKey:
        """Store a key.

        Raises:
            ConflictError: when its id is taken.
        """

    @abstractmethod
    def find(self, key_id: str) -> StoredKey | None:
        """The key with this id, also when it is revoked or has expired."""

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
        """Return whether there ever was a key: revoking the last one opens nothing."""


class SessionStore(ABC):
    """Sessions of signed-in people."""

    @abstractmethod
    def open(self, digest: str, key_id: str, seconds: float) -> None:
        """Store a session of that key under the digest of its token, and delete some that are over.

        Raises:
            ConflictError: when the digest is taken.
        """

    @abstractmethod
    def find(self, digest: str) -> StoredSession | None:
        """The session with its key, also when the key has ended; none when the session is over or was closed."""

    @abstractmethod
    def close(self, digest: str) -> None:
        """End a session; nothing happens to an unknown one."""
