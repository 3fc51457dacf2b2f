"""API keys: required scopes, refusals, quotas, and the secrecy of their texts."""

import hmac
import importlib
import json
import logging
import pkgutil
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

import batchwright_service.api.routes
from batchwright.client import ApiError, Client, ClientError
from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State
from batchwright_service.api.authentication import PUBLIC_PATHS
from batchwright_service.api.docs_page import DOCS_FILES
from batchwright_service.api.events import streaming
from batchwright_service.auth import api_keys as access_module
from batchwright_service.auth.api_keys import KeyAuthenticator
from batchwright_service.domain.callers import KEYLESS, Caller
from batchwright_service.domain.key_texts import make_key
from batchwright_service.entrypoints.serve import check_and_build
from batchwright_service.errors import ConfigurationError, NotAuthenticatedError, StoreUnavailableError
from batchwright_service.fast_path import trusted_callers
from batchwright_service.fast_path.trusted_callers import TRUST_SECONDS
from batchwright_service.settings import Settings
from batchwright_service.store.api_keys import KeyStore
from batchwright_service.store.store import Store
from tests.support.factories import tuning_request
from tests.support.paths import OPENAPI
from tests.support.service.processes import PATIENCE_SECONDS
from tests.support.service.running import Running, StartService, running
from tests.support.service.scripted import ScriptedRunner, Trainer, new_work, until_stopped

TIMEOUT_SECONDS = 120.0
DOCUMENT = json.loads(OPENAPI.read_text(encoding="utf-8"))
"""The OpenAPI document, which another test compares with the service."""


@dataclass(frozen=True)
class Operation:
    """A route, as the OpenAPI document describes it."""

    method: str
    path: str
    scope: str | None

    @property
    def url(self) -> str:
        """Return a URL that the route matches, of a resource that does not exist."""
        return re.sub(r"{\w+}", "tun_" + "0" * 32, self.path)


def _operations() -> list[Operation]:
    return [
        Operation(
            method.upper(),
            path,
            next((requirement["apiKey"][0] for requirement in operation.get("security", ())), None),
        )
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    ]


GUARDED = [operation for operation in _operations() if operation.path not in PUBLIC_PATHS]
SOME = [next(operation for operation in GUARDED if operation.scope == scope) for scope in Scope]
"""An operation of each scope. What is refused before a route sees it, is refused for every one alike."""


def new_key(keys: KeyStore, *scopes: Scope, expires: float | None = None) -> str:
    """Store a key and return its text."""
    new, text = make_key("test", scopes, expires)
    keys.add(new)
    return text


def id_of(key: str) -> str:
    """Return the public part of a key."""
    return key.split("_")[1]


def bearer(key: str) -> dict[str, str]:
    """The header that carries a key."""
    return {"Authorization": f"Bearer {key}"}


def problem_in(response: httpx.Response, status: int, code: str) -> Problem:
    """Return the problem of a response, after a check of its status and code."""
    problem = Problem.model_validate_json(response.content)
    assert (response.status_code, problem.status, problem.code) == (status, status, code)
    return problem


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service that has API keys."""
    with running(tmp_path_factory.mktemp("guarded"), ScriptedRunner(37), Trainer()) as started:
        new_key(started.system.store.keys, Scope.ADMIN)
        yield started


@pytest.fixture
def short_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look keys up again at once, and let idle streams check often."""
    for module in (access_module, trusted_callers):
        monkeypatch.setattr(module, "TRUST_SECONDS", 0.02)
    monkeypatch.setattr(streaming, "_KEEP_ALIVE_SECONDS", 0.1)


# --- every route ---


@pytest.mark.parametrize("operation", GUARDED, ids=lambda operation: f"{operation.method} {operation.path}")
def test_every_route_names_its_scope(operation: Operation) -> None:
    """The document names the one scope of each operation, and the responses without it."""
    assert operation.scope in set(Scope)
    responses = DOCUMENT["paths"][operation.path][operation.method.lower()]["responses"]
    assert {"401", "403"} <= set(responses)
    assert "WWW-Authenticate" in responses["401"]["headers"]


