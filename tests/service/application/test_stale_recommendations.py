"""Recommendations whose torch, driver or hardware has changed are marked, and one probe removes the mark."""

import csv
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from batchwright.client import Client, ConflictError
from batchwright.client.documents.staleness import ChangedCondition, Staleness
from batchwright.client.documents.states import State
from batchwright_service.domain.conditions import Conditions, judge
from batchwright_service.store.models import Ending, RecommendationFilter, StalenessFilter
from batchwright_service.store.store import Store
from tests.support.factories import CPU, recommendation, tuning_request
from tests.support.service.running import Running, running
from tests.support.service.scripted import SERVED, ScriptedRunner, Trainer, new_work
from tests.support.service.stores import NewId, claimed

GIB = 1024**3
CARD = Conditions(
    kind="cuda",
    device="NVIDIA H100",
    memory_bytes=80 * GIB,
    slot="a/cuda:0",
    versions={"torch": "2.8", "driver": "570"},
)

Upgraded = Callable[..., Running]


@pytest.fixture
def upgraded(tmp_path: Path) -> Iterator[Upgraded]:
    """Starts a service in place of the one before, over the same data, with another torch, device or runner."""
    with ExitStack() as services:

        def start(torch: str, largest: int = 37, **given: Any) -> Running:
            services.close()
            return services.enter_context(
                running(tmp_path / "data", ScriptedRunner(largest), Trainer(), torch=torch, **given)
            )

        yield start


def tune(service: Running) -> str:
    """The id of the recommendation of a tuning."""
    with service.client as client:
        return client.tunings.tune(tuning_request(effective_batch_size=74), name="Night run").id


def listed(service: Running, **query: str) -> list[dict[str, Any]]:
    """The list of recommendations."""
    items: list[dict[str, Any]] = service.http.get("/v1/recommendations", params=query).json()["items"]
    return items


# --- the service ---


def test_an_upgrade_marks_what_was_proven_before_it(upgraded: Upgraded) -> None:
    """With what changed from what to what, in the list, alone, and by a filter; the document stays as it is."""
    service = upgraded("2.8")
    name = tune(service)
    document = service.http.get(f"/v1/recommendations/{name}").content
    (row,) = listed(service)
    assert (row["stale"], row["changes"]) == (False, [])
    assert [len(listed(service, stale=stale)) for stale in ("true", "false")] == [0, 1]
    service = upgraded("2.9")
    (row,) = listed(service)
    change = {"name": "torch", "before": "2.8", "now": "2.9"}
    assert (row["stale"], row["changes"], row["confirmed_by"], row["replaced_by"]) == (True, [change], None, None)
    assert [len(listed(service, stale=stale)) for stale in ("true", "false")] == [1, 0]
    assert len(listed(service, stale="true", q="night", sort="-peak")) == 1
    assert listed(service, stale="true", q="day") == []
    with Client(service.url) as client:
        assert client.recommendations.staleness(name).changes == (ChangedCondition.model_validate(change),)
        assert [found.id for found in client.recommendations.list(stale=True)] == [name]
    assert service.http.get(f"/v1/recommendations/{name}").content == document
    (line,) = csv.DictReader(service.http.get("/v1/recommendations?format=csv&stale=true").text.splitlines())
    assert (line["stale"], line["id"]) == ("true", name)


def test_one_probe_removes_the_mark(upgraded: Upgraded) -> None:
    """The tuning of the confirmation proves the same plan; later confirmations have its answer at once."""
    name = tune(upgraded("2.8"))
    service = upgraded("2.9")
    with Client(service.url) as client:
        submitted = client.recommendations.confirm(name)
        assert (submitted.name, submitted.warm_start_from) == ("Night run", name)
        confirmed = client.tunings.wait(submitted.id).recommendation
        assert confirmed is not None
        assert confirmed.evidence.proof.stopped_by == "warm-start"
        assert len(service.runner.sizes) == 1
        mark = client.recommendations.staleness(name)
        assert (mark.stale, mark.confirmed_by) == (False, confirmed.id)
        assert list(client.recommendations.list(stale=True)) == []
        assert {found.id for found in client.recommendations.list(stale=False)} == {name, confirmed.id}
        assert client.recommendations.confirm(name).id == submitted.id
        assert len(service.runner.sizes) == 1


