"""Search, order and pages of the lists, on every backend, and the indexes that make a search cheap."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, select, text

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State, WorkKind
from batchwright.schemas.requests import Named
from batchwright_service.domain.key_texts import make_key
from batchwright_service.store.database import mapping
from batchwright_service.store.database.list_search import page_statement, sort_value
from batchwright_service.store.database.migrate import upgrade
from batchwright_service.store.database.schema import recommendations, work_items
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.models import (
    Binding,
    Ending,
    RecommendationFilter,
    Search,
    StalenessFilter,
    WorkFilter,
    WorkRow,
)
from batchwright_service.store.store import Store, open_store
from tests.support.factories import CPU, probe_result, recommendation
from tests.support.service.scripted import SERVED, new_work
from tests.support.service.stores import NewId, claimed, ended, engine_at, fill

WORK: list[dict[str, Any]] = [
    {"model": "llama", "names": Named(name="Night run", labels={"team": "nlp"})},
    {"model": "llama", "names": Named(name='50 % of "x"', project="vision", labels={"team": "nlp", "tier": "a"})},
    {"model": "gpt_neo", "fingerprint": "ab12" * 16, "names": Named(labels={"team": "nlp-x"})},
    {"model": "mlp", "device": "cuda:3", "hardware": "NVIDIA H200|1"},
]
SEARCHES: list[tuple[dict[str, Any], list[int]]] = [
    ({"words": ("llama",)}, [1, 0]),
    ({"words": ("LAM",)}, [1, 0]),
    ({"words": ("night",)}, [0]),
    ({"words": ("night", "llama")}, [0]),
    ({"words": ("night", "gpt")}, []),
    ({"words": ("ab12ab12",)}, [2]),
    ({"words": ("h200",)}, [3]),
    ({"words": ("cuda:3",)}, [3]),
    ({"words": ("team=nlp",)}, [2, 1, 0]),
    ({"words": ("tier",)}, [1]),
    ({"words": ("vision",)}, [1]),
    ({"words": ("%",)}, [1]),
    ({"words": ('"x"',)}, [1]),
    ({"words": ("t_n",)}, [2]),
    ({"words": ("m",)}, [3, 2, 1, 0]),
    ({"words": ("ml",)}, [3]),
    ({"words": ("nothing",)}, []),
    ({"words": ("' OR 1=1 --",)}, []),
    ({"labels": (("team", "nlp"),)}, [1, 0]),
    ({"labels": (("team", "nlp"), ("tier", "a"))}, [1]),
    ({"labels": (("team", "NLP"),)}, []),
    ({"labels": (("te", "nlp"),)}, []),
    ({"labels": (("team", "nlp"),), "words": ("night",)}, [0]),
    ({"project": "vision"}, [1]),
    ({"project": "vis"}, []),
    ({"project": "vision", "words": ("night",)}, []),
    ({"created_after": datetime(2100, 1, 1, tzinfo=UTC)}, []),
    ({"created_after": datetime(2000, 1, 1, tzinfo=UTC)}, [3, 2, 1, 0]),
    ({"sort": "created", "descending": False}, [0, 1, 2, 3]),
]


def test_a_search_finds_parts_of_texts(store: Store, new_id: NewId) -> None:
    """Every word and label must be there; nothing in a word is a pattern, and labels are compared exactly."""
    ids = [store.submissions.add(new_work(new_id("tun"), **given)).id for given in WORK]
    store.submissions.add(new_work(new_id("job"), WorkKind.JOB, model="llama", names=WORK[0]["names"]))
    for search, found in SEARCHES:
        rows = store.work.newest(WorkKind.TUNING, 10, wanted=WorkFilter(search=Search(**search)))
        assert [row.id for row in rows] == [ids[place] for place in found], search


def test_a_search_narrows_with_the_other_filters(store: Store, new_id: NewId) -> None:
    """A model and a word apply together, for work and for recommendations."""
    for given in WORK[:2]:
        answer = recommendation(id=new_id("rec")).model_copy(update=dict(given["names"]))
        ended(store, new_work(new_id("tun"), **given), answer)
    search = Search(words=("night",))
    for model, count in (("llama", 1), ("gpt", 0)):
        assert len(store.work.newest(WorkKind.TUNING, 5, wanted=WorkFilter(model=model, search=search))) == count
        wanted = RecommendationFilter(model=model, device=CPU.name, search=search)
        assert len(store.recommendations.newest(wanted, 5)) == count
    assert [row.name for row in store.recommendations.newest(RecommendationFilter(search=search), 5)] == ["Night run"]


def test_a_search_finds_what_an_owner_submitted(store: Store, new_id: NewId) -> None:
    """By the name of an API key, of which several keys may have the same, or by its id; also recommendations."""
    keys = [make_key(name, (Scope.ADMIN,))[0] for name in ("night", "night", "day")]
    for key in keys:
        store.keys.add(key)
        answer = recommendation(id=new_id("rec"))
        ended(store, new_work(new_id("tun"), key_id=key.id), answer)
    ended(store, new_work(new_id("tun")))
    for owner, count in (("night", 2), ("day", 1), (keys[0].id, 1), ("nigh", 0)):
        search = Search(owner=owner)
        found = store.work.newest(WorkKind.TUNING, 5, wanted=WorkFilter(search=search))
        expected = [key.id for key in reversed(keys) if owner in {key.name, key.id}]
        assert [row.key_id for row in found] == expected
        assert len(expected) == count
        assert len(store.recommendations.newest(RecommendationFilter(search=search), 5)) == count


def test_a_search_finds_what_failed_by_a_cause(store: Store, new_id: NewId) -> None:
    """Newest first, of one kind, together with the states; work that goes on after the same problem is no failure."""
    failures: dict[str, list[str]] = {"oom": [], "lost": []}
    for code in ("oom", "lost", "oom"):
        work = store.submissions.add(new_work(new_id("tun")))
        problem = Problem(type="about:blank", title="It failed", detail="d", code=code)
        store.leases.finish(claimed(store).lease, Ending(State.FAILED, problem=problem))
        failures[code].append(work.id)
    for code, ids in failures.items():
        for states in ((), (State.FAILED,)):
            wanted = WorkFilter(states=states, search=Search(problem_code=code))
            assert [row.id for row in store.work.newest(WorkKind.TUNING, 5, wanted=wanted)] == ids[::-1]
            assert store.work.newest(WorkKind.JOB, 5, wanted=wanted) == []
    wanted = WorkFilter(states=(State.SUCCEEDED,), search=Search(problem_code="oom"))
    assert store.work.newest(WorkKind.TUNING, 5, wanted=wanted) == []


def test_a_search_finds_what_ran_on_a_slot(store: Store, new_id: NewId) -> None:
    """Ended and held work of the slot is found; queued work ran nowhere."""
    ran = []
    for _ in range(2):
        store.submissions.add(new_work(new_id("tun")))
        lease = claimed(store).lease
        ran.append(lease.work_id)
        if len(ran) == 1:
            store.leases.finish(lease, Ending(State.SUCCEEDED))
    store.submissions.add(new_work(new_id("tun")))
    for slot, expected in ((SERVED.slot, ran[::-1]), (f"{SERVED.slot}0", [])):
        found = store.work.newest(WorkKind.TUNING, 5, wanted=WorkFilter(search=Search(slot=slot)))
        assert [(row.id, row.slot) for row in found] == [(work_id, slot) for work_id in expected]


def test_a_search_finds_what_changed_and_not_what_was_deleted(store: Store, new_id: NewId) -> None:
    """The fingerprint that a first probe brings is found; deleted work is not, and neither is its word."""
    work = store.submissions.add(new_work(new_id("tun"), fingerprint="", names=Named(name="short lived")))
    lease = claimed(store).lease
    store.evidence.record_probe(lease, 1, probe_result(4), Binding("lane", "cd34" * 16, "e" * 64))

    def found(word: str) -> list[str]:
        search = Search(words=(word,))
        return [row.id for row in store.work.newest(WorkKind.TUNING, 5, wanted=WorkFilter(search=search))]

    assert found("cd34cd34") == found("lived") == [work.id]
    store.leases.hand_back(lease)
    store.submissions.cancel(work.id)
    store.retention.delete(work.id)
    assert found("cd34cd34") == found("lived") == []


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("sort", ["name", "model", "state", "device", "priority", "ended", "samples_per_second"])
def test_pages_of_a_sorted_list_join_without_gap(store: Store, new_id: NewId, sort: str, *, descending: bool) -> None:
    """Every row comes once, in the order of the field and then of the id, also where values are equal or absent."""
    for number in range(7):
        names = Named(name=f"n{number % 3}") if number % 2 else Named()
        work = new_work(new_id("tun"), priority=number % 3, model=f"m{number % 2}", names=names)
        if number % 3 == 0:
            ended(store, work, recommendation(id=new_id("rec")))
        else:
            store.submissions.add(work)
            store.submissions.cancel(work.id)
    whole = Search(sort=sort, descending=descending)
    rows: list[WorkRow] = []
    search, before = whole, None
    while page := store.work.newest(WorkKind.TUNING, 2, before, WorkFilter(search=search)):
        rows += page
        before = page[-1].id
        search = Search(sort=sort, descending=descending, after=sort_value(page[-1], whole))
    assert len({row.id for row in rows}) == len(rows) == 7
    keys: list[Any] = [(sort_value(row, whole), row.id) for row in rows]
    assert all((one > other) is descending for one, other in pairwise(keys))


def plan_of_search(engine: Engine, search: Search) -> str:
    """The database's plan of a search."""
    explain = "EXPLAIN" if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    with read_transaction(engine) as connection:
        statement = page_statement(connection, work_items, select(work_items.c.id), search, None, 50)
        written = statement.compile(engine, compile_kwargs={"literal_binds": True})
        return "\n".join(str(row[-1]) for row in connection.execute(text(f"{explain} {written}").bindparams()))


