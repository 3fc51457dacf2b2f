"""The SDK over a network that fails: which calls are retried, and for how long."""

import asyncio
import uuid
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from batchwright.client import (
    ApiError,
    AsyncClient,
    Call,
    Client,
    ClientError,
    ConflictError,
    ConnectionFailedError,
    InvalidRequestError,
    NotAllowedError,
    NotAuthenticatedError,
    NotFoundError,
    QuotaExceededError,
    ServiceUnavailableError,
    UnexpectedResponseError,
)
from batchwright.client.documents.work import TuningPage
from batchwright.client.documents.workers import Health
from batchwright.client.http_messages import retry_after
from batchwright.client.resources.api import AsyncCalls
from batchwright.schemas.estimates import EstimateRequest
from tests.support.factories import mlp_spec, tuning_request
from tests.support.service.scripted_network import (
    RESET,
    Chunks,
    Clock,
    Driver,
    Script,
    all_names,
    page,
    problem,
    tuning,
)

# --- retries ---


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        RESET,
        httpx.ReadTimeout("silent"),
        httpx.RemoteProtocolError("cut off"),
        problem(429, "quota-exceeded"),
        problem(503, "store-unavailable"),
        httpx.Response(502, text="<h1>Bad gateway</h1>"),
        httpx.Response(504, text="<h1>Gateway timeout</h1>"),
    ],
)
def test_transient_errors_are_retried(drive: Driver, clock: Clock, failure: Any) -> None:
    """Lost connections, silence, 429, 503, and a proxy that misses its service."""
    script = Script([failure, failure, page("tun_1")])
    assert drive(script, all_names) == ["tun_1"]
    assert len(script.seen) == 3
    assert len(clock.pauses) == 2


def test_pauses_double_up_to_a_bound_with_jitter(drive: Driver, clock: Clock) -> None:
    """From half a second to ten, and never less than half of that."""
    drive(Script([RESET] * 8 + [page()]), all_names, retry_seconds=300.0)
    bounds = [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(clock.pauses, bounds, strict=True))
    assert len(set(clock.pauses)) == len(clock.pauses)


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(drive: Driver, clock: Clock, status: int) -> None:
    """No try comes before `Retry-After`."""
    drive(Script([problem(status, Retry_After="17"), page()]), all_names)
    assert clock.pauses == [17.0]


def test_a_retry_after_of_zero_keeps_the_pauses(drive: Driver, clock: Clock) -> None:
    """The pauses are those without the header."""
    drive(Script([problem(503, Retry_After="0")] * 3 + [page()]), all_names)
    assert all(pause >= bound / 2 for pause, bound in zip(clock.pauses, [0.5, 1.0, 2.0], strict=True))


def test_a_retry_after_beyond_the_budget_raises_at_once(drive: Driver, clock: Clock) -> None:
    """The error comes at once, and says when."""
    script = Script([problem(429, "quota-exceeded", Retry_After="3600")])
    with pytest.raises(QuotaExceededError) as caught:
        drive(script, all_names)
    assert caught.value.retry_after_seconds == 3600.0
    assert (len(script.seen), clock.pauses) == (1, [])


def test_the_budget_bounds_the_tries(drive: Driver, clock: Clock) -> None:
    """What fails for good fails with its last error, within the budget."""
    began = clock.now
    with pytest.raises(ConnectionFailedError, match="connection reset"):
        drive(Script([problem(503), RESET]), all_names, retry_seconds=20.0)
    assert 5.0 < clock.now - began <= 20.0


def test_a_budget_of_zero_means_one_try(drive: Driver, clock: Clock) -> None:
    """`retry_seconds=0` is no retries at all."""
    script = Script([problem(503, Retry_After="0")])
    with pytest.raises(ServiceUnavailableError):
        drive(script, all_names, retry_seconds=0.0)
    assert (len(script.seen), clock.pauses) == (1, [])


@pytest.mark.parametrize(
    "body",
    [
        lambda calls: calls.tunings.cancel("x"),
        lambda calls: calls.jobs.cancel("x"),
        lambda calls: calls.jobs.configure("x"),
        lambda calls: calls.estimates.create(EstimateRequest(spec=mlp_spec(), effective_batch_size=8, gpus=("T4",))),
    ],
)
def test_idempotent_posts_are_retried_without_a_key(drive: Driver, clock: Clock, body: Any) -> None:
    """Cancelling, configuring and estimating create nothing twice."""
    script = Script([RESET, problem(404)])
    with pytest.raises(NotFoundError):
        drive(script, body)
    assert (len(script.seen), len(clock.pauses)) == (2, 1)
    assert not [request for request in script.seen if "Idempotency-Key" in request.headers]


