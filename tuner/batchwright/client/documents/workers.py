"""Devices, their workers, the queue, statistics and health. Pure data."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from batchwright.client.documents.states import State, WorkKind
from batchwright.hardware.matching import kind_of
from batchwright.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt
from batchwright.schemas.results import DeviceInfo


class DeviceMemory(Document):
    """Memory of a device in use when its worker read it, some seconds before a heartbeat."""

    used_bytes: NonNegativeInt
    """Memory in use by all processes. What is left of the device's memory is free."""
    own_bytes: NonNegativeInt | None = None
    """Memory in use by the worker's processes: probes, jobs, and on the CPU the worker itself. None where it is not
    known, as in a container in which the driver names processes by the ids of the host."""


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
    memory: DeviceMemory | None = None
    """Memory in use now; `used_bytes` of `device` is from the worker's start. None where a cluster's engine hands out
    the device, and where it cannot be read. A change by less than a five-hundredth of the memory is left out."""
    packages: tuple[str, ...] | None = None
    """Optional packages that jobs may request and that its worker has, such as `torchmetrics`; none where the worker
    does not say."""
    unready: str | None = None
    """Reason why the device takes no work now, such as a full disk of its host, beginning with a stable code; none when
    it takes work. Interrupted work is back in the queue, and goes on when the cause is gone, or on another device."""

    @property
    def host(self) -> str:
        """Return the name of the host, which the slot begins with."""
        return self.slot.rpartition("/")[0]

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


class HardwareStatus(Document):
    """The served devices of one kind."""

    name: str
    """Product name."""
    gpu: str | None = None
    """The catalogue's name of the GPU; none for a processor, and for a card that is not listed."""
    total_bytes: PositiveInt
    """Memory of each device."""
    devices: PositiveInt
    """Number of devices with a live worker."""
    free: NonNegativeInt
    """Number of those that run nothing and take work."""
    most_free_per_host: NonNegativeInt
    """Largest number of free devices on one host, for work of several devices."""
    hosts: PositiveInt
    """Number of hosts with such a device."""


class DeviceList(Document):
    """The devices that this service serves."""

    hardware: tuple[HardwareStatus, ...] = ()
    """The kinds of devices with a live worker, and how many of each are free: what a request may name as `hardware`."""
    items: tuple[DeviceStatus, ...]
    """One device per worker."""


class QueueEntry(Document):
    """A waiting tuning or job."""

    id: str
    """Identifier."""
    kind: WorkKind
    """Tuning or job."""
    device: str | None = None
    """The device that it needs; none where it needs hardware."""
    hardware: str | None = None
    """The hardware that it needs, in words; none where it needs a device."""
    name: str | None = None
    """Name that the submission gave it."""
    model: str
    """Short name of the model."""
    effective_batch_size: PositiveInt
    """Samples per optimizer update."""
    priority: int
    """Work of a higher priority is taken first."""
    position: PositiveInt
    """Position in the queue of its device or hardware, from 1."""
    unserved: str | None = None
    """Reason why it waits however long the queue is, such as `no worker has H100-80GB`; none where a worker serves
    it."""
    age_seconds: NonNegativeFloat
    """Seconds since it was queued, or handed back to the queue."""
    expected_wait_seconds: NonNegativeFloat | None = None
    """Expected seconds until a worker takes it. The running work and the work ahead are assumed to take the median
    duration of their kind among recent work on the device. None where fewer than three of a kind have ended, or where
    no worker with the needed hardware takes work now. Later submissions with a higher priority go first."""


class Queue(Document):
    """The waiting work, in the order in which it is taken."""

    items: tuple[QueueEntry, ...]
    """At most the requested number of entries; the positions of each device, and of each hardware, count from 1."""


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

    @property
    def trend(self) -> tuple[int, int]:
        """Return the number of the parts of its trend, and their length in seconds."""
        return {Period.DAY: (24, 3600), Period.WEEK: (28, 21_600), Period.ALL: (30, 86_400)}[self]


class OccupancyPeriod(StrEnum):
    """The time that an occupancy covers."""

    DAY = "24h"
    """The last day, in half hours."""
    WEEK = "7d"
    """The last seven days, in buckets of two hours."""

    @property
    def bucket_seconds(self) -> int:
        """Return the length of a bucket in seconds."""
        return {OccupancyPeriod.DAY: 1800, OccupancyPeriod.WEEK: 7200}[self]

    @property
    def buckets(self) -> int:
        """Return the number of buckets, of which the last is not over yet."""
        return {OccupancyPeriod.DAY: 48, OccupancyPeriod.WEEK: 84}[self]


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


