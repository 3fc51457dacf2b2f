"""The plans of the outbox's polling: due messages are found by their index, however many were delivered."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event, insert, select, text

from batchwright.client.documents.webhooks import DeliveryState, WebhookEvent, WebhookSubmission
from batchwright_service.store.database.schema import now_ms, webhook_deliveries
from batchwright_service.store.database.transactions import write_transaction
from batchwright_service.store.outbox.deliveries import MOST_TOGETHER
from batchwright_service.store.store import Store
from tests.support.service.stores import LEASE_SECONDS, NewId

DELIVERED, WAITING, DUE = 4_000, 200, 3
TABLE = "webhook_deliveries"


@pytest.fixture
def outbox(store: Store, new_id: NewId) -> Store:
    """An outbox in which nearly all was delivered, some waits for its next attempt, little is due, and little dead."""
    hook = new_id("whk")
    store.webhooks.add(hook, WebhookSubmission(url="https://hooks.example.org/"), "whsec_" + "c2VjcmV0" * 4, 50)
    with write_transaction(store.engine) as connection:
        now = connection.execute(select(now_ms())).scalar_one()
        common = {"webhook_id": hook, "event": WebhookEvent.TEST, "body": "{}" * 200, "created_at": now}
        rows = [
            common | {"id": new_id("msg"), "state": state, "next_attempt_at": now + delay, "ended_at": ended}
            for count, state, delay, ended in (
                (DELIVERED, DeliveryState.DELIVERED, -1000, now),
                (WAITING, DeliveryState.PENDING, 3_600_000, None),
                (DUE, DeliveryState.PENDING, -1000, None),
                (DUE, DeliveryState.DEAD, -1000, now),
            )
            for _ in range(count)
        ]
        connection.execute(insert(webhook_deliveries), rows)
        connection.execute(text("ANALYZE"))
    return store


def plans_of(store: Store, call: Callable[[], object]) -> list[str]:
    """The plans of the statements that a call executes on the messages, as texts of the database."""
    seen: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_more: object) -> None:
        if TABLE in statement:
            seen.append((statement, parameters))

    event.listen(store.engine, "before_cursor_execute", note)
    call()
    event.remove(store.engine, "before_cursor_execute", note)
    assert seen
    explain = "EXPLAIN" if store.engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    with store.engine.connect() as connection:  # rolled back
        found = [connection.exec_driver_sql(f"{explain} {statement}", parameters) for statement, parameters in seen]
        return ["\n".join(str(row[-1]) for row in plan) for plan in found]


def assert_indexed(plan: str) -> None:
    """No plan reads the table from its beginning to its end."""
    for line in plan.splitlines():
        words = line.strip(" ->")
        assert not words.startswith(f"Seq Scan on {TABLE}"), plan
        assert not (words.startswith(f"SCAN {TABLE}") and " INDEX " not in words), plan


def test_a_look_for_due_messages_reads_by_an_index(outbox: Store) -> None:
    """It is made every second by every API process, mostly for nothing."""
    leased = []
    plans = plans_of(
        outbox, lambda: leased.append(outbox.deliveries.lease(LEASE_SECONDS, lambda due: [each.id for each in due]))
    )
    assert len(leased[0]) == MOST_TOGETHER
    for plan in plans:
        assert_indexed(plan)
    assert "webhook_deliveries_due" in plans[0]


def test_the_backlog_reads_by_indexes(outbox: Store) -> None:
    """It is counted at every scrape."""
    backlog = []
    plans = plans_of(outbox, lambda: backlog.append(outbox.deliveries.backlog()))
    assert (backlog[0].pending, backlog[0].dead) == (WAITING + DUE, DUE)
    for plan in plans:
        assert_indexed(plan)
