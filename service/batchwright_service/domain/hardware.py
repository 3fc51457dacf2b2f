"""The hardware that queued work needs, as the store keeps it. Pure data."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Self

from pydantic import Field, model_validator
from typing_extensions import override

from batchwright.hardware.matching import has_hardware, kind_of
from batchwright.schemas.requests import MOST_NODES, HardwareRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo

ANY_DEVICE = ""
"""The stored device of work that needs hardware: any device that has it will do, on any host."""
_MAX_LANE_LENGTH = 400
"""Length of the column."""


class HardwareNeed(HardwareRequest):
    """The hardware that work needs: as requested, until the first probe has run; then the kind that probe ran on."""

    kind: Annotated[str, Field(max_length=_MAX_LANE_LENGTH)] | None = None
    """Product and memory (``kind_of``), which the evidence of the work is bound to; no other field but the numbers of
    devices and nodes counts then."""
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] = 1
    """Hosts that the work takes at once, each with ``devices_per_node`` devices. Only a cluster's engine assigns more
    than one."""

    @model_validator(mode="after")
    @override
    def _names_hardware(self) -> Self:
        if (self.gpu, self.product, self.min_memory_bytes, self.kind) == (None, None, None, None):
            raise ValueError("give at least one of `gpu`, `product`, `min_memory_bytes` and `kind`")
        return self

    @property
    @override
    def in_words(self) -> str:
        text = super().in_words if self.kind is None else self._kind_in_words
        return text if self.nodes == 1 else f"{self.nodes} hosts with {text} each".replace(" on one host", "")

    @property
    def takes_several(self) -> bool:
        """True when the work takes more than one device."""
        return self.devices_per_node * self.nodes > 1

    @property
    def _kind_in_words(self) -> str:
        assert self.kind is not None  # noqa: S101 - by its caller
        name, _, total_bytes = self.kind.rpartition("|")
        bound = HardwareRequest(product=name, min_memory_bytes=int(total_bytes), devices_per_node=self.devices_per_node)
        return bound.in_words.replace("with at least", "with")

    @property
    def lane(self) -> str:
        """The text under which the store queues work with this need; equal needs have equal texts."""
        return self.model_dump_json(exclude_defaults=True)

    @classmethod
    def of_request(cls, request: TuningRequest) -> HardwareNeed:
        """Return the need of a tuning for hardware, whose limit must be there."""
        fields = {} if request.hardware is None else request.hardware.model_dump()
        least = max(fields.get("min_memory_bytes") or 0, request.memory_limit_bytes or 0) or None
        return cls.model_validate(fields | {"min_memory_bytes": least})

    @classmethod
    def of_kind(cls, device: DeviceInfo, devices_per_node: int, nodes: int = 1) -> HardwareNeed:
        """Return the need of work that is bound to one kind of device."""
        return cls(kind=kind_of(device), devices_per_node=devices_per_node, nodes=nodes)


@lru_cache(maxsize=4096)
def need_of_lane(lane: str) -> HardwareNeed:
    """Return the need that a lane's text was made of."""
    return HardwareNeed.model_validate_json(lane)


def fits(device: DeviceInfo, need: HardwareNeed) -> bool:
    """Return whether a device is what a need names, however many of them it needs."""
    return kind_of(device) == need.kind if need.kind is not None else has_hardware(device, need)


def is_served_by(device: str, hardware: str | None, served: DeviceInfo) -> bool:
    """Return whether a device of any node of a cluster can run work with these stored columns.

    Args:
        device: the stored device; of a GPU only its kind counts, since a cluster's engine chooses among equal ones.
        hardware: the stored hardware: a lane for work without a device, else a kind, or None.
        served: the device.
    """
    if device == ANY_DEVICE:
        return fits(served, need_of_lane(hardware or ""))
    return device.partition(":")[0] == served.kind and hardware in {None, kind_of(served)}
