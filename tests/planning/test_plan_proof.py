"""The recommended plan has been run, or a fit was at least as demanding: windows of probes, and runs of plans."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from io import StringIO
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from batchwright.cli.display import probe_row, recommendation_panel
from batchwright.errors import SearchError
from batchwright.hardware.inventory import cpu
from batchwright.planning.accumulation import balanced_split, is_as_demanding, plan_window, probe_window
from batchwright.planning.session import TuningSession
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import Objective, ProbeRequest, TuningRequest
from batchwright.schemas.results import Outcome, ProbeResult, UpdateTiming
from tests.support.factories import CPU, mlp_spec, plan_of, probe_result, python_spec, tuning_request

ROOM_FOR_46: dict[str, Any] = {"memory_limit_bytes": 1465 * 2**14, "memory_margin": 0.0}
"""A limit of ``device(46)``, by whose fits a search expects that 46 is the last."""
many = settings(max_examples=100, deadline=None, derandomize=True)
Run = Callable[[ProbeRequest], ProbeResult]


def device(largest: int, special: Mapping[tuple[int, ...], Iterable[Outcome]] | None = None) -> Run:
    """A device that fits micro-batches up to ``largest``, except for windows with outcomes of their own, in turn.

    Others fail in their first micro-batch, and these later.
    """
    outcomes = {window: list(those) for window, those in (special or {}).items()}

    def run(probe: ProbeRequest) -> ProbeResult:
        window = probe_window(probe)
        outcome = Outcome.FIT if max(window) <= largest else Outcome.OOM
        if special_outcomes := outcomes.get(window):
            outcome = special_outcomes.pop(0) if len(special_outcomes) > 1 else special_outcomes[0]
        fits = outcome is Outcome.FIT
        failed = None if fits or window in outcomes else 1
        timing = UpdateTiming(updates=3, micro_batch_sizes=window, update_seconds=1.0, micro_batch_seconds=0.1)
        return probe_result(
            probe.micro_batch_size,
            outcome,
            (1000 + 10 * probe.micro_batch_size) * 2**14 if fits else None,
            accumulates=probe.accumulates,
            micro_batch_sizes=window,
            measures_time=probe.measures_time,
            failed_micro_batch=failed,
            timing=timing if fits else None,
        )

    return run


def new_tuning(share: int, *, ranks: int = 1, **changes: Any) -> TuningSession:
    """A tuning with ``share`` samples in an update, over all ranks."""
    spec = mlp_spec(parallelism={"world_size": ranks})
    return TuningSession(tuning_request(spec, share, **changes), CPU, environment={}, versions={})


def finish(course: TuningSession, run: Run) -> Recommendation:
    """Drive a tuning to its end."""
    while (probe := course.next_probe()) is not None:
        assert len(course.probes) < 100
        course.record(run(probe))
    return course.recommendation(identifier="rec_1", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)


def plan_runs(found: Recommendation) -> list[tuple[tuple[int, ...], Outcome]]:
    """The windows of the probes that ran a plan without timing it, with their outcomes."""
    runs = [probe for probe in found.evidence.probes if probe.runs_plan and not probe.measures_time]
    return [(probe.micro_batch_sizes, probe.outcome) for probe in runs]


def searched(found: Recommendation) -> list[ProbeResult]:
    """The probes of the search."""
    return [probe for probe in found.evidence.probes if probe.shows_size]


# --- windows ---


@pytest.mark.parametrize(
    ("size", "share", "window"),
    [(46, 64, (46, 46)), (32, 64, (32, 32)), (63, 64, (63, 63)), (64, 64, (64,))],
)
def test_a_probe_of_a_size_runs_whole_micro_batches_of_it(size: int, share: int, window: tuple[int, ...]) -> None:
    """Two, though together they may have more samples than the rank; one where it is the whole share."""
    request = ProbeRequest(spec=mlp_spec(), micro_batch_size=size, samples_per_window=share, device="cpu")
    assert probe_window(request) == window


@pytest.mark.parametrize(
    ("size", "share", "window", "timed"),
    [
        (34, 100, (34, 33, 33), (34, 33, 33)),
        (46, 91, (46, 45), (46, 45)),
        (32, 64, (32, 32), (32, 32)),
        (2, 9, (2, 2, 1), (2, 2, 2, 1)),
        (5, 50, (5, 5), (5, 5, 5, 5)),
        (38, 520, (38, 38, 37, 37), (38, 37, 37, 37)),
    ],
)
def test_a_probe_of_a_plan_runs_the_plans_micro_batches(
    size: int, share: int, window: tuple[int, ...], timed: tuple[int, ...]
) -> None:
    """In the order of training: two of each size, or four that show the plan's time."""
    request = ProbeRequest(spec=mlp_spec(), micro_batch_size=size, samples_per_window=share, device="cpu")
    assert probe_window(request.model_copy(update={"runs_plan": True})) == window
    assert probe_window(request.model_copy(update={"measures_time": True})) == timed