def test_a_search_uses_the_index_of_trigrams(database_url: str) -> None:
    """No database with trigrams reads the whole table for a word of three characters."""
    with engine_at(database_url) as engine:
        upgrade(engine)
        fill(engine, 5000)
        with write_transaction(engine) as connection:
            connection.execute(text("ANALYZE"))
        plan = plan_of_search(engine, Search(words=("llama",)))
        has_trigrams = engine.dialect.name == "sqlite" or _offers_trigrams(engine)
    if engine.dialect.name == "postgresql":
        assert ("work_items_search" in plan) is has_trigrams, plan
    else:
        assert "VIRTUAL TABLE INDEX" in plan, plan
        assert "SCAN work_items" not in plan, plan


@pytest.mark.parametrize(
    ("sort", "index"), [("samples_per_second", "work_items_by_sorted_rate"), ("peak", "work_items_by_sorted_peak")]
)
def test_a_sort_by_a_recommendation_reads_by_an_index(store: Store, new_id: NewId, sort: str, index: str) -> None:
    """The index has the order, so that a page costs the same in a list of any length; also after the first page."""
    for _ in range(3):
        ended(store, new_work(new_id("tun")), recommendation(id=new_id("rec")))
    fill(store.engine, 2000)
    pages: list[WorkRow] = []

    def read() -> None:
        first = store.work.newest(WorkKind.TUNING, 1, wanted=WorkFilter(search=Search(sort=sort)))
        later = Search(sort=sort, after=sort_value(first[0], Search(sort=sort)))
        pages.extend(store.work.newest(WorkKind.TUNING, 5, first[0].id, WorkFilter(search=later)))

    plans = plans_of_lists(store.engine, read)
    assert (len(plans), len(pages)) == (2, 5)
    for plan in plans:
        assert index in plan, plan


