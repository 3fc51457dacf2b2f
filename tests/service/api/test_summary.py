"""Statistics of a period, as the API returns them."""

import threading
import time

import pytest

from batchwright.client import Client
from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.workers import OccupancyPeriod, Period
from batchwright.schemas.training import RunOutcome
from batchwright_service.application.hit_counter import HitCounter
from batchwright_service.application.statistics import OccupancyCases, SummaryCases
from batchwright_service.domain.callers import KEYLESS, Caller
from batchwright_service.domain.key_texts import make_key
from batchwright_service.errors import StoreUnavailableError
from batchwright_service.store.models import Ending
from batchwright_service.store.store import Store
from tests.support.factories import tuning_request
from tests.support.service.asking import body, ended
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, Trainer, new_work
from tests.support.service.stores import NewId, claimed, set_work


def test_a_summary_counts_ended_work_and_hits(start_service: StartService) -> None:
    """One tuning probed, one served from the store, one `fresh`; and a failed job with its cause."""
    service = start_service(ScriptedRunner(37), Trainer(outcome=RunOutcome.FAILED))
    with service.client as client:
        made = client.tunings.wait(client.tunings.submit(tuning_request()).id)
        assert client.tunings.submit(tuning_request()).id == made.id
        client.tunings.wait(client.tunings.submit(tuning_request(), fresh=True).id)
        assert made.recommendation is not None
        job = client.jobs.wait(client.jobs.submit(made.recommendation.id).id)
        assert job.state is State.FAILED
        summary = client.summary()
        assert (summary.period, summary.tunings[State.SUCCEEDED], summary.jobs[State.FAILED]) == (Period.DAY, 2, 1)
        assert set(summary.tunings) == set(summary.jobs) == set(State)
        assert (
            summary.recommendation_hits.hits,
            summary.recommendation_hits.misses,
            summary.recommendation_hits.hit_rate,
        ) == (
            1,
            1,
            0.5,
        )
        (failure,) = summary.failures
        assert (failure.kind, failure.code, failure.newest_id) == (WorkKind.JOB, "training-failed", job.id)
        assert "ended" in failure.message
        assert [usage.slot for usage in summary.device_seconds] == ["host/cpu"]
        assert client.summary("all").tunings == summary.tunings
        for period, parts in (("24h", 24), ("7d", 28), ("all", 30)):
            trend = client.summary(period).trend
            assert len(trend) == parts
            assert (sum(part.tunings for part in trend), sum(part.failures for part in trend)) == (2, 1)
            assert all(part.speedup is None for part in trend)


def test_a_summary_is_computed_once_for_all_callers(store: Store, new_id: NewId) -> None:
    """Each period is computed once in two seconds, and each caller gets what its scopes permit."""
    now = [100.0]
    cases = SummaryCases(store.statistics, HitCounter(store.statistics.count_hits), lambda: now[0])
    reader = Caller(key_id="a" * 16, scopes=frozenset({Scope.TUNINGS_READ}))
    failed = store.submissions.add(new_work(new_id("job"), WorkKind.JOB)).id
    store.leases.finish(claimed(store).lease, Ending(State.FAILED))

    def summary(caller: Caller, period: Period = Period.DAY) -> tuple[int, list[str]]:
        found = cases.read(period, caller)
        return found.tunings[State.QUEUED], [failure.newest_id for failure in found.failures]

    assert summary(KEYLESS) == (0, [failed])
    store.submissions.add(new_work(new_id("tun")))
    now[0] += 1.9
    assert (summary(KEYLESS), summary(reader), summary(KEYLESS, Period.ALL)) == ((0, [failed]), (0, []), (1, [failed]))
    now[0] += 0.2
    assert summary(reader) == (1, [])


