"""Leases: claims of queued work with fencing tokens, their renewal and their release."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    Double,
    Engine,
    Executable,
    RowMapping,
    String,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from batchwright.client.documents.states import State, sources_of
from batchwright.client.documents.workers import ServedDevice
from batchwright_service.domain import lease_waits
from batchwright_service.domain.hardware import ANY_DEVICE, is_served_by, need_of_lane
from batchwright_service.errors import StoreUnavailableError
from batchwright_service.store.database import mapping
from batchwright_service.store.database.batches import Batches
from batchwright_service.store.database.claim_admission import admitted
from batchwright_service.store.database.claim_pipeline import claim_and_commit
from batchwright_service.store.database.claim_statements import (
    ABANDONED,
    MISPLACED,
    NEXT_QUEUED,
    RUNNING_HERE,
    Claimer,
    lock_claims,
    prospects_of,
    used_by_lost_owner,
)
from batchwright_service.store.database.notifications import notify_waiting
from batchwright_service.store.database.schema import (
    held_slots,
    is_held,
    is_queued,
    now_ms,
    recommendations,
    work_items,
    workers,
)
from batchwright_service.store.database.statements import (
    add_events,
    change,
    changing,
    is_latest_lease,
    refusal,
    stale_lease_error,
    state_event,
    with_event,
)
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.models import Claim, Ending, Lease
from batchwright_service.store.outbox.endings import record_endings
from batchwright_service.store.scheduling import record_turn
from batchwright_service.store.work_queries import read_item

_work = work_items.c

_MAX_CODE_LENGTH = 64


_MOST_ROUNDS = 3
"""Attempts at a claim while there is work, but others take, cancel or renew what was found."""

Wanted = tuple[ServedDevice, float]
"""A device that claims work, and the seconds of its lease."""


class Candidate(NamedTuple):
    """Work that may be claimed, as it was read."""

    id: str
    state: State
    token: int
    lost_leases: int
    key_id: str | None


@contextmanager
def _kept(claims: Sequence[Claim | None]) -> Iterator[None]:
    """Suppress errors of the database once there are claims, which the caller must learn of to run their work."""
    try:
        yield
    except StoreUnavailableError:
        if not any(claims):
            raise


class LeaseStore:
    """Leases: workers claim work under a lease, and end the work or hand it back; heartbeats renew leases."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._batches = Batches(self.claim_together)

    def claim(self, served: ServedDevice, lease_seconds: float) -> Claim | None:
        """Claim the next piece of work for this device: first abandoned work, of this slot or others, then the queue.

        The order of the queue: the highest priority first; among equals the API key whose work was started least
        recently, on any device (callers without a key count as one); then the oldest. Work whose lease has expired is
        taken over, in the state in which it was left. None when no work waits, or when work runs in that slot.
        """
        return self._batches.run((served, lease_seconds))

    def claim_together(self, wanted: Sequence[Wanted]) -> list[Claim | None]:
        """Claim the next work of each device, in the order of the devices."""
        claims: list[Claim | None] = [None] * len(wanted)
        places = list(range(len(wanted)))
        with _kept(claims):
            for _ in range(_MOST_ROUNDS):
                found, missed = self._claim_once([wanted[place] for place in places])
                for place, claim in zip(places, found, strict=True):
                    claims[place] = claim
                places = [places[index] for index in missed]
                if not places:
                    break
        return claims

    def _claim_once(self, wanted: Sequence[Wanted]) -> tuple[list[Claim | None], list[int]]:
        """Claim for each device, and return the indexes of those that may find work if they try again too."""
        claims: list[Claim | None] = [None] * len(wanted)
        missed: list[int] = []
        try:
            with admitted(self._engine, read_transaction, lease_waits.CLAIM_SECONDS) as connection:
                prospects = prospects_of(connection, [served for served, _ in wanted])
                claimers = {
                    index: Claimer(served, prospect.lanes, lease_seconds, is_blocked=prospect.is_blocked)
                    for index, (served, lease_seconds) in enumerate(wanted)
                    if (prospect := prospects.get(served.slot)) is not None
                }
                if connection.dialect.name == "postgresql":
                    together = [index for index, claimer in claimers.items() if claimer.is_simple]
                    rows = claim_and_commit(connection, [claimers.pop(index) for index in together]) if together else []
                    for index, row in zip(together, rows, strict=True):
                        if row is None:  # taken by others, or cancelled or renewed meanwhile
                            missed.append(index)
                        else:
                            claims[index] = _claim_of(row)
            if claimers:  # a claim that finds nothing takes no writer's lock
                with _kept(claims):
                    with admitted(self._engine, write_transaction, lease_waits.CLAIM_SECONDS) as connection:
                        lock_claims(connection)
                        claims_of_rest = {index: _claim(connection, claimer) for index, claimer in claimers.items()}
                    for index, claim in claims_of_rest.items():
                        claims[index] = claim
        except IntegrityError:  # the unique index: another owner has just taken one of the slots
            if len(wanted) > 1:
                with _kept(claims):
                    for index, each in enumerate(wanted):
                        claims[index] = claims[index] or self._claim_once([each])[0][0]
                return claims, []
        return claims, missed

    def claim_work(self, work_id: str, served: ServedDevice, lease_seconds: float) -> Claim | None:
        """Claim one piece of work for this device, whatever else waits; the id of the device need not be the work's.

        None when the work has ended or does not exist, when it has a live lease or needs other hardware, or when work
        runs in that slot.
        """
        try:
            with admitted(self._engine, write_transaction, lease_waits.ASSIGNED_CLAIM_SECONDS) as connection:
                lock_claims(connection)
                claimer = Claimer(served, (), lease_seconds)
                _requeue_misplaced(connection, claimer)
                candidate = _named(connection, claimer, work_id)
                return None if candidate is None else _take(connection, claimer, candidate, [])
        except IntegrityError:  # as above
            return None

    def finish(self, lease: Lease, ending: Ending) -> None:
        """End the work: store its ending, and free its slot.

        Raises:
            StaleLeaseError: when the lease has ended.
            ConflictError: when the work's state does not allow that ending.
        """
        recommendation, problem = ending.recommendation, ending.problem
        figures = {} if recommendation is None else mapping.sort_values(mapping.figures_of(recommendation))
        values = {
            "lease_work_id": lease.work_id,
            "lease_owner": lease.owner,
            "lease_token": lease.token,
            "new_problem": mapping.as_json(problem),
            "new_problem_code": None if problem is None else problem.code[:_MAX_CODE_LENGTH],
            "new_result": mapping.as_json(ending.result),
            "new_recommendation_id": None if recommendation is None else recommendation.id,
            "new_rate": figures.get("sorted_rate"),
            "new_peak": figures.get("sorted_peak"),
        }
        with write_transaction(self._engine) as connection:
            in_one = connection.dialect.name == "postgresql"
            row = connection.execute(_ending(ending.state, in_one=in_one), values).mappings().first()
            if row is None:
                raise refusal(connection, lease, ending.state)
            if not in_one:
                add_events(connection, row, [state_event(ending.state)])
            _release_beside(connection, row)
            if recommendation is not None and not ending.is_stored:
                stored = mapping.recommendation_values(
                    recommendation, lease.work_id, row["model"], row["key_id"], row["slot"]
                )
                connection.execute(insert(recommendations).values(**stored))
            # Last, since the message tells the stored state and plan; here, since a rollback must undo it with the end.
            record_endings(connection, [lease.work_id])

    def hand_back(self, lease: Lease) -> None:
        """Return work to the queue with its evidence (or to CANCELLED, if it was cancelled meanwhile).

        An owner that could not reach the store in time may do so later; the lease does not count as lost.

        Raises:
            StaleLeaseError: when the work was taken over, or has ended.
        """
        is_latest = is_latest_lease(lease)
        with write_transaction(self._engine) as connection:
            for before, after in ((State.RUNNING, State.QUEUED), (State.CANCELLING, State.CANCELLED)):
                values = {"state": after, "ended_at": now_ms() if after.terminal else None} | _released()
                row = change(connection, and_(is_latest, _work.state == before), values, [state_event(after)])
                if row is not None:
                    _release_beside(connection, row)
                    if after is State.QUEUED:
                        notify_waiting(connection, row["device"], row["hardware"])
                    else:
                        record_endings(connection, [lease.work_id])
                    return
            raise stale_lease_error(lease)

    def release_slot(self, slot: str, owner_prefix: str) -> None:
        """Expire the leases of a slot that are held by owners with this prefix, which are known to be dead."""
        dead = _work.owner.startswith(owner_prefix, autoescape=True)
        held = and_(_work.slot == slot, is_held, dead)
        with write_transaction(self._engine) as connection:
            connection.execute(update(work_items).where(held).values(lease_expires_at=0, expiry_check_at=0))