def test_no_route_is_left_out_of_the_document() -> None:
    """Every route of every router is in the document, so that the tests here cover it."""
    names = [
        module.name
        for module in pkgutil.iter_modules(batchwright_service.api.routes.__path__, "batchwright_service.api.routes.")
    ]
    modules = [importlib.import_module(name) for name in names]
    routes = [route for module in modules if hasattr(module, "router") for route in module.router.routes]
    there = {(method, route.path) for route in routes if isinstance(route, APIRoute) for method in route.methods or ()}
    assert len(routes) == len(there)
    assert there == {(operation.method, operation.path) for operation in _operations()}


def test_only_health_and_the_document_are_public(guarded: Running) -> None:
    """Public paths need no key; an unknown path needs one."""
    page = {"/docs", *(f"/docs/{name}" for name in DOCS_FILES)}
    assert {"/livez", "/readyz", "/readyz/database", "/openapi.json", *page} == PUBLIC_PATHS
    for path in PUBLIC_PATHS:
        assert guarded.http.get(path).status_code == 200
    for path in ("/nowhere", "/livez/", "//livez", "/LIVEZ", "/docs/", "/docs/x", "/"):
        problem_in(guarded.http.get(path), 401, "not-authenticated")


def test_without_a_key_every_route_refuses(guarded: Running) -> None:
    """401 names the way to authenticate."""
    for operation in GUARDED:
        response = guarded.http.request(operation.method, operation.url)
        problem_in(response, 401, "not-authenticated")
        assert response.headers["www-authenticate"] == 'Bearer realm="batchwright"'


@pytest.mark.parametrize("operation", [*SOME, *(pytest.param(each, marks=pytest.mark.thorough) for each in GUARDED)])
def test_an_invalid_key_is_refused(guarded: Running, operation: Operation) -> None:
    """Unknown, malformed, with another secret, expired, revoked, or in another scheme: 401 with the reason."""
    keys = guarded.system.store.keys
    good, expired, revoked = (new_key(keys, Scope.ADMIN, expires=left) for left in (None, -1.0, None))
    keys.revoke(id_of(revoked))
    _, unknown = make_key("never stored", (Scope.ADMIN,))
    mixed = f"bw_{id_of(good)}_{unknown.split('_')[2]}"
    wrong = [unknown, mixed, good[:-1], good.upper(), good + "0", "x", good + " x"]
    refusals = [(f"Bearer {key}", "unknown") for key in wrong]
    refusals += [
        ("Bearer", "send one"),
        ("Bearer " + expired, "expired"),
        ("Bearer " + revoked, "revoked"),
        ("Basic " + good, "Bearer"),
    ]
    for header, word in refusals:
        response = guarded.http.request(operation.method, operation.url, headers={"Authorization": header})
        assert word in problem_in(response, 401, "not-authenticated").detail
        assert 'error="invalid_token"' in response.headers["www-authenticate"]
        assert good.split("_")[2][:-1] not in response.text


def test_without_its_scope_every_route_refuses(guarded: Running) -> None:
    """403 names the missing scope to a key with every other scope."""
    keys = guarded.system.store.keys
    others = {scope: new_key(keys, *(other for other in Scope if other not in {scope, Scope.ADMIN})) for scope in Scope}
    for operation in GUARDED:
        headers = bearer(others[Scope(str(operation.scope))])
        response = guarded.http.request(operation.method, operation.url, headers=headers)
        assert str(operation.scope) in problem_in(response, 403, "scope-missing").detail


@pytest.mark.parametrize("admin", [False, True])
def test_with_its_scope_every_route_responds(guarded: Running, *, admin: bool) -> None:
    """That scope alone is enough, and so is `admin`."""
    keys = {scope: new_key(guarded.system.store.keys, scope) for scope in Scope}
    for operation in GUARDED:
        headers = bearer(keys[Scope.ADMIN if admin else Scope(str(operation.scope))])
        response = guarded.http.request(operation.method, operation.url, headers=headers)
        assert response.status_code in {200, 404, 422}, operation


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "chrome-extension://{host}", "http://{host}.evil"])
def test_no_page_of_another_site_can_change_anything(guarded: Running, origin: str) -> None:
    """Every method that changes something refuses a foreign Origin, with a valid key too."""
    headers = bearer(new_key(guarded.system.store.keys, Scope.ADMIN))
    headers["Origin"] = origin.format(host=guarded.url.removeprefix("http://"))
    for operation in (operation for operation in GUARDED if operation.method != "GET"):
        response = guarded.http.request(operation.method, operation.url, headers=headers)
        problem_in(response, 403, "foreign-origin")


