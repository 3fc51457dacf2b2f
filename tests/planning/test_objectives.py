"""Objectives: the sizes each is about, the plans that are timed, which one wins, and what a recommendation lists."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from io import StringIO
from random import Random
from statistics import median
from typing import Any, get_args

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from batchwright.cli.display import describe_parts, probe_row, recommendation_panel
from batchwright.errors import SearchError
from batchwright.hardware.inventory import cpu
from batchwright.planning.accumulation import balanced_split, probe_window, sizes_for_steps
from batchwright.planning.fingerprint import installed_versions
from batchwright.planning.objectives.by_name import objective_of
from batchwright.planning.objectives.fastest import Fastest
from batchwright.planning.objectives.objective import ObjectiveStrategy
from batchwright.planning.parameters import PARAMETERS
from batchwright.planning.plan_figures import PlanCandidates, alternatives, possible_sizes
from batchwright.planning.session import TuningSession
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.recommendation import Headroom, Proof, Recommendation
from batchwright.schemas.requests import Objective, ProbeRequest
from batchwright.schemas.results import ModelSummary, Outcome, ProbeResult, UpdateTiming
from tests.support.factories import CPU, mlp_spec, plan_of, probe_result, python_spec, tuning_request

MIB = 1024**2
GIB = 1024**3
LIMIT = 1000 * MIB
SUMMARY = ModelSummary(parameters=25 * MIB, trainable_parameters=25 * MIB, parameter_bytes=100 * MIB)
many = settings(max_examples=300, deadline=None, derandomize=True)

Seconds = Callable[[int], float]


@dataclass(frozen=True)
class Device:
    """A device whose memory and time are known: gradients are held while an update accumulates.

    Attributes:
        per_sample: bytes that each sample of a micro-batch takes.
        seconds: of a micro-batch, by its size.
        step_seconds: of the optimizer's step.
        gradients: bytes of the gradients, while more than one micro-batch makes an update.
        deviation: standard deviation of a measured time, as a share of it.
        thrashes_from: the size from which on the allocator has to try again.
        fails_to_time: sizes that run out of memory when they are timed.
    """

    per_sample: float
    seconds: Seconds = lambda size: 0.01 + 0.001 * size
    step_seconds: float = 0.02
    gradients: int = 0
    deviation: float = 0.0
    thrashes_from: float = math.inf
    fails_to_time: frozenset[int] = frozenset()

    def used(self, size: int, *, accumulates: bool) -> float:
        """The peak of an update."""
        return 100 * MIB + self.per_sample * size + (self.gradients if accumulates else 0)

    def update_seconds(self, share: int, size: int) -> float:
        """The true time of the plan with micro-batches of at most ``size``."""
        sizes = balanced_split(share, -(-share // size))
        return self.step_seconds + sum(self.seconds(item) for item in sizes)

    def __call__(self, probe: ProbeRequest) -> ProbeResult:
        """Run a probe."""
        size, timed = probe.micro_batch_size, probe.measures_time
        used = self.used(size, accumulates=probe.accumulates)
        fits = used <= LIMIT and not (timed and size in self.fails_to_time)
        return probe_result(
            size,
            Outcome.FIT if fits else Outcome.OOM,
            round(used) if fits else None,
            accumulates=probe.accumulates,
            micro_batch_sizes=probe_window(probe),
            measures_time=timed,
            timing=self._timing(probe) if fits else None,
            allocator_retries=3 if size >= self.thrashes_from else 0,
            resident_bytes=100 * MIB,
            model=SUMMARY.model_copy(
                update={"parameter_bytes": self.gradients, "parameters": 1, "trainable_parameters": 1}
            ),
        )

    def _timing(self, probe: ProbeRequest) -> UpdateTiming:
        sizes = probe_window(probe)
        rng = Random(f"{probe.micro_batch_size}/{probe.measures_time}")
        factor = 1.0 + rng.gauss(0.0, self.deviation)
        earlier = [factor * self.seconds(size) for size in sizes[:-1]]
        return UpdateTiming(
            updates=5 if probe.measures_time else 1,
            micro_batch_sizes=sizes,
            update_seconds=factor * (self.step_seconds + sum(self.seconds(size) for size in sizes)),
            micro_batch_seconds=median(earlier) if earlier else None,
            noise=self.deviation / 2 if probe.measures_time else 0.0,
        )


def tuning(objective: Objective, share: int, **changes: Any) -> TuningSession:
    """A tuning of one rank that has not begun, on a device of ``LIMIT`` bytes."""
    request = tuning_request(
        effective_batch_size=share, objective=objective, memory_limit_bytes=LIMIT, memory_margin=0.0, **changes
    )
    return TuningSession(request, CPU, environment={}, versions={})


def finish(course: TuningSession, device: Callable[[ProbeRequest], ProbeResult]) -> Recommendation:
    """Drive a tuning to its end."""
    while (probe := course.next_probe()) is not None:
        assert len(course.probes) < 100
        course.record(device(probe))
    return course.recommendation(identifier="rec_1", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)


def answer(objective: Objective, share: int, device: Callable[[ProbeRequest], ProbeResult]) -> Recommendation:
    """The whole tuning."""
    return finish(tuning(objective, share), device)


def holding(largest: int, **changes: Any) -> Device:
    """A device that fits micro-batches up to ``largest``."""
    return Device(per_sample=900 * MIB / (largest + 0.5), **changes)


def timed(found: Recommendation) -> list[int]:
    """The plans that were timed, in order."""
    return [probe.micro_batch_size for probe in found.evidence.probes if probe.measures_time]


# --- the sizes that change the number of steps ---


@many
@given(share=st.integers(1, 400), bound=st.integers(1, 400), granularity=st.integers(1, 20))
def test_the_sizes_are_the_smallest_for_each_number_of_steps(share: int, bound: int, granularity: int) -> None:
    """Of all sizes on the grid, one for every number of accumulation steps that any of them gives."""
    bound = min(bound, share)
    grid = list(range(granularity, bound + 1, granularity)) or [bound]
    smallest: dict[int, int] = {}
    for size in reversed(grid):
        smallest[-(-share // size)] = size
    assert list(sizes_for_steps(share, bound, granularity)) == sorted(smallest.values())


def test_few_sizes_change_the_number_of_steps() -> None:
    """About twice the root of the share, up to the largest effective batch."""
    assert sizes_for_steps(100, 100) == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 15, 17, 20, 25, 34, 50, 100)
    assert len(sizes_for_steps(2**22, 2**22)) == 2 * 2**11 - 1


# --- fewest steps ---


@many
@given(
    share=st.integers(1, 5000),
    part=st.floats(0.0, 1.2),
    max_size=st.one_of(st.none(), st.integers(1, 3000)),
    granularity=st.sampled_from([1, 1, 8]),
)
def test_the_fewest_steps_are_those_of_the_largest_micro_batch(
    share: int, part: float, max_size: int | None, granularity: int
) -> None:
    """Whatever fits: the same plan, proven by a fit at a size that is enough and a failure at the next that counts."""
    device = holding(round(part * share))
    changes = {"max_micro_batch_size": max_size, "granularity": granularity}
    largest = finish(tuning("largest", share, **changes), device)
    fewest = finish(tuning("fewest_steps", share, **changes), device)
    assert fewest.plan == largest.plan
    assert len(fewest.evidence.probes) <= len(largest.evidence.probes) + 1
    proof, outcomes = fewest.evidence.proof, {probe.micro_batch_size: probe.outcome for probe in fewest.evidence.probes}
    assert fewest.largest_micro_batch_size == (proof.fits or None)
    assert proof.fits == 0 or outcomes[proof.fits] is Outcome.FIT
    if proof.next_size is not None:
        assert outcomes[proof.next_size] is Outcome.OOM
        assert proof.fits == 0 or -(-share // proof.next_size) < plan_of(fewest).gradient_accumulation_steps


def test_fewest_steps_takes_fewer_probes() -> None:
    """On 300 workloads a fifth fewer in sum, and hardly ever more in any."""
    rng = Random(7)
    pairs = []
    for _ in range(300):
        share = rng.randint(2, 4000)
        device = holding(rng.randint(1, share))
        pairs.append([len(answer(item, share, device).evidence.probes) for item in ("largest", "fewest_steps")])
    largest, fewest = (sum(column) for column in zip(*pairs, strict=True))
    assert fewest < 0.85 * largest
    assert sum(fewest > largest for largest, fewest in pairs) <= 0.02 * len(pairs)


@pytest.mark.parametrize("objective", ["largest", "fewest_steps", "fastest"])
@pytest.mark.parametrize(("share", "steps"), [(85, 1), (90, 1), (95, 2), (70, 1), (140, 2), (141, 3)])
def test_the_whole_share_may_fit_where_less_does_not(objective: Objective, share: int, steps: int) -> None:
    """An update of one micro-batch holds no gradients: up to 90 samples fit as a whole, 70 when they accumulate."""
    found = answer(objective, share, Device(per_sample=10 * MIB, gradients=200 * MIB))
    assert plan_of(found).gradient_accumulation_steps == steps
    assert found.warnings == ()


def test_one_fit_is_enough_to_expect_that_the_whole_share_fits() -> None:
    """The line then begins at what is resident, with the gradients."""
    device = Device(per_sample=10 * MIB, gradients=200 * MIB)
    course = tuning("largest", 85)
    for size in (70, 71):
        course.record(device(course.conditions.probe(size)))
    probe = course.next_probe()
    assert probe is not None
    assert (probe.micro_batch_size, probe.measures_time) == (85, False)


@pytest.mark.parametrize("sizes", [(60, 66, 68), (66, 68)])
def test_peaks_that_the_limit_cuts_off_do_not_promise_the_whole_share(sizes: tuple[int, ...]) -> None:
    """The line through two fits at the limit is flat: 100 samples at 10 MiB each are not probed for it."""
    course, device = tuning("largest", 100), Device(per_sample=10 * MIB, gradients=200 * MIB)
    for size in sizes:
        cut = min(device.used(size, accumulates=True), (0.989 + size * 1e-5) * LIMIT)
        result = device(course.conditions.probe(size)).model_copy(
            update={"process_peak_bytes": round(cut), "limit_bytes": LIMIT}
        )
        course.record(result)
    course.record(probe_result(69, Outcome.OOM))
    assert course.next_probe() is None


def test_a_bound_between_two_sizes_is_named() -> None:
    """At most 60 of 100 samples: 50 is tried, as 60 would take as many steps."""
    found = finish(tuning("fewest_steps", 100, max_micro_batch_size=60), holding(80))
    assert (found.largest_micro_batch_size, plan_of(found).gradient_accumulation_steps) == (50, 2)
    assert "the bound is 50 (60 would take the same number of accumulation steps; the requested maximum of 60" in (
        found.evidence.proof.statement
    )


# --- fastest ---


def test_the_fewest_steps_are_the_fastest_where_time_is_affine() -> None:
    """The fewest steps and their neighbour are timed, and nothing else: the line says that no other can win."""
    found = answer("fastest", 520, holding(40, seconds=lambda size: 0.03 + 0.001 * size))
    assert (found.largest_micro_batch_size, plan_of(found).gradient_accumulation_steps) == (40, 13)
    assert timed(found) == [40, 38]
    assert found.choice == "13 accumulation steps: 559 samples per second, the fastest of 2 timed plans."


def test_of_equally_fast_plans_the_one_with_less_memory_wins() -> None:
    """Where time does not depend on the micro-batch, a smaller one leaves more memory free."""
    found = answer("fastest", 520, holding(40, seconds=lambda size: 0.001 * size + 0.003))
    assert timed(found) == [40, 38]
    assert found.largest_micro_batch_size == 38
    assert found.choice.endswith("with less memory. None of the 2 timed plans is faster beyond the noise.")
    assert found.headroom is not None
    assert found.headroom.peak_bytes == next(
        alternative.peak_bytes for alternative in found.alternatives if alternative.chosen
    )


def test_a_difference_within_the_noise_is_none() -> None:
    """Updates that vary by a tenth cannot tell 37 from 40; those that do not vary can."""
    slower = {"seconds": lambda size: 0.001 * size + 0.02}
    assert answer("fastest", 512, holding(40, **slower)).largest_micro_batch_size == 40
    course = tuning("fastest", 512)
    device = holding(40, **slower)

    def noisy(probe: ProbeRequest) -> ProbeResult:
        result = device(probe)
        timing = result.timing.model_copy(update={"noise": 0.05}) if result.timing else None
        return result.model_copy(update={"timing": timing})

    assert finish(course, noisy).largest_micro_batch_size == 37


@pytest.mark.parametrize("thrashes_from", [34, 40])
def test_a_thrashing_fit_loses(thrashes_from: int) -> None:
    """It is not even timed where the search has seen it thrash."""
    found = answer("fastest", 512, holding(40, thrashes_from=thrashes_from))
    assert found.largest_micro_batch_size is not None
    assert found.largest_micro_batch_size < thrashes_from
    assert 40 not in timed(found)
    assert [warning.code for warning in found.warnings] == []


def test_a_plan_that_thrashes_when_it_is_timed_loses_though_it_is_the_fastest() -> None:
    """A few updates may be lucky: what is at the edge of the memory is not chosen for its speed."""
    device = holding(40, seconds=lambda size: 0.03 + 0.001 * size)

    def thrashing(probe: ProbeRequest) -> ProbeResult:
        retries = 2 if probe.measures_time and probe.micro_batch_size == 40 else 0
        return device(probe).model_copy(update={"allocator_retries": retries})

    found = answer("fastest", 520, thrashing)
    assert timed(found) == [40, 38]
    assert found.largest_micro_batch_size == 38
    assert [alternative.thrashing for alternative in found.alternatives[:2]] == [True, False]


def test_where_every_timed_plan_thrashes_the_fastest_of_them_wins() -> None:
    """With the warning of any thrashing fit."""
    found = answer("fastest", 4, holding(40, thrashes_from=1))
    assert sorted(timed(found)) == [1, 2, 4]
    assert found.largest_micro_batch_size == 4
    assert [warning.code for warning in found.warnings] == ["thrashing-fit"]


def test_what_the_search_has_seen_leads_to_a_faster_plan() -> None:
    """Micro-batches beyond a cache take three times as long: the probes of the search saw how fast small ones are."""
    cached = holding(500, seconds=lambda size: 0.0005 + 0.001 * size * (1 if size <= 70 else 3))
    found = answer("fastest", 500, cached)
    assert found.largest_micro_batch_size is not None
    assert found.largest_micro_batch_size <= 70
    assert timed(found)[:2] == [500, 250]


@many
@given(
    share=st.integers(1, 3000),
    part=st.floats(0.001, 1.2),
    each=st.floats(0.0, 0.1),
    sample=st.floats(1e-5, 0.01),
    step=st.floats(0.0, 0.1),
    deviation=st.sampled_from([0.0, 0.005, 0.03]),
)
def test_the_fastest_plan_is_near_the_best_where_time_is_affine(  # noqa: PLR0913, PLR0917 - a device's figures
    share: int, part: float, each: float, sample: float, step: float, deviation: float
) -> None:
    """Within what the noise allows, in at most four timed plans, whatever the constants are."""
    largest = max(1, round(part * share))
    device = holding(largest, seconds=lambda size: each + sample * size, step_seconds=step, deviation=deviation)
    found = answer("fastest", share, device)
    assert found.largest_micro_batch_size is not None
    assert len(timed(found)) <= PARAMETERS.most_timed_plans
    best = min(device.update_seconds(share, size) for size in sizes_for_steps(share, min(share, largest)))
    rounding = (
        1 / found.largest_micro_batch_size
    )  # a plan is timed by two micro-batches: their mean is within half a sample
    allowed = 1.02 + rounding + 8 * deviation
    assert device.update_seconds(share, found.largest_micro_batch_size) <= allowed * best * (1 + 1e-9)
    assert plan_of(found).gradient_accumulation_steps == len(plan_of(found).micro_batch_sizes[0])


def test_a_plan_that_cannot_be_timed_is_not_chosen() -> None:
    """The recommendation says so; the proof of the search stands."""
    found = answer("fastest", 512, holding(40, fails_to_time=frozenset({40})))
    assert found.largest_micro_batch_size == 37
    assert found.evidence.proof.fits == 40
    (warning,) = found.warnings
    assert warning.code == "plan-not-timed"
    assert "micro-batches of 40" in warning.message
    assert "OOM" in warning.message


def test_without_any_time_a_smaller_plan_is_run_and_recommended() -> None:
    """After four failures no more is timed, and none of the plans that failed is recommended."""
    found = answer("fastest", 512, holding(40, fails_to_time=frozenset(range(600))))
    assert len(timed(found)) == PARAMETERS.most_timed_plans
    assert (found.evidence.proof.fits, found.largest_micro_batch_size) == (40, 31)
    assert found.choice.endswith("ran out of memory, so the plan has 17 steps of at most 31."), found.choice


def test_nothing_is_timed_where_nothing_fits() -> None:
    """An infeasible answer has no plans."""
    found = answer("fastest", 512, holding(0))
    assert (found.feasible, timed(found), found.alternatives, found.choice) == (False, [], (), "")


@pytest.mark.parametrize("objective", ["largest", "fewest_steps", "fastest"])
def test_a_tuning_goes_on_from_its_recorded_probes(objective: Objective) -> None:
    """Rebuilt after any number of probes, as they are stored, it asks for the same next one."""
    device = holding(333, deviation=0.01, gradients=50 * MIB)
    recorded = answer(objective, 2000, device).evidence.probes
    for count in range(len(recorded)):
        rebuilt = tuning(objective, 2000)
        for result in recorded[:count]:
            rebuilt.record(ProbeResult.model_validate_json(result.model_dump_json()))
        following = rebuilt.next_probe()
        assert following is not None
        assert device(following) == recorded[count]
        assert finish(rebuilt, device).evidence.probes == recorded


@pytest.mark.parametrize(("objective", "size"), [("largest", 50), ("fewest_steps", 50), ("fastest", 51)])
def test_a_timed_plan_that_was_not_requested_is_refused(objective: Objective, size: int) -> None:
    """Of another objective, or of a size that no plan has."""
    with pytest.raises(SearchError, match=f"no plan with micro-batches of {size} is timed"):
        tuning(objective, 100).record(probe_result(size, measures_time=True))


def test_a_tie_with_the_expectation_ends_the_timing() -> None:
    """A plan is worth a probe when it is expected to win by more than the noise."""
    plain = holding(40, seconds=lambda size: 0.001 * size)
    course = tuning("fastest", 512)
    while (probe := course.next_probe()) is not None and not probe.measures_time:
        course.record(plain(probe))
    for size in (40, 37):
        request = ProbeRequest(
            spec=mlp_spec(), micro_batch_size=size, samples_per_window=512, device="cpu", measures_time=True
        )
        course.record(plain(request))
    assert Fastest().next_to_time(PlanCandidates(512, 40, course.probes)) is None


# --- time of an update ---


def test_an_update_is_extrapolated_by_its_earlier_micro_batches() -> None:
    """Measured where the whole update was timed, else each further micro-batch as long as those before the last."""
    timing = UpdateTiming(updates=3, micro_batch_sizes=(9, 10, 10), update_seconds=7.0, micro_batch_seconds=1.9)
    assert timing.seconds_for(3) == 7.0
    assert timing.seconds_for(13) == pytest.approx(7.0 + 10 * 1.9)
    assert UpdateTiming(updates=1, micro_batch_sizes=(8,), update_seconds=2.0).seconds_for(1) == 2.0


def test_the_throughput_of_a_timed_plan_is_that_of_its_updates() -> None:
    """Exact for an even plan, however many micro-batches it has; within a sample of each micro-batch for another."""
    device = holding(40)
    plans = {
        alternative.micro_batch_size: alternative
        for alternative in answer("fastest", 400, device).alternatives
        if alternative.timed_updates > 1
    }
    assert list(plans) == [40, 37]
    for size, tolerance in ((40, 1e-9), (37, 0.01)):
        expected = 400 / device.update_seconds(400, size)
        assert plans[size].samples_per_second == pytest.approx(expected, rel=tolerance)


# --- alternatives ---


def test_neighbouring_sizes_say_nothing_of_small_ones() -> None:
    """Two fits that differ by noise: the bytes between updates show what a plan of smaller micro-batches takes."""
    base, per_sample = 10 * MIB, 2 * MIB
    sizes = {41: base + 41 * per_sample, 42: base + 45 * per_sample}
    fits = [
        probe_result(size, used_bytes=None, process_peak_bytes=peak, resident_bytes=base)
        for size, peak in sizes.items()
    ]
    listed = {plan.micro_batch_size: plan.peak_bytes for plan in alternatives(PlanCandidates(100, 42, fits), 42)}
    assert listed[15] == base + 15 * per_sample


def test_a_plan_that_ran_out_of_memory_when_it_was_timed_is_no_alternative() -> None:
    """Though one micro-batch of its size had fitted in the search."""
    probes = [
        probe_result(50),
        probe_result(50, Outcome.OOM, measures_time=True),
        probe_result(34, measures_time=True),
    ]
    assert [plan.micro_batch_size for plan in alternatives(PlanCandidates(100, 50, probes), 34)] == [34, 25, 20, 17, 15]


def test_alternatives_go_from_the_fewest_steps_upward() -> None:
    """Each with what was measured at its size, or what the lines between the measured sizes say."""
    device = holding(37)
    found = answer("largest", 100, device)
    assert [alternative.gradient_accumulation_steps for alternative in found.alternatives] == [3, 4, 5, 6, 7]
    assert [alternative.micro_batch_size for alternative in found.alternatives] == [34, 25, 20, 17, 15]
    assert [alternative.chosen for alternative in found.alternatives] == [True, False, False, False, False]
    assert found.choice == "37 is the largest micro-batch that fits."
    probed = {probe.micro_batch_size for probe in found.evidence.probes}
    for plan in found.alternatives:
        assert plan.source == ("measured" if plan.micro_batch_size in probed else "modelled")
        assert plan.peak_bytes == pytest.approx(device.used(plan.micro_batch_size, accumulates=True), rel=1e-6)
        expected = 100 / device.update_seconds(100, plan.micro_batch_size)
        assert plan.samples_per_second == pytest.approx(expected, rel=0.03)


def test_alternatives_without_measurements_have_no_figures() -> None:
    """One fit gives no line: the other plans have neither memory nor throughput."""
    course = tuning("largest", 102)
    device = holding(37)
    for size in (37, 38):
        course.record(device(course.conditions.probe(size)))
    found = finish(course, device)
    assert [
        (alternative.peak_bytes, alternative.samples_per_second, alternative.source)
        for alternative in found.alternatives
    ] == [(None, None, "modelled")] * 5


@pytest.mark.parametrize("largest", [1, 16])
def test_alternatives_of_the_whole_share_hold_no_gradients(largest: int) -> None:
    """An update of one micro-batch is no measure of one that accumulates, so it lends no line to the others."""
    device = Device(per_sample=5 * MIB, gradients=200 * MIB)
    course = tuning("largest", 100)
    for size in {1, largest, 100}:
        course.record(device(course.conditions.probe(size)))
    whole, *others = finish(course, device).alternatives
    assert (whole.micro_batch_size, whole.peak_bytes) == (100, 600 * MIB)
    known = [None if largest == 1 else round(device.used(other.micro_batch_size, accumulates=True)) for other in others]
    assert [other.peak_bytes for other in others] == pytest.approx(known)


def test_the_objective_is_part_of_the_request_fingerprint() -> None:
    """An answer for one is never served for another."""
    prints = [tuning(item, 100).fingerprint for item in ("largest", "fewest_steps", "fastest")]
    assert len(set(prints)) == 3


# --- on a terminal ---


def printed(found: Recommendation) -> str:
    """The panel as text."""
    console = Console(width=100, file=StringIO())
    with console.capture() as captured:
        console.print(recommendation_panel(found))
    return captured.get()


@pytest.mark.parametrize(
    ("objective", "title"),
    [
        ("largest", "largest micro-batch that fits"),
        ("fewest_steps", "fewest accumulation steps that fit"),
        ("fastest", "fastest plan that fits"),
    ],
)
def test_the_panel_names_the_objective(objective: Objective, title: str) -> None:
    """And lists the plans, the chosen one marked."""
    found = answer(objective, 400, holding(40))
    lines = printed(found).splitlines()
    assert title in lines[0]
    assert lines[1].startswith("│ plan ")
    (chosen,) = [line for line in lines if " > " in line]
    assert ("timed" in chosen) is (objective == "fastest")
    assert f" {plan_of(found).gradient_accumulation_steps} " in chosen


def test_the_table_marks_what_is_read_off_a_line_and_what_thrashes() -> None:
    """With a tilde; a plan that was timed says so."""
    found = answer("fastest", 512, holding(40, thrashes_from=40))
    text = printed(found)
    slow, *others = found.alternatives
    assert (slow.thrashing, slow.chosen, sum(other.chosen for other in others)) == (True, False, 1)
    assert {other.source for other in others} == {"measured", "modelled"}
    assert [line.count("~") for line in text.splitlines() if "thrashes" in line] == [0]
    modelled = [other for other in others if other.source == "modelled"]
    assert text.count("~") == 2 * len(modelled)


def test_a_timing_probe_says_so_in_its_row() -> None:
    """With the number of updates."""
    probes = answer("fastest", 512, holding(40)).evidence.probes
    remarks = [str(probe_row(probe)[-1]) for probe in probes if probe.outcome is Outcome.FIT]
    assert remarks.count("timed, 5 updates") == 2
    assert set(remarks) == {"", "timed, 5 updates"}


def test_a_peak_on_a_card_is_shown_by_its_parts() -> None:
    """Reserved and allocated memory, and the context beside them, stand in a row and in the panel."""
    peaks: dict[str, Any] = {"peak_allocated_bytes": 3 * GIB, "peak_reserved_bytes": 4 * GIB, "context_bytes": GIB // 2}
    row = probe_row(probe_result(8, used_bytes=None, process_peak_bytes=None, **peaks))
    assert (row[2], str(row[-1])) == ("4.00 GiB", "reserved; allocated 3.00 GiB, context 512.00 MiB beside it")
    room = Headroom(
        limit_bytes=8 * GIB,
        peak_bytes=4 * GIB + GIB // 2,
        allocated_bytes=3 * GIB,
        reserved_bytes=4 * GIB,
        context_bytes=GIB // 2,
        free_bytes=0,
        free_fraction=0.0,
    )
    words = "4.00 GiB reserved by the allocator (3.00 GiB allocated), 512.00 MiB of the process outside of it"
    assert describe_parts(room) == words
    assert not describe_parts(room.model_copy(update={"reserved_bytes": None}))


# --- real tunings ---


SPEC = mlp_spec(
    model={
        "kind": "reference",
        "architecture": {"name": "mlp", "input_features": 256, "hidden_features": 256, "classes": 10},
    }
)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("size", "share", "sizes"), [(4, 4, (4,)), (7, 13, (7, 6)), (2, 9, (2, 2, 2, 1)), (5, 50, (5, 5, 5, 5))]
)
def test_a_timing_probe_times_the_plans_own_micro_batches(
    supervisor: ProbeSupervisor, size: int, share: int, sizes: tuple[int, ...]
) -> None:
    """Up to four of them, in the order of training, in several updates."""
    result = supervisor.run(
        ProbeRequest(spec=SPEC, micro_batch_size=size, samples_per_window=share, device="cpu", measures_time=True)
    )
    assert (result.outcome, result.measures_time) == (Outcome.FIT, True)
    timing = result.timing
    assert timing is not None
    assert timing.micro_batch_sizes == sizes
    assert timing.updates >= 3
    assert timing.update_seconds > 0
    assert (timing.micro_batch_seconds is None) == (len(sizes) == 1)
    if timing.micro_batch_seconds is not None:
        assert 0 < timing.micro_batch_seconds < timing.update_seconds


@pytest.mark.torch
def test_a_probe_of_the_search_times_its_one_update(supervisor: ProbeSupervisor) -> None:
    """What it sees anyway."""
    request = ProbeRequest(spec=SPEC, micro_batch_size=8, samples_per_window=64, device="cpu")
    result = supervisor.run(request)
    assert result.timing is not None
    assert (result.timing.updates, result.timing.micro_batch_sizes, result.measures_time) == (1, (8, 8), False)
    assert result.timing.update_seconds <= result.seconds.measure


@pytest.mark.torch
def test_a_timing_probe_that_fails_is_still_known_as_one(supervisor: ProbeSupervisor) -> None:
    """A process that is killed leaves no result: the supervisor says what the probe was for."""
    request = ProbeRequest(
        spec=python_spec("tests.support.misbehaving:build", way="kills-itself", argument=""),
        micro_batch_size=8,
        samples_per_window=64,
        device="cpu",
        measures_time=True,
    )
    result = supervisor.run(request)
    assert (result.outcome, result.measures_time, result.timing) == (Outcome.LOST, True, None), result.message


@pytest.mark.torch
@pytest.mark.parametrize("objective", ["fewest_steps", pytest.param("fastest", marks=pytest.mark.thorough)])
def test_a_real_tuning(supervisor: ProbeSupervisor, objective: Objective) -> None:
    """A plan that is exact, proven, and listed with what was measured."""
    request = tuning_request(SPEC, 30_000, objective=objective, memory_limit_bytes=48 * MIB)
    course = TuningSession(request, cpu(), environment=supervisor.environment(), versions=installed_versions())
    found = finish(course, supervisor.run)
    assert found.feasible
    assert sum(map(sum, plan_of(found).micro_batch_sizes)) == 30_000
    proof = found.evidence.proof
    assert isinstance(proof, Proof)
    assert proof.fits in sizes_for_steps(30_000, 30_000)
    assert proof.stopped_by == "oom"
    (chosen,) = [alternative for alternative in found.alternatives if alternative.chosen]
    assert (chosen.source, chosen.micro_batch_size) == ("measured", found.largest_micro_batch_size)
    assert chosen.samples_per_second is not None
    assert chosen.samples_per_second > 0
    tried = [probe for probe in found.evidence.probes if probe.measures_time]
    assert len({item.micro_batch_size for item in tried}) == len(tried)
    assert bool(tried) is (objective == "fastest")
    untimed = [warning for warning in found.warnings if warning.code == "plan-not-timed"]
    assert len(untimed) == sum(
        item.outcome is not Outcome.FIT for item in tried
    )  # at the limit a timed plan may not fit
    assert (chosen.timed_updates > 1) is (len(tried) > len(untimed))


def test_plans_that_measurements_contradict_are_not_offered() -> None:
    """The whole share fits alone; plans of fewer samples that failed beside their gradients are not listed."""
    device = holding(90, gradients=600 * MIB)
    found = answer("fastest", 85, device)
    assert found.evidence.proof.fits == 85
    failed = {probe.micro_batch_size for probe in found.evidence.probes if probe.outcome is Outcome.OOM}
    assert failed
    sizes = [alternative.micro_batch_size for alternative in found.alternatives]
    assert sizes[0] == 85
    assert all(size < min(failed) for size in sizes[1:])
    assert set(timed(found)) <= set(sizes)


def test_sizes_above_one_that_a_plan_refuted_are_not_offered() -> None:
    """34 + 34 + 33 ran out of memory in its first micro-batch, so 51 + 50 does not fit either."""
    probes = [probe_result(33), probe_result(34, Outcome.OOM, micro_batch_sizes=(34, 34, 33))]
    assert possible_sizes(PlanCandidates(101, 101, [*probes, probe_result(101, accumulates=False)]))[-2:] == [26, 101]


def test_a_program_is_offered_no_size_that_it_refuses() -> None:
    """It takes the very size of a plan: one that failed, or is no multiple of the granularity, is none for it."""
    probes = [probe_result(1, Outcome.ERROR), probe_result(16)]
    assert possible_sizes(PlanCandidates(64, 16, probes, repeats=True)) == [2, 4, 8, 16]
    assert possible_sizes(PlanCandidates(64, 16, probes, repeats=True, granularity=4)) == [4, 8, 16]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "37 is the largest micro-batch that fits."),
        ({"granularity": 8}, "32 is the largest micro-batch that fits among the sizes searched."),
        ({"max_micro_batch_size": 20}, "20 fits; larger micro-batches were not tried."),
    ],
)
def test_a_choice_says_when_not_all_sizes_were_searched(changes: dict[str, int], words: str) -> None:
    """The largest of a grid, or below a maximum, is not the largest that fits."""
    assert finish(tuning("largest", 500, **changes), holding(37)).choice == words


def test_a_bound_on_a_grid_names_the_grid() -> None:
    """Of the multiples of 8 the largest that changes the steps is 56, as 64 takes as many steps."""
    found = finish(tuning("fewest_steps", 110, granularity=8, max_micro_batch_size=100), holding(1000))
    assert found.evidence.proof.stopped_by == "bound"
    assert "of the multiples of 8" in found.evidence.proof.statement
    assert "96 would take the same number of accumulation steps" in found.evidence.proof.statement


def test_a_share_that_is_no_multiple_gets_no_probe_of_its_own() -> None:
    """Sizes beside the grid are never probed, the whole share included."""
    device = holding(90, gradients=600 * MIB)
    found = finish(tuning("largest", 85, granularity=8), device)
    assert all(probe.micro_batch_size % 8 == 0 for probe in found.evidence.probes if not probe.runs_plan)


@pytest.mark.parametrize("objective", get_args(Objective))
def test_every_objective_of_a_request_is_implemented(objective: Objective) -> None:
    """A name without an objective would fail the first tuning that has it."""
    assert isinstance(objective_of(tuning_request(objective=objective)), ObjectiveStrategy)