@many
@given(share=st.integers(1, 5000), steps=st.integers(1, 5000))
def test_a_window_has_the_sizes_of_its_plan_in_their_order(share: int, steps: int) -> None:
    """Each at most as often as the plan has it, and what follows what in training follows it in the window."""
    sizes, window = balanced_split(share, steps), plan_window(share, steps)
    assert len(window) <= 4
    assert list(dict.fromkeys(window)) == list(dict.fromkeys(sizes))
    assert set(pairwise(sizes)) == set(pairwise(window))


@pytest.mark.parametrize(
    ("ran", "window", "demanding"),
    [
        ((46, 46), (32, 32), True),
        ((46, 46), (46, 46, 46, 46), True),
        ((46, 46), (47, 47), False),
        ((46, 46), (46, 45), False),
        ((46, 46), (34, 33, 33), False),
        ((34, 33, 33), (34, 33, 33), True),
        ((34, 33, 33), (34, 34, 33), False),
        ((34, 34, 34, 33), (34, 34, 33), True),
        ((64,), (64,), True),
        ((64,), (63,), True),
        ((64,), (32, 32), False),
        ((46, 46), (46,), True),
    ],
)
def test_demanding_updates(ran: tuple[int, ...], window: tuple[int, ...], demanding: bool) -> None:  # noqa: FBT001
    """Equal micro-batches cover smaller equal ones, with gradients held; a plan of two sizes is covered by itself."""
    assert is_as_demanding(ran, window) is demanding


# --- when a plan is run ---


def test_a_uniform_plan_takes_no_further_probe() -> None:
    """The largest size of the search, 50 of 64, needs more than the plan of 32 + 32, and the evidence says so."""
    found = finish(new_tuning(64), device(50))
    assert (found.largest_micro_batch_size, plan_of(found).micro_batch_sizes) == (50, ((32, 32),))
    assert (plan_runs(found), len(searched(found))) == ([], len(found.evidence.probes))
    statement = "Verified by a larger run: 50 + 50 fits, and the plan uses 32 + 32."
    assert found.evidence.plan_proof == statement


def test_a_plan_of_two_sizes_is_run_itself() -> None:
    """Once, last, and the panel and the table of probes show it."""
    found = finish(new_tuning(100), device(46))
    assert plan_runs(found) == [((34, 33, 33), Outcome.FIT)]
    assert found.evidence.probes[-1].micro_batch_sizes == plan_of(found).micro_batch_sizes[0]
    assert found.evidence.plan_proof == "Verified by running the plan itself (34 + 33 + 33)."
    assert str(probe_row(found.evidence.probes[-1])[-1]) == "the plan: 34 + 33 + 33"
    console = Console(width=120, file=StringIO())
    with console.capture() as captured:
        console.print(recommendation_panel(found))
    assert f"plan proof       {found.evidence.plan_proof}" in captured.get()
    assert Recommendation.model_validate_json(found.model_dump_json()) == found


def test_many_micro_batches_are_run_by_two_of_each_size() -> None:
    """1,000 samples at most 46 at a time are 22 micro-batches; four are run, and show that 46 fits too."""
    found = finish(new_tuning(1000, **ROOM_FOR_46), device(46))
    assert [(window, outcome) for window, outcome in plan_runs(found) if outcome is Outcome.FIT] == [
        ((46, 46, 45, 45), Outcome.FIT)
    ]
    assert [probe.micro_batch_sizes for probe in found.evidence.probes if probe.micro_batch_size == 46] == [
        (46, 46, 45, 45)
    ]
    assert (found.evidence.proof.fits, found.evidence.proof.next_size) == (46, 47)
    assert "4 of the plan's 22 micro-batches (46 + 46 + 45 + 45)" in found.evidence.plan_proof


