"""Devices, the workers that serve them, and how well the service is. Pure data.

The SDK imports this module, so it knows neither FastAPI nor SQLAlchemy nor torch.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from service.domain.states import State, WorkKind
from tuner.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt
from tuner.schemas.results import DeviceInfo


class ServedDevice(Document):
    """A device that a worker serves, with what its probes run under."""

    slot: str
    """The slot: host and device, unique over all workers."""
    owner: str
    """The worker process."""
    device: DeviceInfo
    """The device, as its worker sees it."""
    environment: dict[str, str]
    """Variables that probes and jobs run with there."""
    versions: dict[str, str]
    """Versions there of what changes memory."""
    unready: str | None = None
    """Why the device takes no work now, such as a full disk of its host, beginning with a stable word; none when it
    does. What it had begun is back in the queue, and goes on when the trouble is over, or elsewhere."""

    @property
    def hardware(self) -> str:
        """The kind of device: product and memory. Work for one kind goes to no other that has the same id."""
        return f"{self.device.name}|{self.device.total_bytes}"


class DeviceStatus(ServedDevice):
    """A device, and what runs on it."""

    alive: bool
    """Whether its worker sent a heartbeat lately."""
    heartbeat_age_seconds: NonNegativeFloat
    """Seconds since its worker's last heartbeat."""
    running_id: str | None = None
    """The tuning or job that runs on it."""
    queued: NonNegativeInt = 0
    """Tunings and jobs that wait for this device."""


class DeviceList(Document):
    """The devices this service serves."""

    items: tuple[DeviceStatus, ...]
    """One per worker."""


class QueueEntry(Document):
    """A tuning or job that waits."""

    id: str
    """Identifier."""
    kind: WorkKind
    """What it is."""
    device: str
    """The device it waits for."""
    model: str
    """Short name of the model."""
    priority: int
    """Work of a higher priority is taken first."""
    position: PositiveInt
    """Its position in the order of its device, from 1."""
    age_seconds: NonNegativeFloat
    """How long it has waited."""
    expected_wait_seconds: NonNegativeFloat | None = None
    """How long until it is taken, if what runs and what is ahead take as long as the median of what ended on this
    device lately, by kind; none where fewer than three of a kind ended, or no worker with the hardware it needs
    serves the device and takes work now. Work that is submitted later with a higher priority goes first."""


class Queue(Document):
    """What waits, in the order in which it is taken."""

    items: tuple[QueueEntry, ...]
    """At most as many as were requested; the positions of each device count from 1."""


class Period(StrEnum):
    """How far back a summary looks."""

    DAY = "24h"
    """What ended within the last 24 hours."""
    WEEK = "7d"
    """What ended within the last 7 days."""
    ALL = "all"
    """All there is: what was deleted or pruned is not counted."""

    @property
    def seconds(self) -> float | None:
        """Its length; none has no bound."""
        return {Period.DAY: 86_400.0, Period.WEEK: 7 * 86_400.0, Period.ALL: None}[self]


class Failures(Document):
    """Tunings or jobs that failed of the same cause."""

    kind: WorkKind
    """What failed."""
    code: str
    """The stable word of their problems."""
    count: PositiveInt
    """How many."""
    message: str
    """What the newest twenty say most often."""
    newest_id: str
    """The one that failed last."""
    newest_at: datetime
    """When that was (UTC)."""


class SpentSeconds(Document):
    """Device-seconds spent on one slot. What runs counts up to now, and what ended counts whole."""

    slot: str
    """The slot (host and device) on which the work ran last."""
    probes_seconds: NonNegativeFloat
    """In tunings, which are probes one after another."""
    jobs_seconds: NonNegativeFloat
    """In jobs."""


class RecommendationHits(Document):
    """How often a submitted tuning was served a stored recommendation. Submissions with `fresh` do not count."""

    hits: NonNegativeInt
    """Served a stored recommendation at once."""
    misses: NonNegativeInt
    """Queued, since none was stored."""
    hit_rate: Annotated[float, Field(ge=0.0, le=1.0)] | None
    """Share of hits; none while nothing was submitted."""


class Summary(Document):
    """What happened in a period, and what has not ended."""

    period: Period
    """How far back it looks. What has not ended is always in it."""
    tunings: dict[State, NonNegativeInt]
    """How many tunings are in each state."""
    jobs: dict[State, NonNegativeInt]
    """How many jobs are in each state."""
    failures: tuple[Failures, ...]
    """By cause, the most frequent first, at most twenty. Those of jobs only for callers who may read jobs."""
    device_seconds: tuple[SpentSeconds, ...]
    """By slot, where any was spent, of what is in the period."""
    recommendation_hits: RecommendationHits
    """From the beginning of the hour in which the period began."""


class Health(Document):
    """Whether the service can do its work."""

    status: Annotated[str, Field(examples=["ok"])]
    """`ok`; anything else comes as a problem with status 503."""
    checks: dict[str, str] = Field(default_factory=dict)
    """What was looked at, and what was seen."""
