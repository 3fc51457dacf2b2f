"""Webhooks and their secrets."""

from typing import Any

from sqlalchemy import Connection, Engine, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from batchwright.client.documents.audit import AuditAction
from batchwright.client.documents.webhooks import DeliveryState, Webhook, WebhookEvent, WebhookSubmission
from batchwright_service.domain.callers import COMMAND_LINE, Caller
from batchwright_service.errors import ConflictError, NotFoundError
from batchwright_service.store.database.audit_log import record
from batchwright_service.store.database.mapping import moment, moment_or_none
from batchwright_service.store.database.schema import is_dead, is_pending, now_ms, webhook_deliveries, webhooks
from batchwright_service.store.database.transactions import read_transaction, write_transaction

_hook = webhooks.c
_delivery = webhook_deliveries.c
_HOOKS = select(webhooks, now_ms().label("now"))


class WebhookStore:
    """Webhooks and their secrets. Each change has its entry in the audit log."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(
        self, webhook_id: str, submission: WebhookSubmission, secret: str, most: int, caller: Caller = COMMAND_LINE
    ) -> Webhook:
        """Store a webhook.

        Raises:
            ConflictError: when its id is taken, or when there are ``most`` webhooks already.
        """
        values = {
            "id": webhook_id,
            "url": submission.url,
            "name": submission.name,
            "events": " ".join(dict.fromkeys(submission.events)),
            "project": submission.project,
            "secret": secret,
            "created_at": now_ms(),
        }
        try:
            with write_transaction(self._engine) as connection:
                connection.execute(insert(webhooks).values(**values))
                if connection.execute(select(func.count()).select_from(webhooks)).scalar_one() > most:
                    raise ConflictError(f"there are {most} webhooks already: delete one first")
                record(connection, AuditAction.WEBHOOK_CREATED, caller, webhook_id, submission.url)
                return _found(connection, webhook_id)
        except IntegrityError:
            raise ConflictError(f"there is a webhook {webhook_id!r} already") from None

    def list(self) -> list[Webhook]:
        """Return all webhooks with the counts of their deliveries, oldest first."""
        with read_transaction(self._engine) as connection:
            pending, dead = _counts(connection, is_pending), _counts(connection, is_dead)
            rows = connection.execute(_HOOKS.order_by(_hook.created_at, _hook.id)).all()
        return [_webhook(row, pending.get(row.id, 0), dead.get(row.id, 0)) for row in rows]

    def rotate(self, webhook_id: str, secret: str, overlap_seconds: float, caller: Caller = COMMAND_LINE) -> Webhook:
        """Replace the secret; the old one signs too for ``overlap_seconds``, an older one no more.

        Raises:
            NotFoundError: when there is none with this id.
        """
        values = {
            "secret": secret,
            "previous_secret": _hook.secret,
            "previous_until": now_ms() + int(overlap_seconds * 1000),
        }
        with write_transaction(self._engine) as connection:
            changed = update(webhooks).where(_hook.id == webhook_id).values(**values).returning(_hook.url)
            url = connection.execute(changed).scalar_one_or_none()
            if url is None:
                raise NotFoundError.of("webhook", webhook_id)
            record(connection, AuditAction.WEBHOOK_ROTATED, caller, webhook_id, url)
            return _found(connection, webhook_id)

    def delete(self, webhook_id: str, caller: Caller = COMMAND_LINE) -> None:
        """Delete a webhook with its deliveries.

        Raises:
            NotFoundError: when there is none with this id.
        """
        with write_transaction(self._engine) as connection:
            deleted = delete(webhooks).where(_hook.id == webhook_id).returning(_hook.url)
            url = connection.execute(deleted).scalar_one_or_none()
            if url is None:
                raise NotFoundError.of("webhook", webhook_id)
            connection.execute(delete(webhook_deliveries).where(_delivery.webhook_id == webhook_id))
            record(connection, AuditAction.WEBHOOK_DELETED, caller, webhook_id, url)


def _found(connection: Connection, webhook_id: str) -> Webhook:
    row = connection.execute(_HOOKS.where(_hook.id == webhook_id)).one()
    own = _delivery.webhook_id == webhook_id
    counted = select(_delivery.state, func.count().label("number")).where(own).group_by(_delivery.state)
    counts = {row.state: row.number for row in connection.execute(counted)}
    return _webhook(row, counts.get(DeliveryState.PENDING, 0), counts.get(DeliveryState.DEAD, 0))


def _counts(connection: Connection, condition: Any) -> dict[str, int]:  # noqa: ANN401 - a condition of SQLAlchemy's
    """Count the deliveries under a condition by webhook."""
    counted = select(_delivery.webhook_id, func.count().label("number")).where(condition).group_by(_delivery.webhook_id)
    return {row.webhook_id: row.number for row in connection.execute(counted)}


def _webhook(row: Row[Any], pending: int, dead: int) -> Webhook:
    is_rotating = row.previous_until is not None and row.previous_until > row.now
    return Webhook(
        id=row.id,
        url=row.url,
        name=row.name,
        events=tuple(WebhookEvent(event) for event in row.events.split()),
        project=row.project,
        created_at=moment(row.created_at),
        previous_secret_until=moment_or_none(row.previous_until) if is_rotating else None,
        pending=pending,
        dead=dead,
    )