def plans_of_lists(engine: Engine, read: Callable[[], object], word: str = "ORDER BY") -> list[str]:
    """The database's plans of the statements with a word that a function has it execute.

    PostgreSQL learns the sizes of its tables by itself, after a while; SQLite does not.
    """
    seen: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_more: object) -> None:
        if word in statement:
            seen.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    read()
    event.remove(engine, "before_cursor_execute", note)
    explain = "EXPLAIN" if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("ANALYZE"))
        return [
            "\n".join(str(row[-1]) for row in connection.exec_driver_sql(f"{explain} {statement}", parameters))
            for statement, parameters in seen
        ]


def insert_recommendations(engine: Engine, count: int) -> None:
    """Store recommendations for half as many requests, each under two conditions."""
    values = mapping.recommendation_values(recommendation(), "tun_1", "mlp", None)
    rows = [
        {**values, "id": f"rec_{number}", "conditions": f"c{number % 2}", "request_digest": f"q{number // 2}"}
        for number in range(count)
    ]
    with write_transaction(engine) as connection:
        connection.execute(insert(recommendations), rows)


def test_the_conditions_are_found_without_a_scan(store: Store) -> None:
    """There are few in a list of any length, and each is one look-up in their index."""
    assert store.recommendations.conditions() == []
    insert_recommendations(store.engine, 4000)
    assert store.recommendations.conditions() == ["c0", "c1"]
    (plan,) = plans_of_lists(store.engine, store.recommendations.conditions, "conditions")
    assert "recommendations_by_conditions" in plan
    assert "SCAN recommendations" not in plan, plan
    assert "Seq Scan on recommendations" not in plan, plan


@pytest.mark.parametrize("stale", [True, False])
def test_a_filter_by_staleness_looks_up_each_request_by_an_index(store: Store, *, stale: bool) -> None:
    """The newest of a request under today's conditions is found by both, not among all of today's."""
    insert_recommendations(store.engine, 4000)
    staleness = StalenessFilter(stale, stale_conditions=("c0",), current=("c1",))
    (plan,) = plans_of_lists(
        store.engine, lambda: store.recommendations.newest(RecommendationFilter(staleness=staleness), 50)
    )
    if store.engine.dialect.name == "postgresql":
        assert "recommendations_by_request_digest" in plan, plan
    else:
        assert "recommendations_by_request_digest (request_digest=? AND conditions=?)" in plan, plan


def _offers_trigrams(engine: Engine) -> bool:
    """Return whether the extension is installed: without it, searches read the table."""
    statement = text("SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_trgm'")
    with read_transaction(engine) as connection:
        return bool(connection.execute(statement).scalar_one())


def test_rows_are_found_after_vacuum(tmp_path: Path) -> None:
    """SQLite may renumber rows then; the index has numbers of its own."""
    url = f"sqlite:///{tmp_path}/store.db"
    with engine_at(url) as engine:
        upgrade(engine)
        ids = fill(engine, 50, model="gpt")
        wanted = fill(engine, 1, model="llama")
    opened = open_store(url)
    for work_id in ids:
        opened.submissions.cancel(work_id)
        opened.retention.delete(work_id)
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as connection:
        connection.execute("VACUUM")
    found = opened.work.newest(WorkKind.TUNING, 5, wanted=WorkFilter(search=Search(words=("llama",))))
    opened.close()
    assert [row.id for row in found] == wanted