def test_each_of_several_is_confirmed_by_its_own_request(upgraded: Upgraded) -> None:
    """The filter looks at the newest recommendation for the same request, and not at the newest of all."""
    service = upgraded("2.8")
    with service.client as client:
        names = [client.tunings.tune(tuning_request(effective_batch_size=size)).id for size in (74, 111, 148)]
    service = upgraded("2.9")
    with Client(service.url) as client:
        for done, name in enumerate(names, 1):
            client.tunings.wait(client.recommendations.confirm(name).id)
            assert [row["id"] for row in listed(service, stale="true")] == names[: done - 1 : -1]
            assert len(listed(service, stale="false")) == 2 * done


def test_another_answer_replaces_the_stale_one(upgraded: Upgraded) -> None:
    """Where less fits than before, the mark stays and names the new recommendation."""
    name = tune(upgraded("2.8"))
    service = upgraded("2.9", largest=20)
    with Client(service.url) as client:
        found = client.tunings.wait(client.recommendations.confirm(name).id).recommendation
        assert found is not None
        assert found.largest_micro_batch_size == 20
        mark = client.recommendations.staleness(name)
        assert (mark.stale, mark.replaced_by, mark.confirmed_by) == (True, found.id, None)
        assert [row.id for row in client.recommendations.list(stale=True)] == [name]


def test_a_second_upgrade_marks_both(upgraded: Upgraded) -> None:
    """The recommendation and its confirmation are of the past then, until one of them is confirmed."""
    name = tune(upgraded("2.8"))
    with upgraded("2.9").client as client:
        client.tunings.wait(client.recommendations.confirm(name).id)
    service = upgraded("2.10")
    with Client(service.url) as client:
        assert len(list(client.recommendations.list(stale=True))) == 2
        client.tunings.wait(client.recommendations.confirm(name).id)
        assert list(client.recommendations.list(stale=True)) == []
        assert len(service.runner.sizes) == 1


def test_nothing_is_said_without_a_worker(upgraded: Upgraded) -> None:
    """There is nothing to compare with, and nobody to confirm it."""
    name = tune(upgraded("2.8"))
    service = upgraded("2.9", worker=False)
    (row,) = listed(service)
    assert (row["stale"], row["changes"]) == (None, [])
    assert [listed(service, stale=stale) for stale in ("true", "false")] == [[], []]
    with Client(service.url) as client, pytest.raises(ConflictError, match="no live worker has; served: none"):
        client.recommendations.confirm(name)


def test_an_exchanged_device_is_a_change(upgraded: Upgraded) -> None:
    """The slot has another product now: nothing of it confirms the recommendation."""
    name = tune(upgraded("2.8"))
    service = upgraded("2.8", device=CPU.model_copy(update={"name": "another processor"}))
    mark = service.http.get(f"/v1/recommendations/{name}/staleness").json()
    assert mark["stale"]
    assert mark["changes"] == [{"name": "device", "before": CPU.name, "now": "another processor"}]
    refused = service.http.post(f"/v1/recommendations/{name}/confirm")
    assert (refused.status_code, refused.json()["code"]) == (409, "not-confirmable")
    assert "another processor" in refused.json()["detail"]


def test_an_unknown_recommendation_is_not_found(upgraded: Upgraded) -> None:
    """By both routes."""
    service = upgraded("2.8")
    path = f"/v1/recommendations/rec_{'0' * 32}"
    assert service.http.get(f"{path}/staleness").status_code == 404
    assert service.http.post(f"{path}/confirm").status_code == 404


# --- the store ---


