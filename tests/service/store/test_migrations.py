"""Databases of every revision that was released come up to date with what is in them, on every backend."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text

from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import JobRequest
from batchwright.schemas.recommendation import Recommendation
from batchwright_service.domain.conditions import Conditions
from batchwright_service.errors import ConfigurationError
from batchwright_service.store.database.engine import read_transaction, write_transaction
from batchwright_service.store.database.migrate import configuration, upgrade
from batchwright_service.store.database.migrations.versions.v0008_plain_names import (
    recommendation_with_plan,
    recommendation_without_plan,
)
from batchwright_service.store.database.schema import metadata
from batchwright_service.store.models import Beat, Ending, Quota, RecommendationFilter
from batchwright_service.store.store import open_store
from tests.support.factories import plan_of, probe_result
from tests.support.paths import ROOT
from tests.support.service.scripted import SERVED, new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, beaten, claimed, engine_at

KEY = "a" * 16
OLD = json.loads((ROOT / "tests" / "support" / "service" / "recommendation_0007.json").read_text())
"""A recommendation as services up to revision 0007 stored it, with a uniform plan, what-ifs and a warm start."""

_OLD_NAMES = "0007_searching"
"""The last revision with the names of before, in which the rows below are written; later ones come by upgrading."""

_BEFORE_NOTIFICATIONS = "0009_estimate_residuals"

_WORK: dict[str, Any] = {
    "kind": "tuning",
    "device": "cpu",
    "model": "mlp",
    "effective_batch_size": 100,
    "fingerprint": "f" * 64,
    "payload": new_work("").payload,
    "created_at": 1,
    "updated_at": 2,
    "event_count": 1,
}
_LATER = {"key_id": KEY, "device_ms": 5000, "question": "q" * 64, "earlier_recommendation_id": "rec_0"}
REVISIONS: dict[str, dict[str, Any]] = {
    "0001": {},
    "0002_keys": {"key_id": KEY, "device_ms": 5000},
    "0003_questions": _LATER,
    "0004_scheduling": _LATER,
    "0005_sessions": _LATER,
    "0006_summary": _LATER,
    "0007_searching": _LATER,
    "0008_plain_names": _LATER,
    "0009_estimate_residuals": _LATER,
    "0010_notifications": _LATER,
    "0011_held_slots": _LATER,
    "0012_fleets": _LATER,
    "0014_names": _LATER,
    "0015_answers": _LATER,
    "0016_search": _LATER,
    "0017_gain": _LATER,
    "0018_audit": _LATER,
    "0019_webhooks": _LATER,
    "0020_staleness": _LATER,
    "0021_course": _LATER,
    "0022_sorting": _LATER,
}
"""Every released revision, and what its tunings hold beyond the first one's, in the names up to revision 0007."""


def marked(revisions: Iterable[str], *but: str) -> list[Any]:
    """Revisions as thorough cases, but for those that are named."""
    return [pytest.param(name, marks=() if name in but else pytest.mark.thorough) for name in revisions]


def insert_into(connection: Connection, table: str, **values: Any) -> None:
    """One row, in the words of the database: the tables of today are not those of the revision."""
    names = ", ".join(values)
    places = ", ".join(f":{name}" for name in values)
    connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({places})"), values)  # noqa: S608 - names of ours


