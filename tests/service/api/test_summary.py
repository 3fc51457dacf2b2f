"""What happened lately, as the API tells it."""

from __future__ import annotations

import threading

from service.application.hit_counter import HitCounter
from service.application.statistics import SummaryCases
from service.client import Client
from service.domain.api_keys import KEYLESS, Caller, Scope, make_key
from service.domain.states import State, WorkKind
from service.domain.workers import Period
from service.errors import StoreUnavailableError
from service.store.models import Ending
from service.store.store import Store
from tests.support.factories import tuning_request
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, Trainer, new_work
from tests.support.service.stores import NewId, claimed
from tuner.schemas.training import RunOutcome


def test_a_summary_tells_what_ended_and_how_answers_were_found(start_service: StartService) -> None:
    """One tuning made, one answered from the store, one asked for afresh; a job that failed, with its cause."""
    service = start_service(ScriptedRunner(37), Trainer(outcome=RunOutcome.FAILED))
    with service.client as client:
        made = client.tunings.wait(client.tunings.submit(tuning_request()).id)
        assert client.tunings.submit(tuning_request()).id == made.id
        client.tunings.wait(client.tunings.submit(tuning_request(), fresh=True).id)
        assert made.recommendation is not None
        job = client.jobs.wait(client.jobs.submit(made.recommendation.id).id)
        assert job.state is State.FAILED
        told = client.summary()
        assert (told.period, told.tunings[State.SUCCEEDED], told.jobs[State.FAILED]) == (Period.DAY, 2, 1)
        assert set(told.tunings) == set(told.jobs) == set(State)
        assert (told.recommendation_hits.hits, told.recommendation_hits.misses, told.recommendation_hits.hit_rate) == (
            1,
            1,
            0.5,
        )
        (failure,) = told.failures
        assert (failure.kind, failure.code, failure.newest_id) == (WorkKind.JOB, "training-failed", job.id)
        assert "ended" in failure.message
        assert [it.slot for it in told.device_seconds] == ["host/cpu"]
        assert client.summary("all").tunings == told.tunings


def test_a_summary_is_counted_once_for_all_who_ask(store: Store, new_id: NewId) -> None:
    """Each period by itself, with what each caller may be told; two seconds later it is counted anew."""
    now = [100.0]
    cases = SummaryCases(store.statistics, HitCounter(store.statistics.count_hits), lambda: now[0])
    reader = Caller(key_id="a" * 16, scopes=frozenset({Scope.TUNINGS_READ}))
    failed = store.submissions.add(new_work(new_id("job"), WorkKind.JOB)).id
    store.leases.finish(claimed(store).lease, Ending(State.FAILED))

    def told(caller: Caller, period: Period = Period.DAY) -> tuple[int, list[str]]:
        found = cases.read(period, caller)
        return found.tunings[State.QUEUED], [it.newest_id for it in found.failures]

    assert told(KEYLESS) == (0, [failed])
    store.submissions.add(new_work(new_id("tun")))
    now[0] += 2.0
    assert (told(KEYLESS), told(reader), told(KEYLESS, Period.ALL)) == ((0, [failed]), (0, []), (1, [failed]))
    now[0] += 0.1
    assert told(reader) == (1, [])


def test_nothing_asked_has_no_rate(service: Running) -> None:
    """Zero of zero is no number; a period that there is not is refused."""
    told = service.http.get("/v1/summary", params={"period": "7d"}).json()
    assert told["recommendation_hits"] == {"hits": 0, "misses": 0, "hit_rate": None}
    refused = service.http.get("/v1/summary", params={"period": "1y"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "period")


def test_why_jobs_failed_is_not_told_to_who_may_not_read_them(start_service: StartService) -> None:
    """They are counted all the same."""
    service = start_service(ScriptedRunner(37), Trainer(outcome=RunOutcome.FAILED))
    with service.client as client:
        made = client.tunings.wait(client.tunings.submit(tuning_request()).id)
        assert made.recommendation is not None
        client.jobs.wait(client.jobs.submit(made.recommendation.id).id)
    new, key = make_key("reader", (Scope.TUNINGS_READ,))
    service.system.store.keys.add(new)
    with Client(service.url, api_key=key) as reader:
        told = reader.summary()
    assert (told.jobs[State.FAILED], told.failures) == (1, ())


def test_counts_are_written_a_moment_later_and_together() -> None:
    """Many answers take one write, from a thread of its own; what waits is written at once when that is asked for."""
    written: list[tuple[int, int]] = []
    done = threading.Event()

    def write(hits: int, misses: int) -> None:
        written.append((hits, misses))
        done.set()

    counter = HitCounter(write, seconds=0.05)
    for hit in (True, True, False):
        counter.count(hit=hit)
    assert written == []
    assert done.wait(240)
    counter.count(hit=True)
    counter.flush()
    counter.flush()
    assert written == [(2, 1), (1, 0)]


def test_what_the_store_does_not_take_is_kept() -> None:
    """It is written with the next."""
    written: list[tuple[int, int]] = []
    broken = [True]

    def write(hits: int, misses: int) -> None:
        if broken:
            broken.pop()
            raise StoreUnavailableError("gone")
        written.append((hits, misses))

    counter = HitCounter(write, seconds=60.0)
    counter.count(hit=True)
    counter.flush()
    counter.count(hit=False)
    counter.flush()
    assert written == [(1, 1)]


def test_what_is_queued_is_in_every_period(start_service: StartService) -> None:
    """However old it is."""
    service = start_service(worker=False)
    service.system.store.submissions.add(new_work("tun_" + "1" * 32))
    with service.client as client:
        assert [client.summary(period).tunings[State.QUEUED] for period in Period] == [1, 1, 1]
