"""Devices, their workers, the queue, statistics and health. Pure data.

The SDK imports this module, so it knows neither FastAPI nor SQLAlchemy nor torch.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from service.domain.hardware import kind_of
from service.domain.states import State, WorkKind
from tuner.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt
from tuner.schemas.results import DeviceInfo


class ServedDevice(Document):
    """A device that a worker serves, with the environment of its probes."""

    slot: str
    """The slot: host and device, unique over all workers."""
    owner: str
    """Name of the worker process, which is unique."""
    device: DeviceInfo
    """The device, as reported by its worker."""
    environment: dict[str, str]
    """Environment variables of probes and jobs on the device."""
    versions: dict[str, str]
    """Installed versions of the packages that affect memory."""
    unready: str | None = None
    """Reason why the device takes no work now, such as a full disk of its host, beginning with a stable code; none when
    it takes work. Interrupted work is back in the queue, and goes on when the cause is gone, or on another device."""

    @property
    def hardware(self) -> str:
        """Return the kind of device: product and memory. Work for one kind goes to no other kind with the same id."""
        return kind_of(self.device)


class DeviceStatus(ServedDevice):
    """A served device, with its heartbeat and its work."""

    alive: bool
    """True when its worker sent a heartbeat within `lease_seconds`."""
    heartbeat_age_seconds: NonNegativeFloat
    """Seconds since its worker's last heartbeat."""
    running_id: str | None = None
    """Identifier of the tuning or job that runs on it."""
    queued: NonNegativeInt = 0
    """Number of tunings and jobs that wait for it."""


class DeviceList(Document):
    """The devices that this service serves."""

    items: tuple[DeviceStatus, ...]
    """One device per worker."""


class QueueEntry(Document):
    """A waiting tuning or job."""

    id: str
    """Identifier."""
    kind: WorkKind
    """Tuning or job."""
    device: str
    """The device that it needs."""
    model: str
    """Short name of the model."""
    priority: int
    """Work of a higher priority is taken first."""
    position: PositiveInt
    """Position in the queue of its device, from 1."""
    age_seconds: NonNegativeFloat
    """Seconds since it was queued, or handed back to the queue."""
    expected_wait_seconds: NonNegativeFloat | None = None
    """Expected seconds until a worker takes it. The running work and the work ahead are assumed to take the median
    duration of their kind among recent work on the device. None where fewer than three of a kind have ended, or where
    no worker with the needed hardware takes work now. Later submissions with a higher priority go first."""


class Queue(Document):
    """The waiting work, in the order in which it is taken."""

    items: tuple[QueueEntry, ...]
    """At most the requested number of entries; the positions of each device count from 1."""


class Period(StrEnum):
    """The period of a summary."""

    DAY = "24h"
    """Work that ended within the last 24 hours."""
    WEEK = "7d"
    """Work that ended within the last 7 days."""
    ALL = "all"
    """All stored work; deleted and pruned work is not counted."""

    @property
    def seconds(self) -> float | None:
        """Return the length of the period in seconds, or None for an unbounded one."""
        return {Period.DAY: 86_400.0, Period.WEEK: 7 * 86_400.0, Period.ALL: None}[self]


class Failures(Document):
    """Tunings or jobs that failed with the same problem code."""

    kind: WorkKind
    """Tunings or jobs."""
    code: str
    """Stable code of their problems."""
    count: PositiveInt
    """Number of failures."""
    message: str
    """The most frequent message among the newest twenty."""
    newest_id: str
    """Identifier of the latest failure."""
    newest_at: datetime
    """Time of the latest failure (UTC)."""


class SpentSeconds(Document):
    """Device-seconds spent on one slot. Running work counts up to now, and ended work counts in full."""

    slot: str
    """The slot (host and device) on which the work ran last."""
    probes_seconds: NonNegativeFloat
    """Device-seconds of tunings, which are sequences of probes."""
    jobs_seconds: NonNegativeFloat
    """Device-seconds of jobs."""


class RecommendationHits(Document):
    """Submitted tunings by whether a stored recommendation served them. Submissions with `fresh` do not count."""

    hits: NonNegativeInt
    """Number served by a stored recommendation."""
    misses: NonNegativeInt
    """Number queued, since no recommendation was stored."""
    hit_rate: Annotated[float, Field(ge=0.0, le=1.0)] | None
    """Share of hits; none while no tuning was submitted."""


class Summary(Document):
    """Statistics of the work that ended in a period, and of all work that has not ended."""

    period: Period
    """The period. Work that has not ended is always included."""
    tunings: dict[State, NonNegativeInt]
    """Number of tunings in each state."""
    jobs: dict[State, NonNegativeInt]
    """Number of jobs in each state."""
    failures: tuple[Failures, ...]
    """The twenty most frequent failures by cause, most frequent first. Failures of jobs need the scope `jobs:read`."""
    device_seconds: tuple[SpentSeconds, ...]
    """Device-seconds of the counted work, by slot; slots without any are left out."""
    recommendation_hits: RecommendationHits
    """Hits and misses since the start of the hour in which the period began."""


class Health(Document):
    """The health of the service."""

    status: Annotated[str, Field(examples=["ok"])]
    """`ok`; any other state is a problem document with status 503."""
    checks: dict[str, str] = Field(default_factory=dict)
    """Results by the name of the check."""
