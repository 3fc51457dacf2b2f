"""Lanes of work that needs hardware: which of them wait, and which a device can take.

The lanes that wait are read with one look-up in an index for each, however much work they have. Their needs are matched
in Python, and a claim receives the matching lanes as a parameter, so that it finds its work by an index too.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, String, TableValuedAlias, bindparam, column, select, text, union
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction

from batchwright.client.documents.workers import ServedDevice
from batchwright.device_traits import kind_of_id
from batchwright.schemas.results import DeviceInfo
from batchwright_service.domain.hardware import ANY_DEVICE, HardwareNeed, fits, need_of_lane
from batchwright_service.store.database.schema import is_held, now_ms, now_once, work_items, workers

_QUEUED = text("""
    WITH RECURSIVE lane(hardware) AS (
        SELECT min(hardware) FROM work_items WHERE state = 'QUEUED' AND device = ''
        UNION ALL
        SELECT (
            SELECT min(hardware) FROM work_items
            WHERE state = 'QUEUED' AND device = '' AND hardware > lane.hardware
        ) FROM lane WHERE lane.hardware IS NOT NULL
    )
    SELECT hardware FROM lane WHERE hardware IS NOT NULL
""").columns(column("hardware", String))
"""The lanes with queued work, each found by one look-up in `work_items_queued`: the conditions have the text of the
partial index."""
_LOST = select(work_items.c.hardware).where(
    is_held, work_items.c.device == ANY_DEVICE, work_items.c.expiry_check_at <= now_once()
)
"""The lanes of work whose lease may have expired."""
ACTIVE_LANES = union(select(_QUEUED.subquery("queued")), _LOST)


class lane_texts(GenericFunction[str]):  # noqa: N801 - used like an SQL function
    """The texts of a JSON array, as rows with one column, ``value``: a list of any length is one parameter."""

    inherit_cache = True


@compiles(lane_texts, "sqlite")
def _sqlite_texts(element: lane_texts, compiler: SQLCompiler, **options: Any) -> str:  # noqa: ANN401
    return f"json_each({compiler.process(element.clauses, **options)})"


@compiles(lane_texts, "postgresql")
def _postgresql_texts(element: lane_texts, compiler: SQLCompiler, **options: Any) -> str:  # noqa: ANN401
    return f"json_array_elements_text(CAST({compiler.process(element.clauses, **options)} AS JSON))"


class json_text(GenericFunction[str]):  # noqa: N801 - used like an SQL function
    """The text at an index of a JSON array of texts."""

    type = String()
    inherit_cache = True


@compiles(json_text, "sqlite")
def _sqlite_text(element: json_text, compiler: SQLCompiler, **options: Any) -> str:  # noqa: ANN401
    array, index = (compiler.process(clause, **options) for clause in element.clauses)
    return f"json_extract({array}, '$[' || {index} || ']')"


@compiles(json_text, "postgresql")
def _postgresql_text(element: json_text, compiler: SQLCompiler, **options: Any) -> str:  # noqa: ANN401
    array, index = (compiler.process(clause, **options) for clause in element.clauses)
    return f"(CAST({array} AS JSON) ->> CAST({index} AS INTEGER))"


def texts_of(parameter: str) -> TableValuedAlias:
    """Return the rows of a parameter that is a JSON array, one column, ``value``."""
    return lane_texts(bindparam(parameter, type_=String)).table_valued("value").alias(f"rows_of_{parameter}")


def own_lanes(name: str) -> TableValuedAlias:
    """Return the rows of the parameter `own_lanes`, under a name of the statement's own."""
    return lane_texts(bindparam("own_lanes", type_=String)).table_valued("value").alias(name)


def lane_parameter(lanes: Iterable[str]) -> str:
    """Return the value of the parameter `own_lanes`."""
    return json.dumps(list(lanes))


def lanes_of(connection: Connection, devices: Sequence[ServedDevice]) -> dict[str, tuple[str, ...]]:
    """Return the lanes with work that each device can take, by its slot."""
    needs = {lane: need_of_lane(lane) for lane in connection.execute(ACTIVE_LANES).scalars()}
    counts: Counter[tuple[str, str]] = Counter()
    if any(need.devices_per_node > 1 for need in needs.values()):
        alive = workers.c.heartbeat_at + workers.c.lease_ms > now_ms()
        found = connection.execute(select(workers.c.document).where(alive)).scalars()
        served = ServedDevice.readable(found)
        counts.update((device.host, device.hardware) for device in served if device.unready is None)
    return {served.slot: _fitting(served, needs, counts) for served in devices}


def _fitting(
    served: ServedDevice, needs: Mapping[str, HardwareNeed], counts: Mapping[tuple[str, str], int]
) -> tuple[str, ...]:
    available = max(1, counts.get((served.host, served.hardware), 0))
    return tuple(
        lane
        for lane, need in needs.items()
        if need.devices_per_node <= available and need.nodes == 1 and fits(served.device, need)
    )


def waiting_kinds(connection: Connection, lane: str) -> list[tuple[str, str]]:
    """Return the ids and the kinds of the devices whose waiting workers can take work of a lane."""
    found = connection.execute(select(workers.c.device, workers.c.hardware).where(workers.c.waits).distinct())
    need = need_of_lane(lane)
    pairs = [(row.device, row.hardware) for row in found if row.hardware]
    return [(device, kind) for device, kind in pairs if fits(_device_of(device, kind), need)]


def _device_of(device: str, kind: str) -> DeviceInfo:
    """Return what matching needs of a device, from the columns of its worker."""
    name, _, total_bytes = kind.rpartition("|")
    return DeviceInfo(id=device, kind=kind_of_id(device), name=name, total_bytes=int(total_bytes))