@pytest.mark.parametrize("outcome", [Outcome.OOM, Outcome.ERROR, Outcome.TIMED_OUT, Outcome.LOST])
def test_a_plan_that_fails_after_its_first_micro_batches_does_not_refute_its_size(outcome: Outcome) -> None:
    """The size is probed alone, and from then on the search runs no plan."""
    found = finish(new_tuning(1000, **ROOM_FOR_46), device(46, {(46, 46, 45, 45): [outcome]}))
    assert [probe.micro_batch_sizes for probe in found.evidence.probes if probe.micro_batch_size == 46][:2] == [
        (46, 46, 45, 45),
        (46, 46),
    ]
    assert (found.evidence.proof.fits, found.evidence.proof.next_size) == (46, 47)
    assert (found.largest_micro_batch_size == 46) is (outcome is not Outcome.OOM)
    assert [warning.code for warning in found.warnings] == ([] if outcome is Outcome.OOM else ["plan-not-known-to-fit"])


@pytest.mark.parametrize(
    ("share", "ranks", "largest", "run"),
    [
        (200, 2, 46, [(34, 33, 33)]),
        (199, 2, 60, [(50, 49)]),  # 100 samples and 99: only the second rank's differ
        (201, 2, 46, [(34, 34, 33)]),  # 101 samples and 100: both differ, in the same two sizes
        (65, 2, 46, []),  # 33 samples and 32, each in one micro-batch
        (128, 2, 50, []),
    ],
)
def test_the_first_rank_whose_micro_batches_differ_is_run(
    share: int, ranks: int, largest: int, run: list[tuple[int, ...]]
) -> None:
    """One probe for all ranks, whose micro-batches have at most two sizes."""
    found = finish(new_tuning(share, ranks=ranks), device(largest))
    assert [window for window, _ in plan_runs(found)] == run


@many
@given(
    share=st.integers(1, 3000),
    ranks=st.integers(1, 4),
    part=st.floats(0.0, 1.2),
    objective=st.sampled_from(["largest", "fewest_steps", "fastest"]),
)
def test_every_recommended_plan_was_run(share: int, ranks: int, part: float, objective: Objective) -> None:
    """On each rank a fit was at least as demanding, or is of the same sizes; at most one probe is added for it."""
    share = max(share, ranks)
    found = finish(new_tuning(share, ranks=ranks, objective=objective), device(round(part * share / ranks)))
    added = [probe for probe in found.evidence.probes if not (probe.shows_size or probe.measures_time)]
    assert len(added) <= 1
    if not found.feasible:
        assert (added, found.evidence.plan_proof) == ([], "")
        return
    fits = [probe.micro_batch_sizes for probe in found.evidence.probes if probe.outcome is Outcome.FIT]
    windows = {plan_window(sum(sizes), len(sizes)) for sizes in plan_of(found).micro_batch_sizes}
    for window in windows:
        covered = any(is_as_demanding(fit, window) for fit in fits)
        assert covered or any(len(set(fit)) > 1 and {*window} <= {*fit} for fit in fits)
    uniform = all(len(set(window)) == 1 for window in windows)
    assert not uniform or not added


@pytest.mark.parametrize(("share", "runs"), [(512, []), (520, []), (518, [((40, 40, 39, 39), Outcome.FIT)])])
def test_the_timing_of_the_fastest_plan_may_be_its_run(share: int, runs: list[tuple[tuple[int, ...], Outcome]]) -> None:
    """The timed updates are of the plan's own sizes: no further probe, unless they had one of them only once."""
    found = finish(new_tuning(share, objective="fastest"), device(40))
    assert plan_runs(found) == runs
    assert found.evidence.plan_proof


def test_the_fewest_steps_are_run_too() -> None:
    """The search fits 34 + 34; the plan is 34 + 33 + 33."""
    found = finish(new_tuning(100, objective="fewest_steps"), device(46))
    assert plan_runs(found) == [((34, 33, 33), Outcome.FIT)]


