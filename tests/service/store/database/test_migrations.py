"""Revisions are never edited, and a database opens only with the tables that they make, on every backend."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from batchwright_service.errors import ConfigurationError
from batchwright_service.store.database.migrations import versions
from batchwright_service.store.database.schema import metadata
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.store import open_store
from tests.support.factories import inconclusive, recommendation
from tests.support.service.scripted import new_work
from tests.support.service.stores import NewId, engine_at

HASHES = {
    "v0001_initial.py": "a5b745756b23a1b302eaaea7471c29e5794eeed9c914aebb8b608262d447eb88",
    "v0002_fresh_tunings.py": "a2c1d4b1882f1610a80002be7bed3a577ccc907560850ba927c399445d082163",
    "v0003_infeasible_tunings.py": "ffec55ed7a9e0155ee7cce1581debbb6d57957ba06320b2b7409f11d34275343",
    "v0004_rendered_replays.py": "692d0a64c68e2c317d38dd01397a43836e400ced3a7d45351b40da8fead9cb56",
    "v0005_conclusive_proofs.py": "1546571b01ced391483679454f1eb501d6bf5dbb90c922ebbf6ab7d121843a07",
}
"""The SHA-256 of each revision. Add the line of a new revision, and change no line of a released one."""


def test_no_revision_is_edited() -> None:
    """Databases have run the revision as it was released: an edit of the file would change none of them."""
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in revisions()}
    edited = [name for name in HASHES if found.get(name) != HASHES[name]]
    assert not edited, f"{edited} was edited: write a new revision instead, which changes what this one made"
    unlisted = sorted(found.keys() - HASHES.keys())
    assert not unlisted, f"add the hash of the new revision to HASHES: {[(name, found[name]) for name in unlisted]}"


def revisions() -> list[Path]:
    """The files of the revisions."""
    return sorted(Path(versions.__path__[0]).glob("v*.py"))


def test_the_revisions_make_the_tables_of_the_code(database_url: str) -> None:
    """Alembic finds nothing to change between the database and ``schema``."""
    open_store(database_url).close()
    with engine_at(database_url) as engine, read_transaction(engine) as connection:
        options = {"include_name": _is_in_schema}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []


def _is_in_schema(name: str | None, _kind: str, _parents: object) -> bool:
    """Each database has an index of its own for searches, which the schema does not describe."""
    return not (name or "").startswith("search_") and not (name or "").endswith("_search")


def test_concurrent_upgrades_of_an_empty_database_both_succeed(database_url: str) -> None:
    """Two services that start at once find one schema."""
    with ThreadPoolExecutor(2) as pool:
        for store in pool.map(lambda _: open_store(database_url), range(2)):
            store.queue.check()
            store.close()


def test_the_database_of_a_newer_version_is_refused(database_url: str) -> None:
    """The error says what to do, and the database stays as it is."""
    open_store(database_url).close()
    change(database_url, "UPDATE alembic_version SET version_num = '9999_later'")
    with pytest.raises(ConfigurationError, match=r"newer Batchwright.*9999_later"):
        open_store(database_url)


def change(database_url: str, *statements: str) -> None:
    """Change a database as someone with other means may."""
    with engine_at(database_url) as engine, write_transaction(engine) as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_a_database_from_before_knows_which_proofs_are_conclusive(database_url: str, new_id: NewId) -> None:
    """Revision 0005 fills its column from the documents."""
    store = open_store(database_url)
    whole = store.submissions.add_succeeded(new_work(new_id("tun")), recommendation(id=new_id("rec")))
    store.submissions.add_succeeded(new_work(new_id("tun")), inconclusive(id=new_id("rec")))
    store.close()
    to_before = "UPDATE alembic_version SET version_num = '0004'"
    change(database_url, "ALTER TABLE recommendations DROP COLUMN conclusive", to_before)
    store = open_store(database_url)
    assert store.recommendations.tuning_with("0" * 64) == whole.id
    store.close()


@pytest.mark.parametrize(
    ("statements", "difference"),
    [
        (["DROP TABLE fleets"], "the table fleets is missing"),
        (["ALTER TABLE workers DROP COLUMN owner"], "the table workers lacks the column owner"),
        (
            ["ALTER TABLE sessions ADD COLUMN note VARCHAR(9)"],
            "the table sessions has a column note, which is not expected",
        ),
        (
            ["ALTER TABLE webhooks DROP COLUMN name", "ALTER TABLE webhooks ADD COLUMN name VARCHAR(50)"],
            "the column name of the table webhooks is VARCHAR(50), expected VARCHAR(100) NOT NULL",
        ),
        (["DROP INDEX one_run_per_device"], "the table work_items lacks the index one_run_per_device"),
    ],
)
def test_a_changed_database_is_refused(database_url: str, statements: list[str], difference: str) -> None:
    """The error names the table and the column, and says what to do."""
    open_store(database_url).close()
    change(database_url, *statements)
    with pytest.raises(ConfigurationError) as refused:
        open_store(database_url)
    assert str(refused.value) == (
        f"the database was changed by something other than Batchwright: {difference}. "
        "Undo these changes or restore a backup, then start again"
    )


def test_tables_and_indexes_of_others_are_no_matter(database_url: str) -> None:
    """An operator may index what they ask for often, and keep tables of their own beside ours."""
    open_store(database_url).close()
    change(database_url, "CREATE TABLE notes (id INTEGER)", "CREATE INDEX by_priority ON work_items (priority)")
    open_store(database_url).close()
