"""The outbox: messages are leased, attempted, listed and deleted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row, and_, case, delete, func, insert, or_, select, update

from batchwright.client.documents.webhooks import LONGEST_ERROR, Delivery, DeliveryState, WebhookEvent, WebhookMessage
from batchwright_service.errors import NotFoundError
from batchwright_service.store.database.mapping import moment, moment_or_none
from batchwright_service.store.database.schema import (
    is_dead,
    is_pending,
    now_ms,
    now_once,
    webhook_deliveries,
    webhooks,
)
from batchwright_service.store.database.transactions import read_transaction, write_transaction

_row = webhook_deliveries.c
_BATCH_SIZE = 500
"""Messages that one transaction deletes, so that other writers wait for milliseconds."""
_LISTED = [column for column in webhook_deliveries.columns if column.name != "body"]
MOST_TOGETHER = 2
"""Messages to one webhook that are sent at once, so that a slow receiver delays no other."""


@dataclass(frozen=True)
class DueDelivery:
    """A message that is due and that nobody has leased."""

    id: str
    webhook_id: str
    url: str


Choose = Callable[[Sequence[DueDelivery]], Sequence[str]]
"""Returns the ids of the messages to lease now."""


@dataclass(frozen=True)
class LeasedDelivery:
    """A message whose next attempt is the caller's, until the lease ends."""

    id: str
    webhook_id: str
    url: str
    secrets: tuple[str, ...]
    """The valid secrets, the newest first."""
    body: str
    attempt: int
    """Number of this attempt, from 1; the fencing token of the lease."""
    now: float
    """Time of the lease by the database's clock, in seconds since 1970."""
    age_seconds: float
    """Time since the event."""


@dataclass(frozen=True)
class Backlog:
    """The messages that are not delivered."""

    pending: int
    dead: int
    oldest_due_seconds: float
    """Time for which the oldest due message waits; 0 when none is due."""