Share = Annotated[float, Field(ge=0.0, le=1.0)]


class DeviceOccupancy(Document):
    """Shares of time for which work held one device, in each bucket; that of the last is of its part until now."""

    slot: str
    """The slot (host and device)."""
    tunings: tuple[Share, ...]
    """Shares of tunings, oldest bucket first."""
    jobs: tuple[Share, ...]
    """Shares of jobs, oldest bucket first."""
    busy: Share
    """Share of the whole time."""


class Occupancy(Document):
    """Occupancy of the devices in the last day or week, from recorded work."""

    start: datetime
    """Begin of the first bucket (UTC)."""
    end: datetime
    """End of the last bucket, which is now (UTC)."""
    bucket_seconds: PositiveInt
    """Length of a bucket; buckets begin at multiples of the length."""
    devices: tuple[DeviceOccupancy, ...]
    """Devices that held work, by slot. Devices that held none are left out."""


class RecommendationHits(Document):
    """Submitted tunings by whether a stored recommendation served them. Submissions with `fresh` do not count."""

    hits: NonNegativeInt
    """Number served by a stored recommendation."""
    misses: NonNegativeInt
    """Number queued, since no recommendation was stored."""
    hit_rate: Annotated[float, Field(ge=0.0, le=1.0)] | None
    """Share of hits; none while no tuning was submitted."""


class ModelGain(Document):
    """Gains of the recommendations of one model over the baselines that their submissions named."""

    model: str
    """Short name of the model."""
    recommendations: PositiveInt
    """Recommendations with a baseline whose memory is known."""
    speedup: NonNegativeFloat | None = None
    """Median of the samples per second over those of the baseline; none where no speed is known."""
    speedups: NonNegativeInt
    """Recommendations whose speed is known before and after."""
    measured: NonNegativeInt
    """Of those, the ones where both plans were timed; the others are estimated from step times of probes."""
    memory_gain: float
    """Median of the share of the memory limit that the plan uses, less that of the baseline: negative where less."""


class Gains(Document):
    """Gains of recommendations over the baselines that their submissions named: of the newest two thousand."""

    recommendations: NonNegativeInt
    """Recommendations with a baseline whose memory is known."""
    speedup: NonNegativeFloat | None = None
    """Median of the samples per second over those of the baseline; none where no speed is known."""
    speedups: NonNegativeInt
    """Recommendations whose speed is known before and after."""
    measured: NonNegativeInt
    """Of those, the ones where both plans were timed."""
    memory_gain: float | None = None
    """Median of the share of the memory limit that the plan uses, less that of the baseline."""
    models: tuple[ModelGain, ...]
    """By model, the most recommendations first: at most twenty."""


class TrendPoint(Document):
    """The work that ended in one part of a period, and the gain of its recommendations."""

    start: datetime
    """Begin of the part (UTC)."""
    tunings: NonNegativeInt
    """Tunings that ended."""
    failures: NonNegativeInt
    """Tunings and jobs that failed."""
    speedup: NonNegativeFloat | None = None
    """Median of the samples per second over those of the baselines; none where no speed is known."""


class Summary(Document):
    """Statistics of the work that ended in a period, and of all work that has not ended."""

    period: Period
    """The period. Work that has not ended is always included."""
    tunings: dict[State, NonNegativeInt]
    """Number of tunings in each state. Those that found that there is no plan are among `SUCCEEDED`."""
    infeasible: NonNegativeInt = 0
    """Number of the tunings in `SUCCEEDED` that found that there is no plan: their `outcome` is `infeasible`."""
    jobs: dict[State, NonNegativeInt]
    """Number of jobs in each state."""
    failures: tuple[Failures, ...]
    """The twenty most frequent failures by cause, most frequent first. Failures of jobs need the scope `jobs:read`."""
    device_seconds: tuple[SpentSeconds, ...]
    """Device-seconds of the counted work, by slot; slots without any are left out."""
    recommendation_hits: RecommendationHits
    """Hits and misses since the start of the hour in which the period began."""
    gains: Gains
    """Gains of the recommendations that were made in the period."""
    trend: tuple[TrendPoint, ...] = ()
    """The period in parts of equal length up to now: 24 hours, 28 parts of six hours, or for `all` the last 30 days."""


class Health(Document):
    """The health of the service."""

    status: Annotated[str, Field(examples=["ok"])]
    """`ok`; any other state is a problem document with status 503."""
    checks: dict[str, str] = Field(default_factory=dict)
    """Results by the name of the check."""