# --- what never is ---


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequestError),
        (401, NotAuthenticatedError),
        (403, NotAllowedError),
        (404, NotFoundError),
        (405, ApiError),
        (409, ConflictError),
        (413, InvalidRequestError),
        (415, InvalidRequestError),
        (422, InvalidRequestError),
        (500, ApiError),
        (504, ServiceUnavailableError),
    ],
)
def test_each_status_raises_its_error(drive: Driver, clock: Clock, status: int, kind: type[ApiError]) -> None:
    """The error carries the problem, and the call is not retried."""
    script = Script([problem(status, "the-code", X_Request_ID="r-1")])
    with pytest.raises(ApiError) as caught:
        drive(script, all_names)
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.code, caught.value.problem.detail) == (status, "the-code", "d")
    assert caught.value.request_id == "r-1"
    assert (len(script.seen), clock.pauses) == (1, [])


@pytest.mark.parametrize("failure", [RESET, httpx.ConnectError("refused"), problem(429), problem(503, Retry_After="1")])
def test_a_call_that_is_not_idempotent_is_sent_once(drive: Driver, clock: Clock, failure: Any) -> None:
    """A call that is neither idempotent nor keyed is never repeated, whatever went wrong."""
    script = Script([failure, page()])
    with pytest.raises(ClientError):
        drive(script, lambda calls: calls.call(TuningPage, Call("POST", "/v1/elsewhere")))
    assert (len(script.seen), clock.pauses) == (1, [])


def test_a_custom_call_with_a_key_is_retried(drive: Driver, clock: Clock) -> None:
    """The key makes it repeatable; it goes along as a header."""
    script = Script([RESET, page()])
    drive(script, lambda calls: calls.call(TuningPage, Call("POST", "/v1/elsewhere", idempotency_key="k")))
    assert [request.headers["Idempotency-Key"] for request in script.seen] == ["k", "k"]
    assert len(clock.pauses) == 1


@pytest.mark.parametrize("failure", [RESET, problem(503, "not-ready", Retry_After="1")])
def test_health_checks_are_not_retried(drive: Driver, clock: Clock, failure: Any) -> None:
    """An error is the result of a health check."""

    async def ask(calls: AsyncCalls) -> Health:
        return await calls.readyz()

    with pytest.raises(ClientError):
        drive(Script([failure, httpx.Response(200, json={"status": "ok"})]), ask)
    assert clock.pauses == []


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host", "http://", "//host", "", "http://a b"])
def test_a_malformed_address_is_refused_at_once(address: str) -> None:
    """The error shows what one looks like."""
    for kind in (Client, AsyncClient):
        with pytest.raises(ClientError, match=r"http://127\.0\.0\.1:8000"):
            kind(address)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"base_url": 5}, "the address 5 is malformed"),
        ({"base_url": b"http://localhost"}, "the address b'http://localhost' is malformed"),
        ({"base_url": "http://localhost:99999999"}, "has a port above 65535"),
        ({"api_key": 5}, "`api_key` must be a text, not int"),
        ({"api_key": "a\nb"}, "the API key .* holds spaces"),
        ({"timeout_seconds": 0}, "`timeout_seconds` must be a number of seconds of at least 0.001, not 0"),
        ({"timeout_seconds": float("nan")}, "`timeout_seconds` .* not nan"),
        ({"timeout_seconds": float("inf")}, "`timeout_seconds` .* not inf"),
        ({"timeout_seconds": "30"}, "`timeout_seconds` .* not '30'"),
        ({"timeout_seconds": None}, "`timeout_seconds` .* not None"),
        ({"retry_seconds": -1}, "`retry_seconds` must be a number of seconds of at least 0, not -1"),
        ({"retry_seconds": "long"}, "`retry_seconds` .* not 'long'"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], words: str) -> None:
    """Before a request is sent."""
    for kind in (Client, AsyncClient):
        with pytest.raises(ClientError, match=words):
            kind(**arguments)


def test_a_client_closes_its_own_connections_only() -> None:
    """As a context manager or by name, any number of times; those of a given client belong to its owner."""

    def answer(_request: httpx.Request) -> httpx.Response:
        return page("tun_1")

    async def of_asyncio() -> None:
        async with AsyncClient() as own:
            pass
        await own.aclose()
        with pytest.raises(ClientError, match="has been closed"):
            await own.devices.list()
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test") as given:
            async with AsyncClient("http://elsewhere", http=given) as client:
                assert await all_names(client) == ["tun_1"]
            assert not given.is_closed

    with Client() as own:
        pass
    own.close()
    with pytest.raises(ClientError, match="has been closed"):
        own.devices.list()
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test") as given:
        with Client("http://elsewhere", http=given) as client:
            assert [row.id for row in client.tunings.list()] == ["tun_1"]
        assert not given.is_closed
    asyncio.run(of_asyncio())