def test_two_origins_are_both_checked(guarded: Running) -> None:
    """A foreign origin is refused beside our own."""
    sent = [("Origin", guarded.url), ("Origin", "http://evil.example")]
    problem_in(guarded.http.post("/v1/jobs", headers=sent), 403, "foreign-origin")


def test_two_keys_are_refused(guarded: Running) -> None:
    """Two Authorization headers are ambiguous, even if one has a valid key."""
    good = new_key(guarded.system.store.keys, Scope.ADMIN)
    sent = [("Authorization", f"Bearer {good}"), ("Authorization", f"Bearer {good}")]
    problem_in(guarded.http.get("/v1/tunings", headers=sent), 401, "not-authenticated")


def test_an_unauthenticated_body_is_not_read(guarded: Running) -> None:
    """Without a key the response is 401 for any body: neither its length nor its JSON is checked."""
    headers = {"Content-Type": "text/plain"}
    response = guarded.http.post("/v1/tunings", content=b"{" * 3_000_000, headers=headers)
    problem_in(response, 401, "not-authenticated")


# --- without keys ---


def test_this_machine_needs_no_key_until_one_exists(start_service: StartService, short_trust: None) -> None:
    """The first key ends that, and its revocation does not restore it."""
    del short_trust
    service = start_service()
    assert service.http.get("/v1/tunings").status_code == 200
    key = new_key(service.system.store.keys, Scope.ADMIN)
    deadline = threading.Event()
    deadline.wait(0.05)
    problem_in(service.http.get("/v1/tunings"), 401, "not-authenticated")
    service.system.store.keys.revoke(id_of(key))
    deadline.wait(0.05)
    problem_in(service.http.get("/v1/tunings"), 401, "not-authenticated")


def test_a_proxied_request_is_not_local(service: Running) -> None:
    """A request from elsewhere through a proxy on this machine needs a key."""
    response = service.http.get("/v1/tunings", headers={"X-Forwarded-For": "203.0.113.7"})
    problem_in(response, 401, "not-authenticated")


def test_a_wrong_key_is_refused_where_none_is_needed(service: Running) -> None:
    """A key that is sent is always verified."""
    _, unknown = make_key("never stored", (Scope.ADMIN,))
    problem_in(service.http.get("/v1/tunings", headers=bearer(unknown)), 401, "not-authenticated")


def test_the_service_listens_on_other_addresses_once_a_key_exists(tmp_path: Path) -> None:
    """Refused at first, naming the command; then served, and closed to callers without a key on every address."""
    settings = Settings(data_dir=tmp_path, host="0.0.0.0", devices="cpu")  # noqa: S104 - not listened on
    with pytest.raises(ConfigurationError, match=r"0\.0\.0\.0.*no API key.*batchwright admin keys create"):
        check_and_build(settings)
    local = check_and_build(Settings(data_dir=tmp_path, devices="cpu"))
    assert local.context.authenticators.api_keys.authenticate(None, local=True) == KEYLESS
    new_key(local.store.keys, Scope.ADMIN)
    local.stop()
    system = check_and_build(settings)
    with pytest.raises(NotAuthenticatedError):
        system.context.authenticators.api_keys.authenticate(None, local=True)
    system.stop()


