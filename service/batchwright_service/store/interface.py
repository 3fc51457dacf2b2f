"""The interfaces of the store, one for each kind of caller, with the contract of every implementation.

Every method raises StoreUnavailableError when the database cannot be used. Time is the database's. Every change of
state is one conditional update that requires the old state and, for the owner of a lease, the lease's fencing token: a
report that comes after its lease has ended changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from batchwright.client.documents.api_keys import ApiKey
from batchwright.client.documents.audit import AuditEntry
from batchwright.client.documents.fleet import FleetReport
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import Event, RecordedProbe
from batchwright.client.documents.workers import ServedDevice
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.residuals import EstimateResidual
from batchwright.schemas.results import ProbeResult
from batchwright.schemas.training import RunProgress
from batchwright_service.domain.callers import COMMAND_LINE, Actor
from batchwright_service.domain.key_texts import NewKey
from batchwright_service.store.models import (
    EVERYTHING,
    UNLIMITED,
    AnnouncedDevice,
    AuditFilter,
    Beat,
    BeatReply,
    Binding,
    Claim,
    Ending,
    FleetWork,
    Idempotency,
    Lease,
    NewWork,
    OccupancyBuckets,
    PendingResponse,
    Pruned,
    QueueDepth,
    Quota,
    RecommendationFilter,
    RecommendationRow,
    ReportedFleet,
    SlotHolder,
    StoredKey,
    StoredResponse,
    StoredSession,
    Totals,
    Waiting,
    WorkFilter,
    WorkHead,
    WorkItem,
    WorkRow,
)


class SubmissionStore(ABC):
    """Submissions: work is queued once, cancelled and resumed."""

    @abstractmethod
    def add(self, work: NewWork, quota: Quota = UNLIMITED, pending: PendingResponse | None = None) -> WorkItem:
        """Queue a piece of work within the quota of its key; with ``pending``, store the response with the work.

        A stored response under the idempotency key is found even when the quota is used.

        Raises:
            ConflictError: when its id is taken.
            QuotaExceededError: when its key has used its quota; work without a key has no quota.
            DuplicateRequestError: when the idempotency key has a response already; nothing is added.
        """

    @abstractmethod
    def add_succeeded(
        self, work: NewWork, recommendation: Recommendation, pending: PendingResponse | None = None
    ) -> WorkItem:
        """Store a tuning that needs no run, since its recommendation is known, in the state SUCCEEDED.

        The tuning uses no device, so that no quota limits it.

        Raises:
            ConflictError: when its id or the recommendation's is taken.
            DuplicateRequestError: as ``add``.
        """

    @abstractmethod
    def store_response(self, idempotency: Idempotency, response: StoredResponse) -> None:
        """Store the response to a request that created nothing (a stored tuning served it).

        Raises:
            DuplicateRequestError: as ``add``.
        """

    @abstractmethod
    def find_response(self, owner: str, key: str) -> StoredResponse | None:
        """Return the response under an idempotency key.

        None when the key is new, or older than ``IDEMPOTENCY_KEY_TTL_SECONDS``.
        """

    @abstractmethod
    def cancel(self, work_id: str, actor: Actor = COMMAND_LINE) -> WorkItem:
        """Change QUEUED to CANCELLED, and RUNNING to CANCELLING; other states stay. Idempotent.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def cancel_all(self, work_ids: Collection[str], actor: Actor = COMMAND_LINE) -> dict[str, State]:
        """Cancel each as ``cancel`` does, all in one transaction, and return their states; unknown ids are left out."""

    @abstractmethod
    def resume(self, work_id: str, quota: Quota = UNLIMITED, actor: Actor = COMMAND_LINE) -> WorkItem:
        """Queue a FAILED or CANCELLED job again; its recorded evidence is kept, and its ending is cleared.

        Raises:
            NotFoundError: when there is none.
            NotResumableError: when it is in another state, or is no job.
            QuotaExceededError: when its key has used its quota.
        """


