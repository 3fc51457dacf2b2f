"""The contract of the store: every backend keeps it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from operator import attrgetter

import pytest

from batchwright.client.documents.fleet import FleetReport
from batchwright.client.documents.states import State, WorkKind, sources_of
from batchwright.client.documents.work import EventKind
from batchwright.schemas.training import RunOutcome, TrainingResult, course_after
from batchwright_service.errors import (
    ConfigurationError,
    ConflictError,
    NotFoundError,
    StaleLeaseError,
    StoreUnavailableError,
)
from batchwright_service.problem_mapping import make_problem
from batchwright_service.store.models import BeatReply, Claim, Ending, Lease, RecommendationFilter
from batchwright_service.store.store import Store, open_store
from tests.support.factories import inconclusive, probe_result, recommendation
from tests.support.service.scripted import SERVED, new_work, progress
from tests.support.service.stores import LEASE_SECONDS, NewId, beaten, claimed, elsewhere


def test_added_work_is_queued_and_read_back_whole(store: Store, new_id: NewId) -> None:
    """Added work is QUEUED, has one event, and has the given values."""
    work = new_work(new_id("tun"))
    item = store.submissions.add(work)
    assert item == store.work.get(work.id)
    assert (item.state, item.attempts, item.probes, item.events) == (State.QUEUED, 0, 0, 1)
    assert (item.payload, item.fingerprint, item.model) == (work.payload, work.fingerprint, work.model)
    assert item.created_at.tzinfo is not None
    assert item.started_at is None


def test_an_id_is_taken_once(store: Store, new_id: NewId) -> None:
    """Adding the same id again is a conflict and changes nothing."""
    work = new_work(new_id("tun"))
    store.submissions.add(work)
    with pytest.raises(ConflictError, match=work.id):
        store.submissions.add(replace(work, model="other"))
    assert store.work.get(work.id).model == "mlp"


@pytest.mark.parametrize("call", ["work.get", "submissions.cancel", "recommendations.get", "retention.delete"])
def test_a_missing_key_is_not_found(store: Store, call: str) -> None:
    """Every read of one thing says when there is none, naming the id."""
    with pytest.raises(NotFoundError, match="tun_none"):
        attrgetter(call)(store)("tun_none")


@pytest.mark.parametrize("fresh", [False, True])
def test_a_tuning_says_whether_it_is_to_be_measured_anew(store: Store, new_id: NewId, *, fresh: bool) -> None:
    """Added, read and claimed."""
    work = new_work(new_id("tun"), fresh=fresh)
    assert store.submissions.add(work).fresh is fresh
    assert store.work.get(work.id).fresh is fresh
    assert claimed(store).item.fresh is fresh


def test_an_equal_tuning_is_awaited_while_it_holds_an_earlier_lease(store: Store, new_id: NewId) -> None:
    """Not by itself, nor by one that was claimed before, nor for a job or another fingerprint, nor after its end."""
    first, second = (new_work(new_id("tun")) for _ in range(2))
    store.submissions.add(first)
    claim = claimed(store)
    store.submissions.add(second)
    later = store.leases.claim(elsewhere("other"), LEASE_SECONDS)
    assert later is not None
    awaited = store.evidence.is_measured_elsewhere
    assert awaited(second.id, first.fingerprint)
    assert not awaited(first.id, first.fingerprint)
    assert not awaited(second.id, "0" * 64)
    store.leases.finish(claim.lease, Ending(State.FAILED))
    assert not awaited(second.id, first.fingerprint)


def test_the_newest_recommendation_of_a_fingerprint_is_found_with_its_tuning(store: Store, new_id: NewId) -> None:
    """Another tuning may end with it too, without storing it again; without its tuning it is not found."""
    made = recommendation()
    for is_stored in (False, True):
        store.submissions.add(new_work(new_id("tun"), fingerprint=made.fingerprint))
        claim = claimed(store)
        store.leases.finish(claim.lease, Ending(State.SUCCEEDED, recommendation=made, is_stored=is_stored))
        assert store.work.get(claim.item.id).recommendation_id == made.id
    assert store.recommendations.with_fingerprint(made.fingerprint) == made
    assert store.recommendations.with_fingerprint("1" * 64) is None
    assert len(store.recommendations.newest(RecommendationFilter(), 9)) == 1


def test_an_inconclusive_recommendation_hides_no_conclusive_one(store: Store, new_id: NewId) -> None:
    """Neither from an equal tuning, nor as a warm start, nor as what replaces one of changed conditions."""
    whole, quick = recommendation(id=new_id("rec")), inconclusive(id=new_id("rec"))
    only_quick = inconclusive(id=new_id("rec"), fingerprint="1" * 64)
    tunings = [
        store.submissions.add_succeeded(new_work(new_id("tun"), request_fingerprint="a" * 64), made).id
        for made in (whole, quick, only_quick)
    ]
    found = store.recommendations
    assert (found.tuning_with("0" * 64), found.with_fingerprint("0" * 64)) == (tunings[0], whole)
    assert (found.tuning_with("1" * 64), found.with_fingerprint("1" * 64)) == (None, None)
    assert found.for_request("a" * 64, 9) == [only_quick, quick, whole]
    row = found.row(whole.id)
    assert found.newest_of_requests({row.request_digest}, {row.conditions}) == {row.request_digest: row}


def test_lists_of_unknown_work_are_empty(store: Store) -> None:
    """Probes, events and counts of unknown work are empty, not errors."""
    assert (
        store.evidence.probes("tun_none"),
        store.evidence.events("tun_none"),
        store.evidence.event_counts(["tun_none"]),
    ) == ([], [], {})


def test_the_list_is_newest_first_by_kind_and_in_pages(store: Store, new_id: NewId) -> None:
    """A page begins after the id it is given; other kinds do not show."""
    tunings = [store.submissions.add(new_work(new_id("tun"))).id for _ in range(3)]
    store.submissions.add(new_work(new_id("job"), WorkKind.JOB))
    newest = store.work.newest(WorkKind.TUNING, 2)
    assert [row.id for row in newest] == [tunings[2], tunings[1]]
    assert [row.id for row in store.work.newest(WorkKind.TUNING, 2, before=tunings[1])] == [tunings[0]]


def test_claims_come_in_order_of_priority_then_age(store: Store, new_id: NewId) -> None:
    """The oldest of the highest priority is next."""
    first, second = new_id("tun"), new_id("tun")
    urgent = new_id("tun")
    for work in (new_work(first), new_work(second), new_work(urgent, priority=5)):
        store.submissions.add(work)
    order = []
    for _ in range(3):
        claim = claimed(store)
        order.append(claim.item.id)
        store.leases.finish(claim.lease, Ending(State.FAILED))
    assert order == [urgent, first, second]
    assert store.leases.claim(SERVED, LEASE_SECONDS) is None


def test_a_claim_runs_and_counts_the_attempt(store: Store, new_id: NewId) -> None:
    """Claimed work is RUNNING at its owner's place, with a token of one."""
    work = store.submissions.add(new_work(new_id("tun")))
    claim = claimed(store)
    assert claim.lease == Lease(work.id, SERVED.owner, 1)
    assert (claim.item.state, claim.item.slot, claim.item.attempts) == (State.RUNNING, SERVED.slot, 1)
    assert claim.item.started_at is not None
    assert claim.lost_leases == 0


