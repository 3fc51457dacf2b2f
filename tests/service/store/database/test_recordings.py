"""The database of each released version is opened, and every row and document in it is read."""

from pathlib import Path

import pytest
from sqlalchemy import Text, func, select, text, type_coerce, update

import batchwright
from batchwright.client.documents.states import WorkKind
from batchwright.client.documents.webhooks import WebhookMessage
from batchwright.client.documents.work import EventKind, JobRequest
from batchwright.schemas.requests import TuningRequest
from batchwright_service.domain.conditions import Conditions
from batchwright_service.errors import NewerDocumentError
from batchwright_service.store.database.schema import (
    StoredDocument,
    events,
    fleets,
    idempotency_keys,
    metadata,
    now_ms,
    work_items,
    workers,
)
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.models import AuditFilter, RecommendationFilter
from batchwright_service.store.store import Store, open_store
from tests.support.service.asking import problem_in
from tests.support.service.recorded_database import KEY, RECORDINGS, SESSION, restore
from tests.support.service.running import running
from tests.support.service.scripted import ScriptedRunner, Trainer
from tests.support.service.stores import engine_at, every_due

ALL = 200
recordings = pytest.mark.parametrize("recording", sorted(RECORDINGS.glob("*.sql")), ids=lambda path: path.stem)


@pytest.fixture
def recorded_url(database_url: str, recording: Path) -> str:
    """A database with the rows of a recording; devices, clusters and requests are as recent as they were then."""
    with engine_at(database_url) as engine:
        restore(engine, recording)
        with write_transaction(engine) as connection:
            connection.execute(update(workers).values(heartbeat_at=now_ms()))
            connection.execute(update(fleets).values(reported_at=now_ms()))
            connection.execute(update(idempotency_keys).values(created_at=now_ms()))
    return database_url


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_this_version_has_a_recording_with_rows_of_every_kind(database_url: str) -> None:
    """Every table, every column of documents, every kind of event and of model."""
    with engine_at(database_url) as engine:
        restore(engine, RECORDINGS / f"{batchwright.__version__}.sql")
        with read_transaction(engine) as connection:
            columns = [column for table in metadata.tables.values() for column in table.columns]
            kept = [column for column in columns if isinstance(column.type, StoredDocument) or column.primary_key]
            counts = {str(column): connection.execute(select(func.count(column))).scalar_one() for column in kept}
            kinds = set(connection.execute(select(events.c.kind)).scalars())
    assert [column for column, count in counts.items() if not count] == []
    assert kinds == set(EventKind)
    store = open_store(database_url)
    tunings = [store.work.get(row.id) for row in store.work.newest(WorkKind.TUNING, ALL)]
    specs = {TuningRequest.model_validate_json(item.payload).spec.model.kind for item in tunings}
    assert specs == {"reference", "transformers", "python", "command"}
    store.close()


@recordings
def test_the_store_reads_every_row(recorded_url: str) -> None:
    """Each document is valid, and what belongs to it is found."""
    store = open_store(recorded_url)
    for kind, request in ((WorkKind.TUNING, TuningRequest), (WorkKind.JOB, JobRequest)):
        for row in store.work.newest(kind, ALL):
            item = store.work.get(row.id)
            request.model_validate_json(item.payload)
            assert [event.id for event in store.evidence.events(row.id)] == list(range(1, item.events + 1))
            assert len(store.evidence.probes(row.id)) == item.probes
    listed = store.recommendations.newest(RecommendationFilter(), ALL)
    assert [store.recommendations.get(row.id).id for row in listed] == [row.id for row in listed]
    assert [Conditions.model_validate_json(found).kind for found in store.recommendations.conditions()]
    assert store.residuals.newest("card", "gpt", ALL)
    holders = {announced.served.slot for announced in store.devices.list() if announced.running_id}
    assert holders == {"test card/cuda:0", "test card/cuda:1"}
    assert [reported.report.engine for reported in store.fleet.reports()] == ["ray"]
    assert store.submissions.find_request("", "first") is not None
    assert [key.name for key in store.keys.list()] == ["ci"]
    assert store.sessions.find(SESSION) is not None
    assert store.audit.newest(AuditFilter(), ALL)
    assert store.statistics.totals(None).misses
    assert store.queue.waiting(ALL)
    (webhook,) = store.webhooks.list()
    assert [WebhookMessage.model_validate_json(leased.body) for leased in store.deliveries.lease(60.0, every_due)]
    assert store.deliveries.newest(webhook.id, ALL)
    _read_the_rest(store)
    store.close()


def _read_the_rest(store: Store) -> None:
    """Used time counts towards quotas and submitters take turns: in statements, which return no row of theirs."""
    with read_transaction(store.engine) as connection:
        for table in metadata.tables.values():
            assert connection.execute(select(table)).all()


@recordings
def test_the_service_shows_every_row_and_goes_on(recorded_url: str, tmp_path: Path) -> None:
    """Lists and documents, with the key that was made then; and new work is done beside what is there."""
    with running(tmp_path, ScriptedRunner(37), Trainer(), database_url=recorded_url) as service:
        service.http.headers["Authorization"] = f"Bearer {KEY}"
        for name in ("tunings", "jobs", "recommendations"):
            rows = service.http.get(f"/v1/{name}", params={"limit": ALL}).raise_for_status().json()["items"]
            for row in rows:
                service.http.get(f"/v1/{name}/{row['id']}").raise_for_status()
        for path in ("devices", "fleet", "queue", "keys", "audit", "webhooks", "webhooks/whk_1/deliveries", "summary"):
            service.http.get(f"/v1/{path}").raise_for_status()
        (newest, *_) = service.http.get("/v1/recommendations").json()["items"]
        job = {"recommendation_id": newest["id"], "training": {"updates": 2}}
        made = service.http.post("/v1/jobs", json=job).raise_for_status().headers["Location"]
        assert service.http.get(made, params={"wait": 30}).json()["state"] == "SUCCEEDED"


def test_a_document_of_a_newer_version_is_named(database_url: str, tmp_path: Path) -> None:
    """By an error that says what to do, and not by a field that this version does not know."""
    with engine_at(database_url) as engine:
        restore(engine, RECORDINGS / f"{batchwright.__version__}.sql")
        newer = func.replace(type_coerce(work_items.c.payload, Text), '"version":1', '"version":2')
        with write_transaction(engine) as connection:
            connection.execute(update(work_items).values(payload=type_coerce(newer, Text)))
            work_id = connection.execute(text("SELECT min(id) FROM work_items WHERE kind = 'tuning'")).scalar_one()
    store = open_store(database_url)
    with pytest.raises(NewerDocumentError, match=r"a document of version 2, which a newer.* Update this installation"):
        store.work.get(work_id)
    store.close()
    with running(tmp_path, ScriptedRunner(37), Trainer(), database_url=database_url) as service:
        headers = {"Authorization": f"Bearer {KEY}"}
        problem_in(service.http.get(f"/v1/tunings/{work_id}", headers=headers), 500, "newer-document")