# --- verifying ---


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class CountedKeys:
    """A key store that counts its calls."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys
        self.calls: list[str] = []
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        """Return the method of the store, and count its call."""
        self.calls.append(name)
        if self.broken:
            raise StoreUnavailableError("gone")
        return getattr(self._keys, name)


@pytest.fixture
def counted(store: Store) -> CountedKeys:
    """The key store of each backend, with counted calls."""
    return CountedKeys(store.keys)


def authenticator_of(counted: CountedKeys, clock: Clock) -> KeyAuthenticator:
    """Return the authenticator under test, over counted keys."""
    return KeyAuthenticator(counted, allow_keyless_local=True, clock=clock)  # type: ignore[arg-type]


def test_a_key_is_trusted_for_seconds_only(store: Store, counted: CountedKeys) -> None:
    """A key is verified once in three seconds; a revocation counts at the next verification."""
    key = new_key(store.keys, Scope.JOBS_READ)
    clock = Clock()
    access = authenticator_of(counted, clock)
    caller = Caller(id_of(key), frozenset({Scope.JOBS_READ}), key_name="test")
    assert access.authenticate(key, local=False) == caller
    asked = len(counted.calls)
    store.keys.revoke(id_of(key))
    clock.now += TRUST_SECONDS - 0.01
    assert access.authenticate(key, local=False) == access.cached_caller(key, local=False) == caller
    assert len(counted.calls) == asked
    clock.now += 0.02
    assert access.cached_caller(key, local=False) is None
    with pytest.raises(NotAuthenticatedError, match="revoked"):
        access.authenticate(key, local=False)
    assert TRUST_SECONDS < 5


def test_a_key_is_not_trusted_beyond_its_expiry(store: Store, counted: CountedKeys) -> None:
    """A key that expires within the trusted time is looked up again then."""
    key = new_key(store.keys, Scope.JOBS_READ, expires=1.0)
    clock = Clock()
    access = authenticator_of(counted, clock)
    access.authenticate(key, local=False)
    clock.now += 1.0
    assert access.cached_caller(key, local=False) is None


def test_the_absence_of_keys_is_trusted_for_seconds_only(store: Store, counted: CountedKeys) -> None:
    """One read in three seconds; none once a key exists."""
    clock = Clock()
    access = authenticator_of(counted, clock)
    assert access.authenticate(None, local=True) == access.authenticate(None, local=True) == KEYLESS
    assert counted.calls == ["exist"]
    new_key(store.keys, Scope.ADMIN)
    clock.now += TRUST_SECONDS
    assert access.cached_caller(None, local=True) is None
    for _ in range(2):
        with pytest.raises(NotAuthenticatedError):
            access.authenticate(None, local=True)
    assert counted.calls == ["exist", "exist"]


def test_the_number_of_trusted_keys_is_bounded(
    store: Store, counted: CountedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key that was verified first is verified again."""
    monkeypatch.setattr(trusted_callers, "_MAX_CALLERS", 2)
    access = authenticator_of(counted, Clock())
    keys = [new_key(store.keys, Scope.ADMIN) for _ in range(3)]
    for key in keys:
        access.authenticate(key, local=False)
    assert [access.cached_caller(key, local=False) is None for key in keys] == [True, False, False]


def test_the_use_of_a_key_is_recorded(store: Store, counted: CountedKeys) -> None:
    """The list has the time of the last use."""
    key = new_key(store.keys, Scope.ADMIN)
    authenticator_of(counted, Clock()).authenticate(key, local=False)
    assert store.keys.list()[0].last_used_at is not None