def _claim_of(row: Any) -> Claim:  # noqa: ANN401 - a row of `CLAIM_AT_ONCE`
    lease = Lease(work_id=row.id, owner=row.owner, token=row.token)
    item = mapping.work_item(row, related=False)
    return Claim(lease, item, row.lost_leases, taken_over=row.state_before != State.QUEUED)


def _claim(connection: Connection, claimer: Claimer) -> Claim | None:
    """Claim the next work.

    Work of several devices is taken with all of them, or waits at the head of the queue, so that the devices of the
    host become free for it: other work does not overtake it for ever, and two such works never hold a part each.
    """
    _requeue_misplaced(connection, claimer)
    while (candidate := _candidate(connection, claimer)) is not None:
        beside = _slots_beside(connection, claimer.served, candidate)
        if beside is None:
            return None
        if (claim := _take(connection, claimer, candidate, beside)) is not None:
            return claim
    return None


def _candidate(connection: Connection, claimer: Claimer) -> Candidate | None:
    """Return the work that the device would take now; None when no work waits, or when work runs in its slot."""
    if connection.execute(RUNNING_HERE, claimer.parameters).first() is not None:
        return None
    abandoned = connection.execute(ABANDONED, claimer.parameters).first()
    row = abandoned or connection.execute(NEXT_QUEUED, claimer.parameters).first()
    return None if row is None else Candidate(row[0], State(row[1]), *row[2:])


