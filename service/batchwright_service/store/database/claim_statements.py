"""The statements that find work for devices and claim it.

Each is built once, which costs more than executing it, and reads by indexes alone, so that its cost depends neither on
the number of devices nor on the length of the queue.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    TableValuedAlias,
    TextClause,
    and_,
    bindparam,
    case,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from batchwright.client.documents.states import State
from batchwright.client.documents.work import EventKind
from batchwright.client.documents.workers import ServedDevice
from batchwright_service.domain.hardware import ANY_DEVICE, need_of_lane
from batchwright_service.store.database.lanes import json_text, lane_parameter, lanes_of, own_lanes, texts_of
from batchwright_service.store.database.schema import (
    DOCUMENT_HEAD,
    DOCUMENT_TAIL,
    events,
    health,
    held_slots,
    is_held,
    is_queued,
    now_ms,
    now_once,
    submitters,
    work_items,
)

_work = work_items.c

CLAIM_SETTINGS = text("""
    SELECT set_config('plan_cache_mode', 'force_generic_plan', true) AS plans,
        set_config('enable_seqscan', 'off', true) AS scans, set_config('enable_hashjoin', 'off', true) AS hashes,
        set_config('enable_mergejoin', 'off', true) AS merges
""")
"""Settle the plans of the transaction: planning the claim takes longer than the claim, and others wait for as long. Its
plan reads by indexes whatever the statistics say, which do not know of a queue that has just been filled."""
LOCK_CLAIMS = text(f"LOCK TABLE {health.name} IN SHARE UPDATE EXCLUSIVE MODE")
"""Lock the claims: nothing else takes this lock but a vacuum of the table, which has one row, and readers and writers
of the row do not wait for it. An advisory lock would wait within a query, whose snapshot keeps PostgreSQL from removing
the index entries of claimed work: each claim would visit those of all claims since the wait began."""


def lock_claims(connection: Connection) -> None:
    """Serialise the claims until the end of the transaction: concurrent ones would choose the same submitter.

    A statement sees the claims that were committed before it began, so that the lock is taken by one of its own.
    SQLite has one writer at a time.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(CLAIM_SETTINGS)
        connection.execute(LOCK_CLAIMS)


# --- work for one device ---

_HOLDS = and_(is_held, _work.lease_expires_at > now_ms())
RUNNING_HERE = union_all(
    select(_work.id).where(_work.slot == bindparam("own_slot"), _HOLDS),
    select(_work.id)
    .join(held_slots, held_slots.c.work_id == _work.id)
    .where(held_slots.c.slot == bindparam("own_slot"), _HOLDS),
)
"""The work that holds a slot with a valid lease, as its own or beside its own; its parameter is `own_slot`."""

ABANDONED = (
    select(_work.id, _work.state, _work.token, _work.lost_leases, _work.key_id)
    .where(
        is_held,
        _work.device.in_([bindparam("own_device"), ANY_DEVICE]),
        _work.expiry_check_at <= now_once(),
        _work.lease_expires_at <= now_ms(),
        case(
            (_work.device == ANY_DEVICE, _work.hardware.in_(select(own_lanes("lost_lanes").c.value))),
            else_=or_(_work.hardware.is_(None), _work.hardware == bindparam("own_hardware")),
        ),
    )
    .order_by(_work.slot != bindparam("own_slot"), _work.priority.desc(), _work.created_at, _work.id)
    .limit(1)
)
"""The first work for a device whose lease has expired: work of its slot, then of others; its parameters are `own_slot`,
`own_device`, `own_hardware` and `own_lanes`."""

MISPLACED = and_(
    is_held,
    _work.slot == bindparam("own_slot"),
    or_(
        and_(_work.device != ANY_DEVICE, _work.hardware != bindparam("own_hardware")),
        and_(_work.device == ANY_DEVICE, _work.hardware.not_in(select(own_lanes("slot_lanes").c.value))),
    ),
    _work.lease_expires_at <= now_ms(),
)
"""The work that holds a slot with an expired lease, and needs other hardware than the slot has now. No worker takes it
over there, and it blocks the slot. The parameters are `own_slot`, `own_hardware` and `own_lanes`."""


def _next_queued() -> Select[Any]:
    """Select with one index look-up for each submitter and lane, however much work waits."""
    own = work_items.alias("own").c
    lane = own_lanes("queued_lanes")
    for_device = own.device == bindparam("own_device")
    lanes: tuple[tuple[ColumnElement[bool], TableValuedAlias | None], ...] = (
        (and_(for_device, own.hardware == bindparam("own_hardware")), None),
        (and_(for_device, own.hardware.is_(None)), None),
        (and_(own.device == ANY_DEVICE, own.hardware == lane.c.value), lane),
    )
    heads = union_all(*(_heads(own, *each, keyed=keyed) for each in lanes for keyed in (False, True))).subquery()
    return (
        select(_work.id, _work.state, _work.token, _work.lost_leases, _work.key_id)
        .join(heads, heads.c.id == _work.id)
        .order_by(_work.priority.desc(), heads.c.turn, _work.created_at, _work.id)
        .limit(1)
    )