def write_as_of(engine: Engine, revision: str) -> None:
    """Fill a database as a service of that revision left it: tunings that ended, ran and waited, and a job."""
    upgrade(engine, min(revision, _OLD_NAMES))
    more = REVISIONS[revision]
    with write_transaction(engine) as connection:
        done = {"state": "SUCCEEDED", "ended_at": 3, "recommendation_id": "rec_1", "probe_count": 1, "token": 1}
        held = {"state": "RUNNING", "owner": "gone", "place": SERVED.slot, "token": 1, "lease_expires_at": 4}
        for work_id, state in {"tun_1": done, "tun_2": held, "tun_3": {"state": "QUEUED", "priority": 2}}.items():
            insert_into(connection, "work_items", id=work_id, **_WORK, **more, **state)
            insert_into(connection, "events", work_id=work_id, id=1, at=1, kind="state", document='"QUEUED"')
        job = {"kind": "job", "payload": json.dumps({"recommendation": OLD, "training": {"updates": 7}})}
        insert_into(connection, "work_items", **{"id": "job_1", **_WORK, **more, **done, **job})
        document = probe_result(4).model_dump_json()
        insert_into(connection, "probes", work_id="tun_1", ordinal=1, recorded_at=2, document=document)
        given = {"id": "rec_1", "tuning_id": "tun_1", "created_at": 3, "fingerprint": OLD["fingerprint"]}
        named = {"model": "mlp", "device": "cpu", "device_name": "test processor", "feasible": True}
        sizes = {"micro_batch_size": 37, "gradient_accumulation_steps": 2, "world_size": 2, "effective_batch_size": 101}
        insert_into(connection, "recommendations", **given, **named, **sizes, document=json.dumps(OLD))
        served = json.dumps({"place": "p", **SERVED.model_dump(mode="json", exclude={"slot"})})
        insert_into(connection, "workers", place="p", owner="o", heartbeat_at=1, document=served)
        if revision != "0001":
            key = {"id": KEY, "prefix": "bw", "digest": "d", "name": "ci", "scopes": "admin", "created_at": 1}
            insert_into(connection, "api_keys", **key)
        if revision >= "0004":
            insert_into(connection, "submitters", id=KEY, turn=0)
            body = json.dumps({"id": "tun_1", "place": "p", "earlier_recommendation_id": None, "recommendation": OLD})
            kept = {"owner": KEY, "created_at": 1, "digest": "d", "work_id": "tun_1", "status": 200, "body": body}
            insert_into(connection, "idempotency_keys", key="k", **kept)
    upgrade(engine, revision)


def test_no_released_revision_is_left_out(tmp_path: Path) -> None:
    """Every revision but the newest is in the table above."""
    with engine_at(f"sqlite:///{tmp_path / 'store.db'}") as engine, write_transaction(engine) as connection:
        steps = ScriptDirectory.from_config(configuration(connection)).walk_revisions()
        assert [step.revision for step in steps][1:] == list(REVISIONS)[::-1]


@pytest.mark.parametrize("revision", marked(REVISIONS, "0001"))
def test_what_a_revision_left_is_kept_and_goes_on(database_url: str, revision: str) -> None:
    """Everything is read as it was; what ran is taken over, what waited is claimed, and answers are found."""
    with engine_at(database_url) as engine:
        write_as_of(engine, revision)
    store = open_store(database_url)
    items = {row.id: row for row in store.work.newest(WorkKind.TUNING, 10)}
    assert [item.state for item in items.values()] == [State.QUEUED, State.RUNNING, State.SUCCEEDED]
    assert {item.key_id for item in items.values()} == {REVISIONS[revision].get("key_id")}
    assert {item.warm_start_from for item in items.values()} == {REVISIONS[revision].get("earlier_recommendation_id")}
    assert (items["tun_3"].priority, items["tun_1"].probes, items["tun_1"].fingerprint) == (2, 1, "f" * 64)
    assert store.work.get("tun_1").payload == new_work("").payload
    assert [probe.result for probe in store.evidence.probes("tun_1")] == [probe_result(4)]
    assert store.recommendations.get("rec_1") == Recommendation.model_validate(recommendation_with_plan(OLD))
    assert store.recommendations.tuning_with(OLD["fingerprint"]) == "tun_1"
    assert [stored.id for stored in store.recommendations.newest(RecommendationFilter(model="mlp"), 5)] == ["rec_1"]
    assert [key.name for key in store.keys.list()] == ([] if revision == "0001" else ["ci"])
    assert [entry.id for entry in store.queue.waiting(5)] == ["tun_3"]
    for expected, attempt in (("tun_2", 2), ("tun_3", 1)):
        claim = claimed(store)
        assert (claim.item.id, claim.item.attempts) == (expected, attempt)
        store.leases.finish(claim.lease, Ending(State.FAILED))
    store.retention.delete("tun_1")
    store.submissions.add(new_work("tun_4", key_id=KEY), Quota(device_seconds=1000.0))
    store.close()


