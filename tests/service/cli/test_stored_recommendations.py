"""`batchwright admin recommendations`, as an operator meets it."""

import json
from pathlib import Path

from sqlalchemy import text

from batchwright.client import Client
from batchwright_service.store.database.transactions import read_transaction
from tests.support.command import called
from tests.support.factories import tuning_request
from tests.support.service.running import running
from tests.support.service.scripted import ScriptedRunner, Trainer
from tests.support.service.stores import engine_at

WIDE = 200


def test_an_upgrade_is_looked_into(tmp_path: Path) -> None:
    """The stale ones with their changes, and the counted tuning that confirms one, on the database of a service."""
    data = tmp_path / "data"
    with running(data, ScriptedRunner(37), Trainer()) as service, Client(service.url) as client:
        name = client.tunings.tune(tuning_request(effective_batch_size=74), name="Night run").id
        url = ("--database-url", service.settings.url)
        assert name in called("admin", "recommendations", "list", "--current", *url, columns=WIDE).stdout
        assert name not in called("admin", "recommendations", "list", "--stale", *url, columns=WIDE).stdout
    with running(data, ScriptedRunner(37), Trainer(), torch="2.9") as service, Client(service.url) as client:
        listed = called("admin", "recommendations", "list", "--stale", *url, columns=WIDE).stdout
        assert "stale: torch 2.8 to 2.9" in listed
        assert "2 x 37" in listed
        said = called("admin", "recommendations", "confirm", name, *url).stdout
        tuning_id = said.removeprefix("Queued ").strip(".\n")
        confirmed = client.tunings.wait(tuning_id).recommendation
        assert confirmed is not None
        (row,) = (
            row
            for row in map(json.loads, called("admin", "recommendations", "list", "--json", *url).stdout.splitlines())
            if row["id"] == name
        )
        assert (row["stale"], row["confirmed_by"]) == (False, confirmed.id)
        assert f"Confirmed before by {tuning_id}." in called("admin", "recommendations", "confirm", name, *url).stdout
        with engine_at(service.settings.url) as engine, read_transaction(engine) as connection:
            assert connection.execute(text("SELECT sum(hits) FROM recommendation_hits")).scalar_one() == 1
    assert "unknown: no live worker" in called("admin", "recommendations", "list", *url, columns=WIDE).stdout


def test_an_unknown_recommendation_is_an_error(tmp_path: Path) -> None:
    """With its id, on standard error."""
    name = f"rec_{'0' * 32}"
    ended = called("admin", "recommendations", "confirm", name, "--database-url", f"sqlite:///{tmp_path / 'store.db'}")
    assert ended.returncode != 0
    assert name in ended.stderr