def test_no_request_has_no_hit_rate(service: Running) -> None:
    """Zero of zero has no ratio; an unknown period is refused."""
    summary = service.http.get("/v1/summary", params={"period": "7d"}).json()
    assert summary["recommendation_hits"] == {"hits": 0, "misses": 0, "hit_rate": None}
    refused = service.http.get("/v1/summary", params={"period": "1y"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "period")


def test_causes_of_failed_jobs_require_the_scope(start_service: StartService) -> None:
    """Failed jobs are counted for every caller."""
    service = start_service(ScriptedRunner(37), Trainer(outcome=RunOutcome.FAILED))
    with service.client as client:
        made = client.tunings.wait(client.tunings.submit(tuning_request()).id)
        assert made.recommendation is not None
        client.jobs.wait(client.jobs.submit(made.recommendation.id).id)
    new, key = make_key("reader", (Scope.TUNINGS_READ,))
    service.system.store.keys.add(new)
    with Client(service.url, api_key=key) as reader:
        summary = reader.summary()
    assert (summary.jobs[State.FAILED], summary.failures) == (1, ())


def test_counts_are_written_together_in_the_background() -> None:
    """Many counts take one write, from a background thread; a flush writes pending counts at once."""
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


def test_counts_that_cannot_be_written_are_kept() -> None:
    """They are written with the next ones."""
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


def test_a_flush_returns_when_another_one_has_written() -> None:
    """A summary reads the store right after its flush, while the background's may still be writing."""
    begun, may_end, written = threading.Event(), threading.Event(), []

    def write(hits: int, misses: int) -> None:
        begun.set()
        may_end.wait(60.0)
        written.append((hits, misses))

    counter = HitCounter(write, seconds=0.0)

    def flush() -> None:
        counter.flush()
        written.append((0, 0))

    counter.count(hit=True)
    assert begun.wait(60.0)
    later = threading.Thread(target=flush)
    later.start()
    may_end.set()
    later.join(60.0)
    assert written == [(1, 0), (0, 0)]


def test_queued_work_is_in_every_period(start_service: StartService) -> None:
    """The age of queued work does not matter."""
    service = start_service(worker=False)
    service.system.store.submissions.add(new_work("tun_" + "1" * 32))
    with service.client as client:
        assert [client.summary(period).tunings[State.QUEUED] for period in Period] == [1, 1, 1]


def test_the_occupancy_has_a_share_for_each_half_hour(start_service: StartService) -> None:
    """Work that has just ended is in the last buckets, over HTTP and in the SDK; the sums are kept for ten seconds."""
    service = start_service()
    document = ended(service.http, service.http.post("/v1/tunings", json=body()).headers["location"])
    set_work(service.settings.url, document["id"], device_ms=7_200_000)
    with service.client as client:
        found = client.occupancy()
    (device,) = found.devices
    assert (device.slot, found.bucket_seconds, len(device.tunings), set(device.jobs)) == ("host/cpu", 1800, 48, {0.0})
    assert 3 <= device.tunings.count(1.0) <= 5
    assert set(device.tunings[:-6]) == {0.0}
    assert 7200 / 86_400 - 0.001 < device.busy < 7200 / (86_400 - 1800) + 0.001
    set_work(service.settings.url, document["id"], device_ms=0)
    assert service.http.get("/v1/occupancy").json() == found.model_dump(mode="json")


@pytest.mark.parametrize("period", OccupancyPeriod)
def test_work_of_a_millisecond_is_not_told_as_none(start_service: StartService, period: OccupancyPeriod) -> None:
    """The shares of a device say that it held work, however short."""
    service = start_service()
    document = ended(service.http, service.http.post("/v1/tunings", json=body()).headers["location"])
    set_work(service.settings.url, document["id"], device_ms=1)
    with service.client as client:
        (device,) = client.occupancy(period).devices
    assert max(device.tunings) > 0


def test_the_occupancy_of_a_week_has_buckets_of_two_hours(start_service: StartService) -> None:
    """Work of some days ago is in the week alone; another period is refused."""
    service = start_service()
    document = ended(service.http, service.http.post("/v1/tunings", json=body()).headers["location"])
    days_ago = int(1000 * time.time()) - 3 * 86_400_000
    set_work(service.settings.url, document["id"], ended_at=days_ago, device_ms=7_200_000)
    with service.client as client:
        week, day = client.occupancy("7d"), client.occupancy()
    (device,) = week.devices
    assert (week.bucket_seconds, len(device.tunings), day.devices) == (7200, 84, ())
    assert (week.end - week.start).total_seconds() > 6.9 * 86_400
    assert sum(device.tunings) == pytest.approx(1.0, abs=0.01)
    assert sum(device.tunings[46:50]) == sum(device.tunings)
    assert service.http.get("/v1/occupancy", params={"period": "all"}).status_code == 422


def test_the_occupancy_is_summed_anew_after_a_while(store: Store) -> None:
    """Callers within ten seconds share the sums."""
    now = [0.0]
    cases = OccupancyCases(store.statistics, lambda: now[0])
    first = cases.read()
    now[0] = 9.9
    assert cases.read() is first
    now[0] = 10.1
    assert cases.read() is not first