def test_a_warm_start_runs_the_plan_again() -> None:
    """One probe confirms the size, one the plan: neither was run under these versions."""
    stored = finish(new_tuning(100, memory_limit_bytes=2**30), device(46))
    again = TuningSession(stored.request, CPU, environment={}, versions={"torch": "3"})
    again.warm_start_from(stored)
    found = finish(again, device(46))
    assert [probe.micro_batch_sizes for probe in found.evidence.probes] == [(46, 46), (34, 33, 33)]
    assert found.evidence.proof.stopped_by == "warm-start"


# --- when it does not fit ---


def test_a_plan_that_runs_out_of_memory_is_followed_by_the_next_smaller_one() -> None:
    """46 + 46 fits and 46 + 45 does not: three micro-batches are recommended, and the evidence says why."""
    found = finish(new_tuning(91), device(46, {(46, 45): [Outcome.OOM]}))
    assert plan_runs(found) == [((46, 45), Outcome.OOM), ((31, 30, 30), Outcome.FIT)]
    assert plan_of(found).micro_batch_sizes == ((31, 30, 30),)
    assert (found.evidence.proof.fits, found.largest_micro_batch_size) == (46, 31)
    assert found.evidence.plan_proof == (
        "The plan in micro-batches of 46 + 45 ran out of memory (OOM at 46). "
        "Verified by running the plan itself (31 + 30 + 30)."
    )
    assert found.choice == "The 2-step plan (46 + 45) ran out of memory, so the plan has 3 steps of at most 31."
    assert found.headroom is not None
    assert found.headroom.peak_bytes == 1310 * 2**14
    assert 46 not in {plan.micro_batch_size for plan in found.alternatives}
    assert [plan.micro_batch_size for plan in found.alternatives if plan.chosen] == [31]


def test_a_smaller_plan_of_one_size_needs_no_run() -> None:
    """35 + 34 + 34 does not fit; 104 samples less one micro-batch size are 26 in each of four."""
    found = finish(new_tuning(104), device(46, {(35, 35, 34): [Outcome.OOM]}))
    assert plan_runs(found) == [((35, 35, 34), Outcome.OOM)]
    assert plan_of(found).micro_batch_sizes == ((26,) * 4,)
    assert found.headroom is not None
    assert "46 + 46 fits, and the plan uses 26 + 26" in found.evidence.plan_proof


@many
@given(share=st.integers(2, 4000), part=st.floats(0.01, 1.0))
def test_few_plans_are_tried_where_none_of_two_sizes_fits(share: int, part: float) -> None:
    """Twice as many sizes are left out each time: a plan of one size ends it, of one sample at the latest."""
    largest = max(1, round(part * share))

    def run(probe: ProbeRequest) -> ProbeResult:
        result = device(largest)(probe)
        ragged = len(set(probe_window(probe))) > 1
        return result.model_copy(update={"outcome": Outcome.OOM}) if ragged else result

    found = finish(new_tuning(share), run)
    assert len(plan_runs(found)) <= largest.bit_length() + 1
    assert all(len(set(sizes)) == 1 for sizes in plan_of(found).micro_batch_sizes)


def test_a_timed_plan_that_runs_out_of_memory_is_not_recommended() -> None:
    """Where no plan of four can be timed, the one that is recommended has another window, and was run."""

    def run(probe: ProbeRequest) -> ProbeResult:
        result = device(40)(probe)
        return result.model_copy(update={"outcome": Outcome.OOM, "timing": None}) if probe.measures_time else result

    found = finish(new_tuning(512, objective="fastest"), run)
    timed = {probe.micro_batch_sizes for probe in found.evidence.probes if probe.measures_time}
    (run_last,) = plan_runs(found)
    assert run_last[1] is Outcome.FIT
    assert run_last[0] not in timed
    assert run_last[0] == plan_window(512, plan_of(found).gradient_accumulation_steps)


# --- when its run shows nothing ---


@pytest.mark.parametrize("outcome", [Outcome.TIMED_OUT, Outcome.ERROR])
def test_a_run_that_shows_nothing_ends_the_tuning_with_a_warning(outcome: Outcome) -> None:
    """The size is proven; that the plan fits is not known, and the recommendation says so."""
    found = finish(new_tuning(100), device(46, {(34, 33, 33): [outcome]}))
    assert plan_runs(found) == [((34, 33, 33), outcome)]
    assert plan_of(found).micro_batch_sizes == ((34, 33, 33),)
    (warning,) = found.warnings
    assert warning.code == "plan-not-known-to-fit"
    assert warning.message == found.evidence.plan_proof
    assert f"34 + 33 + 33, ended with {outcome}" in warning.message


