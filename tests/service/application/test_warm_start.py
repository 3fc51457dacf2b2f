"""Stored answers to the same question: they lead new tunings, and are served for their own fingerprint only."""

import random
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from batchwright.client import Client
from batchwright.client.documents.states import State
from batchwright.client.documents.work import Tuning, TuningPage, TuningSubmission
from batchwright.client.documents.workers import ServedDevice
from batchwright.driving.probe_runner import WorkloadRunner
from batchwright.planning.session import TuningSession
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import ProbeRequest, TuningRequest
from batchwright.schemas.results import Outcome, ProbeResult
from batchwright_service.application.application_context import ApplicationContext
from batchwright_service.application.hit_counter import HitCounter
from batchwright_service.application.queue import QueueCases
from batchwright_service.application.rules.policy import Policy
from batchwright_service.application.rules.stored_warm_start import warm_start_of
from batchwright_service.application.tunings import TuningCases
from batchwright_service.domain.callers import KEYLESS
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.fast_path.queue_positions import QueuePositions
from batchwright_service.registry.registered_commands import RegisteredCommands
from batchwright_service.store.database.schema import recommendations
from batchwright_service.store.database.transactions import write_transaction
from batchwright_service.store.models import Ending, WorkItem
from batchwright_service.store.store import Store
from batchwright_service.worker.coordinator import Coordinator
from batchwright_service.worker.worker_settings import WorkerSettings
from tests.support.factories import CPU, gpt_spec, mlp_spec, plan_of, tuning_request
from tests.support.service.scripted import SERVED, InlineExecutor, ScriptedRunner, Trainer, new_work

MIB, GIB = 1024**2, 1024**3
REQUEST = tuning_request(memory_limit_bytes=4 * GIB)
UPGRADED = {"torch": "2.9"}
PATIENCE_SECONDS = 120.0

NewId = Callable[[str], str]


class MovedRunner(ScriptedRunner):
    """A runner on which the same sizes take another share of the limit."""

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Answer from the formula, with a peak that is 5 % lower."""
        found = super().run(request, should_stop)
        return found.model_copy(update={"process_peak_bytes": int((found.process_peak_bytes or 0) * 0.95)})


def serving(store: Store, versions: dict[str, str] | None = None, **device: Any) -> ServedDevice:
    """Announce the worker of the one place, and that it is this one now."""
    changes = {"versions": versions or {"torch": "2.8"}, "device": CPU.model_copy(update=device)}
    served = SERVED.model_copy(update=changes)
    store.devices.announce(served)
    return served


def context_of(store: Store) -> ApplicationContext:
    """The application context, around a store."""
    hit_counter = HitCounter(store.statistics.count_hits)
    return ApplicationContext(
        store,
        Policy([], []),
        Path("unused"),
        60.0,
        commands=RegisteredCommands({}, Path()),
        hit_counter=hit_counter,
    )


def cases(context: ApplicationContext) -> TuningCases:
    """The use cases of tunings."""
    return TuningCases(context, QueuePositions(QueueCases(context).read))


def submit(store: Store, request: TuningRequest = REQUEST, **changes: Any) -> tuple[Tuning, bool]:
    """Submit a tuning; whether it was queued."""
    context = context_of(store)
    answer = cases(context).submit(TuningSubmission(**dict(request), **changes), KEYLESS)
    context.hit_counter.flush()  # not later from a thread, when the store is closed
    return Tuning.model_validate_json(answer.body), answer.queued


def course(item: WorkItem, served: ServedDevice) -> TuningSession:
    """The tuning of a queued item, as its worker begins it."""
    request = TuningRequest.model_validate_json(item.payload)
    return TuningSession(request, served.device, environment=served.environment, versions=served.versions)


def work_off(store: Store, served: ServedDevice, runner: WorkloadRunner | None = None) -> Recommendation:
    """Claim what is queued, run it, and store its answer; what is asked of an estimate is asked."""
    claim = store.leases.claim(served, 3600.0)  # real probes take long on a busy machine, and nobody renews the lease
    assert claim is not None
    tuning = course(claim.item, served)
    if (stored := warm_start_of(store.recommendations, claim.item)) is not None:
        tuning.warm_start_from(stored)
    runner = runner or ScriptedRunner(37)
    if (question := tuning.expectation_request()) is not None:
        tuning.start_from_estimate(runner.expect(question))
    found = finish(tuning, runner, IdentifierSource().new("rec"))
    store.leases.finish(claim.lease, Ending(State.SUCCEEDED, recommendation=found))
    return found


def finish(tuning: TuningSession, runner: WorkloadRunner, identifier: str) -> Recommendation:
    """Drive a tuning to its end."""
    while (probe := tuning.next_probe()) is not None:
        tuning.record(runner.run(probe))
    return tuning.recommendation(identifier=identifier, created_at=datetime.now(UTC), total_seconds=1.0)


@pytest.fixture
def answered(store: Store) -> Recommendation:
    """An answer under the versions before the upgrade; the worker serves the upgraded ones from now on."""
    served = serving(store)
    submit(store)
    found = work_off(store, served)
    serving(store, UPGRADED)
    return found


# --- what is queued ---


def test_an_upgrade_queues_a_tuning_that_refers_to_the_earlier_answer(store: Store, answered: Recommendation) -> None:
    """The answer is not served under other versions; the new tuning's row names it."""
    tuning, queued = submit(store)
    assert queued
    assert (tuning.state, tuning.recommendation) == (State.QUEUED, None)
    assert tuning.warm_start_from == answered.id
    listed = TuningPage.model_validate_json(cases(context_of(store)).page(1))
    assert listed.items[0].warm_start_from == answered.id