def _slots_beside(connection: Connection, served: ServedDevice, found: Candidate) -> list[str] | None:
    """Return free slots of the host for the other devices of a candidate; None when there are too few now."""
    row = connection.execute(select(_work.device, _work.hardware).where(_work.id == found.id)).one()
    if (count := _devices_needed(row.device, row.hardware)) == 1:
        return []
    alive = and_(workers.c.hardware == served.hardware, workers.c.heartbeat_at + workers.c.lease_ms > now_ms())
    documents = connection.execute(select(workers.c.document).where(alive)).scalars()
    others = ServedDevice.readable(documents)
    taken = set(connection.execute(select(_work.slot).where(is_held, _work.id != found.id)).scalars())
    beside = select(held_slots.c.slot).where(held_slots.c.work_id != found.id)
    taken |= set(connection.execute(beside).scalars())
    free = sorted(
        (other.slot for other in others if other.host == served.host and other.unready is None),
        key=lambda slot: (len(slot), slot),
    )
    chosen = [slot for slot in free if slot not in taken and slot != served.slot][: count - 1]
    return chosen if len(chosen) == count - 1 else None


def _named(connection: Connection, claimer: Claimer, work_id: str) -> Candidate | None:
    """Return the work with this id if the device may take it now; the engine has assigned its other devices too."""
    if connection.execute(RUNNING_HERE, claimer.parameters).first() is not None:
        return None
    may_be_taken = or_(is_queued, and_(is_held, _work.lease_expires_at <= now_ms()))
    columns = (_work.id, _work.state, _work.token, _work.lost_leases, _work.key_id, _work.device, _work.hardware)
    row = connection.execute(select(*columns).where(_work.id == work_id, may_be_taken)).first()
    if row is None or not is_served_by(row.device, row.hardware, claimer.served.device):
        return None
    return Candidate(row.id, State(row.state), row.token, row.lost_leases, row.key_id)


def _devices_needed(device: str, hardware: str | None) -> int:
    return need_of_lane(hardware or "").devices_per_node if device == ANY_DEVICE else 1