def test_a_place_runs_one_thing(store: Store, new_id: NewId) -> None:
    """Nothing more is claimed for a place that runs something; another place may claim."""
    for _ in range(2):
        store.submissions.add(new_work(new_id("tun")))
    claimed(store)
    assert store.leases.claim(SERVED, LEASE_SECONDS) is None
    assert claimed(store, elsewhere("other")).item.slot == "other/cpu"


def test_only_work_for_the_device_is_claimed(store: Store, new_id: NewId) -> None:
    """Work for another device waits."""
    store.submissions.add(new_work(new_id("tun"), device="cuda:0"))
    assert store.leases.claim(SERVED, LEASE_SECONDS) is None


def test_an_expired_lease_is_taken_over_with_a_new_token(store: Store, new_id: NewId) -> None:
    """Abandoned work comes before the queue, and its claim counts the lost lease."""
    abandoned = store.submissions.add(new_work(new_id("tun"))).id
    store.submissions.add(new_work(new_id("tun"), priority=9))
    store.submissions.cancel(store.work.newest(WorkKind.TUNING, 1)[0].id)
    claimed(store, lease_seconds=0.0)
    store.submissions.add(new_work(new_id("tun"), priority=9))
    claim = claimed(store, elsewhere("other"))
    assert (claim.item.id, claim.lease.token, claim.lost_leases, claim.taken_over) == (abandoned, 2, 1, True)