def test_a_fresh_tuning_refers_to_nothing(store: Store, answered: Recommendation) -> None:
    """Fresh means from nothing."""
    assert answered.feasible
    assert submit(store, fresh=True)[0].warm_start_from is None


def test_chains_are_cut(store: Store, answered: Recommendation) -> None:
    """A later tuning refers to the answer with the full proof, which more were confirmed from than are looked at."""
    for release in range(9):
        served = serving(store, {"torch": f"3.{release}"})
        assert submit(store)[0].warm_start_from == answered.id
        assert work_off(store, served).evidence.proof.stopped_by == "warm-start"


def test_an_answer_that_a_probe_may_confirm_comes_before_a_newer_one(store: Store, answered: Recommendation) -> None:
    """The newest was found under a lower limit: the one under the same limit is worth more."""
    served = serving(store)
    submit(store, tuning_request(memory_limit_bytes=2 * GIB))
    work_off(store, served)
    serving(store, UPGRADED)
    assert submit(store)[0].warm_start_from == answered.id


# --- what is served without a probe ---


def drawn(source: random.Random) -> tuple[TuningRequest, ServedDevice]:
    """A request and a worker, from few of each kind, so that pairs agree in much and differ in some."""
    request = tuning_request(
        source.choice([mlp_spec(), mlp_spec(precision="bf16-mixed"), gpt_spec()]),
        source.choice([100, 100, 90]),
        memory_limit_bytes=source.choice([None, 4 * GIB, 3 * GIB]),
        memory_margin=source.choice([0.03, 0.03, 0.1]),
        objective=source.choice(["largest", "fewest_steps"]),
        probe_timeout_seconds=source.choice([10.0, 20.0]),
    )
    total, name = source.choice([16 * GIB, 32 * GIB]), source.choice(["one", "one", "another"])
    changes = {
        "device": CPU.model_copy(update={"total_bytes": total, "name": name}),
        "versions": {"torch": source.choice(["2.8", "2.9"]), "python": source.choice(["3.11", "3.12"])},
        "environment": source.choice([{}, {}, {"MALLOC_ARENA_MAX": "1"}]),
    }
    return request, SERVED.model_copy(update=changes)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_an_answer_is_served_for_its_own_fingerprint_only(store: Store, seed: int) -> None:
    """Over random requests, devices, versions and limits: without a probe exactly when the fingerprint was answered."""
    source, answers = random.Random(seed), dict[str, Recommendation]()
    proven: set[str] = set()
    for _ in range(60):
        request, served = drawn(source)
        store.devices.announce(served)
        asked = TuningSession(request, served.device, environment=served.environment, versions=served.versions)
        tuning, queued = submit(store, request)
        assert queued == (asked.fingerprint not in answers)
        if not queued:
            assert tuning.recommendation is not None
            assert tuning.recommendation.fingerprint == asked.fingerprint
            continue
        assert (tuning.warm_start_from is not None) == (asked.request_fingerprint in proven)
        if tuning.warm_start_from is not None:
            earlier = store.recommendations.get(tuning.warm_start_from)
            assert earlier.fingerprint != asked.fingerprint
            assert earlier.evidence.proof.stopped_by != "warm-start"
        found = work_off(store, served)
        assert found.fingerprint == asked.fingerprint
        assert found.evidence.probes
        assert -(-request.effective_batch_size // found.evidence.proof.fits) == 3  # accumulation steps
        assert found.evidence.proof.fits == 37 or request.objective == "fewest_steps"
        answers[asked.fingerprint] = found
        proven.add(asked.request_fingerprint)
    assert len(answers) > len(proven) > 1


# --- what a worker makes of it ---


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[Callable[..., Coordinator]]:
    """Starts a worker around a runner, with the upgraded versions unless given others."""
    started: list[Coordinator] = []

    def new(runner: ScriptedRunner, versions: dict[str, str] = UPGRADED) -> Coordinator:
        terms = WorkerSettings(
            node_name="host",
            runs_dir=tmp_path / "runs",
            locks_dir=tmp_path / "locks",
            lease_seconds=60.0,
            poll_seconds=0.02,
            shutdown_grace_seconds=1.0,
        )
        started.append(Coordinator(store, [InlineExecutor(CPU, runner, Trainer())], versions, terms))
        store.devices.withdraw(SERVED)  # announced by the tests for another owner
        started[-1].start()
        return started[-1]

    yield new
    for coordinator in started:
        coordinator.stop()


def answer_to(store: Store, tuning_id: str) -> Recommendation:
    """The recommendation of a tuning once it has ended."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.01)):
        if (item := store.work.get(tuning_id)).state.terminal:
            assert item.state is State.SUCCEEDED, item
            return store.recommendations.get(str(item.recommendation_id))
        pause.wait(0.01)
    raise AssertionError(f"still {store.work.get(tuning_id)}")


def test_one_probe_confirms_the_answer(
    store: Store, answered: Recommendation, start: Callable[..., Coordinator]
) -> None:
    """The worker runs the earlier size, the plan, and no other; the answer rests on the earlier one and says so."""
    tuning, _ = submit(store)
    runner = ScriptedRunner(37)
    start(runner)
    found = answer_to(store, tuning.id)
    assert (runner.checked, runner.sizes) == (1, [37, 34])  # the size, and the plan
    assert plan_of(found).micro_batch_sizes == plan_of(answered).micro_batch_sizes
    assert found.evidence.warm_start is not None
    assert found.evidence.warm_start.recommendation_id == answered.id
    assert found.fingerprint == tuning.fingerprint != answered.fingerprint
    assert submit(store)[0].recommendation == found  # its own fingerprint is answered now


@pytest.mark.parametrize("kept", [1, 2])
def test_after_a_crash_the_tuning_goes_on_as_if_nothing_had_happened(
    store: Store, answered: Recommendation, start: Callable[..., Coordinator], kept: int
) -> None:
    """A worker dies after some probes; the next runs exactly those that an undisturbed tuning would still run."""
    undisturbed = MovedRunner(40)
    whole = TuningSession(REQUEST, CPU, environment={}, versions=UPGRADED)
    whole.warm_start_from(answered)
    whole.record(undisturbed.coupling)
    expected = finish(whole, undisturbed, "rec_expected")
    tuning, _ = submit(store)
    claim = store.leases.claim(SERVED, 60.0)
    assert claim is not None
    for ordinal, result in enumerate(expected.evidence.probes[:kept], start=1):
        store.evidence.record_probe(claim.lease, ordinal, result)
    store.leases.release_slot(SERVED.slot, "host:")
    runner = MovedRunner(40)
    start(runner)
    found = answer_to(store, tuning.id)
    assert runner.sizes == undisturbed.sizes[kept:]
    assert found.evidence == expected.evidence.model_copy(update={"tuning_id": tuning.id})


class SlowRunner(ScriptedRunner):
    """Nothing above ``largest`` ends in time."""

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """A probe that fits, or one that is given up."""
        result = super().run(request, should_stop)
        return result.model_copy(update={} if result.outcome is Outcome.FIT else {"outcome": Outcome.TIMED_OUT})


def test_an_answer_below_a_time_out_succeeds_and_is_not_served_again(store: Store) -> None:
    """The size that fits is recommended; a second submission, perhaps with more time, tries larger sizes again."""
    served = serving(store)
    submit(store)
    found = work_off(store, served, SlowRunner(37))
    assert (found.feasible, found.evidence.proof.stopped_by) == (True, "timeout")
    assert 0 < (found.largest_micro_batch_size or 0) <= 37
    assert "larger-sizes-not-known" in {advice.code for advice in found.warnings}
    again, queued = submit(store, REQUEST.model_copy(update={"probe_timeout_seconds": 3000.0}))
    assert (queued, again.recommendation, again.warm_start_from) == (True, None, found.id)


@pytest.mark.parametrize("reference", ["rec_none", "another question", "another version"])
def test_a_reference_that_leads_nowhere_is_no_failure(
    store: Store, answered: Recommendation, start: Callable[..., Coordinator], reference: str
) -> None:
    """The earlier answer is gone, answers another question or cannot be read by now: the tuning searches as ever."""
    request = tuning_request(effective_batch_size=50) if reference == "another question" else REQUEST
    if reference == "another version":
        with write_transaction(store.engine) as connection:
            connection.execute(update(recommendations).values(document="{}"))
    asked = TuningSession(request, CPU, environment={}, versions=UPGRADED)
    work = new_work(
        IdentifierSource().new("tun"),
        fingerprint=asked.fingerprint,
        payload=request.model_dump_json(),
        warm_start_from=reference if reference == "rec_none" else answered.id,
    )
    store.submissions.add(work)
    start(ScriptedRunner(37))
    found = answer_to(store, work.id)
    assert (found.largest_micro_batch_size, found.evidence.proof.stopped_by, found.evidence.warm_start) == (
        37,
        "oom",
        None,
    )


# --- the store's contract ---


def test_the_store_finds_answers_by_their_question(store: Store, new_id: NewId) -> None:
    """Feasible ones of tunings with that question, newest first, at most as many as asked for."""
    served = serving(store)
    made: list[str] = []
    for limit, largest in ((2 * GIB, 37), (3 * GIB, 37), (4 * GIB, 0), (5 * GIB, 37)):
        submit(store, tuning_request(memory_limit_bytes=limit), fresh=True)
        made.append(work_off(store, served, ScriptedRunner(largest)).id)
    fingerprint = TuningSession(REQUEST, served.device, environment={}, versions={}).request_fingerprint
    store.submissions.add(new_work(new_id("tun"), request_fingerprint=fingerprint))
    assert [stored.id for stored in store.recommendations.for_request(fingerprint, 9)] == [made[3], made[1], made[0]]
    assert [stored.id for stored in store.recommendations.for_request(fingerprint, 2)] == [made[3], made[1]]
    assert store.recommendations.for_request("0" * 64, 9) == []


# --- over HTTP ---


def test_the_api_shows_what_leads_a_tuning(client: Client) -> None:
    """Null for the first; the first's answer for the same question under another limit, found anew and exactly."""
    first = client.tunings.wait(client.tunings.submit(REQUEST).id)
    assert first.warm_start_from is None
    lower = client.tunings.submit(tuning_request(memory_limit_bytes=2 * GIB))
    assert lower.warm_start_from == first.recommendation_id
    answer = client.tunings.wait(lower.id).recommendation
    assert answer is not None
    assert (answer.largest_micro_batch_size, answer.evidence.proof.stopped_by) == (37, "oom")
    assert answer.evidence.warm_start is not None
    assert answer.evidence.expected is not None


# --- with real probes ---
