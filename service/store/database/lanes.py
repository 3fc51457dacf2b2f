"""Lanes of work that needs hardware: which of them wait, and which a device can take.

The lanes that wait are read with one look-up in an index for each, however much work they have. Their needs are matched
in Python, and a claim receives the matching lanes as a parameter, so that it finds its work by an index too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, String, TableValuedAlias, bindparam, select, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction

from service.domain.hardware import HardwareNeed, fits, need_of_lane
from service.domain.workers import ServedDevice
from service.store.database.schema import now_ms, workers
from tuner.schemas.results import DeviceInfo

_ACTIVE = text("""
    WITH RECURSIVE lane(hardware) AS (
        SELECT min(hardware) FROM work_items WHERE state = 'QUEUED' AND device = ''
        UNION ALL
        SELECT (
            SELECT min(hardware) FROM work_items
            WHERE state = 'QUEUED' AND device = '' AND hardware > lane.hardware
        ) FROM lane WHERE lane.hardware IS NOT NULL
    )
    SELECT hardware FROM lane WHERE hardware IS NOT NULL
    UNION
    SELECT hardware FROM work_items WHERE state IN ('CANCELLING', 'RUNNING') AND device = '' AND expiry_check_at <= :now
""")
"""The lanes with queued work, each found by one look-up in `work_items_queued`, and those whose lease may have expired.
The conditions have the text of the partial indexes."""


class lane_texts(GenericFunction[str]):  # noqa: N801 - used like an SQL function
    """The texts of a JSON array, as rows with one column, ``value``: a list of any length is one parameter."""

    inherit_cache = True


@compiles(lane_texts, "sqlite")
def _sqlite_texts(element: lane_texts, compiler: SQLCompiler, **options: Any) -> str:  # noqa: ANN401
    return f"json_each({compiler.process(element.clauses, **options)})"


@compiles(lane_texts, "postgresql")
def _postgresql_texts(element: lane_texts, compiler: SQLCompiler, **options: Any) -> str:  # noqa: ANN401
    return f"json_array_elements_text(CAST({compiler.process(element.clauses, **options)} AS JSON))"


def own_lanes(name: str) -> TableValuedAlias:
    """Return the rows of the parameter `own_lanes`, under a name of the statement's own."""
    return lane_texts(bindparam("own_lanes", type_=String)).table_valued("value").alias(name)


def lane_parameter(lanes: Iterable[str]) -> str:
    """Return the value of the parameter `own_lanes`."""
    return json.dumps(list(lanes))


def lanes_of(connection: Connection, devices: Sequence[ServedDevice]) -> dict[str, tuple[str, ...]]:
    """Return the lanes with work that each device can take, by its slot."""
    now = connection.execute(select(now_ms())).scalar_one()
    active = list(connection.execute(_ACTIVE, {"now": now}).scalars())
    needs = {lane: need_of_lane(lane) for lane in active}
    counts = _devices_per_host(connection, now) if any(need.devices_per_node > 1 for need in needs.values()) else {}
    return {served.slot: _fitting(served, needs, counts) for served in devices}


def _fitting(
    served: ServedDevice, needs: Mapping[str, HardwareNeed], counts: Mapping[tuple[str, str], int]
) -> tuple[str, ...]:
    available = max(1, counts.get((served.host, served.hardware), 0))
    return tuple(
        lane for lane, need in needs.items() if need.devices_per_node <= available and fits(served.device, need)
    )


def waiting_kinds(connection: Connection, lane: str) -> list[str]:
    """Return the kinds of the waiting workers that can take work of a lane."""
    found = connection.execute(select(workers.c.device, workers.c.hardware).where(workers.c.waits).distinct())
    need = need_of_lane(lane)
    return [row.hardware for row in found if row.hardware and fits(_device_of(row.device, row.hardware), need)]


def _devices_per_host(connection: Connection, now: int) -> Counter[tuple[str, str]]:
    """Count the devices with a live worker that takes work, by their host and kind."""
    alive = workers.c.heartbeat_at + workers.c.lease_ms > now
    found = connection.execute(select(workers.c.document).where(alive)).scalars()
    served = [ServedDevice.model_validate_json(document) for document in found]
    return Counter((device.host, device.hardware) for device in served if device.unready is None)


def _device_of(device: str, kind: str) -> DeviceInfo:
    """Return what matching needs of a device, from the columns of its worker."""
    name, _, total_bytes = kind.rpartition("|")
    return DeviceInfo(id=device, kind="cpu" if device == "cpu" else "cuda", name=name, total_bytes=int(total_bytes))