def test_recommendations_are_filtered_by_their_conditions(store: Store, new_id: NewId) -> None:
    """Stale ones without a newer equal answer, or those that hold: by their own conditions, or by that answer."""
    kept = []
    for torch, size in (("2.7", 4), ("2.8", 4), ("2.8", 2)):
        store.submissions.add(new_work(new_id("tun")))
        found = recommendation(
            id=new_id("rec"), versions={"torch": torch, "python": "3"}, largest_micro_batch_size=size
        )
        store.leases.finish(claimed(store).lease, Ending(State.SUCCEEDED, recommendation=found))
        kept.append(found)
    old, new = sorted(store.recommendations.conditions())
    assert Conditions.model_validate_json(old) == Conditions.of_recommendation(kept[0], SERVED.slot)

    def ids(wanted: StalenessFilter) -> list[str]:
        rows = store.recommendations.newest(RecommendationFilter(staleness=wanted), 10)
        return [row.id for row in rows]

    assert ids(StalenessFilter(stale=True, stale_conditions=(old,), current=(new,))) == [kept[0].id]
    assert ids(StalenessFilter(stale=False, stale_conditions=(old,), current=(new,))) == [kept[2].id, kept[1].id]
    assert ids(StalenessFilter(stale=True, stale_conditions=(old, new), current=())) == [it.id for it in kept[::-1]]
    assert ids(StalenessFilter(stale=False, stale_conditions=(), current=())) == []
    digest = store.recommendations.row(kept[0].id).request_digest
    assert digest is not None
    assert store.recommendations.newest_of_requests([digest], [new])[digest].id == kept[2].id
    assert store.recommendations.newest_of_requests([digest], []) == {}


# --- the rule ---


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, ()),
        ({"slot": "b/cuda:3"}, ()),
        ({"versions": {"torch": "2.8", "driver": "570", "peft": "1"}}, ()),
        ({"versions": {"torch": "2.8", "driver": "580"}}, (("driver", "570", "580"),)),
        ({"versions": {"driver": "570"}}, (("torch", "2.8", None),)),
        ({"memory_bytes": 96 * GIB}, (("memory", "80.00 GiB", "96.00 GiB"),)),
        ({"memory_bytes": 80 * GIB - 1}, (("memory", f"{80 * GIB} bytes", f"{80 * GIB - 1} bytes"),)),
        ({"device": "NVIDIA A100"}, (("device", "NVIDIA H100", "NVIDIA A100"),)),
    ],
)
def test_what_changed_is_named(changes: dict[str, Any], found: tuple[tuple[str, str, str | None], ...]) -> None:
    """From what to what; packages that the recommendation does not depend on do not count, nor does the place."""
    expected = tuple(ChangedCondition(name=name, before=before, now=now) for name, before, now in found)
    assert judge(CARD, [CARD.model_copy(update=changes)]) == Staleness(stale=bool(found), changes=expected)


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        (64 * GIB, 64 * GIB - 300 * 1024**2, ()),
        (64 * GIB, 64 * GIB + 4096, ()),
        (64 * GIB, 60 * GIB, ("memory",)),
        (None, 60 * GIB, ()),
    ],
)
def test_a_kernel_does_not_change_the_memory_of_a_host(before: int | None, now: int, changes: tuple[str, ...]) -> None:
    """Its kernel reserves some MiB more or less; a requested limit on the CPU does not depend on the host at all."""
    host = CARD.model_copy(update={"kind": "cpu", "device": "a processor"})
    found = judge(host.model_copy(update={"memory_bytes": before}), [host.model_copy(update={"memory_bytes": now})])
    assert tuple(change.name for change in found.changes) == changes
    assert found.stale is bool(changes)


@pytest.mark.parametrize(("limit", "memory"), [(None, CPU.total_bytes), (1 * GIB, None)])
def test_conditions_on_the_cpu_leave_out_memory_under_a_limit(limit: int | None, memory: int | None) -> None:
    """The limit is the request's own then, and part of its digest."""
    found = recommendation(request=tuning_request(effective_batch_size=10, memory_limit_bytes=limit))
    assert Conditions.of_recommendation(found, None).memory_bytes == memory


def test_one_device_that_is_as_before_is_enough() -> None:
    """Where several workers have the product, the one most like it counts; other products do not."""
    newer = CARD.model_copy(update={"slot": "b/cuda:0", "versions": {"torch": "2.9", "driver": "580"}})
    driver = CARD.model_copy(update={"slot": "c/cuda:0", "versions": {"torch": "2.8", "driver": "580"}})
    other = CARD.model_copy(update={"slot": "d/cuda:0", "device": "NVIDIA T4"})
    assert judge(CARD, [newer, driver, other, CARD]).stale is False
    assert [change.name for change in judge(CARD, [newer, driver, other]).changes] == ["driver"]
    assert judge(CARD, [other]) == judge(CARD, []) == Staleness()
