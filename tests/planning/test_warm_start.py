"""Warm starts: a stored recommendation is confirmed by one probe, or seeds the search."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from batchwright.errors import SearchError, SpecError
from batchwright.planning.accumulation import probe_window
from batchwright.planning.session import TuningSession
from batchwright.planning.warm_start import measured_peaks, warm_start_from
from batchwright.schemas.recommendation import Evidence, Recommendation
from batchwright.schemas.requests import ProbeRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo, Outcome, ProbeResult, RankResult, UpdateTiming
from tests.support.factories import CPU, gpt_spec, mlp_spec, plan_of, probe_result, tuning_request

MIB = 1024**2
THEN = {"torch": "2.12", "batchwright": "0.1.0"}
NOW = {"torch": "2.13", "batchwright": "0.1.0"}
LIMIT = 1000 * MIB


@dataclass(frozen=True)
class Memory:
    """A device with memory affine in the size, in MiB. Sizes above ``largest_valid`` are invalid."""

    base: float = 100.0
    slope: float = 20.0
    other_processes: int = 0
    largest_valid: int | None = None

    def used(self, size: int) -> int:
        """The bytes that a size takes."""
        return int((self.base + self.slope * size) * MIB)

    def run(self, probe: ProbeRequest) -> ProbeResult:
        """Probe a size under the limit less the memory of other processes."""
        size, limit = probe.micro_batch_size, (probe.limit_bytes or 0) - self.other_processes * MIB
        outcome = Outcome.FIT if self.used(size) <= limit else Outcome.OOM
        if self.largest_valid is not None and size > self.largest_valid:
            outcome = Outcome.INVALID_SIZE
        timing = UpdateTiming(updates=3, micro_batch_sizes=(size,), update_seconds=1.0) if probe.measures_time else None
        return probe_result(
            size,
            outcome,
            self.used(size) if outcome is Outcome.FIT else None,
            accumulates=probe.accumulates,
            micro_batch_sizes=probe_window(probe),
            limit_bytes=limit,
            resident_bytes=int(self.base / 2 * MIB),
            measures_time=probe.measures_time,
            timing=timing,
        )

    def largest(self, limit: int) -> int:
        """The largest size that fits into a limit; 0 when there is none."""
        return max(0, int((limit / MIB - self.base) / self.slope + 1e-9))


def request_under(limit: int = LIMIT, **changes: Any) -> TuningRequest:
    """Build the request with an exact limit and no margin."""
    return tuning_request(**{"effective_batch_size": 500, "memory_limit_bytes": limit, "memory_margin": 0.0, **changes})


def new_tuning(request: TuningRequest, versions: dict[str, str], stored: Recommendation | None = None) -> TuningSession:
    """Build a tuning, warm-started if a recommendation is given."""
    tuning = TuningSession(request, CPU, environment={}, versions=versions)
    if stored is not None:
        tuning.warm_start_from(stored)
    return tuning


def finish(tuning: TuningSession, memory: Memory, identifier: str = "rec_now") -> Recommendation:
    """Drive a tuning to its end."""
    while (probe := tuning.next_probe()) is not None:
        tuning.record(memory.run(probe))
    when = datetime(2026, 1, 1, tzinfo=UTC)
    return tuning.recommendation(identifier=identifier, created_at=when, total_seconds=1.0)


def stored_recommendation(
    request: TuningRequest | None = None, memory: Memory | None = None, **changes: Any
) -> Recommendation:
    """Build a stored recommendation with a full proof."""
    versions = changes.pop("versions", THEN)
    found = finish(new_tuning(request or request_under(), versions), memory or Memory(), "rec_then")
    return found.model_copy(update=changes)


def retuned(stored: Recommendation, memory: Memory, limit: int = LIMIT, **changes: Any) -> Recommendation:
    """Tune the request now, warm-started by the stored recommendation."""
    return finish(new_tuning(request_under(limit, **changes), NOW, stored), memory)


def sizes(found: Recommendation) -> list[int]:
    """The sizes that were searched, in order; a run of a smaller plan may follow."""
    proven = found.evidence.proof.fits
    probes = [probe for probe in found.evidence.probes if not probe.runs_plan or probe.micro_batch_size == proven]
    return [probe.micro_batch_size for probe in probes]


def test_under_other_versions_one_probe_confirms_the_recommendation() -> None:
    """45 fitted and 46 did not. Now 45 is run and takes the same memory; the statement names the size not run."""
    stored = stored_recommendation()
    found = retuned(stored, Memory())
    assert sizes(found) == [45]
    assert (found.largest_micro_batch_size, plan_of(found).micro_batch_sizes) == (
        45,
        plan_of(stored).micro_batch_sizes,
    )
    proof = found.evidence.proof
    assert (proof.fits, proof.stopped_by, proof.next_size) == (45, "warm-start", 46)
    for part in ("45 fits: run now, it took", "46, was not run again", "torch 2.12 (now 2.13)", "rec_then", "+0.00%"):
        assert part in proof.statement
    assert found.evidence.warm_start is not None
    assert found.evidence.warm_start.recommendation_id == "rec_then"
    assert (found.evidence.warm_start.versions, found.evidence.warm_start.proof) == (THEN, stored.evidence.proof)
    assert "rests-on-warm-start" in {warning.code for warning in found.warnings}
    assert found.fingerprint != stored.fingerprint
    assert Recommendation.model_validate_json(found.model_dump_json()) == found


def test_a_fit_of_the_plan_is_confirmed_by_another() -> None:
    """The plan begins with two micro-batches of 45, so its run proved the size: one run confirms both again."""
    stored = stored_recommendation(request_under(effective_batch_size=895))
    window = (45, 45, 44, 44)
    assert [probe.micro_batch_sizes for probe in stored.evidence.probes if probe.micro_batch_size == 45] == [window]
    found = retuned(stored, Memory(), effective_batch_size=895)
    assert [probe.micro_batch_sizes for probe in found.evidence.probes] == [window]
    assert found.evidence.proof.stopped_by == "warm-start"
    assert found.evidence.plan_proof == stored.evidence.plan_proof


def test_a_plan_that_was_lost_is_not_run_again_to_confirm_its_size() -> None:
    """The size is then probed alone, and the search ends where that is lost too."""
    request = request_under(effective_batch_size=895)
    tuning = new_tuning(request, NOW, stored_recommendation(request))
    ran = []
    while (probe := tuning.next_probe()) is not None:
        ran.append((probe.micro_batch_size, probe.runs_plan))
        tuning.record(probe_result(probe.micro_batch_size, Outcome.LOST, micro_batch_sizes=probe_window(probe)))
    assert ran == [(45, True), (45, False), (45, False)]


def test_a_recommendation_whose_ranks_all_ran_is_taken() -> None:
    """Its fingerprint has the number of ranks that ran, which are those of its probes."""
    request = request_under(spec=mlp_spec(parallelism={"world_size": 2}), effective_batch_size=1000)
    devices = new_tuning(request, THEN).conditions.rank_devices
    assert len(devices) == 2

    def found(tuning: TuningSession) -> Recommendation:
        while (probe := tuning.next_probe()) is not None:
            result = Memory().run(probe)
            ranks = tuple(RankResult(rank=rank, outcome=result.outcome) for rank in range(2))
            tuning.record(result.model_copy(update={"ranks": ranks}))
        return tuning.recommendation(identifier="rec", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)

    stored = found(new_tuning(request, THEN))
    assert found(new_tuning(request, NOW, stored)).evidence.proof.stopped_by == "warm-start"


def test_a_full_proof_names_no_warm_start() -> None:
    """Without a warm start there is none in the evidence, and no warning."""
    found = stored_recommendation()
    assert found.evidence.warm_start is None
    assert "rests-on-warm-start" not in {warning.code for warning in found.warnings}


def test_under_a_lower_limit_that_still_holds_the_peak_one_probe_confirms() -> None:
    """What failed in more memory fails in less: only that 45 fits has to be seen."""
    found = retuned(stored_recommendation(request_under(1010 * MIB)), Memory(), limit=Memory().used(45))
    assert (sizes(found), found.evidence.proof.stopped_by) == ([45], "warm-start")
    assert "a limit of 1010.00 MiB (now 1000.00 MiB)" in found.evidence.proof.statement


def test_a_limit_below_the_measured_peak_is_searched_from_the_measured_curve() -> None:
    """No probe is wasted on a size that cannot fit: the curve leads to the answer and the size above it."""
    found = retuned(stored_recommendation(), Memory(), limit=700 * MIB)
    assert (found.largest_micro_batch_size, found.evidence.proof.stopped_by) == (30, "oom")
    assert max(sizes(found)) < 45
    assert len(sizes(found)) <= 3


def test_a_larger_limit_is_searched_since_more_may_fit() -> None:
    """The answer is exact for the larger limit, found from the curve in a few probes."""
    found = retuned(stored_recommendation(), Memory(), limit=3000 * MIB)
    assert (found.largest_micro_batch_size, found.evidence.proof.stopped_by) == (145, "oom")
    assert len(sizes(found)) <= 3
    assert found.evidence.warm_start is not None
    assert found.evidence.expected == measured_peaks(stored_recommendation())


def test_a_bound_needs_no_stored_proof_under_any_limit() -> None:
    """A fit at the bound is a proof by itself, so that one probe is enough also where the limit grew."""
    stored = stored_recommendation(request_under(max_micro_batch_size=40))
    assert stored.evidence.proof.stopped_by == "bound"
    found = retuned(stored, Memory(), limit=2 * LIMIT, max_micro_batch_size=40)
    assert (sizes(found), found.evidence.proof.stopped_by) == ([40], "bound")
    assert "rests-on-warm-start" not in {warning.code for warning in found.warnings}


@pytest.mark.parametrize("slope", [19.0, 19.7, 20.5, 25.0])
def test_a_peak_that_moved_is_searched(slope: float) -> None:
    """More than 1 % less or more memory at the stored size: the tuning searches, and the answer is exact."""
    found = retuned(stored_recommendation(), Memory(slope=slope))
    assert sizes(found)[0] == 45
    assert found.largest_micro_batch_size == Memory(slope=slope).largest(LIMIT)
    assert found.evidence.proof.stopped_by == "oom"


@pytest.mark.parametrize("noise", [-20.0, 20.0])
def test_noise_of_a_processor_leaves_a_wide_step_confirmed(noise: float) -> None:
    """Probes of 40 differ by 2.2 %, while the next size, 48, exceeds the limit by 6 %: it needs no second failure."""
    stored = stored_recommendation(request_under(granularity=8))
    found = retuned(stored, Memory(base=100.0 + noise), granularity=8)
    assert (sizes(found), found.evidence.proof.stopped_by) == ([40], "warm-start")
    assert f"{noise / 900:+.2%}" in found.evidence.proof.statement


def test_the_peak_of_a_card_has_no_such_noise() -> None:
    """The same difference on a card is another use of memory, so that the next size is run."""
    card = CPU.model_copy(update={"kind": "cuda", "id": "cuda:0"})
    found: list[Recommendation] = []
    for identifier, base in (("rec_then", 100.0), ("rec_now", 80.0)):
        tuning = TuningSession(
            request_under(granularity=8, device="cuda:0"), card, environment={}, versions={"torch": identifier}
        )
        for stored in found:
            tuning.warm_start_from(stored)
        found.append(finish(tuning, Memory(base=base), identifier))
    assert (sizes(found[1]), found[1].evidence.proof.stopped_by) == ([40, 48], "oom")


def test_a_single_fit_is_led_by_the_curve_of_its_own_tuning() -> None:
    """A search that a curve led straight to the limit measured one fit: the next starts from that curve again."""
    first = stored_recommendation()
    second = retuned(first, Memory(slope=19.7))
    assert measured_peaks(second) is None
    third = finish(new_tuning(request_under(), {"torch": "2.14"}, second), Memory(slope=19.2))
    assert third.evidence.expected == second.evidence.expected == measured_peaks(first)
    assert (third.largest_micro_batch_size, third.evidence.proof.stopped_by) == (
        Memory(slope=19.2).largest(LIMIT),
        "oom",
    )


@pytest.mark.parametrize(("context", "stopped_by"), [(500, "warm-start"), (560, "oom")])
def test_memory_beside_the_tensors_that_moved_is_searched(context: int, stopped_by: str) -> None:
    """The same tensors, but a context that took more: the next size was not seen to fail beside that one."""

    def on_a_card(taken: int) -> Callable[[ProbeRequest], ProbeResult]:
        def run(probe: ProbeRequest) -> ProbeResult:
            seen = Memory().run(probe)
            held = {"peak_allocated_bytes": seen.process_peak_bytes, "peak_reserved_bytes": seen.process_peak_bytes}
            return seen.model_copy(update={**held, "process_peak_bytes": None, "context_bytes": taken * MIB})

        return run

    def found(tuning: TuningSession, taken: int) -> Recommendation:
        while (probe := tuning.next_probe()) is not None:
            tuning.record(on_a_card(taken)(probe))
        return tuning.recommendation(identifier="rec", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)

    stored = found(new_tuning(request_under(), THEN), 500)
    now = found(new_tuning(request_under(), NOW, stored), context)
    assert now.evidence.proof.stopped_by == stopped_by


def test_the_fastest_plan_is_searched_and_timed_again() -> None:
    """A peak does not confirm a time: the stored recommendation only seeds the search with its curve."""
    request = request_under(objective="fastest")
    start = warm_start_from(stored_recommendation(request), new_tuning(request, NOW).conditions)
    assert start.size is None
    assert start.peaks is not None


def test_the_fewest_steps_are_confirmed_like_the_largest() -> None:
    """The next size is the next one that changes the steps, then as now."""
    request = request_under(objective="fewest_steps")
    found = retuned(stored_recommendation(request), Memory(), objective="fewest_steps")
    assert (sizes(found), found.evidence.proof.stopped_by) == ([42], "warm-start")


def test_an_infeasible_recommendation_warm_starts_nothing() -> None:
    """No fit was measured: the tuning requests an estimate and searches as without a warm start."""
    stored = stored_recommendation(memory=Memory(base=2000.0))
    assert not stored.feasible
    tuning = new_tuning(request_under(), NOW, stored)
    assert tuning.expectation_request() is not None
    assert finish(tuning, Memory()).evidence.warm_start is None


def test_a_warm_start_replaces_the_estimate() -> None:
    """A measured curve makes an estimate unnecessary."""
    assert new_tuning(request_under(), NOW, stored_recommendation()).expectation_request() is None


def test_chains_are_cut() -> None:
    """A recommendation that was only confirmed cannot warm-start: the error names the one with the proof."""
    confirmed = retuned(stored_recommendation(), Memory())
    with pytest.raises(SpecError, match="rests on rec_then"):
        new_tuning(request_under(), {"torch": "2.14"}, confirmed)


def test_a_warm_started_recommendation_with_a_full_proof_may_warm_start() -> None:
    """A full search from a warm start has a proof of its own."""
    searched = retuned(stored_recommendation(), Memory(), limit=3000 * MIB)
    found = finish(new_tuning(request_under(3000 * MIB), {"torch": "2.14"}, searched), Memory())
    assert sizes(found) == [145]


@pytest.mark.parametrize(
    ("request_now", "named"),
    [
        (request_under(spec=gpt_spec()), "spec.model.architecture.name"),
        (request_under(spec=mlp_spec(precision="bf16-mixed")), "spec.precision"),
        (request_under(effective_batch_size=400), "request.effective_batch_size"),
        (request_under(memory_margin=0.1), "request.memory_margin"),
        (request_under(granularity=8), "request.granularity"),
        (request_under(objective="fewest_steps"), "request.objective"),
    ],
)
def test_another_request_is_refused_with_the_differences(request_now: TuningRequest, named: str) -> None:
    """Every difference is named, with what it was."""
    with pytest.raises(SpecError, match=named) as caught:
        new_tuning(request_now, NOW, stored_recommendation())
    assert named in {problem.field for problem in caught.value.problems}


@pytest.mark.parametrize("changes", [{"name": "another card"}, {"kind": "cuda", "id": "cuda:0"}])
def test_another_device_is_another_request(changes: dict[str, str]) -> None:
    """A card of the same kind is accepted, another kind is not."""
    device = CPU.model_copy(update=changes)
    with pytest.raises(SpecError, match=f"device.{next(iter(changes))}"):
        TuningSession(request_under(), device, environment={}, versions=NOW).warm_start_from(stored_recommendation())


def test_another_allocator_setting_is_another_request() -> None:
    """The environment that probes run with changes what fits."""
    with pytest.raises(SpecError, match=r"environment\.A"):
        TuningSession(request_under(), CPU, environment={"A": "1"}, versions=NOW).warm_start_from(
            stored_recommendation()
        )


def test_an_edited_recommendation_is_refused() -> None:
    """The fingerprint differs from that of the contents."""
    with pytest.raises(SpecError, match="fingerprint"):
        new_tuning(request_under(), NOW, stored_recommendation().model_copy(update={"versions": {"torch": "1.0"}}))


@pytest.mark.parametrize(("versions", "confirms"), [(NOW, False), (THEN, True)])
def test_a_kernels_own_limit_counts_for_the_same_versions_only(versions: dict[str, str], confirms: bool) -> None:  # noqa: FBT001 - a case
    """Another version may have lifted it; less memory has not."""
    stored = stored_recommendation(memory=Memory(largest_valid=40))
    assert stored.evidence.proof.stopped_by == "invalid-size"
    start = warm_start_from(stored, new_tuning(request_under(990 * MIB), versions).conditions)
    assert start.size == (40 if confirms else None)


def test_a_next_size_that_failed_in_less_memory_is_searched() -> None:
    """Other processes held 300 MiB when 46 failed. Now they are gone, so a fit of 45 does not show that 46 fails."""
    crowded = stored_recommendation(memory=Memory(other_processes=300))
    assert crowded.largest_micro_batch_size == 30
    found = retuned(crowded, Memory())
    assert sizes(found)[0] == 30
    assert (found.largest_micro_batch_size, found.evidence.proof.stopped_by) == (45, "oom")


def test_contradictory_probes_cannot_be_confirmed() -> None:
    """Where a larger size had fitted too, only a search gives a proof."""
    stored = stored_recommendation()
    odd = (*stored.evidence.probes, probe_result(60, used_bytes=MIB))
    evidence = Evidence(probes=odd, proof=stored.evidence.proof)
    assert (
        warm_start_from(
            stored.model_copy(update={"evidence": evidence}), new_tuning(request_under(), NOW).conditions
        ).size
        is None
    )


def test_a_drop_that_may_fit_the_next_size_is_searched() -> None:
    """45 takes 0.6 % less than it did; 46 had failed by less than that, so that it is run."""
    stored = stored_recommendation(request_under(1015 * MIB))
    found = retuned(stored, Memory(base=94.0), limit=1015 * MIB)
    assert (sizes(found)[0], found.largest_micro_batch_size, found.evidence.proof.stopped_by) == (45, 46, "oom")


def test_a_lost_probe_is_run_again() -> None:
    """The loss is unrelated to the size; a second loss ends the tuning as usual."""
    tuning = new_tuning(request_under(), NOW, stored_recommendation())
    probe = tuning.next_probe()
    assert probe is not None
    tuning.record(probe_result(probe.micro_batch_size, Outcome.LOST, None))
    assert tuning.next_probe() == probe
    assert sizes(finish(tuning, Memory())) == [45, 45]


def test_a_warm_start_comes_before_the_first_probe() -> None:
    """A later warm start would change requests that were already made."""
    tuning = new_tuning(request_under(), NOW)
    probe = tuning.next_probe()
    assert probe is not None
    tuning.record(Memory().run(probe))
    with pytest.raises(SearchError, match="1 probes were recorded"):
        tuning.warm_start_from(stored_recommendation())


@pytest.mark.parametrize("memory", [Memory(), Memory(slope=22.0), Memory(slope=18.0)])
def test_a_rebuilt_tuning_continues_unchanged(memory: Memory) -> None:
    """State is a function of the request, the stored recommendation and the recorded probes."""
    stored = stored_recommendation()
    whole = retuned(stored, memory)
    for kept in range(len(whole.evidence.probes) + 1):
        rebuilt = new_tuning(request_under(), NOW, stored)
        for probe in whole.evidence.probes[:kept]:
            rebuilt.record(probe)
        assert finish(rebuilt, memory) == whole


def test_the_measured_curve_is_that_of_updates_that_accumulate() -> None:
    """The whole share holds no gradients while it runs; where fewer than two other sizes fitted, there is no curve."""
    fits = [probe_result(size, used_bytes=size * MIB, resident_bytes=MIB) for size in (8, 2)]
    whole = probe_result(500, used_bytes=400 * MIB, accumulates=False)
    peaks = measured_peaks(with_probes(*fits, whole))
    assert peaks is not None
    assert [(point.micro_batch_size, point.used_bytes) for point in peaks.points] == [(2, 2 * MIB), (8, 8 * MIB)]
    assert peaks.resident_bytes == MIB
    assert measured_peaks(with_probes(fits[0], whole)) is None


def test_a_curve_that_does_not_rise_seeds_no_search() -> None:
    """Two sizes on a floor do not show where the limit is met."""
    assert measured_peaks(with_probes(probe_result(1, used_bytes=MIB), probe_result(2, used_bytes=MIB))) is None


def with_probes(*probes: ProbeResult) -> Recommendation:
    """Build a stored recommendation with these probes."""
    stored = stored_recommendation()
    return stored.model_copy(update={"evidence": stored.evidence.model_copy(update={"probes": probes})})


memories = st.builds(
    Memory, base=st.floats(10, 300), slope=st.floats(0.5, 100), other_processes=st.sampled_from([0, 0, 50])
)
limits = st.integers(400, 3000).map(lambda mib: mib * MIB)


@settings(deadline=None, max_examples=150)
@example(then=Memory(base=10.0, slope=1.0, other_processes=50), drift=0.992, before=447 * MIB, today=400 * MIB)
@given(then=memories, drift=st.sampled_from([0.9, 0.98, 0.992, 1.0, 1.005, 1.02, 1.2]), before=limits, today=limits)
def test_every_warm_started_answer_is_exact_or_confirmed(then: Memory, drift: float, before: int, today: int) -> None:
    """After any change the answer is exact, or the stored size fits with the same peak under no larger limit."""
    stored = stored_recommendation(request_under(before), then)
    now = Memory(base=then.base * drift, slope=then.slope * drift)
    found = retuned(stored, now, limit=today)
    proof = found.evidence.proof
    if proof.stopped_by != "warm-start":
        assert proof.fits == min(500, now.largest(today))
        return
    assert sizes(found) == [stored.largest_micro_batch_size]
    assert now.used(proof.fits) <= today <= before
    assert abs(drift - 1.0) <= 0.03
    if abs(drift - 1.0) > 0.01:
        assert proof.next_size is not None
        assert now.used(proof.next_size) > today
    if found.evidence.expected is not None and proof.next_size is not None:  # the drop was weighed against the curve
        doubt = 0.01 * now.slope * (proof.next_size - proof.fits) * MIB
        assert now.used(proof.next_size) > today - doubt


@settings(deadline=None, max_examples=100)
@given(
    limit=st.sampled_from([LIMIT, 2 * LIMIT, None]),
    torch=st.sampled_from(["2.12", "2.13"]),
    total=st.sampled_from([CPU.total_bytes, 2 * CPU.total_bytes]),
    batch=st.sampled_from([100, 500]),
    name=st.sampled_from(["test processor", "another"]),
)
def test_a_request_fingerprint_ignores_versions_and_limit(
    limit: int | None, torch: str, total: int, batch: int, name: str
) -> None:
    """Versions, the limit and the device's memory change the fingerprint but not the request fingerprint."""
    device = DeviceInfo(id="cpu", kind="cpu", name=name, total_bytes=total)
    request = request_under().model_copy(update={"memory_limit_bytes": limit, "effective_batch_size": batch})
    one = TuningSession(request, device, environment={}, versions={"torch": torch})
    other = new_tuning(request_under(), {"torch": "2.12"})
    assert (one.request_fingerprint == other.request_fingerprint) == ((batch, name) == (500, "test processor"))
    if one.fingerprint == other.fingerprint:
        assert one.request_fingerprint == other.request_fingerprint


def test_a_fit_of_one_update_confirms_nothing() -> None:
    """A resumed tuning may begin with a probe that only narrowed its search."""
    course = new_tuning(request_under(), NOW, stored_recommendation())
    probe = course.next_probe()
    assert probe is not None
    course.record(Memory().run(probe).model_copy(update={"brackets": True}))
    assert course.next_probe() is not None