def test_a_failed_record_of_a_use_refuses_no_caller(
    store: Store, counted: CountedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A valid key is accepted, whether or not its use is recorded."""

    def fail(*_: object) -> None:
        raise StoreUnavailableError("read-only")

    key = new_key(store.keys, Scope.ADMIN)
    monkeypatch.setattr(type(store.keys), "touch", fail)
    assert authenticator_of(counted, Clock()).authenticate(key, local=False).key_id == id_of(key)


def test_an_unavailable_store_authenticates_no_caller(store: Store, counted: CountedKeys) -> None:
    """Neither a key nor its absence is accepted without a read."""
    key = new_key(store.keys, Scope.ADMIN)
    counted.broken = True
    for given in (key, None):
        with pytest.raises(StoreUnavailableError):
            authenticator_of(counted, Clock()).authenticate(given, local=True)


def test_digests_are_compared_in_constant_time(
    store: Store, counted: CountedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known or unknown key takes one comparison in constant time."""
    compared = []

    def compare(one: str, other: str) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(
        "batchwright_service.auth.api_keys.hmac", type("Hmac", (), {"compare_digest": staticmethod(compare)})
    )
    access = authenticator_of(counted, Clock())
    access.authenticate(new_key(store.keys, Scope.ADMIN), local=False)
    for wrong in (make_key("never stored", ())[1], "nonsense"):
        with pytest.raises(NotAuthenticatedError):
            access.authenticate(wrong, local=False)
    assert compared == [(64, 64)] * 3


def test_keys_hold_256_random_bits() -> None:
    """A key has a prefix, an id, and 64 random hexadecimal digits; only its digest is stored."""
    made = [make_key("ci", (Scope.ADMIN,)) for _ in range(100)]
    assert all(re.fullmatch(r"bw_[0-9a-f]{16}_[0-9a-f]{64}", text) for _, text in made)
    assert len({text.split("_")[2] for _, text in made}) == len({new.id for new, _ in made}) == 100
    assert not [new for new, text in made if text.split("_")[2] in repr(new)]


# --- revoked while it waits ---


def test_a_stream_ends_when_its_key_does(start_service: StartService, short_trust: None) -> None:
    """A follower receives nothing more, and is refused when it reconnects."""
    del short_trust
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    key = new_key(service.system.store.keys, Scope.TUNINGS_READ, Scope.TUNINGS_WRITE)
    with Client(service.url, api_key=key) as client:
        tuning = client.tunings.submit(tuning_request())
        assert started.wait(TIMEOUT_SECONDS)
        events = client.tunings.events(tuning.id)
        assert next(events).state is State.QUEUED
        service.system.store.keys.revoke(id_of(key))
        with pytest.raises(ApiError) as caught:
            list(events)
        assert (caught.value.status, caught.value.code) == (401, "not-authenticated")


def test_a_long_poll_ends_when_its_key_does(start_service: StartService, short_trust: None) -> None:
    """The result of the wait is not disclosed to a key that was revoked during it."""
    del short_trust
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    keys = service.system.store.keys
    key = new_key(keys, Scope.TUNINGS_READ, Scope.TUNINGS_WRITE)
    with Client(service.url, api_key=key) as client:
        tuning = client.tunings.submit(tuning_request())
        assert started.wait(TIMEOUT_SECONDS)
        threading.Timer(0.2, keys.revoke, [id_of(key)]).start()
        response = httpx.get(f"{service.url}/v1/tunings/{tuning.id}", params={"wait": 1}, headers=bearer(key))
        problem_in(response, 401, "not-authenticated")


# --- owners and quotas ---


def test_only_its_owner_or_an_admin_cancels(start_service: StartService) -> None:
    """Another key of the same scopes may read the work, not cancel it; work without a key is the admin's."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    keys = service.system.store.keys
    ownerless = service.system.store.submissions.add(new_work("tun_" + "1" * 32)).id
    both = (Scope.TUNINGS_READ, Scope.TUNINGS_WRITE)
    owner, other, admin = new_key(keys, *both), new_key(keys, *both), new_key(keys, Scope.ADMIN)
    with Client(service.url, api_key=owner) as mine, Client(service.url, api_key=other) as theirs:
        tuning = mine.tunings.submit(tuning_request())
        assert theirs.tunings.get(tuning.id).key_id == id_of(owner)
        for client, tuning_id in ((theirs, tuning.id), (mine, ownerless)):
            with pytest.raises(ApiError) as caught:
                client.tunings.cancel(tuning_id)
            assert (caught.value.status, caught.value.code) == (403, "not-owner")
        assert mine.tunings.cancel(tuning.id).state in {State.CANCELLED, State.CANCELLING}
    with Client(service.url, api_key=admin) as client:
        assert client.tunings.cancel(ownerless).state in {State.CANCELLED, State.CANCELLING}


def test_a_key_queues_no_more_than_its_quota(start_service: StartService) -> None:
    """One more is 429 with `Retry-After`; a stored recommendation needs no queue entry; each key has its own quota."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)), max_queued_per_key=1)
    keys = service.system.store.keys
    one, other = (new_key(keys, Scope.TUNINGS_WRITE) for _ in range(2))
    body = [tuning_request(effective_batch_size=size).model_dump(mode="json") for size in (5, 6, 7)]
    assert service.http.post("/v1/tunings", json=body[0], headers=bearer(one)).status_code == 202
    assert started.wait(TIMEOUT_SECONDS)
    assert service.http.post("/v1/tunings", json=body[1], headers=bearer(one)).status_code == 202
    refused = service.http.post("/v1/tunings", json=body[2], headers=bearer(one))
    assert "1 tunings and jobs queued (limit 1)" in problem_in(refused, 429, "quota-exceeded").detail
    assert int(refused.headers["retry-after"]) >= 1
    assert service.http.post("/v1/tunings", json=body[2], headers=bearer(other)).status_code == 202


def test_a_key_that_used_its_device_seconds_is_refused(start_service: StartService) -> None:
    """The time of one tuning counts at the next submission, of jobs too."""

    def take_time(_size: int, _should_stop: Callable[[], bool]) -> None:
        threading.Event().wait(0.01)

    service = start_service(ScriptedRunner(37, take_time), max_device_seconds_per_key=0.02)
    key = new_key(service.system.store.keys, Scope.ADMIN)
    with Client(service.url, api_key=key) as client:
        done = client.tunings.wait(client.tunings.submit(tuning_request()).id)
        assert done.recommendation is not None
        with pytest.raises(ApiError) as caught:
            client.tunings.submit(tuning_request(effective_batch_size=7))
        assert (caught.value.status, caught.value.code) == (429, "quota-exceeded")
        with pytest.raises(ApiError) as caught:
            client.jobs.submit(done.recommendation)
        assert caught.value.code == "quota-exceeded"
        assert client.tunings.submit(tuning_request()).id == done.id


# --- the SDK, and where the text of a key never is ---


def test_the_sdk_takes_its_key_from_the_environment(guarded: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument takes precedence over the variable; surrounding newlines are removed."""
    key = new_key(guarded.system.store.keys, Scope.TUNINGS_READ)
    with Client(guarded.url) as client, pytest.raises(ApiError, match="not-authenticated"):
        client.devices.list()
    monkeypatch.setenv("BATCHWRIGHT_API_KEY", f"{key}\n")
    with Client(guarded.url) as client, httpx.Client(base_url=guarded.url, timeout=PATIENCE_SECONDS) as http:
        assert client.gpus.list() == Client(http=http).gpus.list()
        assert list(client.tunings.list()) == []
    with Client(guarded.url, api_key="another") as client, pytest.raises(ApiError, match="not-authenticated"):
        client.devices.list()


@pytest.mark.parametrize("spoilt", ["bw_1 s3cr3t", "s3cr3t\nX: y", "s3cr3t\x00", "s3cr3té"])
def test_the_sdk_does_not_disclose_an_invalid_key(spoilt: str) -> None:
    """The key is refused at once, and the error does not hold it."""
    with pytest.raises(ClientError, match="BATCHWRIGHT_API_KEY") as caught:
        Client(api_key=spoilt)
    assert "s3cr3t" not in str(caught.value)


def test_the_text_of_a_key_is_not_disclosed(
    start_service: StartService, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Neither debug logs, nor the data folder, nor the outputs of the service and the SDK hold it."""
    caplog.set_level(logging.DEBUG)
    service = start_service()
    keys = service.system.store.keys
    good, revoked = new_key(keys, Scope.ADMIN), new_key(keys, Scope.ADMIN)
    keys.revoke(id_of(revoked))
    shown = [repr(keys.list())]
    with Client(service.url, api_key=good) as client:
        tuning = client.tunings.wait(client.tunings.submit(tuning_request()).id)
        shown += [repr(client), repr(vars(client)["_http"]), tuning.model_dump_json()]
    for key in (good, revoked, good[:-1] + "z"):
        shown.append(service.http.get("/v1/jobs", headers=bearer(key)).text)
    shown.append(caplog.text)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for key in (good, revoked):
        secret = key.split("_")[2][:-1]
        assert id_of(key).encode() in stored
        assert secret.encode() not in stored
        assert not [text for text in shown if secret in text]