@pytest.mark.parametrize("revision", marked([*REVISIONS, "head"], "head"))
def test_every_way_leads_to_the_tables_of_the_code(database_url: str, revision: str) -> None:
    """From whatever revision, Alembic finds nothing to change between the database and the model."""
    with engine_at(database_url) as engine:
        upgrade(engine, revision)
        upgrade(engine)
        with read_transaction(engine) as connection:
            assert _differences(connection) == []


def _differences(connection: Connection) -> list[Any]:
    """Return what Alembic finds to change between the database and the model."""
    options = {"include_name": _is_not_of_search}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def _is_not_of_search(name: str | None, _kind: str, _parents: object) -> bool:
    """Each database has an index of its own for searches, which the model does not describe."""
    return not (name or "").startswith("search_") and not (name or "").endswith("_search")


@pytest.mark.thorough
def test_old_recommendations_are_found_by_what_their_documents_say(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older rows lack precision and objective, and the oldest documents have no objective."""
    monkeypatch.setattr("batchwright_service.store.database.migrations.versions.v0007_searching._AT_ONCE", 2)
    kinds = {
        "rec_1": ("fp32", None),
        "rec_2": ("bf16", None),
        "rec_3": ("fp32", "fastest"),
        "rec_4": ("bf16", "fastest"),
    }
    common = {"tuning_id": "tun_1", "created_at": 3, "fingerprint": "f" * 64, "model": "mlp", "device": "cpu"}
    sizes = {"device_name": "test processor", "feasible": True, "world_size": 1, "effective_batch_size": 100}
    with engine_at(database_url) as engine:
        upgrade(engine, "0006_summary")
        with write_transaction(engine) as connection:
            for answer_id, (precision, objective) in kinds.items():
                request = {"spec": {"precision": precision}} | ({"objective": objective} if objective else {})
                document = json.dumps({"request": request})
                insert_into(connection, "recommendations", id=answer_id, document=document, **common, **sizes)
    store = open_store(database_url)
    found = {
        stored.id: (stored.precision, stored.objective)
        for stored in store.recommendations.newest(RecommendationFilter(), 9)
    }
    assert found == {answer_id: (precision, it or "largest") for answer_id, (precision, it) in kinds.items()}
    assert [stored.id for stored in store.recommendations.newest(RecommendationFilter(precision="bf16"), 9)] == [
        "rec_4",
        "rec_2",
    ]
    store.close()


@pytest.mark.parametrize("revision", marked(revision for revision in REVISIONS if revision >= "0004"))
def test_every_stored_recommendation_takes_the_names_of_today(
    database_url: str, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan comes first, in the table, in lists, in jobs and in the first responses of idempotency keys."""
    monkeypatch.setattr("batchwright_service.store.database.migrations.versions.v0008_plain_names._AT_ONCE", 1)
    with engine_at(database_url) as engine:
        write_as_of(engine, revision)
    store = open_store(database_url)
    found = store.recommendations.get("rec_1")
    assert plan_of(found).micro_batch_sizes == ((26, 25), (25, 25))
    (listed,) = store.recommendations.newest(RecommendationFilter(), 5)
    assert listed.plan == plan_of(found).summary()
    assert (listed.plan.micro_batch_size, listed.plan.effective_batch_size, listed.plan.world_size) == (26, 101, 2)
    assert (listed.largest_micro_batch_size, found.largest_micro_batch_size) == (37, 37)
    assert store.recommendations.conditions() == [Conditions.of_recommendation(found, slot=None).text]
    assert JobRequest.model_validate_json(store.work.get("job_1").payload).recommendation == found
    (first,) = _stored(database_url, "SELECT body FROM idempotency_keys")
    assert Recommendation.model_validate(first["recommendation"]) == found
    assert {name: value for name, value in first.items() if name != "recommendation"} == {
        "id": "tun_1",
        "slot": "p",
        "warm_start_from": None,
    }
    assert "p" in {seen["slot"] for seen in _stored(database_url, "SELECT document FROM workers")}
    store.close()


def test_a_recommendation_of_before_says_the_same_in_the_names_of_today() -> None:
    """Its uniform plan, its what-ifs, and what it rests on; and it can be written in the names of before."""
    found = Recommendation.model_validate(recommendation_with_plan(OLD))
    assert found.uniform is not None
    assert (found.uniform.effective_batch_size, found.uniform.requested_effective_batch_size) == (100, 101)
    assert not found.uniform.exact
    fits, nothing = found.what_ifs
    assert fits.plan is not None
    assert (fits.largest_micro_batch_size, fits.plan.micro_batch_size, fits.plan.world_size) == (40, 26, 2)
    assert (nothing.largest_micro_batch_size, nothing.plan) == (0, None)
    assert found.evidence.warm_start is not None
    assert (found.evidence.proof.stopped_by, found.evidence.warm_start.recommendation_id) == ("warm-start", "rec_0")
    assert [warning.code for warning in found.warnings] == ["rests-on-warm-start"]
    stored = found.model_dump(mode="json", exclude_unset=True)  # without the fields that came later
    assert recommendation_without_plan(stored) == OLD


def _stored(database_url: str, statement: str) -> list[dict[str, Any]]:
    """JSON as it is in the database."""
    with engine_at(database_url) as engine, read_transaction(engine) as connection:
        return [json.loads(row[0]) for row in connection.execute(text(statement))]


@pytest.mark.thorough
def test_the_first_revision_can_be_gone_back_to(database_url: str) -> None:
    """Each revision undoes what it did; the work and its recommendations are kept on the way."""
    with engine_at(database_url) as engine:
        write_as_of(engine, "0001")
        with read_transaction(engine) as connection:
            before = [column["name"] for column in inspect(connection).get_columns("work_items")]
        upgrade(engine)
        with write_transaction(engine) as connection:
            command.downgrade(configuration(connection), "0007_searching")
            indexed = {index["name"]: index["column_names"] for index in inspect(connection).get_indexes("work_items")}
            assert indexed["work_items_by_question"] == ["question", "id"]
            command.downgrade(configuration(connection), "0001")
        with read_transaction(engine) as connection:
            assert [column["name"] for column in inspect(connection).get_columns("work_items")] == before
            assert connection.execute(text("SELECT count(*) FROM probes")).scalar_one() == 1
    assert _stored(database_url, "SELECT document FROM recommendations") == [OLD]


@pytest.mark.thorough
def test_the_newest_revisions_can_be_undone_and_made_again(database_url: str, new_id: NewId) -> None:
    """One at a time and with work that waits and runs: its worker goes on, and what waited is claimed."""
    store = open_store(database_url)
    running = store.submissions.add(new_work(new_id("tun"))).id
    waiting = store.submissions.add(new_work(new_id("tun"))).id
    store.devices.beat(Beat(LEASE_SECONDS, devices=(SERVED,), changed=frozenset({SERVED.slot})))
    claim = claimed(store)
    with write_transaction(store.engine) as connection:
        script = ScriptDirectory.from_config(configuration(connection))
        newest = [revision.revision for revision in script.walk_revisions(base=_BEFORE_NOTIFICATIONS, head="head")]
        for revision in newest[1:]:
            command.downgrade(configuration(connection), revision)
        assert revision == _BEFORE_NOTIFICATIONS
        names = {column["name"] for column in inspect(connection).get_columns("work_items")}
        assert "expiry_check_at" not in names
        assert not {"held_slots", "fleets"} & set(inspect(connection).get_table_names())
    upgrade(store.engine)
    with read_transaction(store.engine) as connection:
        assert _differences(connection) == []
    assert beaten(store, claim.lease).renewed == {claim.lease: State.RUNNING}
    store.leases.finish(claim.lease, Ending(State.FAILED))
    assert claimed(store).item.id == waiting
    assert store.work.get(running).state is State.FAILED
    store.close()


def test_concurrent_upgrades_of_an_empty_database_both_succeed(database_url: str) -> None:
    """Two services that start at once find one schema."""
    with ThreadPoolExecutor(2) as pool:
        for store in pool.map(lambda _: open_store(database_url), range(2)):
            store.queue.check()
            store.close()


def test_the_database_of_a_newer_version_is_refused(database_url: str) -> None:
    """The error says what to do, and the database stays as it is."""
    open_store(database_url).close()
    with engine_at(database_url) as engine, write_transaction(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999_later'"))
    with pytest.raises(ConfigurationError, match=r"newer Batchwright.*9999_later"):
        open_store(database_url)
