"""Webhooks through the whole service: told when work ends, tried again, given up, sent again; by several processes."""

import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update
from standardwebhooks.webhooks import Webhook

from batchwright.client import Client
from batchwright.client.documents.api_keys import KeySubmission, Scope
from batchwright.client.documents.webhooks import DeliveryState, WebhookSubmission
from batchwright.client.errors import ApiError, NotAllowedError, NotFoundError
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.application.api_keys import KeyCases
from batchwright_service.store.database.schema import webhook_deliveries
from batchwright_service.store.database.transactions import write_transaction
from batchwright_service.store.store import Store
from batchwright_service.webhooks.deliverer import Deliverer, Schedule
from batchwright_service.webhooks.sending import Attempt
from batchwright_service.webhooks.signatures import new_secret
from tests.support.factories import tuning_request
from tests.support.service.processes import Api, slow_service, wait_until
from tests.support.service.receiver import Receiver, receiving, silent, status
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import new_work
from tests.support.service.stores import NewId, engine_at

QUICK = Schedule(attempts=3, first_pause_seconds=0.01, timeout_seconds=60.0)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that takes everything."""
    with receiving() as listening:
        yield listening


@pytest.fixture
def told(start_service: StartService, receiver: Receiver) -> Running:
    """A service that may tell the receiver."""
    return start_service(
        webhook_hosts=(receiver.host,),
        webhook_networks=("127.0.0.0/8",),
        webhook_attempts=2,
        webhook_first_pause_seconds=0.01,
    )


def has_ended(client: Client, webhook_id: str) -> None:
    """Wait until every message to a webhook is delivered or dead."""
    wait_until(lambda: not list(client.webhooks.deliveries(webhook_id, state=DeliveryState.PENDING)))


def test_a_tuning_and_a_job_are_told_when_they_end(told: Running, receiver: Receiver) -> None:
    """Each with a signature that verifies; the list has both as delivered."""
    with told.client as client:
        hook = client.webhooks.create(receiver.url, name="team")
        tuning = client.tunings.wait(client.tunings.submit(tuning_request()).id)
        assert tuning.recommendation is not None
        job = client.jobs.wait(client.jobs.submit(tuning.recommendation.id, TrainingRequest(updates=2)).id)
        wait_until(lambda: len(receiver.received) == 2)
        verifier = Webhook(hook.secret)
        bodies = [verifier.verify(request.body, dict(request.headers)) for request in receiver.received]
        told_of = {body["type"]: body["data"]["id"] for body in bodies}
        assert told_of == {"tuning.succeeded": tuning.id, "job.succeeded": job.id}
        has_ended(client, hook.id)
        found = list(client.webhooks.deliveries(hook.id, page_size=1))
        assert [(row.work_id, row.state, row.attempts) for row in found] == [
            (job.id, DeliveryState.DELIVERED, 1),
            (tuning.id, DeliveryState.DELIVERED, 1),
        ]
        assert {row.id for row in found} == {request.headers["webhook-id"] for request in receiver.received}
        metrics = told.http.get("/metrics").text
    assert 'batchwright_webhook_delivery_seconds_count{result="delivered"} 2.0' in metrics
    assert 'batchwright_webhook_backlog{state="pending"} 0.0' in metrics


def test_a_message_is_tried_again_then_dead_then_sent_again(told: Running, receiver: Receiver) -> None:
    """With one id throughout; the list shows the last error, and the dead count until it is delivered after all."""
    receiver.replies = [status(503, b"later")]
    with told.client as client:
        hook = client.webhooks.create(receiver.url)
        message = client.webhooks.test(hook.id)
        has_ended(client, hook.id)
        (dead,) = client.webhooks.deliveries(hook.id, state="dead")
        assert (dead.attempts, dead.last_status, dead.last_error) == (2, 503, "the receiver answered 503: later")
        assert [(row.pending, row.dead) for row in client.webhooks.list()] == [(0, 1)]
        assert 'batchwright_webhook_backlog{state="dead"} 1.0' in told.http.get("/metrics").text
        receiver.replies = [status(200)]
        assert client.webhooks.resend(hook.id, dead.id).state is DeliveryState.PENDING
        has_ended(client, hook.id)
        (delivered,) = client.webhooks.deliveries(hook.id)
        assert (delivered.state, delivered.attempts, delivered.last_error) == (DeliveryState.DELIVERED, 1, None)
    assert [request.headers["webhook-id"] for request in receiver.received] == [message.id] * 3
    assert len({request.body for request in receiver.received}) == 1


def test_a_slow_receiver_delays_no_other(start_service: StartService, receiver: Receiver) -> None:
    """While one says nothing, the messages to another arrive."""
    receiver.replies = [silent(receiver.released)]
    with receiving() as quick:
        hosts, networks = (receiver.host, quick.host), ("127.0.0.0/8",)
        told = start_service(webhook_hosts=hosts, webhook_networks=networks, webhook_timeout_seconds=60.0)
        with told.client as client:
            slow_hook, quick_hook = client.webhooks.create(receiver.url), client.webhooks.create(quick.url)
            for _ in range(20):
                client.webhooks.test(slow_hook.id)
            wait_until(lambda: bool(receiver.received))
            for _ in range(5):
                client.webhooks.test(quick_hook.id)
            has_ended(client, quick_hook.id)
            assert len(quick.received) == 5
            assert [(row.pending, row.dead) for row in client.webhooks.list() if row.id == slow_hook.id] == [(20, 0)]
        receiver.replies = [status(200)]
        receiver.released.set()


def test_two_deliverers_share_the_messages(store: Store, new_id: NewId) -> None:
    """Each message is sent once, by one or the other, while none of them is killed."""
    store.webhooks.add(new_id("whk"), WebhookSubmission(url="https://hooks.example.org"), new_secret(), 50)
    for _ in range(30):
        store.submissions.cancel(store.submissions.add(new_work(new_id("tun"))).id)
    sent: Counter[str] = Counter()
    lock = threading.Lock()

    def deliverer() -> Deliverer:
        def send(leased: object) -> Attempt:
            with lock:
                sent[leased.id] += 1  # type: ignore[attr-defined]
            return Attempt(200)

        return Deliverer(store.deliveries, send, QUICK, lambda _result, _seconds: None)

    both = [deliverer(), deliverer()]
    for each in both:
        each.start()
        each.start()
    wait_until(lambda: store.deliveries.backlog().pending == 0)
    for each in both:
        each.stop()
        each.stop()
    assert sorted(sent.values()) == [1] * 30


def test_a_sender_that_breaks_makes_as_many_attempts_as_any(store: Store, new_id: NewId) -> None:
    """An error that nobody expected is a failed attempt, after the last of which the message is dead; others go on."""
    for name in ("broken", "sound"):
        hook = store.webhooks.add(new_id("whk"), WebhookSubmission(url=f"https://{name}.example.org"), new_secret(), 50)
        store.deliveries.add_test(hook.id, new_id("msg"))
    told = threading.Event()

    def send(leased: object) -> Attempt:
        if "broken" in leased.url:  # type: ignore[attr-defined]
            raise RuntimeError("of the test")
        told.set()
        return Attempt(200)

    deliverer = Deliverer(store.deliveries, send, QUICK, lambda _result, _seconds: None)
    deliverer.start()
    wait_until(lambda: told.is_set() and store.deliveries.backlog().dead == 1)
    deliverer.stop()
    broken = next(hook for hook in store.webhooks.list() if "broken" in hook.url)
    (dead,) = store.deliveries.newest(broken.id, 10)
    assert (dead.attempts, dead.last_error) == (3, "the message could not be sent: RuntimeError")


def test_attempts_that_nobody_could_record_are_bounded(store: Store, new_id: NewId) -> None:
    """A message that ends the process each time, for example, is not sent again without an end."""
    hook = store.webhooks.add(new_id("whk"), WebhookSubmission(url="https://hooks.example.org"), new_secret(), 50)
    store.deliveries.add_test(hook.id, new_id("msg"))
    with write_transaction(store.engine) as connection:
        connection.execute(update(webhook_deliveries).values(attempts=QUICK.attempts))
    deliverer = Deliverer(store.deliveries, lambda _: Attempt(200), QUICK, lambda _result, _seconds: None)
    deliverer.start()
    wait_until(lambda: store.deliveries.backlog().dead == 1)
    deliverer.stop()


def test_receivers_that_hang_delay_none_that_answers(start_service: StartService, receiver: Receiver) -> None:
    """Neither four webhooks at one host, nor sixteen hosts that say nothing."""
    with ExitStack() as stack:
        hanging = [stack.enter_context(receiving()) for _ in range(16)]
        for each in hanging:
            each.replies = [silent(each.released)]
            stack.callback(each.released.set)
        hosts = (receiver.host, *(each.host for each in hanging))
        told = start_service(
            webhook_hosts=hosts, webhook_networks=("127.0.0.0/8",), webhook_timeout_seconds=60.0, webhook_attempts=1
        )
        with told.client as client:
            for each in (*hanging[:1] * 4, *hanging[1:]):
                hook = client.webhooks.create(each.url)
                for _ in range(3):
                    client.webhooks.test(hook.id)
            good = client.webhooks.create(receiver.url)
            for count in range(1, 4):
                client.webhooks.test(good.id)
                wait_until(lambda count=count: len(receiver.received) == count)  # type: ignore[misc]
            has_ended(client, good.id)
            assert sum(row.pending for row in client.webhooks.list()) == 3 * 19
        for each in hanging:
            each.replies = [status(200)]


def test_an_odd_status_is_listed(told: Running, receiver: Receiver) -> None:
    """A receiver may answer with a number that HTTP does not define, and the list of its deliveries stays readable."""
    receiver.replies = [status(600), status(999), status(799)]
    with told.client as client:
        hook = client.webhooks.create(receiver.url)
        for _ in range(3):
            client.webhooks.test(hook.id)
        has_ended(client, hook.id)
        found = [row.last_status for row in client.webhooks.deliveries(hook.id)]
    assert set(found) <= {600, 799, 999}
    assert len(found) == 3


@pytest.mark.usefixtures("starts")
def test_a_killed_service_tells_after_its_restart(tmp_path: Path, receiver: Receiver) -> None:
    """Killed with kill -9 while the receiver has not answered: the same message comes again, none is lost."""
    receiver.replies = [silent(receiver.released)]
    environment = {
        "BATCHWRIGHT_WEBHOOK_HOSTS": receiver.host,
        "BATCHWRIGHT_WEBHOOK_NETWORKS": "127.0.0.0/8",
        "BATCHWRIGHT_WEBHOOK_TIMEOUT_SECONDS": "0.5",
        "BATCHWRIGHT_WEBHOOK_FIRST_PAUSE_SECONDS": "0.1",
    }
    data, journal = tmp_path / "data", tmp_path / "journal"
    with slow_service(data, journal, 0.0, environment=environment) as service:
        api = Api(service.url)
        made = api.http.post("/v1/webhooks", json={"url": receiver.url}).raise_for_status().json()
        tuning = api.submit("/v1/tunings", json.loads(tuning_request().model_dump_json()))
        wait_until(lambda: bool(receiver.received))
        service.end(signal.SIGKILL)
        api.http.close()
    receiver.replies = [status(200)]
    receiver.released.set()
    with engine_at(f"sqlite:///{data / 'batchwright.db'}") as engine, write_transaction(engine) as connection:
        connection.execute(update(webhook_deliveries).values(next_attempt_at=0))  # as if the lease had ended
    with slow_service(data, journal, 0.0, environment=environment) as service:
        api = Api(service.url)
        path = f"/v1/webhooks/{made['id']}/deliveries"
        api.when(path, lambda found: [row["state"] for row in found["items"]] == ["delivered"])
        assert tuning.endswith(api.get(path)["items"][0]["work_id"])
        api.http.close()
        service.end(signal.SIGTERM)
    assert len({request.headers["webhook-id"] for request in receiver.received}) == 1
    for request in receiver.received:
        Webhook(made["secret"]).verify(request.body, dict(request.headers))


def test_pauses_grow_with_chance_to_a_bound() -> None:
    """Four times as long each, within a fifth, and none after the last attempt."""
    schedule = Schedule(attempts=10, first_pause_seconds=5.0, timeout_seconds=10.0)
    pauses = [schedule.pause_after(attempt) for attempt in range(1, 11)]
    expected = [5.0, 20.0, 80.0, 320.0, 1280.0, 5120.0, 20_480.0, 21_600.0, 21_600.0]
    assert pauses[:9] == [pytest.approx(seconds, rel=0.2) for seconds in expected]
    assert pauses[9] is None
    assert len({schedule.pause_after(1) for _ in range(20)}) > 1


def test_administrators_alone_manage_webhooks_on_allowed_hosts(told: Running, receiver: Receiver) -> None:
    """Secrets are in the responses that make them, and nowhere else; other scopes and hosts are refused."""
    keys = KeyCases(told.system.store.keys)
    admin = keys.create(KeySubmission(name="operator", scopes=(Scope.ADMIN,)))
    reader = keys.create(KeySubmission(name="reader", scopes=(Scope.TUNINGS_READ, Scope.TUNINGS_WRITE)))
    with Client(told.url, api_key=reader.key) as client, pytest.raises(NotAllowedError):
        client.webhooks.create(receiver.url)
    with Client(told.url, api_key=admin.key) as client:
        with pytest.raises(ApiError, match="BATCHWRIGHT_WEBHOOK_HOSTS") as refused:
            client.webhooks.create("https://elsewhere.example.org")
        assert refused.value.problem.errors[0].field == "url"
        hook = client.webhooks.create(receiver.url, name="team", events=["job.failed"], project="vision")
        rotated = client.webhooks.rotate(hook.id, 60.0)
        assert rotated.previous_secret_until is not None
        assert hook.secret != rotated.secret
        client.webhooks.test(hook.id)
        wait_until(lambda: bool(receiver.received))
        for secret in (hook.secret, rotated.secret):
            Webhook(secret).verify(receiver.received[0].body, dict(receiver.received[0].headers))
        with httpx.Client(base_url=told.url, headers={"Authorization": f"Bearer {admin.key}"}) as http:
            paths = ("/v1/webhooks", f"/v1/webhooks/{hook.id}/deliveries", "/v1/audit")
            texts = [http.get(path).raise_for_status().text for path in paths]
            assert http.get(paths[1], params={"cursor": "t1"}).json()["code"] == "invalid-cursor"
        assert not [text for text in texts if hook.secret in text or rotated.secret in text]
        assert hook.secret not in repr(hook)
        client.webhooks.delete(hook.id)
        assert client.webhooks.list() == ()
        with pytest.raises(NotFoundError, match=hook.id):
            client.webhooks.test(hook.id)


def test_nothing_is_delivered_where_no_host_is_allowed(service: Running) -> None:
    """Webhooks are off by default, and the refusal says how to allow a host."""
    assert service.system.deliverer is None
    with service.client as client, pytest.raises(ApiError, match="allowed: none"):
        client.webhooks.create("https://hooks.example.org")