class LeaseStore(ABC):
    """Leases: workers claim work under a lease, and end the work or hand it back; heartbeats renew leases."""

    @abstractmethod
    def claim(self, served: ServedDevice, lease_seconds: float) -> Claim | None:
        """Claim the next piece of work for this device: first abandoned work, of this slot or others, then the queue.

        The order of the queue: the highest priority first; among equals the API key whose work was started least
        recently, on any device (callers without a key count as one); then the oldest. Work whose lease has expired is
        taken over, in the state in which it was left. None when no work waits, or when work runs in that slot.
        """

    @abstractmethod
    def claim_work(self, work_id: str, served: ServedDevice, lease_seconds: float) -> Claim | None:
        """Claim one piece of work for this device, whatever else waits; the id of the device need not be the work's.

        None when the work has ended or does not exist, when it has a live lease or needs other hardware, or when work
        runs in that slot.
        """

    @abstractmethod
    def finish(self, lease: Lease, ending: Ending) -> None:
        """End the work: store its ending, and free its slot.

        Raises:
            StaleLeaseError: when the lease has ended.
            ConflictError: when the work's state does not allow that ending.
        """

    @abstractmethod
    def hand_back(self, lease: Lease) -> None:
        """Return work to the queue with its evidence (or to CANCELLED, if it was cancelled meanwhile).

        An owner that could not reach the store in time may do so later; the lease does not count as lost.

        Raises:
            StaleLeaseError: when the work was taken over, or has ended.
        """

    @abstractmethod
    def release_slot(self, slot: str, owner_prefix: str) -> None:
        """Expire the leases of a slot that are held by owners with this prefix, which are known to be dead."""


