"""Lists and answers of the store, on every backend."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from batchwright.client.documents.states import State, WorkKind
from batchwright_service.errors import NotFoundError
from batchwright_service.store import recommendation_queries
from batchwright_service.store.database.migrate import upgrade
from batchwright_service.store.database.transactions import read_transaction
from batchwright_service.store.models import RecommendationFilter, WorkFilter
from batchwright_service.store.store import Store
from tests.support.factories import CPU, mlp_spec, recommendation, tuning_request
from tests.support.service.scripted import new_work
from tests.support.service.stores import NewId, claimed, ended, engine_at, fill

TUNING = WorkKind.TUNING
CARD = CPU.model_copy(update={"id": "cuda:0", "name": "test card"})


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, [4, 3, 2, 1, 0]),
        ({"states": (State.QUEUED,)}, [4, 3, 2, 1]),
        ({"states": (State.RUNNING,)}, [0]),
        ({"states": (State.FAILED,)}, []),
        ({"states": (State.FAILED, State.QUEUED, State.RUNNING)}, [4, 3, 2, 1, 0]),
        ({"states": (State.QUEUED, State.RUNNING), "model": "gpt"}, [4, 3]),
        ({"device": "cuda:0"}, [3]),
        ({"model": "gpt"}, [4, 3]),
        ({"fingerprint": "e" * 64}, [2]),
        ({"states": (State.QUEUED,), "device": "cpu", "model": "gpt"}, [4]),
        ({"model": "gpt", "fingerprint": "e" * 64}, []),
        ({"model": "mlp' OR 1=1"}, []),
    ],
)
def test_a_list_shows_what_its_filter_names(
    store: Store, new_id: NewId, wanted: dict[str, Any], found: list[int]
) -> None:
    """Every field restricts, several together; jobs do not show."""
    changes: list[dict[str, Any]] = [{}, {}, {"fingerprint": "e" * 64}, {"model": "gpt", "device": "cuda:0"}]
    ids = [store.submissions.add(new_work(new_id("tun"), **given)).id for given in [*changes, {"model": "gpt"}]]
    store.submissions.add(new_work(new_id("job"), WorkKind.JOB))
    assert claimed(store).item.id == ids[0]
    rows = store.work.newest(TUNING, 10, wanted=WorkFilter(**wanted))
    assert [row.id for row in rows] == [ids[place] for place in found]


def test_a_list_that_was_seen_before_shows_what_changed_since(store: Store, new_id: NewId) -> None:
    """Cached rows are never stale: a new state shows, a new row comes first, a deleted row is absent."""
    ids = [store.submissions.add(new_work(new_id("tun"))).id for _ in range(3)]
    before = store.work.newest(TUNING, 10)
    assert store.work.newest(TUNING, 10) == before
    store.submissions.cancel(ids[0])
    store.submissions.cancel(ids[1])
    store.retention.delete(ids[1])
    ids.append(store.submissions.add(new_work(new_id("tun"))).id)
    seen = [(row.id, row.state) for row in store.work.newest(TUNING, 10)]
    assert seen == [(ids[3], State.QUEUED), (ids[2], State.QUEUED), (ids[0], State.CANCELLED)]


def test_a_filtered_list_has_pages(store: Store, database_url: str) -> None:
    """Each page goes on after the one before; together they are the whole list."""
    with engine_at(database_url) as engine:
        mine = fill(engine, 7, model="gpt")
        fill(engine, 7, model="mlp")
    wanted, seen, before = WorkFilter(model="gpt"), [], None
    while page := store.work.newest(TUNING, 3, before, wanted):
        seen += [row.id for row in page]
        before = page[-1].id
    assert seen == mine[::-1]


def test_a_row_tells_its_priority_and_an_item_its_trace(store: Store, new_id: NewId) -> None:
    """Both come back as they were given, from every read."""
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    item = store.submissions.add(new_work(new_id("tun"), priority=7, trace_parent=parent))
    assert (item.priority, item.trace_parent) == (7, parent)
    assert claimed(store).item.trace_parent == parent
    assert store.work.newest(TUNING, 1)[0].priority == 7


def test_the_text_of_a_recommendation_is_what_is_stored(store: Store, new_id: NewId) -> None:
    """Texts parse as the document; unknown ids are left out of a list, and not found alone."""
    answers = [recommendation(id=new_id("rec")) for _ in range(2)]
    for answer in answers:
        ended(store, new_work(new_id("tun")), answer)
    texts = store.recommendations.texts(["rec_none", *(stored.id for stored in answers)])
    assert texts == {stored.id: stored.model_dump_json() for stored in answers}
    assert store.recommendations.texts([]) == {}
    with pytest.raises(NotFoundError, match="rec_none"):
        store.recommendations.get("rec_none")


ANSWERS: list[tuple[str, str, dict[str, Any]]] = [
    ("fp32", "largest", {}),
    ("fp32", "largest", {"device": CARD}),
    ("bf16", "largest", {}),
    ("bf16", "fastest", {}),
    ("fp32", "fastest", {"fingerprint": "e" * 64}),
    ("fp32", "largest", {"device": CARD.model_copy(update={"name": CARD.id})}),
]
"""Precision, objective and more of recommendations; the last is for another model than the others."""
SEARCHES: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [5, 4, 3, 2, 1, 0]),
    ({"precision": "bf16"}, [3, 2]),
    ({"objective": "fastest"}, [4, 3]),
    ({"objective": "fewest_steps"}, []),
    ({"precision": "bf16", "objective": "fastest"}, [3]),
    ({"model": "mlp"}, [4, 3, 2, 1, 0]),
    ({"model": "mlp", "precision": "fp32"}, [4, 1, 0]),
    ({"device": "cuda:0"}, [5, 1]),
    ({"device": "test card"}, [1]),
    ({"device": "cpu", "precision": "bf16", "model": "mlp"}, [3, 2]),
    ({"device": "cuda:0", "model": "gpt", "precision": "fp32", "objective": "largest"}, [5]),
    ({"fingerprint": "e" * 64}, [4]),
    ({"fingerprint": "e" * 64, "precision": "fp32", "objective": "fastest", "device": "cpu"}, [4]),
    ({"fingerprint": "e" * 64, "precision": "bf16"}, []),
]


def test_recommendations_are_found_by_what_they_are(store: Store, new_id: NewId) -> None:
    """Every field restricts, several together, page by page; a device is one by its id or its product's name."""
    made = []
    for precision, objective, more in ANSWERS:
        request = tuning_request(mlp_spec(precision=precision), 10, objective=objective)
        made.append(recommendation(id=new_id("rec"), request=request, **more))
        store.submissions.add_succeeded(
            new_work(new_id("tun"), model="gpt" if len(made) == len(ANSWERS) else "mlp"), made[-1]
        )
    for given, found in SEARCHES:
        wanted = RecommendationFilter(**given)
        rows = store.recommendations.newest(wanted, 10)
        listed_rows = [(row.id, row.precision, row.objective) for row in rows]
        assert listed_rows == [(made[place].id, *ANSWERS[place][:2]) for place in found], given
        pages = [store.recommendations.newest(wanted, 1, row.id) for row in rows]
        assert [row for page in pages for row in page] == rows[1:], given