def _requeue_misplaced(connection: Connection, claimer: Claimer) -> None:
    """Queue abandoned work of this slot again that needs other hardware than the slot has now."""
    for row in connection.execute(select(_work.id, _work.state).where(MISPLACED), claimer.parameters).all():
        ended = row.state == State.CANCELLING
        state = State.CANCELLED if ended else State.QUEUED
        values = {
            "state": state,
            "owner": None,
            "slot": None,
            "lease_expires_at": None,
            "claimed_at": None,
            "device_ms": _work.device_ms + used_by_lost_owner(),
            "lost_leases": _work.lost_leases + 1,
            "ended_at": now_ms() if ended else None,
        }
        still = and_(_work.id == row.id, _work.state == row.state, _work.lease_expires_at <= now_ms())
        changed = change(connection, still, values, [state_event(state)])
        if changed is not None:
            _release_beside(connection, changed)
        if changed is not None and ended:
            record_endings(connection, [row.id])
        if changed is not None and not ended:
            notify_waiting(connection, changed["device"], changed["hardware"])


def _take(connection: Connection, claimer: Claimer, found: Candidate, beside: list[str]) -> Claim | None:
    """Claim a candidate; None when it was cancelled, or its owner renewed its lease, meanwhile."""
    served, lease_ms = claimer.served, claimer.lease_ms
    was_queued = found.state is State.QUEUED
    state = State.RUNNING if was_queued else found.state
    lost_leases = found.lost_leases + int(not was_queued)
    values = {
        "state": state,
        "owner": served.owner,
        "slot": served.slot,
        "token": found.token + 1,
        "claimed_at": now_ms(),
        "device_ms": _work.device_ms + used_by_lost_owner(),
        "lease_expires_at": now_ms() + lease_ms,
        "expiry_check_at": now_ms() + lease_ms,
        "lost_leases": lost_leases,
        "started_at": func.coalesce(_work.started_at, now_ms()),
    }
    unchanged = and_(_work.id == found.id, _work.state == found.state, _work.token == found.token)
    if not was_queued:
        unchanged = and_(unchanged, _work.lease_expires_at <= now_ms())
    row = change(connection, unchanged, values, [state_event(state)])
    if row is None:
        return None
    if was_queued:
        record_turn(connection, found.key_id)
    _release_beside(connection, row)
    if beside:
        connection.execute(insert(held_slots), [{"slot": slot, "work_id": found.id} for slot in beside])
    lease = Lease(work_id=found.id, owner=served.owner, token=found.token + 1)
    return Claim(lease, read_item(connection, found.id), lost_leases, not was_queued, tuple(beside))


def _release_beside(connection: Connection, row: RowMapping) -> None:
    """Release the slots that work of several devices holds beside its own."""
    if _devices_needed(row["device"], row["hardware"]) > 1:
        connection.execute(delete(held_slots).where(held_slots.c.work_id == row["id"]))


def _released() -> dict[str, Any]:
    """Return the values of a row whose owner releases its lease."""
    in_time = now_ms() - func.coalesce(_work.claimed_at, now_ms())
    used = case((_work.lease_expires_at > now_ms(), in_time), else_=used_by_lost_owner())
    return {"owner": None, "lease_expires_at": None, "claimed_at": None, "device_ms": _work.device_ms + used}


@cache
def _ending(state: State, *, in_one: bool) -> Executable:
    """Return the statement that ends work under a lease; ``in_one`` adds the event too."""
    is_held_by_lease = and_(
        _work.id == bindparam("lease_work_id"),
        _work.owner == bindparam("lease_owner"),
        _work.token == bindparam("lease_token"),
        is_held,
        _work.lease_expires_at > now_ms(),
        _work.state.in_(sorted(sources_of(state))),
    )
    values = {
        "state": state,
        "problem": bindparam("new_problem"),
        "problem_code": bindparam("new_problem_code"),
        "result": bindparam("new_result"),
        "recommendation_id": func.coalesce(bindparam("new_recommendation_id", type_=String), _work.recommendation_id),
        "sorted_rate": func.coalesce(bindparam("new_rate", type_=Double), _work.sorted_rate),
        "sorted_peak": func.coalesce(bindparam("new_peak", type_=BigInteger), _work.sorted_peak),
        "ended_at": now_ms(),
    }
    changed = changing(is_held_by_lease, values | _released(), events_added=1)
    return with_event(changed, *state_event(state)) if in_one else changed
