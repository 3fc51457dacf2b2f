"""`batchwright admin webhooks`, as an operator meets it."""

import json
import subprocess
from pathlib import Path

import pytest

from batchwright_service.store.store import open_store
from tests.support.command import called
from tests.support.service.stores import every_due

HOOK = "https://hooks.example.org/told"
WIDE = 200


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """A database that the first command makes."""
    return f"sqlite:///{tmp_path / 'store.db'}"


def webhooks(database_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command's answer; the operator allows one host."""
    url = ("--database-url", database_url)
    return called("admin", "webhooks", *arguments, *url, columns=WIDE, BATCHWRIGHT_WEBHOOK_HOSTS="hooks.example.org")


def test_a_webhook_is_added_listed_and_removed(database_url: str) -> None:
    """Its secret is shown once, on standard output; its events and its project are those that were named."""
    added = webhooks(database_url, "add", HOOK, "--name", "chat", "--event", "job.failed", "--project", "vision")
    secret = added.stdout.strip()
    assert secret.startswith("whsec_")
    (row,) = (json.loads(line) for line in webhooks(database_url, "list", "--json").stdout.splitlines())
    assert (row["url"], row["name"], row["events"], row["project"]) == (HOOK, "chat", ["job.failed"], "vision")
    assert row["id"] in added.stderr
    listed = webhooks(database_url, "list").stdout
    assert "job.failed" in listed
    assert secret not in listed
    assert row["id"] in webhooks(database_url, "remove", row["id"]).stdout
    assert webhooks(database_url, "list", "--json").stdout == ""


def test_dead_messages_are_listed_and_sent_again(database_url: str) -> None:
    """With the error of the last attempt; all dead ones are sent again, or one by its id."""
    added = json.loads(webhooks(database_url, "add", HOOK, "--json").stdout)
    store = open_store(database_url)
    for number in range(2):
        store.deliveries.add_test(added["id"], f"msg_{number:032x}")
    for leased in store.deliveries.lease(60.0, every_due):
        assert store.deliveries.failed(leased, "503 Service Unavailable", 503, None)
    listed = webhooks(database_url, "deliveries", added["id"], "--state", "dead").stdout
    assert listed.count("503 Service Unavailable") == 2
    only = webhooks(database_url, "deliveries", added["id"], "--limit", "1", "--json").stdout.splitlines()
    assert [json.loads(line)["id"] for line in only] == [f"msg_{1:032x}"]
    assert "1 message again" in webhooks(database_url, "resend", added["id"], f"msg_{0:032x}").stdout
    assert "1 message again" in webhooks(database_url, "resend", added["id"]).stdout
    assert webhooks(database_url, "deliveries", added["id"], "--state", "dead", "--json").stdout == ""
    assert len(store.deliveries.lease(60.0, every_due)) == 2
    store.close()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("add", "https://elsewhere.example.org/"), "BATCHWRIGHT_WEBHOOK_HOSTS does not allow"),
        (("add", "ftp://hooks.example.org/"), "url"),
        (("add", HOOK, "--event", "job.done"), "job.done"),
        (("add", HOOK, "--project", "no project"), "project"),
        (("remove", "whk_0"), "whk_0"),
        (("deliveries", "whk_0"), "whk_0"),
        (("resend", "whk_0", "msg_0"), "msg_0"),
    ],
)
def test_what_is_wrong_is_said(database_url: str, arguments: tuple[str, ...], word: str) -> None:
    """Exit code 2 and the value on standard error."""
    ended = webhooks(database_url, *arguments)
    assert ended.returncode == 2
    assert word in ended.stderr
    assert not ended.stdout
