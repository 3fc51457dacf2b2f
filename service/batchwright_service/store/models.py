"""Plain values that several modules of the store share, without SQL: work, leases, recommendations, filters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from pydantic import Field
from pydantic_core import to_json

from batchwright.client.documents.api_keys import ApiKey
from batchwright.client.documents.audit import AuditAction
from batchwright.client.documents.fleet import FleetReport
from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State, WorkKind, WorkOutcome, outcome_of
from batchwright.client.documents.work import JobSummary, RecommendationSummary, TuningSummary
from batchwright.client.documents.workers import ServedDevice
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import UNNAMED, Named, Objective
from batchwright.schemas.training import RunProgress, TrainingResult
from batchwright.schemas.workload import Precision
from batchwright_service.errors import ServiceError


@dataclass(frozen=True)
class NewWork:
    """A tuning or job to queue.

    Attributes:
        payload: the request as JSON, opaque to the store.
        request_fingerprint: digest of a tuning's request without versions and memory limit, by which warm starts are
            found.
        warm_start_from: id of the stored recommendation that warm-starts the tuning.
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
    request_fingerprint: str | None = None
    warm_start_from: str | None = None
    key_id: str | None = None
    trace_parent: str | None = None
    """W3C ``traceparent`` of the submitting request."""
    hardware: str | None = None
    """The kind of device that it needs (``ServedDevice.hardware``); without one, any device with the id will do. With
    the device ``ANY_DEVICE``, the lane of its need for hardware (``HardwareNeed.lane``)."""
    names: Named = UNNAMED
    """The names that its submitter gave it."""
    address: str | None = None
    """Address from which it was submitted, for the audit log."""
    fresh: bool = False
    """True where a tuning is measured although an equal one is stored."""


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a process, for all of its leases and devices."""

    lease_seconds: float
    leases: tuple[Lease, ...] = ()
    """The leases to renew."""
    devices: tuple[ServedDevice, ...] = ()
    """The devices to announce."""
    changed: frozenset[str] = frozenset()
    """Slots of devices whose documents have changed since they were last announced."""
    idle: tuple[ServedDevice, ...] = ()
    """The devices for which to look for work."""


@dataclass(frozen=True)
class BeatReply:
    """The result of a heartbeat. A lease in neither field stays as it is: another transaction had locked its row."""

    renewed: Mapping[Lease, State]
    """Renewed leases, each with the state of its work: RUNNING or CANCELLING."""
    lost: frozenset[Lease]
    """Leases that have ended."""
    wanted: frozenset[str]
    """Slots of idle devices for which work waits."""


@dataclass(frozen=True)
class Idempotency:
    """An idempotency key with its owner and a digest of its request. Work is created once per owner and key."""

    owner: str
    """Id of the API key; empty for callers without one."""
    key: str
    digest: str
    """SHA-256 of method, path and body: requests with another digest under the same key are refused."""


@dataclass(frozen=True)
class StoredRequest:
    """The first request with an idempotency key, and the work that it got."""

    digest: str
    """That of its ``Idempotency``."""
    work_id: str
    status: int
    """HTTP status of its response."""


class DuplicateRequestError(ServiceError):
    """The idempotency key belongs to a stored request already, ``first``. Never reaches HTTP."""

    code = "duplicate-request"

    def __init__(self, first: StoredRequest) -> None:
        self.first = first
        super().__init__(f"the request for {first.work_id} is stored under this idempotency key already")


@dataclass(frozen=True)
class Search:
    """A search in a list, and the order of its rows."""

    words: tuple[str, ...] = ()
    """Texts of which each is a part of the name, project, labels, model, device, fingerprint or id, in any case."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that must be there with these values."""
    project: str | None = None
    owner: str | None = None
    """Name or id of the API key that submitted the work."""
    problem_code: str | None = None
    """Code of the problem with which work failed; no filter of recommendations."""
    outcome: WorkOutcome | None = None
    """Outcome of the work; no filter of recommendations."""
    created_after: datetime | None = None
    """Only what was created later."""
    slot: str | None = None
    """The slot that runs work, or ran it last; no filter of recommendations."""
    sort: str = "created"
    """The field to sort by; see ``batchwright_service.api.dependencies``."""
    descending: bool = True
    """True for the largest first."""
    after: str | float | None = None
    """The value of the field in the last row of the previous page."""


NO_SEARCH = Search()


@dataclass(frozen=True)
class WorkFilter:
    """A filter of tunings or jobs; a field that is None does not restrict."""

    states: tuple[State, ...] = ()
    """Allowed states, each once; an empty tuple does not restrict."""
    device: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    search: Search = NO_SEARCH


@dataclass(frozen=True, kw_only=True)
class WorkRow:
    """A tuning or job as a list shows it; cheap to read."""

    id: str
    kind: WorkKind
    state: State
    name: str | None
    project: str | None
    labels: dict[str, str]
    device: str | None
    hardware: str | None
    slot: str | None
    model: str
    effective_batch_size: int
    fingerprint: str | None
    recommendation_id: str | None
    warm_start_from: str | None
    key_id: str | None
    owner: str | None
    """Name of the API key."""
    priority: int
    attempts: int
    probes: int
    events: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    updated_at: datetime
    feasible: bool | None = None
    plan: dict[str, Any] | None = None
    """The fields of a ``PlanSummary``."""
    largest_micro_batch_size: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    samples_per_second: float | None = None
    speedup: float | None = None
    speed_source: str | None = None
    course: dict[str, Any] | None = None
    """The fields of a ``RunCourse``."""
    problem: Problem | None = None

    @property
    def names(self) -> Named:
        """The names that its submitter gave it."""
        return Named(name=self.name, project=self.project, labels=self.labels)

    @property
    def outcome(self) -> WorkOutcome | None:
        """How it ended, if it has ended."""
        return outcome_of(self.state, feasible=self.feasible) if self.state.terminal else None

    def summary(self) -> dict[str, Any]:
        """Return the fields of a ``TuningSummary`` or ``JobSummary``."""
        return {name: getattr(self, name) for name in _SUMMARY_FIELDS[self.kind]}

    @cached_property
    def summary_json(self) -> bytes:
        """The summary as JSON, serialised once: lists show the same row repeatedly."""
        return to_json(self.summary())


