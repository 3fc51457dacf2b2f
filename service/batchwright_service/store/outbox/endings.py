"""Write messages to the outbox, within the transactions that end work."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, RowMapping, insert, select

from batchwright.client.documents.states import State, outcome_of
from batchwright.client.documents.webhooks import DeliveryState, EndedWork, WebhookEvent, WebhookMessage
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.store.database.mapping import labels_of, moment
from batchwright_service.store.database.schema import now_ms, recommendations, webhook_deliveries, webhooks, work_items

_NAMED = ("id", "kind", "state", "name", "project", "labels", "model", "effective_batch_size", "recommendation_id")
_COLUMNS = (
    *(work_items.c[name] for name in (*_NAMED, "problem_code", "ended_at")),
    *(recommendations.c[name] for name in ("feasible", "micro_batch_size", "gradient_accumulation_steps")),
)
_RECOMMENDED = work_items.outerjoin(recommendations, recommendations.c.id == work_items.c.recommendation_id)


def record_endings(connection: Connection, work_ids: Sequence[str]) -> None:
    """Add a message for each webhook that wants to know that this work has ended.

    The work must have its final state and its recommendation in this transaction already.
    """
    if not work_ids:
        return
    receivers = connection.execute(select(webhooks.c.id, webhooks.c.events, webhooks.c.project)).mappings().all()
    if not receivers:
        return
    ended = connection.execute(select(*_COLUMNS).select_from(_RECOMMENDED).where(work_items.c.id.in_(work_ids))).all()
    new_id = IdentifierSource().new
    rows = [
        _delivery(new_id("msg"), receiver["id"], event, row)
        for row in ended
        for event in [WebhookEvent(f"{row.kind}.{outcome_of(State(row.state), feasible=row.feasible)}")]
        for receiver in receivers
        if _is_wanted(receiver, event, row.project)
    ]
    if rows:
        times = {"created_at": now_ms(), "next_attempt_at": now_ms()}
        connection.execute(insert(webhook_deliveries).values([row | times for row in rows]))


def _is_wanted(receiver: RowMapping, event: WebhookEvent, project: str | None) -> bool:
    wanted = receiver["events"].split()
    return (not wanted or event in wanted) and receiver["project"] in {None, project}


def _delivery(message_id: str, webhook_id: str, event: WebhookEvent, row: Row[Any]) -> dict[str, Any]:
    values = {name: value for name, value in row._mapping.items() if name not in {"labels", "ended_at"}}  # noqa: SLF001 - its public name
    work = EndedWork(**values, labels=labels_of(row.labels))
    message = WebhookMessage(type=event, timestamp=moment(row.ended_at), data=work)
    return {
        "id": message_id,
        "webhook_id": webhook_id,
        "event": event,
        "work_id": row.id,
        "body": message.model_dump_json(),
        "state": DeliveryState.PENDING,
    }
