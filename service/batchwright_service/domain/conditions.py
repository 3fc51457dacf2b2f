"""The conditions of a recommendation, compared with those of the live workers. Pure rules."""

from collections.abc import Iterator, Sequence
from typing import Self

from batchwright.client.documents.staleness import ChangedCondition, Staleness
from batchwright.client.documents.workers import ServedDevice
from batchwright.device_traits import DeviceKind, traits_of
from batchwright.planning.fingerprint import canonical_json, fingerprinted_versions
from batchwright.schemas.base import Document
from batchwright.schemas.recommendation import Recommendation
from batchwright.units import format_bytes

_HOST_MEMORY_TOLERANCE = 0.01
"""Share by which the memory of a host may differ and count as equal. Linux reports the physical memory without the
parts that the kernel reserves at boot (`MemTotal` in Documentation/filesystems/proc.rst), which are some MiB more or
less with each kernel. An exchanged memory module makes a difference of several percent: 1 of 24 is 4 %."""


class Conditions(Document):
    """The conditions of a recommendation, or those that a worker reports."""

    kind: DeviceKind
    """Kind of the device."""
    device: str
    """Product name of the device."""
    memory_bytes: int | None
    """Memory of the device; none where the recommendation does not depend on it: on the CPU under a requested limit."""
    slot: str | None = None
    """The slot (host and device), if known."""
    versions: dict[str, str]
    """Versions that memory depends on, that of the driver included."""

    @classmethod
    def of_recommendation(cls, document: Recommendation, slot: str | None) -> Self:
        """Return the conditions under which a recommendation was made."""
        device = document.device
        has_own_limit = device.traits.counts_host_memory and document.request.memory_limit_bytes is not None
        return cls(
            kind=device.kind,
            device=device.name,
            memory_bytes=None if has_own_limit else device.total_bytes,
            slot=slot,
            versions=fingerprinted_versions(document.versions),
        )

    @classmethod
    def of_served(cls, served: ServedDevice) -> Self:
        """Return the conditions that a worker reports."""
        device = served.device
        driver = {} if device.driver_version is None else {"driver": device.driver_version}
        versions = fingerprinted_versions(served.versions) | driver
        return cls(
            kind=device.kind,
            device=device.name,
            memory_bytes=device.total_bytes,
            slot=served.slot,
            versions=versions,
        )

    @property
    def text(self) -> str:
        """The conditions as they are stored: equal texts for equal conditions."""
        return canonical_json(self.model_dump())


def judge(then: Conditions, reported: Sequence[Conditions]) -> Staleness:
    """Compare the conditions of a recommendation with those that the live workers report.

    Devices of the same product are compared, and the one most like it counts. Where there is none, the device that is
    in its slot now counts, which was exchanged then. Confirmations are not looked for.
    """
    alike = [now for now in reported if now.device == then.device]
    alike = alike or [now for now in reported if then.slot is not None and now.slot == then.slot]
    if not alike:
        return Staleness()
    changes = min((tuple(_changes(then, now)) for now in alike), key=len)
    return Staleness(stale=bool(changes), changes=changes)


def _changes(then: Conditions, now: Conditions) -> Iterator[ChangedCondition]:
    """Yield the differences. A worker may have more packages than the recommendation depends on."""
    if then.device != now.device:
        yield ChangedCondition(name="device", before=then.device, now=now.device)
    if then.memory_bytes is not None and now.memory_bytes is not None:
        tolerance = _HOST_MEMORY_TOLERANCE * then.memory_bytes if traits_of(then.kind).counts_host_memory else 0
        if abs(now.memory_bytes - then.memory_bytes) > tolerance:
            before, after = format_bytes(then.memory_bytes), format_bytes(now.memory_bytes)
            if before == after:
                before, after = f"{then.memory_bytes} bytes", f"{now.memory_bytes} bytes"
            yield ChangedCondition(name="memory", before=before, now=after)
    for name, version in sorted(then.versions.items()):
        if now.versions.get(name) != version:
            yield ChangedCondition(name=name, before=version, now=now.versions.get(name))