_SUMMARY_FIELDS = {
    WorkKind.TUNING: tuple(TuningSummary.model_fields),
    WorkKind.JOB: tuple(JobSummary.model_fields),
}


@dataclass(frozen=True)
class WorkHead:
    """The fields of a tuning or job that decide who may change it, and how."""

    id: str
    kind: WorkKind
    state: State
    key_id: str | None


@dataclass(frozen=True, kw_only=True)
class WorkItem(WorkRow):
    """A tuning or job in full."""

    payload: str
    fresh: bool
    trace_parent: str | None
    progress: RunProgress | None
    activity: str | None
    result: TrainingResult | None


@dataclass(frozen=True)
class Lease:
    """The right to run a piece of work in a slot until it expires. The fencing ``token`` excludes earlier owners."""

    work_id: str
    owner: str
    token: int


@dataclass(frozen=True)
class Binding:
    """The identity of a tuning that needs hardware, as long as it has evidence of one kind of device."""

    lane: str
    """Lane of the kind of device."""
    fingerprint: str
    request_fingerprint: str


@dataclass(frozen=True)
class Claim:
    """Claimed work. ``lost_leases`` counts consecutive owners that vanished without recording anything."""

    lease: Lease
    item: WorkItem
    lost_leases: int
    taken_over: bool = False
    """The work was held by an owner whose lease had expired, and did not wait in the queue."""
    other_slots: tuple[str, ...] = ()
    """The slots of the same host that the work holds beside its own, in their order."""


@dataclass(frozen=True)
class Ending:
    """The end of a piece of work, with its results."""

    state: State
    recommendation: Recommendation | None = None
    problem: Problem | None = None
    result: TrainingResult | None = None
    is_stored: bool = False
    """True where the recommendation is that of an equal tuning, which is stored already."""

    @property
    def outcome(self) -> WorkOutcome:
        """How the work ended."""
        found = self.recommendation
        return outcome_of(self.state, feasible=None if found is None else found.feasible)


@dataclass(frozen=True)
class StalenessFilter:
    """A filter of recommendations by their staleness."""

    stale: bool
    """True for those that are stale, False for those that hold, which later ones may have confirmed."""
    stale_conditions: tuple[str, ...]
    """The stored conditions that differ from those that the workers report."""
    current: tuple[str, ...]
    """The stored conditions that do not differ."""


@dataclass(frozen=True)
class RecommendationFilter:
    """A filter of recommendations; a field that is None does not restrict. ``device`` is an id or a product name."""

    fingerprint: str | None = None
    model: str | None = None
    device: str | None = None
    precision: Precision | None = None
    objective: Objective | None = None
    search: Search = NO_SEARCH
    staleness: StalenessFilter | None = None
    distinct: bool = False
    """Only the newest recommendation of each fingerprint, with the number of those that match."""


class RecommendationRow(RecommendationSummary):
    """A recommendation in a list, with the columns by which its staleness is judged."""

    conditions: str = Field(exclude=True)
    """``Conditions.text``."""
    request_digest: str = Field(exclude=True)
    """Digest of the request without versions, with the requested memory limit: equal for requests that one
    recommendation serves."""

    @property
    def recommended(self) -> tuple[Any, ...]:
        """The parts that are equal when two recommendations for the same request recommend the same."""
        return self.feasible, self.largest_micro_batch_size, self.plan


@dataclass(frozen=True)
class AuditFilter:
    """A filter of the audit log; a field that is None does not restrict."""

    action: AuditAction | None = None
    key_id: str | None = None
    object_id: str | None = None
    after: datetime | None = None
    until: datetime | None = None
    exclude: tuple[AuditAction, ...] = ()


@dataclass(frozen=True)
class AnnouncedDevice:
    """An announced device: the age of its last heartbeat, the running work, and the amount of waiting work."""

    served: ServedDevice
    age_seconds: float
    running_id: str | None
    queued: int


@dataclass(frozen=True)
class SlotHolder:
    """The process that announced a slot, and the age of its last heartbeat."""

    owner: str
    age_seconds: float


@dataclass(frozen=True)
class FleetWork:
    """Work as a dispatcher sees it. ``seconds`` counts since it was queued, lost its lease, or ended."""

    id: str
    state: State
    device: str
    hardware: str | None
    token: int
    """The fencing token of its last lease, or 0."""
    has_live_lease: bool
    seconds: float


@dataclass(frozen=True)
class ReportedFleet:
    """The last report of a cluster's dispatcher, and its age."""

    report: FleetReport
    age_seconds: float


@dataclass(frozen=True)
class Quota:
    """The limits of one API key; None does not limit."""

    queued: int | None = None
    """Waiting tunings and jobs."""
    device_seconds: float | None = None
    """Device-seconds of all work that runs now or ended within the window."""
    window_seconds: float = 86_400.0
    """The time for which ended work counts."""


UNLIMITED = Quota()
EVERYTHING = WorkFilter()


@dataclass(frozen=True)
class StoredKey:
    """A key with its digest. ``seconds_left`` is the time until it expires, by the database's clock."""

    key: ApiKey
    digest: str
    seconds_left: float | None