def test_work_that_was_handed_back_is_not_taken_over(store: Store, new_id: NewId) -> None:
    """The lost lease of an earlier owner still counts, but nobody vanished since."""
    store.submissions.add(new_work(new_id("tun")))
    assert not claimed(store, lease_seconds=0.0).taken_over
    store.leases.hand_back(claimed(store, elsewhere("other")).lease)
    claim = claimed(store)
    assert (claim.lost_leases, claim.taken_over) == (1, False)


_REPORTS = ["probe", "activity", "progress", "finish"]
_LATE = [*product(_REPORTS, ["expired", "taken over", "ended"]), *product(["hand_back"], ["taken over", "ended"])]


@pytest.mark.parametrize(("report", "how"), _LATE)
def test_a_late_report_is_refused_and_changes_nothing(store: Store, new_id: NewId, report: str, how: str) -> None:
    """Whatever the owner of a lease that ended reports, it is refused and nothing of it is kept."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    lease = claimed(store, lease_seconds=LEASE_SECONDS if how == "ended" else 0.0).lease
    if how == "ended":
        store.leases.finish(lease, Ending(State.SUCCEEDED))
    if how == "taken over":
        claimed(store, elsewhere("other"))
    before = store.work.get(work_id)
    reports: dict[str, Callable[[], object]] = {
        "probe": lambda: store.evidence.record_probe(lease, 1, probe_result(4)),
        "activity": lambda: store.evidence.record_activity(lease, "opening the data"),
        "progress": lambda: store.evidence.record_progress(lease, [progress(1)]),
        "finish": lambda: store.leases.finish(lease, Ending(State.SUCCEEDED, recommendation=recommendation())),
        "hand_back": lambda: store.leases.hand_back(lease),
    }
    with pytest.raises(StaleLeaseError, match=work_id):
        reports[report]()
    assert store.work.get(work_id) == before
    assert store.evidence.probes(work_id) == []
    assert store.recommendations.newest(RecommendationFilter(), 10) == []


@pytest.mark.parametrize(("cancelled", "state"), [(False, State.QUEUED), (True, State.CANCELLED)])
def test_work_is_handed_back_late_where_nobody_took_it(
    store: Store, new_id: NewId, state: State, *, cancelled: bool
) -> None:
    """An owner that could not reach the store in time did not vanish: no lease is lost, and no time is counted."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    lease = claimed(store, lease_seconds=0.0).lease
    if cancelled:
        store.submissions.cancel(work_id)
    store.leases.hand_back(lease)
    item = store.work.get(work_id)
    assert (item.state, item.ended_at is not None) == (state, cancelled)
    with pytest.raises(StaleLeaseError):
        store.leases.hand_back(lease)
    if not cancelled:
        assert (claim := claimed(store)).lost_leases == 0
        assert claim.lease.token == 2


def test_a_renewed_lease_holds(store: Store, new_id: NewId) -> None:
    """After a renewal the work is not up for claim."""
    store.submissions.add(new_work(new_id("tun")))
    lease = claimed(store).lease
    assert beaten(store, lease) == BeatReply({lease: State.RUNNING}, frozenset(), frozenset())
    assert store.leases.claim(elsewhere("other"), LEASE_SECONDS) is None


