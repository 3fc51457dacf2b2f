"""The contract of the outbox: what ends is told once to each who wants to know, by one deliverer at a time."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import update

from batchwright.client.documents.audit import AuditAction
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.webhooks import (
    LONGEST_ERROR,
    DeliveryState,
    Webhook,
    WebhookEvent,
    WebhookMessage,
    WebhookSubmission,
)
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import Named
from batchwright_service.domain.callers import Caller
from batchwright_service.errors import ConflictError, NotFoundError, StaleLeaseError
from batchwright_service.problem_mapping import make_problem
from batchwright_service.store.database.schema import webhook_deliveries
from batchwright_service.store.database.transactions import write_transaction
from batchwright_service.store.models import AuditFilter, Ending
from batchwright_service.store.outbox.deliveries import MOST_TOGETHER, Backlog, DueDelivery, LeasedDelivery
from batchwright_service.store.store import Store
from tests.support.factories import recommendation
from tests.support.service.scripted import new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, claimed, ended, every_due

URL = "https://hooks.example.org/told"
AT = Caller("a" * 16, address="192.0.2.7")
SECRET = "whsec_" + "c2VjcmV0" * 4


def registered(store: Store, new_id: NewId, **wanted: Any) -> Webhook:
    """A webhook."""
    return store.webhooks.add(new_id("whk"), WebhookSubmission(url=URL, **wanted), SECRET, 50, AT)


def infeasible(identifier: str) -> Recommendation:
    """The recommendation of a tuning in which nothing fits."""
    nothing = {"feasible": False, "plan": None, "largest_micro_batch_size": None}
    return recommendation(id=identifier).model_copy(update=nothing)


def told(store: Store) -> list[WebhookMessage]:
    """Lease everything that is due, and read it."""
    found = []
    while leased := store.deliveries.lease(LEASE_SECONDS, every_due):
        found += [WebhookMessage.model_validate_json(each.body) for each in leased]
    return found


def one_leased(store: Store, lease_seconds: float = LEASE_SECONDS) -> LeasedDelivery:
    """Lease the one message that is due."""
    (leased,) = store.deliveries.lease(lease_seconds, every_due)
    return leased


def come_due(store: Store) -> None:
    """Let all pauses and leases be over, as if time had passed."""
    with write_transaction(store.engine) as connection:
        connection.execute(update(webhook_deliveries).values(next_attempt_at=0))


# --- what is told -----------------------------------------------------------------------------------------------------


def fail(store: Store, new_id: NewId) -> None:
    """A tuning that fails."""
    store.submissions.add(new_work(new_id("tun")))
    store.leases.finish(claimed(store).lease, Ending(State.FAILED, problem=make_problem(500, "host-trouble", "", "")))


def cancel_queued(store: Store, new_id: NewId) -> None:
    """A waiting tuning that is cancelled, twice."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    store.submissions.cancel(work_id)
    store.submissions.cancel(work_id)


def cancel_running(store: Store, new_id: NewId) -> None:
    """A running job that is cancelled, and handed back by its worker."""
    work_id = store.submissions.add(new_work(new_id("job"), WorkKind.JOB)).id
    lease = claimed(store).lease
    store.submissions.cancel(work_id)
    assert told(store) == []
    store.leases.hand_back(lease)