def test_an_unsendable_request_is_not_retried(drive: Driver, clock: Clock) -> None:
    """A fault of the caller's own is an error at once."""
    script = Script([httpx.LocalProtocolError("Illegal header value")])
    with pytest.raises(ClientError, match="Illegal header value") as caught:
        drive(script, all_names)
    assert not isinstance(caught.value, ConnectionFailedError)
    assert clock.pauses == []


# --- malformed responses ---


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, text="<h1>Log in to the wireless network</h1>"),
        httpx.Response(200, json={"items": 7}),
        httpx.Response(200, content=b""),
        httpx.Response(200, content=b"\xff\xfe\x00"),
    ],
)
def test_a_malformed_response_is_an_error_of_the_sdk(drive: Driver, clock: Clock, response: httpx.Response) -> None:
    """The call is not retried, and never raises an error of pydantic or httpx."""
    with pytest.raises(UnexpectedResponseError, match="TuningPage"):
        drive(Script([response]), all_names)
    assert clock.pauses == []


def test_an_undecodable_body_is_an_error_of_the_sdk(drive: Driver) -> None:
    """Content that is not compressed as it says."""

    def spoilt(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=Chunks([b"not gzip"]))

    with pytest.raises(UnexpectedResponseError, match="cannot be read"):
        drive(Script([spoilt]), all_names)


def test_a_refusal_without_a_problem_shows_the_text(drive: Driver) -> None:
    """A proxy's page becomes an ApiError with the status and the text, and a redirect is not followed."""
    with pytest.raises(ApiError, match="Teapot") as caught:
        drive(Script([httpx.Response(418, text="<h1>Teapot</h1>")]), all_names)
    assert (caught.value.status, caught.value.code) == (418, "not-a-problem-document")
    with pytest.raises(ApiError) as caught:
        drive(Script([httpx.Response(307, headers={"Location": "http://elsewhere/"})]), all_names)
    assert caught.value.status == 307


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        (" 12 ", 12.0),
        ("9" * 400, float("inf")),
        ("Thu, 01 Jan 2026 00:01:00 GMT", 60.0),
        ("Thu, 01 Jan 2026 00:01:00 -0000", 60.0),
        ("Wed, 31 Dec 2025 00:00:00 GMT", 0.0),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("nan", None),
        ("²", None),
        ("soon", None),
        ("Thu, 99 Jan 2026 00:00:00 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str, seconds: float | None) -> None:
    """Any other value is ignored."""
    assert retry_after(text, datetime(2026, 1, 1, tzinfo=UTC)) == seconds


# --- what creates ---


def test_a_submission_keeps_its_key_over_retries(drive: Driver, clock: Clock) -> None:
    """The same UUID and the same body each time, also while the first request is in flight; the next has another."""
    script = Script([RESET, problem(409, "idempotency-key-in-flight", Retry_After="1"), problem(503), tuning()])

    async def submit_twice(calls: AsyncCalls) -> None:
        await calls.tunings.submit(tuning_request())
        await calls.tunings.submit(tuning_request())

    drive(script, submit_twice)
    keys = [request.headers["Idempotency-Key"] for request in script.seen]
    assert len(keys) == 5
    assert len(set(keys[:4])) == len({request.content for request in script.seen[:4]}) == 1
    assert uuid.UUID(keys[0]).version == uuid.UUID(keys[4]).version == 4
    assert keys[4] != keys[0]
    assert len(clock.pauses) == 3


def test_the_caller_may_give_the_key(drive: Driver) -> None:
    """The key of the caller is sent."""
    script = Script([tuning()])
    drive(script, lambda calls: calls.tunings.submit(tuning_request(), idempotency_key="slurm-7-0"))
    assert script.seen[0].headers["Idempotency-Key"] == "slurm-7-0"


def test_a_deletion_with_a_lost_response_succeeds(drive: Driver, clock: Clock) -> None:
    """The second try finds nothing more; without a first try there was nothing to delete."""
    drive(Script([RESET, problem(404, "not-found")]), lambda calls: calls.tunings.delete("tun_1"))
    assert len(clock.pauses) == 1
    with pytest.raises(NotFoundError):
        drive(Script([problem(404, "not-found")]), lambda calls: calls.tunings.delete("tun_1"))


def test_an_identifier_stays_one_part_of_the_path(drive: Driver) -> None:
    """Whatever it holds."""
    script = Script([problem(404)])
    with pytest.raises(NotFoundError):
        drive(script, lambda calls: calls.tunings.get("../jobs?x=1#y z"))
    assert script.seen[0].url.raw_path == b"/v1/tunings/..%2Fjobs%3Fx%3D1%23y%20z"