def test_of_each_fingerprint_the_newest_answer_counts(store: Store, new_id: NewId) -> None:
    """Copies of an answer share its fingerprint: they do not keep the answers to other limits out."""
    fingerprint = "a" * 64

    def answer(fingerprint: str, **changes: Any) -> str:
        made = recommendation(id=new_id("rec"), fingerprint=fingerprint * 64)
        store.submissions.add_succeeded(new_work(new_id("tun"), fingerprint=fingerprint * 64, **changes), made)
        return made.id

    other = answer("1", request_fingerprint=fingerprint)
    answer("2", request_fingerprint="b" * 64)
    copies = [answer("2", request_fingerprint=fingerprint) for _ in range(5)]
    assert [stored.id for stored in store.recommendations.for_request(fingerprint, 8)] == [copies[-1], other]
    assert [stored.id for stored in store.recommendations.for_request(fingerprint, 1)] == [copies[-1]]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_page_of_recommendations_costs_what_it_shows(store: Store, database_url: str) -> None:
    """Each lane of a list is a stretch of an index that has all it is searched by, in the order of the list."""
    del store
    fields = ("model", "device", "precision", "objective")
    with engine_at(database_url) as engine, read_transaction(engine) as connection:
        for given in (names for count in range(1, 5) for names in combinations(fields, count)):
            values = {**dict.fromkeys([*given, "before"], "x"), "limit": 50}
            statement = recommendation_queries._listing(given, True).params(values)
            written = statement.compile(engine, compile_kwargs={"literal_binds": True})
            steps = [row[3] for row in connection.execute(text(f"EXPLAIN QUERY PLAN {written}"))]
            lanes = [step for step in steps if "recommendations_by_" in step]
            searched = len({*given, "precision", "objective"})
            assert lanes, steps
            assert all(
                "COVERING INDEX" in lane and lane.count("=?") == searched and "id<?" in lane for lane in lanes
            ), lanes


@pytest.mark.parametrize(
    "condition",
    [
        "kind = 'tuning' AND state = 'FAILED'",
        "kind = 'tuning' AND device = 'cpu'",
        "kind = 'tuning' AND model = 'gpt'",
        "kind = 'tuning' AND model = 'gpt' AND state = 'FAILED'",
        "kind = 'tuning' AND device = 'cpu' AND state = 'FAILED'",
        "kind = 'tuning' AND device = 'cpu' AND model = 'gpt'",
        "fingerprint = 'f'",
    ],
)
def test_every_filter_has_an_index_in_the_order_of_the_list(tmp_path: Path, condition: str) -> None:
    """SQLite neither scans nor sorts the table for a page, so that a page costs the same however long the list is."""
    statement = f"EXPLAIN QUERY PLAN SELECT id FROM work_items WHERE {condition} ORDER BY id DESC LIMIT 10"  # noqa: S608
    with engine_at(f"sqlite:///{tmp_path}/store.db") as engine:
        upgrade(engine)
        with read_transaction(engine) as connection:
            (step,) = connection.execute(text(statement)).all()
    assert step[-1].startswith("SEARCH")
    assert step[-1].count("=?") == condition.count("=")