def test_probes_are_kept_in_order_and_counted(store: Store, new_id: NewId) -> None:
    """Recorded probes come back equal, in order, and clear the count of lost leases."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    claimed(store, lease_seconds=0.0)
    claim = claimed(store)
    results = [probe_result(4), probe_result(8)]
    for ordinal, result in enumerate(results, start=1):
        store.evidence.record_probe(claim.lease, ordinal, result)
    assert [probe.result for probe in store.evidence.probes(work_id)] == results
    assert store.work.get(work_id).probes == 2
    store.leases.release_slot(SERVED.slot, "host:")
    assert claimed(store).lost_leases == 1


def test_an_ordinal_is_recorded_once(store: Store, new_id: NewId) -> None:
    """A second probe with the same ordinal is a conflict, and leaves the first and its event alone."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    lease = claimed(store).lease
    store.evidence.record_probe(lease, 1, probe_result(4))
    before = store.work.get(work_id)
    with pytest.raises(ConflictError, match="probe 1"):
        store.evidence.record_probe(lease, 1, probe_result(8))
    assert store.evidence.probes(work_id)[0].result.micro_batch_size == 4
    assert store.work.get(work_id) == before


def test_what_a_tuning_does_now_is_kept_without_an_event(store: Store, new_id: NewId) -> None:
    """The last activity replaces the others, and is a new version of the row alone."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    lease = claimed(store).lease
    before = store.work.get(work_id)
    for activity in ("opening the data", "running two updates at micro-batch 43"):
        store.evidence.record_activity(lease, activity)
    assert store.work.get(work_id).activity == "running two updates at micro-batch 43"
    assert store.work.get(work_id).events == before.events


def test_progress_is_kept_with_one_event_each(store: Store, new_id: NewId) -> None:
    """The last update becomes the job's progress; all become events."""
    work_id = store.submissions.add(new_work(new_id("job"), WorkKind.JOB)).id
    lease = claimed(store).lease
    store.evidence.record_progress(lease, [progress(1), progress(2)])
    store.evidence.record_progress(lease, [])
    assert store.work.get(work_id).progress == progress(2)
    store.evidence.record_progress(lease, [progress(2)])  # repeated, as its reply was lost
    (row,) = store.work.newest(WorkKind.JOB, 5)
    assert row.course == course_after(None, [progress(1), progress(2)]).model_dump(mode="json")
    seen = [event.progress.update for event in store.evidence.events(work_id) if event.progress is not None]
    assert seen == [1, 2]


def test_finishing_stores_the_answer_and_frees_the_place(store: Store, new_id: NewId) -> None:
    """The recommendation is stored with the end, can be found by what it is searched by, and the place is free."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    store.submissions.add(new_work(new_id("tun")))
    answer = recommendation(id=new_id("rec"))
    store.leases.finish(claimed(store).lease, Ending(State.SUCCEEDED, recommendation=answer))
    item = store.work.get(work_id)
    assert (item.state, item.recommendation_id) == (State.SUCCEEDED, answer.id)
    assert item.ended_at is not None
    assert store.recommendations.get(answer.id) == answer
    assert store.recommendations.tuning_with(answer.fingerprint) == work_id
    assert store.recommendations.tuning_with("1" * 64) is None
    assert claimed(store).item.id != work_id


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (RecommendationFilter(), True),
        (RecommendationFilter(model="mlp", device="cpu"), True),
        (RecommendationFilter(device="test processor", fingerprint="0" * 64), True),
        (RecommendationFilter(model="gpt"), False),
        (RecommendationFilter(device="cuda:0"), False),
        (RecommendationFilter(fingerprint="1" * 64), False),
    ],
)
def test_recommendations_are_found_by_their_fields(
    store: Store, new_id: NewId, wanted: RecommendationFilter, *, found: bool
) -> None:
    """A filter restricts by model, fingerprint, and device id or name."""
    store.submissions.add(new_work(new_id("tun")))
    answer = recommendation(id=new_id("rec"))
    store.leases.finish(claimed(store).lease, Ending(State.SUCCEEDED, recommendation=answer))
    rows = store.recommendations.newest(wanted, 10)
    assert [row.id for row in rows] == ([answer.id] if found else [])
    assert store.recommendations.newest(wanted, 10, before=answer.id) == []


def test_an_answered_tuning_begins_at_its_end(store: Store, new_id: NewId) -> None:
    """A tuning whose answer is known is stored with it, and nobody claims it."""
    answer = recommendation(id=new_id("rec"))
    item = store.submissions.add_succeeded(new_work(new_id("tun"), fingerprint=answer.fingerprint), answer)
    assert (item.state, item.recommendation_id) == (State.SUCCEEDED, answer.id)
    assert store.leases.claim(SERVED, LEASE_SECONDS) is None
    assert store.recommendations.tuning_with(answer.fingerprint) == item.id


def test_failures_and_results_are_kept(store: Store, new_id: NewId) -> None:
    """A problem and a training result come back as they were given."""
    work_id = store.submissions.add(new_work(new_id("job"), WorkKind.JOB)).id
    problem = make_problem(500, "training-failed", "It failed", "loss is not finite")
    result = TrainingResult(outcome=RunOutcome.FAILED, message="loss is not finite", updates=3)
    store.leases.finish(claimed(store).lease, Ending(State.FAILED, problem=problem, result=result))
    item = store.work.get(work_id)
    assert (item.problem, item.result) == (problem, result)


def test_handed_back_work_keeps_what_it_has(store: Store, new_id: NewId) -> None:
    """Handed back, it is queued with its probes, and the next claim is a fresh attempt."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    lease = claimed(store).lease
    store.evidence.record_probe(lease, 1, probe_result(4))
    store.leases.hand_back(lease)
    assert store.work.get(work_id).state is State.QUEUED
    claim = claimed(store)
    assert (claim.lease.token, claim.item.probes, claim.lost_leases) == (2, 1, 0)