class DeliveryStore:
    """The outbox of messages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add_test(self, webhook_id: str, message_id: str) -> Delivery:
        """Add a test message, which reports no event.

        Raises:
            NotFoundError: when there is no such webhook.
        """
        with write_transaction(self._engine) as connection:
            _check_webhook(connection, webhook_id)
            at = connection.execute(select(now_ms())).scalar_one()
            message = WebhookMessage(type=WebhookEvent.TEST, timestamp=moment(at), data=None)
            values = {
                "id": message_id,
                "webhook_id": webhook_id,
                "event": WebhookEvent.TEST,
                "body": message.model_dump_json(),
                "state": DeliveryState.PENDING,
                "created_at": at,
                "next_attempt_at": at,
            }
            added = insert(webhook_deliveries).values(**values).returning(*_LISTED)
            return _delivery(connection.execute(added).one())

    def lease(self, lease_seconds: float, choose: Choose) -> list[LeasedDelivery]:
        """Lease the due messages that ``choose`` returns. A message is due again when its lease ends.

        ``choose`` gets the ``MOST_TOGETHER`` messages of each webhook that have been due longest, the longest first.
        """
        place = func.row_number().over(partition_by=_row.webhook_id, order_by=_row.next_attempt_at).label("place")
        is_due = and_(is_pending, _row.next_attempt_at <= now_once())
        placed = select(_row.id, _row.webhook_id, _row.next_attempt_at, place).where(is_due).subquery()
        due = (
            select(placed.c.id, placed.c.webhook_id, webhooks.c.url)
            .join(webhooks, webhooks.c.id == placed.c.webhook_id)
            .where(placed.c.place <= MOST_TOGETHER)
            .order_by(placed.c.next_attempt_at)
        )
        with read_transaction(self._engine) as connection:  # nothing due takes no writer's lock
            found = [DueDelivery(*row) for row in connection.execute(due)]
        chosen = choose(found)
        if not chosen:
            return []
        with write_transaction(self._engine) as connection:
            return _leased(connection, chosen, int(lease_seconds * 1000))

    def delivered(self, leased: LeasedDelivery, status: int) -> bool:
        """Record that the receiver has the message; False when the lease has gone to another deliverer."""
        values = {"state": DeliveryState.DELIVERED, "ended_at": now_ms(), "last_status": status, "last_error": None}
        return self._end_attempt(leased, values)

    def failed(self, leased: LeasedDelivery, error: str, status: int | None, retry_seconds: float | None) -> bool:
        """Record a failed attempt; the next is due in ``retry_seconds``, or the message is dead if that is None.

        False when the lease has gone to another deliverer.
        """
        printable = "".join(part if part.isprintable() else " " for part in error[:LONGEST_ERROR])
        values: dict[str, Any] = {"last_status": status, "last_error": printable}
        if retry_seconds is None:
            values |= {"state": DeliveryState.DEAD, "ended_at": now_ms()}
        else:
            values["next_attempt_at"] = now_ms() + int(retry_seconds * 1000)
        return self._end_attempt(leased, values)

    def _end_attempt(self, leased: LeasedDelivery, values: dict[str, Any]) -> bool:
        # A deliverer that was suspended beyond its lease must not overwrite the result of the attempt after its own.
        held = and_(_row.id == leased.id, _row.attempts == leased.attempt, is_pending)
        with write_transaction(self._engine) as connection:
            return connection.execute(update(webhook_deliveries).where(held).values(**values)).rowcount == 1

    def newest(
        self, webhook_id: str, limit: int, before: str | None = None, state: DeliveryState | None = None
    ) -> Sequence[Delivery]:
        """Return at most ``limit`` deliveries to a webhook, newest first, older than the id ``before``.

        Raises:
            NotFoundError: when there is no such webhook.
        """
        statement = select(*_LISTED).where(_row.webhook_id == webhook_id).order_by(_row.id.desc()).limit(limit)
        if before is not None:
            statement = statement.where(_row.id < before)
        if state is not None:
            statement = statement.where(_row.state == state)
        with read_transaction(self._engine) as connection:
            _check_webhook(connection, webhook_id)
            return [_delivery(row) for row in connection.execute(statement)]

    def send_again(self, webhook_id: str, delivery_id: str) -> Delivery:
        """Make a delivery due now, with all of its attempts before it; one that is pending becomes due now.

        Raises:
            NotFoundError: when there is no such delivery to this webhook.
        """
        own = and_(_row.id == delivery_id, _row.webhook_id == webhook_id)
        values = {"state": DeliveryState.PENDING, "attempts": 0, "next_attempt_at": now_ms(), "ended_at": None}
        with write_transaction(self._engine) as connection:
            changed = update(webhook_deliveries).where(own).values(**values).returning(*_LISTED)
            row = connection.execute(changed).first()
        if row is None:
            raise NotFoundError.of("delivery", delivery_id)
        return _delivery(row)

    def backlog(self) -> Backlog:
        """Count the messages that are not delivered."""
        waited = case((_row.next_attempt_at <= now_once(), now_once() - _row.next_attempt_at), else_=0)
        pending = select(func.count(), func.coalesce(func.max(waited), 0)).where(is_pending)
        dead = select(func.count()).select_from(webhook_deliveries).where(is_dead)
        with read_transaction(self._engine) as connection:
            count, oldest = connection.execute(pending).one()
            return Backlog(count, connection.execute(dead).scalar_one(), oldest / 1000)

    def prune(self, delivered_seconds: float, dead_seconds: float) -> int:
        """Delete delivered and dead messages of these ages, and those of deleted webhooks; return their number."""
        kept = ((DeliveryState.DELIVERED, delivered_seconds), (DeliveryState.DEAD, dead_seconds))
        old = [and_(_row.state == state, _row.ended_at <= now_once() - int(age * 1000)) for state, age in kept]
        orphaned = _row.webhook_id.not_in(select(webhooks.c.id))
        expired = select(_row.id).where(or_(*old, orphaned)).limit(_BATCH_SIZE).with_for_update(skip_locked=True)
        deleted = 0
        while True:
            with write_transaction(self._engine) as connection:
                count = connection.execute(delete(webhook_deliveries).where(_row.id.in_(expired))).rowcount
            if not count:
                return deleted
            deleted += count


def _leased(connection: Connection, chosen: Sequence[str], lease_ms: int) -> list[LeasedDelivery]:
    """Lease those of the chosen messages that are still due, which other deliverers have not taken meanwhile."""
    due = and_(_row.id.in_(chosen), is_pending, _row.next_attempt_at <= now_ms())
    free = select(_row.id).where(due).order_by(_row.id).with_for_update(skip_locked=True)
    taken = (
        update(webhook_deliveries)
        .where(_row.id.in_(free), due)
        .values(attempts=_row.attempts + 1, next_attempt_at=now_ms() + lease_ms)
        .returning(_row.id, _row.webhook_id, _row.body, _row.attempts, _row.created_at)
    )
    rows = connection.execute(taken).all()
    known = select(webhooks, now_ms().label("now")).where(webhooks.c.id.in_({row.webhook_id for row in rows}))
    receivers = {row.id: row for row in connection.execute(known)}
    return [_leased_delivery(row, receivers[row.webhook_id]) for row in rows if row.webhook_id in receivers]


def _leased_delivery(row: Row[Any], receiver: Row[Any]) -> LeasedDelivery:
    has_previous = receiver.previous_secret is not None and receiver.previous_until > receiver.now
    return LeasedDelivery(
        id=row.id,
        webhook_id=row.webhook_id,
        url=receiver.url,
        secrets=(receiver.secret, receiver.previous_secret) if has_previous else (receiver.secret,),
        body=row.body,
        attempt=row.attempts,
        now=receiver.now / 1000,
        age_seconds=(receiver.now - row.created_at) / 1000,
    )


def _check_webhook(connection: Connection, webhook_id: str) -> None:
    if connection.execute(select(webhooks.c.id).where(webhooks.c.id == webhook_id)).first() is None:
        raise NotFoundError.of("webhook", webhook_id)


def _delivery(row: Row[Any]) -> Delivery:
    is_waiting = row.state == DeliveryState.PENDING
    return Delivery(
        id=row.id,
        event=WebhookEvent(row.event),
        work_id=row.work_id,
        state=DeliveryState(row.state),
        attempts=row.attempts,
        created_at=moment(row.created_at),
        next_attempt_at=moment(row.next_attempt_at) if is_waiting else None,
        ended_at=moment_or_none(row.ended_at),
        last_status=row.last_status,
        last_error=row.last_error,
    )
