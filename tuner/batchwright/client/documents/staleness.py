"""Staleness of recommendations: what changed on their devices since they were made. Pure data and rules."""

from batchwright.schemas.base import Document


class ChangedCondition(Document):
    """A condition that memory depends on, and that has changed."""

    name: str
    """Name of the condition: `device`, `memory`, `driver`, or a package such as `torch`."""
    before: str | None = None
    """Value with which the recommendation was made; none for a package that was not there."""
    now: str | None = None
    """Value that the worker of the device reports now; none for a package that is gone."""


class Staleness(Document):
    """The judgement whether a recommendation, proven with the software and the hardware of its time, still holds."""

    stale: bool | None = None
    """True when something that memory depends on has changed on its kind of device, and no later tuning has confirmed
    it. None while no live worker has the device."""
    changes: tuple[ChangedCondition, ...] = ()
    """Changes since then, on the device of a live worker that is most like it; empty while there are none."""
    confirmed_by: str | None = None
    """Identifier of the newest recommendation for the same request under today's conditions, when it gives the same
    plan: the recommendation is not stale then."""
    replaced_by: str | None = None
    """Identifier of that recommendation when it gives another plan: use that one."""