def test_cancelling_follows_the_state(store: Store, new_id: NewId) -> None:
    """Queued work ends at once, running work becomes CANCELLING, ended work stays; each may be repeated."""
    queued, running = (
        store.submissions.add(new_work(new_id("tun"))).id,
        store.submissions.add(new_work(new_id("tun"))).id,
    )
    assert [store.submissions.cancel(queued).state for _ in range(2)] == [State.CANCELLED, State.CANCELLED]
    lease = claimed(store).lease
    assert [store.submissions.cancel(running).state for _ in range(2)] == [State.CANCELLING, State.CANCELLING]
    assert beaten(store, lease).renewed == {lease: State.CANCELLING}
    store.leases.finish(lease, Ending(State.CANCELLED))
    before = store.work.get(running)
    assert store.submissions.cancel(running) == before
    assert before.state is State.CANCELLED


def test_several_are_cancelled_and_deleted_together(store: Store, new_id: NewId) -> None:
    """Each as alone, with its event and its device time; unknown ids are left out, and a repetition changes nothing."""
    ids = [store.submissions.add(new_work(new_id("tun"))).id for _ in range(3)]
    lease = claimed(store).lease
    wanted = [*ids[:2], "tun_none"]
    expected = {ids[0]: State.CANCELLING, ids[1]: State.CANCELLED}
    assert [store.submissions.cancel_all(wanted) for _ in range(2)] == [expected, expected]
    assert beaten(store, lease).renewed == {lease: State.CANCELLING}
    assert [event.state for event in store.evidence.events(ids[1])] == [State.QUEUED, State.CANCELLED]
    assert store.work.get(ids[1]).ended_at is not None
    assert store.work.get(ids[2]).state is State.QUEUED
    remaining = {ids[0]: State.CANCELLING, ids[2]: State.QUEUED}
    assert store.retention.delete_all([*ids, "tun_none"]) == {**remaining, ids[1]: None}
    assert store.retention.delete_all([*ids, "tun_none"]) == remaining
    assert store.work.heads([*ids, "tun_none"]).keys() == remaining.keys()
    assert store.evidence.events(ids[1]) == []


def test_cancelled_work_that_is_handed_back_ends(store: Store, new_id: NewId) -> None:
    """A worker that stops between a cancellation and hearing of it does not put the work back in the queue."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    lease = claimed(store).lease
    store.submissions.cancel(work_id)
    store.leases.hand_back(lease)
    assert store.work.get(work_id).state is State.CANCELLED


def test_a_cancelled_run_whose_worker_died_is_claimed_to_be_ended(store: Store, new_id: NewId) -> None:
    """CANCELLING with an expired lease is claimed as it is."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    claimed(store, lease_seconds=0.0)
    store.submissions.cancel(work_id)
    claim = claimed(store)
    assert (claim.item.id, claim.item.state) == (work_id, State.CANCELLING)


