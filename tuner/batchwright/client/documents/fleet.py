"""The clusters that run dispatched work: nodes, and the work that waits for them. Pure data."""

from batchwright.schemas.base import Document, NonNegativeFloat, NonNegativeInt


class FleetNode(Document):
    """A node of a cluster."""

    id: str
    """The engine's identifier of the node."""
    name: str
    """Name or address of the node."""
    state: str
    """State of the node, in the engine's word."""
    alive: bool
    """True when the engine can run jobs there."""
    slots: tuple[str, ...] = ()
    """Slots of the devices that the node has announced (see `/v1/devices`)."""


class FleetWaiting(Document):
    """A tuning or job, or a node to be inspected, that has no worker yet."""

    id: str
    """Identifier of the tuning or job; `node-` and the identifier of a node whose devices are not known yet."""
    device: str
    """The device that it needs."""
    hardware: str | None = None
    """The hardware that it needs. None for any with that device."""
    reason: str
    """Reason why it waits, in the engine's words where the engine has the job."""


class FleetReport(Document):
    """The state of a cluster, as its dispatcher sees it."""

    engine: str
    """`ray` or `slurm`."""
    address: str
    """Address of the cluster."""
    error: str | None = None
    """Reason why the engine cannot be used now; the rest is the last known state. None when it can be used."""
    nodes: tuple[FleetNode, ...] = ()
    """The nodes, dead ones included as long as the engine lists them."""
    pending_jobs: NonNegativeInt = 0
    """Jobs that wait in the engine's queue."""
    running_jobs: NonNegativeInt = 0
    """Jobs that run."""
    waiting: tuple[FleetWaiting, ...] = ()
    """The work that has no worker yet, in the order in which it is submitted; at most 100."""


class FleetStatus(FleetReport):
    """The state of a cluster, with the age of its last report."""

    alive: bool
    """True when the dispatcher has reported within `lease_seconds`."""
    report_age_seconds: NonNegativeFloat
    """Seconds since the last report."""


class Fleet(Document):
    """The clusters on which this service runs work. Empty where workers serve the devices of their hosts."""

    items: tuple[FleetStatus, ...]
    """One cluster per engine and address."""