def cancel_together(store: Store, new_id: NewId) -> None:
    """One that waits of two that are cancelled together; the other has ended without being told of."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    store.submissions.cancel_all([work_id, "tun_none"])


def serve_stored(store: Store, new_id: NewId) -> None:
    """A tuning that a stored recommendation serves at once."""
    store.submissions.add_succeeded(new_work(new_id("tun")), recommendation(id=new_id("rec")))


ENDINGS: dict[WebhookEvent, list[Callable[[Store, NewId], object]]] = {
    WebhookEvent.TUNING_SUCCEEDED: [
        lambda store, new_id: ended(store, new_work(new_id("tun")), recommendation(id=new_id("rec"))),
        serve_stored,
    ],
    WebhookEvent.TUNING_INFEASIBLE: [
        lambda store, new_id: ended(store, new_work(new_id("tun")), infeasible(new_id("rec")))
    ],
    WebhookEvent.TUNING_FAILED: [fail],
    WebhookEvent.TUNING_CANCELLED: [cancel_queued, cancel_together],
    WebhookEvent.JOB_SUCCEEDED: [lambda store, new_id: ended(store, new_work(new_id("job"), WorkKind.JOB))],
    WebhookEvent.JOB_CANCELLED: [cancel_running],
}


@pytest.mark.parametrize(("event", "act"), [(event, act) for event, acts in ENDINGS.items() for act in acts])
def test_each_way_to_end_is_told_once(
    store: Store, new_id: NewId, event: WebhookEvent, act: Callable[[Store, NewId], object]
) -> None:
    """By whom ever the work is ended: one message with its event and state, and none before it ends."""
    registered(store, new_id)
    act(store, new_id)
    (message,) = told(store)
    assert message.type is event
    assert message.data is not None
    assert event.startswith(message.data.kind)
    item = store.work.get(message.data.id)
    assert (message.data.state, message.timestamp) == (item.state, item.ended_at)


def test_a_message_has_names_plan_and_cause(store: Store, new_id: NewId) -> None:
    """A receiver can say what ended without a call of the API."""
    registered(store, new_id)
    names = Named(name="nightly", project="vision", labels={"team": "a"})
    work = new_work(new_id("tun"), names=names, effective_batch_size=10)
    answer = recommendation(id=new_id("rec"))
    ended(store, work, answer)
    fail(store, new_id)
    first, second = (message.data for message in sorted(told(store), key=lambda message: message.timestamp))
    assert first is not None
    assert second is not None
    assert answer.plan is not None
    assert (first.id, first.name, first.project, first.labels) == (work.id, "nightly", "vision", {"team": "a"})
    assert (first.recommendation_id, first.feasible, first.problem_code) == (answer.id, True, None)
    assert first.micro_batch_size == answer.plan.micro_batch_size
    assert first.gradient_accumulation_steps == answer.plan.gradient_accumulation_steps
    assert (second.recommendation_id, second.feasible, second.problem_code) == (None, None, "host-trouble")


def test_events_and_projects_restrict_what_is_told(store: Store, new_id: NewId) -> None:
    """Each webhook gets its own; nothing is written for one that wants nothing of it."""
    every = registered(store, new_id)
    failures = registered(store, new_id, events=(WebhookEvent.TUNING_FAILED,))
    vision = registered(store, new_id, project="vision")
    fail(store, new_id)
    ended(store, new_work(new_id("tun"), names=Named(project="vision")))
    counts = {hook.id: hook.pending for hook in store.webhooks.list()}
    assert counts == {every.id: 2, failures.id: 1, vision.id: 1}


def test_an_end_that_is_rolled_back_is_not_told(store: Store, new_id: NewId) -> None:
    """A late report changes nothing, and a taken id of a recommendation undoes the end and its message."""
    registered(store, new_id)
    store.submissions.add(new_work(new_id("tun")))
    late = claimed(store, lease_seconds=0.0).lease
    with pytest.raises(StaleLeaseError):
        store.leases.finish(late, Ending(State.SUCCEEDED, recommendation=recommendation()))
    lease = claimed(store).lease
    ended_id = new_id("rec")
    store.submissions.add_succeeded(new_work(new_id("tun")), recommendation(id=ended_id))
    assert len(told(store)) == 1
    with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
        store.leases.finish(lease, Ending(State.SUCCEEDED, recommendation=recommendation(id=ended_id)))
    assert told(store) == []
    assert store.work.get(lease.work_id).state is State.RUNNING


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_message_is_leased_by_one_deliverer_at_a_time(store: Store, new_id: NewId) -> None:
    """Of many that look at the same moment, one gets it; when its lease ends, the next does."""
    registered(store, new_id)
    cancel_queued(store, new_id)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: store.deliveries.lease(LEASE_SECONDS, every_due), range(8)))
    assert sorted(len(leased) for leased in found) == [0] * 7 + [1]
    come_due(store)
    assert one_leased(store).attempt == 2


def test_a_deliverer_that_lost_its_lease_changes_nothing(store: Store, new_id: NewId) -> None:
    """The result of its attempt comes too late, success or failure; that of the next counts."""
    hook = registered(store, new_id)
    cancel_queued(store, new_id)
    lost = one_leased(store, lease_seconds=0.0)
    held = one_leased(store)
    assert not store.deliveries.failed(lost, "slow", None, None)
    assert not store.deliveries.delivered(lost, 200)
    assert store.deliveries.delivered(held, 204)
    (delivery,) = store.deliveries.newest(hook.id, 10)
    assert (delivery.state, delivery.attempts, delivery.last_status) == (DeliveryState.DELIVERED, 2, 204)


def test_a_webhook_holds_few_places(store: Store, new_id: NewId) -> None:
    """Of one with many messages few are offered, so that those to others are among them; only the chosen are leased."""
    full = registered(store, new_id, events=(WebhookEvent.TUNING_CANCELLED,))
    for _ in range(2 * MOST_TOGETHER):
        cancel_queued(store, new_id)
    other = registered(store, new_id)
    cancel_queued(store, new_id)
    offered: list[DueDelivery] = []

    def last(due: Sequence[DueDelivery]) -> list[str]:
        offered[:] = due
        return every_due(due)[-1:]

    (leased,) = store.deliveries.lease(LEASE_SECONDS, last)
    assert [each.webhook_id for each in offered] == [full.id] * MOST_TOGETHER + [other.id]
    assert (leased.id, leased.url, {each.url for each in offered}) == (offered[-1].id, URL, {URL})
    assert len(store.deliveries.lease(LEASE_SECONDS, every_due)) == MOST_TOGETHER


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_a_failed_message_is_due_after_its_pause_until_it_is_dead(store: Store, new_id: NewId) -> None:
    """The list shows the pause and the shortened error; sent again, it has its attempts anew and the same id."""
    hook = registered(store, new_id)
    cancel_queued(store, new_id)
    first = one_leased(store)
    assert store.deliveries.failed(first, "x" * 2 * LONGEST_ERROR, 500, 3600.0)
    (waiting,) = store.deliveries.newest(hook.id, 10)
    assert (waiting.state, waiting.last_status, waiting.last_error) == (DeliveryState.PENDING, 500, "x" * LONGEST_ERROR)
    assert waiting.next_attempt_at is not None
    assert (waiting.next_attempt_at - waiting.created_at).total_seconds() >= 3600.0
    assert store.deliveries.lease(LEASE_SECONDS, every_due) == []
    assert store.deliveries.backlog() == Backlog(pending=1, dead=0, oldest_due_seconds=0.0)
    come_due(store)
    assert store.deliveries.backlog().oldest_due_seconds > 0
    assert store.deliveries.failed(one_leased(store), "gone", None, None)
    (dead,) = store.deliveries.newest(hook.id, 10, state=DeliveryState.DEAD)
    assert (dead.next_attempt_at, dead.last_status, dead.last_error) == (None, None, "gone")
    assert dead.ended_at is not None
    assert [(row.pending, row.dead) for row in store.webhooks.list()] == [(0, 1)]
    again = store.deliveries.send_again(hook.id, dead.id)
    assert (again.state, again.attempts, again.ended_at) == (DeliveryState.PENDING, 0, None)
    leased = one_leased(store)
    assert (leased.id, leased.body, leased.attempt) == (first.id, first.body, 1)


def test_pages_of_deliveries_are_newest_first(store: Store, new_id: NewId) -> None:
    """A page begins after the id it is given, and a state restricts."""
    hook = registered(store, new_id)
    for _ in range(3):
        cancel_queued(store, new_id)
    rows = store.deliveries.newest(hook.id, 10)
    assert [row.id for row in rows] == sorted((row.id for row in rows), reverse=True)
    assert list(store.deliveries.newest(hook.id, 1, before=rows[0].id)) == [rows[1]]
    assert store.deliveries.newest(hook.id, 10, state=DeliveryState.DEAD) == []


def test_a_test_message_tells_of_nothing(store: Store, new_id: NewId) -> None:
    """It is for the one webhook, whatever its events are."""
    hook = registered(store, new_id, events=(WebhookEvent.JOB_FAILED,))
    registered(store, new_id)
    delivery = store.deliveries.add_test(hook.id, new_id("msg"))
    leased = one_leased(store)
    assert (leased.id, leased.webhook_id) == (delivery.id, hook.id)
    assert json.loads(leased.body) | {"timestamp": None} == {"type": "webhook.test", "timestamp": None, "data": None}


def test_old_messages_are_deleted(store: Store, new_id: NewId) -> None:
    """Delivered and dead ones after their times, those of deleted webhooks at once, pending ones never."""
    hook = registered(store, new_id)
    for _ in range(3):
        cancel_queued(store, new_id)
    delivered, dead = store.deliveries.lease(LEASE_SECONDS, every_due)
    store.deliveries.delivered(delivered, 200)
    store.deliveries.failed(dead, "gone", None, None)
    assert store.deliveries.prune(3600.0, 3600.0) == 0
    assert store.deliveries.prune(-1.0, 3600.0) == 1
    assert store.deliveries.prune(-1.0, -1.0) == 1
    assert [row.state for row in store.deliveries.newest(hook.id, 10)] == [DeliveryState.PENDING]
    with write_transaction(store.engine) as connection:
        connection.execute(update(webhook_deliveries).values(webhook_id="whk_none"))
    assert store.deliveries.lease(LEASE_SECONDS, every_due) == []
    assert store.deliveries.prune(3600.0, 3600.0) == 1


# --- webhooks ---------------------------------------------------------------------------------------------------------


def test_a_replaced_secret_signs_until_its_time(store: Store, new_id: NewId) -> None:
    """Both are valid meanwhile, the newest first; a second rotation drops the oldest."""
    hook = registered(store, new_id)
    cancel_queued(store, new_id)
    rotated = store.webhooks.rotate(hook.id, "second", 3600.0, AT)
    assert rotated.previous_secret_until is not None
    assert one_leased(store, 0.0).secrets == ("second", SECRET)
    store.webhooks.rotate(hook.id, "third", 3600.0, AT)
    assert one_leased(store, 0.0).secrets == ("third", "second")
    assert store.webhooks.rotate(hook.id, "fourth", 0.0, AT).previous_secret_until is None
    assert one_leased(store).secrets == ("fourth",)


def test_changes_of_webhooks_are_in_the_audit_log_without_secrets(store: Store, new_id: NewId) -> None:
    """Registered, rotated and deleted, each with the address and its caller."""
    hook = registered(store, new_id)
    store.webhooks.rotate(hook.id, "second", 0.0, AT)
    store.webhooks.delete(hook.id, AT)
    found = list(reversed(store.audit.newest(AuditFilter(), 10)))
    acts = (AuditAction.WEBHOOK_CREATED, AuditAction.WEBHOOK_ROTATED, AuditAction.WEBHOOK_DELETED)
    assert [(entry.action, entry.object_id, entry.address, entry.detail) for entry in found] == [
        (act, hook.id, AT.address, URL) for act in acts
    ]


def test_a_deleted_webhook_is_told_nothing_more(store: Store, new_id: NewId) -> None:
    """Its messages go with it, and a result that comes late changes nothing."""
    hook = registered(store, new_id)
    cancel_queued(store, new_id)
    leased = one_leased(store)
    store.webhooks.delete(hook.id, AT)
    assert not store.deliveries.failed(leased, "late", None, 0.0)
    assert store.webhooks.list() == []
    assert store.deliveries.backlog() == Backlog(0, 0, 0.0)


def test_what_is_not_there_is_named(store: Store, new_id: NewId) -> None:
    """Unknown webhooks and messages, those of another webhook included; a taken id and one webhook too many."""
    hook, other = registered(store, new_id), registered(store, new_id)
    cancel_queued(store, new_id)
    (delivery,) = store.deliveries.newest(other.id, 10)
    calls: list[Callable[[], object]] = [
        lambda: store.webhooks.rotate("whk_none", "x", 0.0),
        lambda: store.webhooks.delete("whk_none"),
        lambda: store.deliveries.newest("whk_none", 10),
        lambda: store.deliveries.add_test("whk_none", "msg_1"),
        lambda: store.deliveries.send_again(hook.id, "msg_none"),
        lambda: store.deliveries.send_again(hook.id, delivery.id),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match=r"whk_none|msg_"):
            call()
    submission = WebhookSubmission(url=URL)
    with pytest.raises(ConflictError, match=hook.id):
        store.webhooks.add(hook.id, submission, SECRET, 50)
    with pytest.raises(ConflictError, match="2 webhooks"):
        store.webhooks.add("whk_third", submission, SECRET, 2)
    assert len(store.webhooks.list()) == 2