@pytest.mark.parametrize("target", [State.CANCELLED, State.QUEUED, State.RUNNING])
def test_an_end_that_the_table_does_not_allow_is_refused(store: Store, new_id: NewId, target: State) -> None:
    """RUNNING cannot end in a state that its row of the table does not name as an end."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    lease = claimed(store).lease
    if target in {State.CANCELLED, State.RUNNING}:
        with pytest.raises(ConflictError, match="RUNNING"):
            store.leases.finish(lease, Ending(target))
        assert store.work.get(work_id).state is State.RUNNING
    else:
        assert State.RUNNING in sources_of(target)


def test_events_are_numbered_without_gaps(store: Store, new_id: NewId) -> None:
    """Events tell everything that happened, in order, and can be read from any of them on."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    lease = claimed(store).lease
    store.evidence.record_probe(lease, 1, probe_result(4))
    store.submissions.cancel(work_id)
    store.leases.finish(lease, Ending(State.CANCELLED))
    events = store.evidence.events(work_id)
    assert [event.id for event in events] == [1, 2, 3, 4, 5]
    states = [event.state for event in events]
    assert states == [State.QUEUED, State.RUNNING, None, State.CANCELLING, State.CANCELLED]
    assert events[2].kind is EventKind.PROBE
    assert events[2].probe is not None
    assert events[2].probe.result == probe_result(4)
    assert [event.id for event in store.evidence.events(work_id, after=3)] == [4, 5]
    assert [event.id for event in store.evidence.events(work_id, after=1, limit=2)] == [2, 3]
    assert store.evidence.event_counts([work_id, "tun_none"]) == {work_id: 5}


def test_a_place_is_released_for_the_owners_that_are_dead(store: Store, new_id: NewId) -> None:
    """Leases of a place expire when its owners are known dead; those of owners with another name do not."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    claimed(store)
    store.leases.release_slot(SERVED.slot, "host:another")
    assert store.leases.claim(SERVED, LEASE_SECONDS) is None
    store.leases.release_slot(SERVED.slot, "host:scope:")
    assert claimed(store).item.id == work_id


def test_devices_say_who_holds_them_and_what_waits(store: Store, new_id: NewId) -> None:
    """A device shows its worker's announcement, its holder and its queue; it leaves with its own worker only."""
    store.devices.announce(SERVED)
    store.devices.announce(SERVED)
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    store.submissions.add(new_work(new_id("tun")))
    claimed(store)
    (seen,) = store.devices.list()
    assert (seen.served, seen.running_id, seen.queued) == (SERVED, work_id, 1)
    assert seen.age_seconds < 60
    store.devices.withdraw(SERVED.model_copy(update={"owner": "another"}))
    assert len(store.devices.list()) == 1
    store.devices.withdraw(SERVED)
    assert store.devices.list() == []


def test_the_check_writes(store: Store) -> None:
    """A store that can be written passes its check, again and again."""
    store.queue.check()
    store.queue.check()


def test_everything_survives_a_restart(database_url: str, new_id: NewId) -> None:
    """Opening the same database again finds what was there, and migrating again changes nothing."""
    first = open_store(database_url)
    work_id = first.submissions.add(new_work(new_id("tun"))).id
    first.evidence.record_probe(claimed(first).lease, 1, probe_result(4))
    first.close()
    again = open_store(database_url)
    assert [probe.result.micro_batch_size for probe in again.evidence.probes(work_id)] == [4]
    again.close()


def test_concurrent_claims_of_one_place_give_one_run(store: Store, new_id: NewId) -> None:
    """The database itself keeps a place to one run, whoever claims at the same time."""
    for _ in range(8):
        store.submissions.add(new_work(new_id("tun")))
    together = threading.Barrier(8)

    def claim(name: int) -> Claim | None:
        together.wait()
        return store.leases.claim(SERVED.model_copy(update={"owner": f"owner{name}"}), LEASE_SECONDS)

    with ThreadPoolExecutor(8) as pool:
        won = [result for result in pool.map(claim, range(8)) if result is not None]
    assert len(won) == 1