def _heads(
    own: ReadOnlyColumnCollection[str, Any], in_lane: ColumnElement[bool], lane: TableValuedAlias | None, *, keyed: bool
) -> Select[Any]:
    """Select the first work of each submitter in a lane, or in each of several, and the submitter's latest turn.

    The order has every column of the index: PostgreSQL does not treat a column that is null as constant.
    """
    order = (own.device, own.hardware, own.key_id, own.priority.desc(), own.created_at, own.id)
    first = (
        select(own.id)
        .where(is_queued, in_lane, own.key_id == submitters.c.id if keyed else own.key_id.is_(None))
        .order_by(*order)
        .limit(1)
        .correlate(submitters, *([] if lane is None else [lane]))
        .scalar_subquery()
    )
    owners = submitters.c.id != "" if keyed else submitters.c.id == ""
    heads = select(submitters.c.turn, first.label("id")).where(owners)
    return heads if lane is None else heads.join_from(submitters, lane, literal(value=True))


NEXT_QUEUED = _next_queued()
"""The next queued work of a device; its parameters are `own_device`, `own_hardware` and `own_lanes`."""


def used_by_lost_owner() -> ColumnElement[int]:
    """Return the milliseconds of a vanished owner: to the end of its lease, or 0 when the lease was expired early."""
    return case((_work.lease_expires_at > _work.claimed_at, _work.lease_expires_at - _work.claimed_at), else_=0)


def _claim_at_once() -> Select[Any]:
    """Choose a candidate, take it, add its event, record the submitter's turn, and return the whole row."""
    lost, waiting = ABANDONED.subquery("lost"), NEXT_QUEUED.subquery("waiting")
    candidates = union_all(
        select(literal(0).label("place"), *lost.columns), select(literal(1), *waiting.columns)
    ).subquery("candidates")
    # Abandoned work first: it holds its slot until it is taken over, and has waited in the queue once already.
    found = select(candidates).where(~RUNNING_HERE.exists()).order_by(candidates.c.place).limit(1).cte("found")
    was_queued = found.c.state == State.QUEUED
    until = now_ms() + bindparam("lease_ms", type_=BigInteger)
    taken = (
        update(work_items)
        .where(_work.id == found.c.id, _work.state == found.c.state, _work.token == found.c.token)
        .where(or_(was_queued, _work.lease_expires_at <= now_ms()))
        .values(
            state=case((was_queued, State.RUNNING.value), else_=_work.state),
            owner=bindparam("new_owner"),
            slot=bindparam("own_slot"),
            token=_work.token + 1,
            claimed_at=now_ms(),
            device_ms=_work.device_ms + used_by_lost_owner(),
            lease_expires_at=until,
            expiry_check_at=until,
            lost_leases=_work.lost_leases + case((was_queued, 0), else_=1),
            started_at=func.coalesce(_work.started_at, now_ms()),
            updated_at=now_ms(),
            event_count=_work.event_count + 1,
        )
        .returning(*work_items.columns, found.c.state.label("state_before"))
        .cte("taken")
    )
    columns = (
        taken.c.id,
        taken.c.event_count,
        taken.c.updated_at,
        literal(EventKind.STATE.value),
        literal(DOCUMENT_HEAD + '"') + taken.c.state + literal('"' + DOCUMENT_TAIL),
    )
    added = insert(events).from_select(["work_id", "id", "at", "kind", "document"], select(*columns)).cte("added")
    turns = submitters.alias("turns")
    turned = (
        update(submitters)
        .where(submitters.c.id == func.coalesce(taken.c.key_id, ""), taken.c.state_before == State.QUEUED)
        .values(turn=select(func.max(turns.c.turn) + 1).scalar_subquery())
        .cte("turned")
    )
    return select(taken).add_cte(added, turned)


CLAIM_AT_ONCE = _claim_at_once()
"""The claim of a device in one statement of PostgreSQL, under the lock of claims. Its parameters are those of the
candidates, and `new_owner` and `lease_ms`. Work of several devices, and misplaced work, need more statements."""


# --- work for several devices ---


@dataclass(frozen=True)
class Prospect:
    """A device for which there is something to claim.

    Attributes:
        lanes: the lanes with work that it can take.
        is_blocked: its slot has abandoned work for other hardware, which a claim queues again first.
    """

    lanes: tuple[str, ...]
    is_blocked: bool


