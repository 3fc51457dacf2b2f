"""One attempt at a message: signed for those who verify, and bounded whatever the receiver does."""

import json
import time
from dataclasses import replace

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from batchwright_service.store.outbox.deliveries import LeasedDelivery
from batchwright_service.webhooks.receivers import AllowedReceivers
from batchwright_service.webhooks.sending import Attempt, Sender
from batchwright_service.webhooks.signatures import new_secret
from tests.support.service.processes import PATIENCE_SECONDS
from tests.support.service.receiver import Receiver, dripping, endless, raw, receiving, silent, status

LOOPBACK = ["127.0.0.0/8"]
BODY = '{"type":"webhook.test","data":"é"}'


def leased(url: str, *secrets: str) -> LeasedDelivery:
    """A message to an address."""
    return LeasedDelivery(
        id="msg_1",
        webhook_id="whk_1",
        url=url,
        secrets=secrets or (new_secret(),),
        body=BODY,
        attempt=1,
        now=time.time(),
        age_seconds=0.0,
    )


def sent(receiver: Receiver, timeout_seconds: float = PATIENCE_SECONDS) -> Attempt:
    """Send a message to a receiver that is allowed."""
    return Sender(AllowedReceivers([receiver.host], LOOPBACK), timeout_seconds).send(leased(receiver.url))


def test_a_receiver_verifies_each_valid_secret() -> None:
    """With the package of Standard Webhooks: while a secret is replaced, both; another one, or a changed body, not."""
    first, second = new_secret(), new_secret()
    with receiving() as receiver:
        sender = Sender(AllowedReceivers([receiver.host], LOOPBACK), PATIENCE_SECONDS)
        assert sender.send(leased(receiver.url, second, first)) == Attempt(204)
    (request,) = receiver.received
    assert request.path == "/told?by=batchwright"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["webhook-id"] == "msg_1"
    for secret in (first, second):
        assert Webhook(secret).verify(request.body, dict(request.headers)) == json.loads(BODY)
    for secret, body in ((new_secret(), request.body), (first, request.body + b" ")):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(body, dict(request.headers))
    late = dict(request.headers) | {"webhook-timestamp": "1700000000"}
    with pytest.raises(WebhookVerificationError):
        Webhook(first).verify(request.body, late)


def test_an_error_names_status_and_answer() -> None:
    """Printable and shortened, whatever the receiver answers."""
    with receiving(status(500, b"no \x1b[31mroom\n" + b"x" * 10_000), status(404)) as receiver:
        failed = sent(receiver)
        assert failed.status == 500
        assert failed.error is not None
        assert failed.error.startswith("the receiver answered 500: no  [31mroom xxx")
        assert len(failed.error) < 300
        assert sent(receiver) == Attempt(404, "the receiver answered 404")


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(code: int) -> None:
    """Where to a receiver sends us, nothing arrives: the body is for the registered address alone."""
    with receiving() as other, receiving(status(code, headers={"Location": other.url})) as receiver:
        attempt = sent(receiver)
    assert (attempt.status, attempt.error) == (code, f"the receiver answered {code}: redirects are not followed")
    assert other.received == []


def test_a_silent_receiver_takes_no_longer_than_allowed() -> None:
    """Neither one that says nothing, nor one that sends a byte now and then."""
    with receiving() as receiver:
        receiver.replies = [silent(receiver.released), dripping(receiver.released)]
        for _ in range(2):
            attempt = sent(receiver, timeout_seconds=0.3)
            assert attempt.status is None
            assert attempt.error is not None
            assert "took too long" in attempt.error


def test_an_endless_answer_is_cut() -> None:
    """The status counts; the rest is neither kept nor waited for."""
    with receiving(endless) as receiver:
        assert sent(receiver) == Attempt(200)


def test_a_receiver_that_is_no_longer_allowed_gets_nothing() -> None:
    """The operator's lists count at each attempt: another host, and an address that is not public."""
    with receiving() as receiver:
        other = Sender(AllowedReceivers(["hooks.example.org"], LOOPBACK), PATIENCE_SECONDS)
        assert "BATCHWRIGHT_WEBHOOK_HOSTS" in str(other.send(leased(receiver.url)).error)
        private = Sender(AllowedReceivers([receiver.host]), PATIENCE_SECONDS)
        assert "127.0.0.1, which is not public" in str(private.send(leased(receiver.url)).error)
    assert receiver.received == []


def test_a_receiver_that_is_away_or_talks_no_http_is_named() -> None:
    """What a socket or a parser raises becomes the error of the attempt."""
    with receiving(raw(b"SSH-2.0-OpenSSH\r\n\r\n")) as receiver:
        assert "ProtocolError" in str(sent(receiver).error)
    assert "refused" in str(sent(receiver).error)
    encrypted = replace(leased(receiver.url.replace("http:", "https:")))
    with receiving() as plain:
        host = plain.host.replace("http:", "https:")
        sender = Sender(AllowedReceivers([host], LOOPBACK), PATIENCE_SECONDS)
        assert "TLS" in str(sender.send(replace(encrypted, url=f"{host}/told")).error)