def test_a_database_that_is_gone_is_said_to_be(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The driver's own error becomes ours, with its words."""
    folder = tmp_path_factory.mktemp("gone")
    (folder / "db").mkdir()
    with pytest.raises(StoreUnavailableError, match="unable to open"):
        open_store(f"sqlite:///{folder / 'db'}")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://host/db", "no url at all"])
def test_a_database_that_cannot_be_used_is_refused(url: str) -> None:
    """URLs in memory, of other databases, or of nothing are refused with what is allowed."""
    with pytest.raises(ConfigurationError, match="database_url"):
        open_store(url)


def test_named_work_is_claimed_whatever_else_waits(store: Store, new_id: NewId) -> None:
    """The worker of a dispatched job takes its own work only, and only while no other worker has it."""
    first, named = (store.submissions.add(new_work(new_id("tun"))) for _ in range(2))
    claim = store.leases.claim_work(named.id, SERVED, LEASE_SECONDS)
    assert claim is not None
    assert (claim.item.id, claim.item.state, claim.lease.token) == (named.id, State.RUNNING, 1)
    assert store.leases.claim_work(named.id, elsewhere("other"), LEASE_SECONDS) is None, "it has a live lease"
    assert store.leases.claim_work(first.id, SERVED, LEASE_SECONDS) is None, "the slot is in use"
    assert store.leases.claim_work("tun_none", elsewhere("other"), LEASE_SECONDS) is None
    store.leases.release_slot(SERVED.slot, "host:")
    taken_over = store.leases.claim_work(named.id, elsewhere("other"), LEASE_SECONDS)
    assert taken_over is not None
    assert (taken_over.lease.token, taken_over.lost_leases) == (2, 1)
    with pytest.raises(StaleLeaseError):
        store.leases.finish(claim.lease, Ending(State.SUCCEEDED))


@pytest.mark.parametrize(
    ("device", "hardware", "fits"),
    [
        ("cuda:3", None, True),
        ("cuda:3", "test card|1", False),
        ("cpu", None, False),
        ("", '{"product":"test*"}', True),
        ("", '{"product":"other*"}', False),
    ],
)
def test_named_work_needs_its_hardware(
    store: Store, new_id: NewId, device: str, hardware: str | None, *, fits: bool
) -> None:
    """An engine numbers its devices itself, so that only their kind and product count."""
    item = store.submissions.add(new_work(new_id("tun"), device=device, hardware=hardware))
    info = SERVED.device.model_copy(update={"id": "cuda:0", "kind": "cuda", "name": "test card"})
    claim = store.leases.claim_work(item.id, SERVED.model_copy(update={"device": info}), LEASE_SECONDS)
    assert (claim is not None) == fits


def test_a_dispatcher_sees_queued_held_and_named_work(store: Store, new_id: NewId) -> None:
    """Held work comes first, then the queue in its order, and ended work only by name."""
    ended_one, held, early, late = (store.submissions.add(new_work(new_id("tun"), priority=n == 3)) for n in range(4))
    store.submissions.cancel(ended_one.id)
    assert store.leases.claim_work(held.id, SERVED, LEASE_SECONDS) is not None
    assert [found.id for found in store.fleet.work(10, ())] == [held.id, late.id, early.id]
    assert [found.id for found in store.fleet.work(1, ())] == [held.id, late.id]
    store.leases.release_slot(SERVED.slot, "host:")
    seen = {found.id: found for found in store.fleet.work(10, {ended_one.id, "tun_none"})}
    assert (seen[held.id].has_live_lease, seen[held.id].token, seen[early.id].token) == (False, 1, 0)
    assert seen[ended_one.id].state is State.CANCELLED


def test_the_last_report_of_each_cluster_is_kept(store: Store) -> None:
    """A report replaces the one before of the same engine and address."""
    for engine, error in (("ray", "lost"), ("slurm", None), ("ray", None)):
        store.fleet.report(FleetReport(engine=engine, address="there", error=error))
    assert [(found.report.engine, found.report.error) for found in store.fleet.reports()] == [
        ("ray", None),
        ("slurm", None),
    ]