@pytest.mark.parametrize(("outcomes", "warnings"), [([Outcome.LOST, Outcome.FIT], 0), ([Outcome.LOST], 1)])
def test_a_lost_run_is_repeated_once(outcomes: list[Outcome], warnings: int) -> None:
    """A lost run of a plan is repeated once, as a lost probe of the search is."""
    found = finish(new_tuning(100), device(46, {(34, 33, 33): outcomes}))
    assert len(plan_runs(found)) == 2
    assert len(found.warnings) == warnings


# --- recorded probes ---


@pytest.mark.parametrize(
    ("request_", "special"),
    [
        (tuning_request(effective_batch_size=100), {}),
        (tuning_request(effective_batch_size=91), {(46, 45): [Outcome.OOM]}),
        (tuning_request(effective_batch_size=1000, **ROOM_FOR_46), {}),
        (tuning_request(effective_batch_size=1000, **ROOM_FOR_46), {(46, 46, 45, 45): [Outcome.OOM]}),
        (tuning_request(effective_batch_size=91, objective="fastest"), {(46, 45): [Outcome.OOM]}),
        (tuning_request(mlp_spec(parallelism={"world_size": 2}), effective_batch_size=199), {}),
    ],
)
def test_a_tuning_goes_on_from_its_recorded_probes(
    request_: TuningRequest, special: dict[tuple[int, ...], list[Outcome]]
) -> None:
    """Rebuilt after any number of probes, as they are stored, the tuning ends with the same evidence."""
    run = device(60 if request_.effective_batch_size == 199 else 46, special)
    recorded = finish(TuningSession(request_, CPU, environment={}, versions={}), run).evidence
    assert any(probe.runs_plan for probe in recorded.probes)
    for count in range(len(recorded.probes) + 1):
        rebuilt = TuningSession(request_, CPU, environment={}, versions={})
        for result in recorded.probes[:count]:
            rebuilt.record(ProbeResult.model_validate_json(result.model_dump_json()))
        assert finish(rebuilt, run).evidence == recorded


def test_a_run_of_another_plan_is_refused() -> None:
    """Before the search has ended, and of other sizes."""
    with pytest.raises(SearchError, match=r"34 \+ 33 \+ 33 is not the one to run now"):
        new_tuning(100).record(probe_result(34, micro_batch_sizes=(34, 33, 33)))


# --- real probes ---


@pytest.mark.torch
def test_a_plan_that_takes_more_than_its_largest_size_is_not_recommended(supervisor: ProbeSupervisor) -> None:
    """With a cache for each size of micro-batch 60 + 60 fits, and 50 + 49 runs out of memory, but not 33 + 33 + 33."""
    spec = python_spec("tests.support.misbehaving:build", way="keeps-by-size", argument="")
    request = tuning_request(spec, 99, memory_limit_bytes=128 * 2**20, memory_margin=0.0, granularity=10)
    found = finish(TuningSession(request, cpu(), environment=supervisor.environment(), versions={}), supervisor.run)
    assert 50 <= found.evidence.proof.fits < 99
    assert all(len(set(probe.micro_batch_sizes)) == 1 for probe in searched(found))
    assert plan_runs(found) == [((50, 49), Outcome.OOM)]
    assert [probe.failed_micro_batch for probe in found.evidence.probes if probe.runs_plan] == [None]
    assert plan_of(found).micro_batch_sizes == ((33, 33, 33),)
    assert found.evidence.plan_proof.endswith("fits, and the plan uses 33 + 33.")


def test_a_size_that_was_not_requested_is_refused_once_the_search_has_ended() -> None:
    """A runner that leaves out the plan's micro-batches gets an error, and does not run one probe for ever."""
    course = new_tuning(100)
    while not (probe := course.next_probe() or pytest.fail("no plan was run")).runs_plan:
        course.record(device(37)(probe))
    with pytest.raises(SearchError, match="the search has ended"):
        course.record(probe_result(probe.micro_batch_size))
