"""The database of a release, with rows of every kind, which every later release must open.

``python -m tests.support.service.recorded_database`` records the one of this version. Until the version is released,
run it after a change of a stored document or of a table. A released recording is never renewed: the databases of users
are like it. The next version records a file of its own instead.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Boolean, Connection, Engine, text

import batchwright
from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.fleet import FleetNode, FleetReport, FleetWaiting
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.webhooks import WebhookSubmission
from batchwright.client.documents.work import JobRequest
from batchwright.schemas.requests import Named, TrainingRequest, TuningRequest
from batchwright.schemas.training import CommandProgress, RunOutcome, TrainingResult
from batchwright_service.domain.callers import Caller
from batchwright_service.domain.hardware import ANY_DEVICE, HardwareNeed
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.domain.key_texts import NewKey, digest_of
from batchwright_service.problem_mapping import make_problem
from batchwright_service.store.database.migrate import upgrade
from batchwright_service.store.database.schema import metadata
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.models import Beat, Ending, NewWork
from batchwright_service.store.store import Store
from tests.support.exports.plans import command_plan
from tests.support.factories import python_spec, residual, transformers_spec, tuning_request
from tests.support.paths import ROOT
from tests.support.service.asking import body, ended
from tests.support.service.running import Running, running
from tests.support.service.scripted import SERVED, ScriptedRunner, Trainer, new_work
from tests.support.service.stores import LEASE_SECONDS, claimed, on_device

RECORDINGS = ROOT / "tests" / "service" / "store" / "database" / "recordings"
KEY = f"bw_{'a' * 16}_{'b' * 64}"
"""The text of the API key, which has every scope."""
SESSION = digest_of("session")
_ACTOR = Caller("a" * 16, address="192.0.2.7")
_NAMES = Named(name="the first's", project="vision", labels={"team": "vision-1"})
_COMMAND = ("train", "--size={micro_batch_size}", "--steps={gradient_accumulation_steps}")
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def main() -> None:
    """Record the database of this version."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), ScriptedRunner(37), Trainer(evaluates=True)) as service,
    ):
        _fill_by_requests(service)
        service.system.coordinator.stop()
        _fill(service.system.store)
        statements = list(_statements(service.system.store.engine))
    file = RECORDINGS / f"{batchwright.__version__}.sql"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{statement};\n" for statement in statements), encoding="utf-8")
    sys.stdout.write(f"{file}: {len(statements)} statements\n")


def restore(engine: Engine, recording: Path) -> None:
    """Make an empty database what the recorded one was: the tables of its revision, and its rows."""
    comment, *statements = recording.read_text(encoding="utf-8").split(";\n")[:-1]
    upgrade(engine, comment.split()[-1])
    with write_transaction(engine) as connection:
        _execute(connection, statements)


def _execute(connection: Connection, statements: list[str]) -> None:
    exact = connection.execution_options(no_parameters=True)
    for statement in statements:
        exact.exec_driver_sql(statement)
    if connection.dialect.name == "postgresql":  # numbers that the rows have brought are taken
        exact.exec_driver_sql("SELECT setval('audit_log_id_seq', (SELECT max(id) FROM audit_log))")


def _statements(engine: Engine) -> Iterator[str]:
    """Yield an INSERT for each row, in an order that foreign keys allow."""
    with read_transaction(engine) as connection:
        (revision,) = connection.execute(text("SELECT version_num FROM alembic_version")).one()
        yield f"-- Recorded by tests/support/service/recorded_database.py from a database of revision {revision}"
        for table in metadata.sorted_tables:
            names = ", ".join(column.name for column in table.columns)
            for row in connection.execute(text(f"SELECT {names} FROM {table.name}")):  # noqa: S608 - names of ours
                values = [
                    _literal(bool(value) if isinstance(column.type, Boolean) else value)
                    for column, value in zip(table.columns, row, strict=True)
                ]
                yield f"INSERT INTO {table.name} ({names}) VALUES ({', '.join(values)})"  # noqa: S608 - as above


def _literal(value: object) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else str(value).upper() if isinstance(value, bool) else repr(value)