def _prospects() -> Select[Any]:
    """Select the slots with something to claim; the devices and their lanes are JSON arrays of arrays of texts."""
    given, paired = texts_of("asked_devices"), texts_of("asked_lanes")
    names = ("slot", "device", "hardware")
    requested = select(*(json_text(given.c.value, index).label(name) for index, name in enumerate(names))).cte(
        "requested"
    )
    lanes = select(json_text(paired.c.value, 0).label("slot"), json_text(paired.c.value, 1).label("lane")).cte("lanes")
    is_lane = and_(_work.device == ANY_DEVICE, _work.hardware == lanes.c.lane)
    expired = and_(is_held, _work.lease_expires_at <= now_ms())
    is_lost = and_(expired, _work.expiry_check_at <= now_once())
    own_lane = and_(is_lane, lanes.c.slot == requested.c.slot)
    has_lane = exists().where(own_lane).correlate(work_items, requested)
    is_placed = _work.device != ANY_DEVICE
    is_unfit = or_(and_(is_placed, _work.hardware != requested.c.hardware), and_(~is_placed, ~has_lane))
    is_blocked = _any_work(requested, where=(_work.slot == requested.c.slot, expired, is_unfit)).label("is_blocked")
    of_device = _work.device == requested.c.device
    fits_kind = or_(_work.hardware.is_(None), _work.hardware == requested.c.hardware)
    in_lane = or_(
        _any_work(lanes, where=(is_queued, is_lane), order=_QUEUE_ORDER),
        _any_work(lanes, where=(is_lane, is_lost), order=_EXPIRY_ORDER),
    )
    waiting = (
        _any_work(requested, where=(of_device, fits_kind, is_lost), order=_EXPIRY_ORDER),
        _any_work(requested, where=(is_queued, of_device, _work.hardware.is_(None)), order=_QUEUE_ORDER),
        _any_work(requested, where=(is_queued, of_device, _work.hardware == requested.c.hardware), order=_QUEUE_ORDER),
        exists().where(lanes.c.slot == requested.c.slot, in_lane).correlate(requested),
    )
    found = select(requested.c.slot, is_blocked, or_(*waiting).label("has_work"), _is_busy(requested).label("is_busy"))
    rows = found.subquery()
    return select(rows.c.slot, rows.c.is_blocked).where(or_(rows.c.is_blocked, and_(rows.c.has_work, ~rows.c.is_busy)))


_QUEUE_ORDER = (
    _work.device,
    _work.hardware,
    _work.key_id,
    _work.priority.desc(),
    _work.created_at,
    _work.id,
)
"""The order of `work_items_queued`."""
_EXPIRY_ORDER = (_work.device, _work.expiry_check_at)
"""The order of `work_items_expiring`."""


def _any_work(
    outer: FromClause, *, where: Sequence[ColumnElement[bool] | TextClause], order: Sequence[ColumnElement[Any]] = ()
) -> ColumnElement[bool]:
    """Return the condition that there is work, found as the first in the order of an index.

    PostgreSQL may read the whole queue for an `EXISTS` instead, into a hash table of all answers, or pass all work that
    has ended before the first that waits.
    """
    first = select(_work.id).where(*where).order_by(*order).limit(1)
    return first.correlate(outer).scalar_subquery().is_not(None)


def _is_busy(requested: CTE) -> ColumnElement[bool]:
    """Return the condition that work holds the slot of a row with a valid lease."""
    is_beside = and_(held_slots.c.slot == requested.c.slot, held_slots.c.work_id == _work.id)
    return or_(
        _any_work(requested, where=(_work.slot == requested.c.slot, _HOLDS)),
        _any_work(requested, where=(is_beside, _HOLDS)),
    )


_PROSPECTS = _prospects()


def prospects_of(connection: Connection, devices: Sequence[ServedDevice]) -> Mapping[str, Prospect]:
    """Return the devices whose workers would find something to claim, by their slots."""
    if not devices:
        return {}
    lanes = lanes_of(connection, devices)
    parameters = {
        "asked_devices": json.dumps([(served.slot, served.device.id, served.hardware) for served in devices]),
        "asked_lanes": json.dumps([(slot, lane) for slot, own in lanes.items() for lane in own]),
    }
    found = connection.execute(_PROSPECTS, parameters)
    return {row.slot: Prospect(lanes[row.slot], bool(row.is_blocked)) for row in found}


@dataclass(frozen=True)
class Claimer:
    """A device that claims work, the lanes that it can take work of, and the length of its lease.

    Its slot ``is_blocked`` by abandoned work for other hardware, which a claim queues again first.
    """

    served: ServedDevice
    lanes: tuple[str, ...]
    lease_seconds: float
    is_blocked: bool = False

    @property
    def is_simple(self) -> bool:
        """Return whether ``CLAIM_AT_ONCE`` makes the claim: of work for one device, with a slot that is not blocked."""
        return not self.is_blocked and all(need_of_lane(lane).devices_per_node == 1 for lane in self.lanes)

    @property
    def lease_ms(self) -> int:
        """The length of the lease in milliseconds."""
        return int(self.lease_seconds * 1000)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the statements that choose work, and of the claim in one statement."""
        return {
            "own_slot": self.served.slot,
            "own_device": self.served.device.id,
            "own_hardware": self.served.hardware,
            "own_lanes": lane_parameter(self.lanes),
            "new_owner": self.served.owner,
            "lease_ms": self.lease_ms,
        }
