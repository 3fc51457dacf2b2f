"""A database that is not what it was: faults that do not end by themselves, and documents of earlier versions."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, select, text, update

from batchwright.client.documents.states import State
from batchwright.schemas.requests import TuningRequest
from batchwright_service.errors import StoreBrokenError
from batchwright_service.store.database.migrate import upgrade
from batchwright_service.store.database.schema import probes, recommendations, work_items, workers
from batchwright_service.store.database.transactions import open_engine, write_transaction
from batchwright_service.store.models import Beat
from batchwright_service.store.store import Store, open_store
from batchwright_service.worker.lease import LeaseHolder, LeaseTerms
from tests.service.store.database.test_migrations import revisions
from tests.support.factories import probe_result, tuning_request
from tests.support.service.asking import body, ended, problem_in
from tests.support.service.running import Running, running
from tests.support.service.scripted import ScriptedRunner, Trainer, new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, claimed, engine_at, on_device


def _replaced(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)


def _moved(file: Path) -> None:
    file.rename(file.with_suffix(".old"))


@pytest.mark.parametrize("change", [Path.unlink, _replaced, _moved])
def test_a_file_that_is_no_longer_there_takes_no_work(
    migrated_file: Path, tmp_path: Path, new_id: NewId, change: Callable[[Path], None]
) -> None:
    """What is accepted after its loss would be gone at the end; nor is a new file made in its place."""
    file = tmp_path / "store.db"
    file.write_bytes(migrated_file.read_bytes())
    store = Store(open_engine(f"sqlite:///{file}"))
    try:
        store.queue.check()
        change(file)
        exists = file.exists()
        for use in (lambda: store.submissions.add(new_work(new_id("tun"))), lambda: store.work.heads([])):
            with pytest.raises(StoreBrokenError, match="deleted or replaced while the service runs"):
                use()
        assert file.exists() == exists
    finally:
        store.close()


def test_a_lost_column_makes_the_service_unready(database_url: str) -> None:
    """Nothing would end in a table that lacks one, though the database can be written."""
    store = open_store(database_url)
    try:
        with write_transaction(store.engine) as connection:
            connection.execute(text("ALTER TABLE recommendations RENAME COLUMN speedup TO other"))
        with pytest.raises(StoreBrokenError, match="speedup"):
            store.queue.check()
    finally:
        store.close()


def test_a_permanent_fault_is_not_tried_again(store: Store, new_id: NewId) -> None:
    """A worker hands the fault on, where it waits for a database that may come back."""
    calls: list[float] = []

    def fail() -> None:
        calls.append(time.monotonic())
        raise StoreBrokenError("the database lacks a column")

    store.submissions.add(new_work(new_id("tun")))
    holder = LeaseHolder(claimed(store).lease, LeaseTerms(60.0, 1.0), time.monotonic())
    with pytest.raises(StoreBrokenError):
        holder.retry(fail)
    assert len(calls) == 1


def test_a_stored_field_that_this_version_lacks_is_left_out(store: Store, new_id: NewId) -> None:
    """Work of an earlier version is read, and ends, after a field was taken out of a document, however deep."""
    request = tuning_request()
    document = request.model_dump(mode="json")
    document["dropped"] = document["spec"]["dropped"] = document["spec"]["model"]["dropped"] = 1
    work = replace(new_work(new_id("tun")), payload=json.dumps(document))
    store.submissions.add(work)
    assert TuningRequest.from_stored(claimed(store).item.payload) == request
    result = probe_result(4)
    stored = {**result.model_dump(mode="json"), "dropped": 1}
    with write_transaction(store.engine) as connection:
        connection.execute(
            probes.insert().values(work_id=work.id, ordinal=1, recorded_at=0, document=json.dumps(stored))
        )
    assert [found.result for found in store.evidence.probes(work.id)] == [result]


def _objective(document: dict[str, Any]) -> None:
    document["request"]["objective"] = "cheapest"


def _spec(document: dict[str, Any]) -> None:
    del document["spec"]


def _outcome(document: dict[str, Any]) -> None:
    document["outcome"] = "LATER"


@pytest.mark.parametrize(
    ("column", "change", "unreadable"),
    [
        (work_items.c.payload, _spec, "/v1/tunings/{tuning}"),
        (recommendations.c.document, _objective, "/v1/recommendations/{recommendation}/exports/pytorch"),
        (probes.c.document, _outcome, "/v1/tunings/{tuning}/probes"),
    ],
)
def test_a_document_that_cannot_be_read_stops_nothing_else(
    tmp_path: Path, column: Column[str], change: Callable[[dict[str, Any]], None], unreadable: str
) -> None:
    """A value that this version does not know, or a field that it lacks: named where it is asked for alone."""
    with running(tmp_path, ScriptedRunner(37), Trainer()) as service:
        first = _tuned(service)
        with write_transaction(service.system.store.engine) as connection:
            rows = select(column, *column.table.primary_key)
            for stored, *key in connection.execute(rows).all():
                document = json.loads(stored)
                change(document)
                same = (of_key == value for of_key, value in zip(column.table.primary_key, key, strict=True))
                connection.execute(update(column.table).where(*same).values({column: json.dumps(document)}))
        path = unreadable.format(tuning=first["id"], recommendation=first["recommendation_id"])
        problem_in(service.http.get(path), 500, "unreadable-document")
        for path in ("tunings", "recommendations", "devices", "summary", "queue"):
            assert service.http.get(f"/v1/{path}").status_code == 200
        _tuned(service, effective_batch_size=50)
        _tuned(service)


def test_a_device_that_cannot_be_read_is_not_listed(store: Store) -> None:
    """A worker of a later version serves it. The others go on."""
    known, later = on_device("cuda:0"), on_device("cuda:1")
    devices = (known, later)
    store.devices.beat(Beat(LEASE_SECONDS, devices=devices, changed=frozenset(served.slot for served in devices)))
    document = later.model_dump(mode="json")
    document["device"]["kind"] = "later"
    with write_transaction(store.engine) as connection:
        changed = update(workers).where(workers.c.slot == later.slot)
        connection.execute(changed.values(document=json.dumps(document)))
    assert [announced.served for announced in store.devices.list()] == [known]


def test_waiting_work_that_cannot_be_read_fails_by_name(tmp_path: Path) -> None:
    """And the work behind it is done. A job's progress is left out: it goes on without."""
    database_url = f"sqlite:///{tmp_path}/store.db"
    document = tuning_request().model_dump(mode="json")
    _spec(document)
    unreadable, behind = "tun_" + "1" * 32, "tun_" + "2" * 32
    store = open_store(database_url)
    store.submissions.add(new_work(unreadable, payload=json.dumps(document)))
    store.submissions.add(new_work(behind))
    with write_transaction(store.engine) as connection:
        connection.execute(work_items.update().where(work_items.c.id == behind).values(progress='{"later": 1}'))
    store.close()
    with running(tmp_path, ScriptedRunner(37), Trainer(), database_url=database_url) as service:
        assert ended(service.http, f"/v1/tunings/{behind}")["state"] == "SUCCEEDED"
        item = service.system.store.work.get(unreadable)
    assert item.state is State.FAILED
    assert item.problem is not None
    assert item.problem.code == "unreadable-document"
    assert "spec" in item.problem.detail


def _tuned(service: Running, **changes: Any) -> dict[str, Any]:
    found = ended(service.http, service.http.post("/v1/tunings", json=body(**changes)).headers["Location"])
    assert found["state"] == "SUCCEEDED"
    return found


@pytest.mark.parametrize("revision", [path.stem.split("_")[0][1:] for path in revisions()])
def test_a_database_of_every_revision_becomes_ready(database_url: str, tmp_path: Path, revision: str) -> None:
    """It is brought to the newest one, and a tuning ends there."""
    with engine_at(database_url) as engine:
        upgrade(engine, revision)
    with running(tmp_path, ScriptedRunner(37), Trainer(), database_url=database_url) as service:
        assert service.http.get("/readyz").status_code == 200
        _tuned(service)
