"""Creating, listing and revoking API keys over HTTP."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchwright.client import Client
from batchwright.client.documents.api_keys import Scope
from batchwright.client.errors import ConflictError, NotAllowedError, NotFoundError
from batchwright_service.domain.key_texts import make_key
from tests.support.service.running import Running, running
from tests.support.service.scripted import ScriptedRunner, Trainer

SUBMISSION = {"name": "ci", "scopes": ["tunings:read"]}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service that is going to have keys."""
    with running(tmp_path_factory.mktemp("guarded"), ScriptedRunner(37), Trainer()) as started:
        yield started


@pytest.fixture(scope="module")
def admin(guarded: Running) -> Iterator[Client]:
    """A client with an `admin` key that was created in the database."""
    new, text = make_key("operator", (Scope.ADMIN,))
    guarded.system.store.keys.add(new)
    with Client(guarded.url, api_key=text) as client:
        yield client


def test_the_first_key_is_not_created_over_http(shared_service: Running) -> None:
    """Anyone on this machine could create and keep it: the response names the command, and creates no key."""
    response = shared_service.http.post("/v1/keys", json=SUBMISSION)
    assert (response.status_code, response.json()["code"]) == (403, "first-key")
    assert "batchwright admin keys create" in response.json()["detail"]
    assert shared_service.http.get("/v1/keys").json() == {"items": []}


def test_a_key_is_created_used_listed_and_revoked(admin: Client, guarded: Running) -> None:
    """Its text is in one response and works; the list omits the text; a revoked key stays in the list."""
    made = admin.keys.create("scheduler", ["tunings:read", Scope.TUNINGS_READ], expires_in_days=90)
    assert (made.name, made.scopes) == ("scheduler", (Scope.TUNINGS_READ,))
    assert made.expires_at is not None
    assert (made.expires_at - made.created_at).days in {89, 90}
    with Client(guarded.url, api_key=made.key) as client:
        assert len(client.devices.list()) == 1
        with pytest.raises(NotAllowedError):
            client.keys.list()
    (listed,) = (key for key in admin.keys.list() if key.id == made.id)
    assert dict(listed) | {"key": made.key} == dict(made) | {"last_used_at": listed.last_used_at}
    ended = admin.keys.revoke(made.id)
    assert ended.revoked_at is not None
    assert admin.keys.revoke(made.id) == ended
    assert ended in admin.keys.list()


def test_a_key_cannot_revoke_itself(admin: Client) -> None:
    """409 with the remedy; the key stays valid."""
    own = admin.keys.list()[0].id
    with pytest.raises(ConflictError, match=r"own-key.*batchwright admin keys revoke"):
        admin.keys.revoke(own)
    assert admin.keys.list()[0].revoked_at is None


@pytest.mark.parametrize("key_id", ["0" * 16, "0" * 15, "'; --", "a/b"])
def test_an_unknown_key_is_not_found(admin: Client, key_id: str) -> None:
    """Well-formed and malformed ids are treated alike."""
    with pytest.raises(NotFoundError):
        admin.keys.revoke(key_id)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "  "),
        ("name", "a\nb"),
        ("name", "a\u202eb"),
        ("name", "n" * 101),
        ("scopes", []),
        ("scopes", ["everything"]),
        ("expires_in_days", 0),
        ("expires_in_days", -1),
        ("expires_in_days", 4000),
        ("expires_in_days", "90"),
        ("digest", "d"),
    ],
)
def test_invalid_fields_are_named(admin: Client, guarded: Running, field: str, value: object) -> None:
    """422 names the field at fault, and no key is created."""
    before = len(admin.keys.list())
    made = make_key("operator", (Scope.ADMIN,))
    guarded.system.store.keys.add(made[0])
    headers = {"Authorization": f"Bearer {made[1]}"}
    response = guarded.http.post("/v1/keys", json=SUBMISSION | {field: value}, headers=headers)
    assert response.status_code == 422
    assert {fault["field"].partition(".")[0] for fault in response.json()["errors"]} == {field}
    assert len(admin.keys.list()) == before + 1


def test_the_text_of_a_key_is_in_one_response_only(
    admin: Client, guarded: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """No cache keeps that response, the log names the creator, and no file holds the text."""
    caplog.set_level(logging.DEBUG)
    made = admin.keys.create("ci", [Scope.ADMIN])
    text = guarded.http.post("/v1/keys", json=SUBMISSION, headers={"Authorization": f"Bearer {made.key}"})
    assert (text.status_code, text.headers["cache-control"]) == (201, "no-store")
    assert f"key {text.json()['id']} was created by key {made.id}" in caplog.text
    folder = Path(guarded.settings.data_dir)
    stored = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for key in (made.key, text.json()["key"]):
        secret = key.split("_")[2]
        assert secret not in caplog.text + repr(admin.keys.list()) + repr(made)
        assert secret.encode() not in stored