def _fill_by_requests(service: Running) -> None:
    """A tuning, another that it warm-starts, a job, and a message about each."""
    store, http = service.system.store, service.http
    store.webhooks.add("whk_1", WebhookSubmission(url="https://hooks.invalid/told"), "whsec_c2VjcmV0", 50, _ACTOR)
    asked = body(baseline={"micro_batch_size": 10}, **_NAMES.model_dump())
    given = http.post("/v1/tunings", json=asked, headers={"Idempotency-Key": "first"})
    tuning = ended(http, given.headers["Location"])
    lower = body(memory_limit_bytes="2GiB")
    ended(http, http.post("/v1/tunings", json=lower).headers["Location"])
    job = {"recommendation_id": tuning["recommendation_id"], "training": {"updates": 5}}
    ended(http, http.post("/v1/jobs", json=job).headers["Location"])
    service.system.hit_counter.flush()


def _fill(store: Store) -> None:
    """What no request of the tests makes: other hosts, clusters, keys, deleted and broken work."""
    new_id = IdentifierSource().new
    store.keys.add(NewKey("a" * 16, digest_of(KEY), "ci", tuple(Scope), 10**9))
    store.keys.touch("a" * 16, 0.0)
    store.sessions.open(SESSION, "a" * 16, 10**9, "192.0.2.7")
    store.queue.check()
    store.residuals.add(new_id("tun"), residual())
    waiting = FleetWaiting(id="tun_1", device="cuda:0", reason="no node is free")
    nodes = (FleetNode(id="1", name="gpu-1", state="ALIVE", alive=True, slots=("gpu-1/cuda:0",)),)
    store.fleet.report(FleetReport(engine="ray", address="http://head:8265", nodes=nodes, waiting=(waiting,)))
    _fail(store, new_work(new_id("tun"), device=SERVED.device.id, key_id="a" * 16))
    deleted = new_work(new_id("tun"), key_id="a" * 16)
    _fail(store, deleted)
    store.retention.delete(deleted.id, _ACTOR)
    _run_command(store, new_id("job"))
    _run_on_two_cards(store, new_id("tun"))
    for request in (
        tuning_request(transformers_spec("causal-lm", _LLAMA, adapter={"kind": "lora"}, batch={"sequence_length": 8})),
        tuning_request(python_spec("package.module:build", width=8)),
        command_plan(*_COMMAND).request,
    ):
        store.submissions.add(_waiting(new_id("tun"), request))
    need = HardwareNeed(gpu="H100-80GB", devices_per_node=4)
    store.submissions.add(new_work(new_id("tun"), device=ANY_DEVICE, hardware=need.lane, names=_NAMES))


def _waiting(work_id: str, request: TuningRequest) -> NewWork:
    return new_work(work_id, device="cuda:7", payload=request.model_dump_json(), key_id="a" * 16, priority=3)


def _fail(store: Store, work: NewWork) -> None:
    store.submissions.add(work)
    problem = make_problem(500, "worker-lost", "The worker was lost", "three workers in turn ended while they ran it")
    store.leases.finish(claimed(store).lease, Ending(State.FAILED, problem=problem))


def _run_command(store: Store, work_id: str) -> None:
    """A job of a command, which ended."""
    request = JobRequest(recommendation=command_plan(*_COMMAND), training=TrainingRequest(updates=9))
    made_from = {"recommendation_id": request.recommendation.id, "payload": request.model_dump_json()}
    store.submissions.add(new_work(work_id, WorkKind.JOB, **made_from))
    lease = claimed(store).lease
    store.evidence.record_progress(lease, [CommandProgress(update=9, updates=9, samples_seen=900)])
    result = TrainingResult(outcome=RunOutcome.SUCCEEDED, message="ended", updates=9)
    store.leases.finish(lease, Ending(State.SUCCEEDED, result=result))


def _run_on_two_cards(store: Store, work_id: str) -> None:
    """Work that runs: it holds another slot too, and its lease has expired when the recording is opened."""
    card = on_device("cuda:0", "test card")
    other = card.model_copy(update={"slot": "test card/cuda:1"})
    store.devices.beat(Beat(LEASE_SECONDS, devices=(card, other), changed=frozenset({card.slot, other.slot})))
    need = HardwareNeed.of_kind(card.device, 2)
    store.submissions.add(new_work(work_id, device=ANY_DEVICE, hardware=need.lane))
    claimed(store, card, LEASE_SECONDS)


if __name__ == "__main__":
    main()
