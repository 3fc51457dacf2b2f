"""`batchwright admin keys`, as an operator meets it."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from batchwright.client import ApiError, Client
from tests.support.command import called
from tests.support.service.running import StartService

ARGUMENTS_WRONG = 2


def keys(database_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command's answer."""
    return called("admin", "keys", *arguments, "--database-url", database_url)


def used_for(client: Client, seconds: float) -> None:
    """Call the service again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        client.devices.list()


def test_a_key_is_made_used_listed_and_revoked(start_service: StartService) -> None:
    """On the database of a service that runs: the key works at once, is shown once, and ends within five seconds."""
    service = start_service()
    url = service.settings.url
    made = keys(url, "create", "scheduler", "--scope", "tunings:read", "--expires-in-days", "90")
    key = made.stdout.strip()
    key_id, secret = key.split("_")[1:]
    assert key_id in made.stderr
    assert secret not in made.stderr
    with Client(service.url, api_key=key) as client:
        assert len(client.devices.list()) == 1
        listed = keys(url, "list")
        assert key_id in listed.stdout
        assert secret not in listed.stdout + listed.stderr
        (row,) = (json.loads(line) for line in keys(url, "list", "--json").stdout.splitlines())
        assert (row["id"], row["name"], row["scopes"], row["revoked_at"]) == (
            key_id,
            "scheduler",
            ["tunings:read"],
            None,
        )
        assert row["last_used_at"] is not None
        assert "revoked" in keys(url, "revoke", key_id).stdout
        with pytest.raises(ApiError, match="revoked"):
            used_for(client, 240.0)  # ends at the first call that is refused, five seconds later


def test_a_key_is_made_before_there_is_a_service(tmp_path: Path) -> None:
    """The database is made with it; as JSON the key is in the field `key`, with all that is listed later."""
    url = f"sqlite:///{tmp_path / 'new' / 'store.db'}"
    made = json.loads(keys(url, "create", "admin of the day", "--scope", "admin", "--json").stdout)
    (listed,) = (json.loads(line) for line in keys(url, "list", "--json").stdout.splitlines())
    assert made.pop("key").startswith(f"bw_{listed['id']}_")
    assert made == listed


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("create", "ci"), "--scope"),
        (("create", "ci", "--scope", "everything"), "everything"),
        (("create", "", "--scope", "admin"), "NAME"),
        (("create", "ci", "--scope", "admin", "--expires-in-days", "-1"), "--expires-in-days"),
        (("revoke", "0123456789abcdef"), "there is no API key"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    """Exit code 2 and the reason on standard error; no key is made."""
    ended = keys(f"sqlite:///{tmp_path / 'store.db'}", *arguments)
    assert ended.returncode == ARGUMENTS_WRONG
    assert word in ended.stderr
    assert not ended.stdout


def test_a_first_key_that_can_make_no_others_says_so(tmp_path: Path) -> None:
    """With the command that makes one; silent once an admin's key is there."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    first = keys(url, "create", "ci", "--scope", "tunings:read")
    assert first.returncode == 0
    assert "batchwright admin keys create admin --scope admin" in first.stderr
    admin = keys(url, "create", "admin", "--scope", "admin")
    later = keys(url, "create", "more", "--scope", "tunings:read")
    assert "Note" not in admin.stderr + later.stderr
