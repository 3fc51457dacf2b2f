"""A database that is not what it was: faults that do not end by themselves, and documents of earlier versions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from batchwright.schemas.requests import TuningRequest
from batchwright_service.errors import StoreBrokenError
from batchwright_service.store.database.engine import open_engine, write_transaction
from batchwright_service.store.database.schema import probes
from batchwright_service.store.store import Store, open_store
from batchwright_service.worker.lease import LeaseHolder, LeaseTerms
from tests.support.factories import probe_result, tuning_request
from tests.support.service.scripted import new_work
from tests.support.service.stores import NewId, claimed


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