class EvidenceStore(ABC):
    """Recorded probes, training progress, and their events."""

    @abstractmethod
    def record_probe(self, lease: Lease, ordinal: int, result: ProbeResult, binding: Binding | None = None) -> None:
        """Record a probe and its event. A repeated call with an equal result is ignored.

        The first probe of a tuning that needs hardware comes with the binding to the kind of device that it ran on.

        Raises:
            StaleLeaseError: when the lease has ended.
            ConflictError: when the ordinal has another result already.
        """

    @abstractmethod
    def record_progress(self, lease: Lease, progress: Sequence[RunProgress]) -> None:
        """Record updates, one event each; the last becomes the progress of the job.

        Raises:
            StaleLeaseError: when the lease has ended.
        """

    @abstractmethod
    def is_measured_elsewhere(self, work_id: str, fingerprint: str) -> bool:
        """Return whether another tuning of this fingerprint, which was claimed before this one, holds a valid lease."""

    @abstractmethod
    def probes(self, work_id: str) -> list[RecordedProbe]:
        """Return the recorded probes in order; empty for unknown work."""

    @abstractmethod
    def events(self, work_id: str, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return the events with ids above ``after``, in order; empty for unknown work."""

    @abstractmethod
    def event_counts(self, work_ids: Sequence[str]) -> dict[str, int]:
        """Return the id of the newest event of each piece of work, for polling; unknown work is left out."""


class QueueStore(ABC):
    """The waiting work of all devices."""

    @abstractmethod
    def waiting(self, limit: int) -> list[Waiting]:
        """Return at most ``limit`` waiting pieces of work, by their position in the queue of their device.

        The order of each device assumes that no other device takes work from now on.
        """

    @abstractmethod
    def depths(self) -> list[QueueDepth]:
        """Return the depth of the queue of each device; devices without waiting work are left out."""

    @abstractmethod
    def check(self) -> None:
        """Check that the database can be written; a success is cached for ``WRITE_CHECK_TTL_SECONDS`` per process."""


class WorkStore(ABC):
    """Tunings and jobs, read only."""

    @abstractmethod
    def get(self, work_id: str) -> WorkItem:
        """Return the work with this id.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def heads(self, work_ids: Collection[str]) -> dict[str, WorkHead]:
        """Return the heads of work by their ids; unknown ids are left out."""

    @abstractmethod
    def newest(
        self, kind: WorkKind, limit: int, before: str | None = None, wanted: WorkFilter = EVERYTHING
    ) -> list[WorkRow]:
        """Return at most ``limit`` rows of one kind, newest first, older than the id ``before``."""


class RecommendationStore(ABC):
    """Stored recommendations, read only."""

    @abstractmethod
    def get(self, recommendation_id: str) -> Recommendation:
        """Return the stored recommendation.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def texts(self, recommendation_ids: Sequence[str]) -> dict[str, str]:
        """Return stored recommendations as JSON, by their ids; unknown ids are left out."""

    @abstractmethod
    def tuning_with(self, fingerprint: str) -> str | None:
        """Return the id of the stored tuning with the newest recommendation of this fingerprint."""

    @abstractmethod
    def with_fingerprint(self, fingerprint: str) -> Recommendation | None:
        """Return the newest recommendation of this fingerprint whose tuning is stored, or None."""

    @abstractmethod
    def for_request(self, request_fingerprint: str, limit: int) -> list[Recommendation]:
        """Return at most ``limit`` feasible recommendations of tunings with this request fingerprint.

        They come newest first, and only the newest of each fingerprint.
        """

    @abstractmethod
    def newest(self, wanted: RecommendationFilter, limit: int, before: str | None = None) -> list[RecommendationRow]:
        """Return at most ``limit`` recommendations, newest first, older than the id ``before``."""

    @abstractmethod
    def row(self, recommendation_id: str) -> RecommendationRow:
        """Return a recommendation as a list has it.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def conditions(self) -> list[str]:
        """Return the conditions of all recommendations, each once (``Conditions.text``)."""

    @abstractmethod
    def newest_of_requests(
        self, request_digests: Collection[str], conditions: Collection[str]
    ) -> dict[str, RecommendationRow]:
        """Return the newest recommendation for each request that was made under one of these conditions, by digest."""


class ResidualStore(ABC):
    """Residuals of estimates, by hardware and family of the workload."""

    @abstractmethod
    def add(self, tuning_id: str, residual: EstimateResidual) -> None:
        """Store the residual of a tuning; a repeated call for the same tuning is ignored.

        Of each hardware and family the newest ``RESIDUALS_PER_FAMILY`` are kept.
        """

    @abstractmethod
    def newest(self, hardware: str, family: str, limit: int) -> list[EstimateResidual]:
        """Return at most ``limit`` residuals of the family, then at most as many of others on the hardware.

        Both come newest first.
        """


class StatisticsStore(ABC):
    """Statistics of work, failures and cache hits."""

    @abstractmethod
    def totals(self, seconds: float | None) -> Totals:
        """Count the work that ended within ``seconds`` (None: ever), to the millisecond, and all that has not ended.

        Hits and misses are stored by the hour: those of the hour in which the period began count too.
        """

    @abstractmethod
    def occupancy(self, buckets: int, bucket_seconds: int) -> OccupancyBuckets:
        """Sum the time for which recorded work held each slot, in ``buckets`` that begin at multiples of their length.

        Work that has ended counts for its last slot, for the device time of all its claims before its end; work that
        is held counts since its claim, in each of its slots. Slots and buckets without work are left out.
        """

    @abstractmethod
    def count_hits(self, hits: int, misses: int) -> None:
        """Add to the counts of tunings that a stored recommendation served (hits), and of queued ones (misses)."""


class AuditStore(ABC):
    """The audit log, to which the other stores add in the transactions of their acts."""

    @abstractmethod
    def newest(self, wanted: AuditFilter, limit: int, before: int | None = None) -> Sequence[AuditEntry]:
        """Return at most ``limit`` matching entries, newest first, of those with an id below ``before``."""

    @abstractmethod
    def prune(self, older_than_seconds: float) -> int:
        """Delete older entries, in short transactions, and return their number."""


class RetentionStore(ABC):
    """Deletion of work that has ended."""

    @abstractmethod
    def delete(self, work_id: str, actor: Actor = COMMAND_LINE) -> None:
        """Delete work that has ended, with its probes and events. Its recommendation stays.

        Its device time still counts towards the quota of its key.

        Raises:
            NotFoundError: when there is none.
            NotEndedError: when it has not ended.
        """

    @abstractmethod
    def delete_all(self, work_ids: Collection[str], actor: Actor = COMMAND_LINE) -> dict[str, State | None]:
        """Delete each that has ended as ``delete`` does, all in one transaction.

        Returns the states of those that have not ended, and None for those that were deleted; unknown ids are left out.
        """

    @abstractmethod
    def prune(self, ended_before_seconds: float, *, recommendations: bool = False) -> Pruned:
        """Delete work that ended longer ago than ``ended_before_seconds``, in short transactions.

        With ``recommendations``, recommendations of that age that no remaining work references are deleted too, and
        so are records of device time of that age.
        """

    @abstractmethod
    def prunable(self, ended_before_seconds: float, *, recommendations: bool = False) -> Pruned:
        """Return the result that ``prune`` would have now."""


class DeviceStore(ABC):
    """Served devices, as their workers announce them."""

    @abstractmethod
    def announce(self, served: ServedDevice) -> None:
        """Record that a worker serves the device now."""

    @abstractmethod
    def beat(self, beat: Beat) -> BeatReply:
        """Renew leases, announce devices and look for work of one process, in one transaction.

        Leases that have ended do not affect the others. Devices that were withdrawn or deleted are announced anew.
        """

    @abstractmethod
    def await_work(self, served: ServedDevice) -> None:
        """Have the worker of an announced device notified of the next work for the device, where notifications exist.

        Work that was queued at the same time may not be noticed: look for work again a moment later.
        """

    @abstractmethod
    def withdraw(self, served: ServedDevice) -> None:
        """Remove a worker's device, unless another worker has taken the slot over."""

    @abstractmethod
    def holder(self, slot: str) -> SlotHolder | None:
        """Return the process that announced a slot, alive or not."""

    @abstractmethod
    def list(self) -> list[AnnouncedDevice]:
        """Return the announced devices whose last heartbeat is less than a day old."""


class FleetStore(ABC):
    """The work of dispatchers, and their reports."""

    @abstractmethod
    def work(self, limit: int, work_ids: Collection[str]) -> list[FleetWork]:
        """Return at most ``limit`` queued pieces of work in the order of the queue, all that are held, and those named.

        Work with an expired lease comes first. Unknown ids are left out.
        """

    @abstractmethod
    def report(self, report: FleetReport) -> None:
        """Store the report of a dispatcher in place of the last one of the same cluster."""

    @abstractmethod
    def reports(self) -> list[ReportedFleet]:
        """Return the last report of each cluster that was made within a day."""


class KeyStore(ABC):
    """API keys. Rows are never deleted."""

    @abstractmethod
    def add(self, new: NewKey, actor: Actor = COMMAND_LINE) -> ApiKey:
        """Store a key.

        Raises:
            ConflictError: when its id is taken.
        """

    @abstractmethod
    def find(self, key_id: str) -> StoredKey | None:
        """Return the key with this id, also when it is revoked or has expired."""

    @abstractmethod
    def list(self) -> list[ApiKey]:
        """Return all keys, revoked and expired ones included, oldest first."""

    @abstractmethod
    def revoke(self, key_id: str, actor: Actor = COMMAND_LINE) -> ApiKey:
        """Revoke a key. A revoked key stays unchanged.

        Raises:
            NotFoundError: when there is none with this id.
        """

    @abstractmethod
    def touch(self, key_id: str, at_most_every_seconds: float) -> None:
        """Record the use of a key, at most every ``at_most_every_seconds``; unknown keys are ignored."""

    @abstractmethod
    def exist(self) -> bool:
        """Return whether any key is stored; revoked keys count, so that authentication stays required."""


class SessionStore(ABC):
    """Browser sessions."""

    @abstractmethod
    def open(self, digest: str, key_id: str, seconds: float, address: str | None = None) -> None:
        """Store a session of a key under the digest of its token, and delete some expired sessions.

        Raises:
            ConflictError: when the digest is taken.
        """

    @abstractmethod
    def find(self, digest: str) -> StoredSession | None:
        """Return the open session with its key, also when the key has ended; None for any other session."""

    @abstractmethod
    def close(self, digest: str, address: str | None = None) -> None:
        """End a session; unknown sessions are ignored."""
