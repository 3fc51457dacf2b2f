"""Devices, the workers that serve them, and how well the service is. Pure data.

The SDK imports this module, so it knows neither FastAPI nor SQLAlchemy nor torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.states import WorkKind
from tuner.documents import Document, NonNegativeFloat, NonNegativeInt, PositiveInt
from tuner.results import DeviceInfo


class ServedDevice(Document):
    """A device that a worker serves, with what its probes run under."""

    place: str
    """Host and device, unique over all workers."""
    owner: str
    """The worker process."""
    device: DeviceInfo
    """The device, as its worker sees it."""
    environment: dict[str, str]
    """Variables that probes and jobs run with there."""
    versions: dict[str, str]
    """Versions there of what changes memory."""

    @property
    def hardware(self) -> str:
        """The kind of device: product and memory. Work for one kind goes to no other that has the same id."""
        return f"{self.device.name}|{self.device.total_bytes}"


class DeviceStatus(ServedDevice):
    """A device, and who holds it."""

    alive: bool
    """Whether its worker was heard of lately."""
    heartbeat_age_seconds: NonNegativeFloat
    """Seconds since its worker was last heard of."""
    held_by: str | None = None
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
    """Its place in the order of its device, from 1."""
    age_seconds: NonNegativeFloat
    """How long it has waited."""
    expected_wait_seconds: NonNegativeFloat | None = None
    """How long until it is taken, if what runs and what is ahead take as long as the median of what ended on this
    device lately, by kind; none where fewer than three of a kind ended, or no worker serves the device with the
    hardware it needs. Work that is submitted later with a higher priority goes first."""


class Queue(Document):
    """What waits, in the order in which it is taken."""

    items: tuple[QueueEntry, ...]
    """At most as many as were asked for; the positions of each device count from 1."""


class Health(Document):
    """Whether the service can do its work."""

    status: Annotated[str, Field(examples=["ok"])]
    """`ok`; anything else comes as a problem with status 503."""
    checks: dict[str, str] = Field(default_factory=dict)
    """What was looked at, and what was seen."""
