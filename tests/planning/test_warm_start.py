"""Earlier answers to the same question: when one probe confirms them, and what they lead otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.factories import CPU, gpt_spec, mlp_spec, plan_of, probe_result, tuning_request
from tuner.errors import SearchError, SpecError
from tuner.planning.session import Tuning
from tuner.planning.warm_start import measured_peaks
from tuner.schemas.recommendation import Evidence, Recommendation
from tuner.schemas.requests import ProbeRequest, TuningRequest
from tuner.schemas.results import DeviceInfo, Outcome, ProbeResult, UpdateTiming

MIB = 1024**2
THEN = {"torch": "2.12", "batchwright": "0.1.0"}
NOW = {"torch": "2.13", "batchwright": "0.1.0"}
LIMIT = 1000 * MIB


@dataclass(frozen=True)
class Memory:
    """A device on which memory is affine in the size, in MiB; sizes above ``largest_valid`` are not valid ones."""

    base: float = 100.0
    slope: float = 20.0
    other_processes: int = 0
    largest_valid: int | None = None

    def used(self, size: int) -> int:
        """The bytes that a size takes."""
        return int((self.base + self.slope * size) * MIB)

    def run(self, probe: ProbeRequest) -> ProbeResult:
        """Probe a size, in what other processes leave of the limit."""
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
            limit_bytes=limit,
            resident_bytes=int(self.base / 2 * MIB),
            measures_time=probe.measures_time,
            timing=timing,
        )

    def largest(self, limit: int) -> int:
        """The largest size that fits into a limit; 0 when none does."""
        return max(0, int((limit / MIB - self.base) / self.slope + 1e-9))


def asking(limit: int = LIMIT, **changes: Any) -> TuningRequest:
    """The request, with an exact limit and no margin."""
    return tuning_request(**{"effective_batch_size": 500, "memory_limit_bytes": limit, "memory_margin": 0.0, **changes})


def course(request: TuningRequest, versions: dict[str, str], earlier: Recommendation | None = None) -> Tuning:
    """A tuning that has not begun, led by an earlier answer where there is one."""
    tuning = Tuning(request, CPU, environment={}, versions=versions)
    if earlier is not None:
        tuning.warm_start_from(earlier)
    return tuning


def finish(tuning: Tuning, memory: Memory, identifier: str = "rec_now") -> Recommendation:
    """Drive a tuning to its end."""
    while (probe := tuning.next_probe()) is not None:
        tuning.record(memory.run(probe))
    when = datetime(2026, 1, 1, tzinfo=UTC)
    return tuning.recommendation(identifier=identifier, created_at=when, total_seconds=1.0)


def answered(request: TuningRequest | None = None, memory: Memory | None = None, **changes: Any) -> Recommendation:
    """An earlier answer, with its full proof."""
    versions = changes.pop("versions", THEN)
    found = finish(course(request or asking(), versions), memory or Memory(), "rec_then")
    return found.model_copy(update=changes)


def again(earlier: Recommendation, memory: Memory, limit: int = LIMIT, **changes: Any) -> Recommendation:
    """The answer to the same question now, led by the earlier one."""
    return finish(course(asking(limit, **changes), NOW, earlier), memory)


def sizes(found: Recommendation) -> list[int]:
    """The sizes that were probed, in order."""
    return [it.micro_batch_size for it in found.evidence.probes]


def test_under_other_versions_one_probe_confirms_the_answer() -> None:
    """45 fitted and 46 did not; now 45 is run, takes the same, and stands, with words that say what was not run."""
    earlier = answered()
    found = again(earlier, Memory())
    assert sizes(found) == [45]
    assert (found.largest_micro_batch_size, plan_of(found).micro_batch_sizes) == (
        45,
        plan_of(earlier).micro_batch_sizes,
    )
    proof = found.evidence.proof
    assert (proof.fits, proof.stopped_by, proof.next_size) == (45, "warm-start", 46)
    for part in ("45 fits: it was run now", "46, was not run again", "torch 2.12 (now 2.13)", "rec_then", "+0.00%"):
        assert part in proof.statement
    assert found.evidence.warm_start is not None
    assert found.evidence.warm_start.recommendation_id == "rec_then"
    assert (found.evidence.warm_start.versions, found.evidence.warm_start.proof) == (THEN, earlier.evidence.proof)
    assert "rests-on-warm-start" in {it.code for it in found.warnings}
    assert found.fingerprint != earlier.fingerprint
    assert Recommendation.model_validate_json(found.model_dump_json()) == found


def test_a_full_proof_says_nothing_of_earlier_answers() -> None:
    """Without an earlier answer there is none in the evidence, and no warning."""
    found = answered()
    assert found.evidence.warm_start is None
    assert "rests-on-warm-start" not in {it.code for it in found.warnings}


def test_under_a_lower_limit_that_still_holds_the_peak_one_probe_confirms() -> None:
    """What failed in more memory fails in less: only that 45 fits has to be seen."""
    found = again(answered(asking(1010 * MIB)), Memory(), limit=Memory().used(45))
    assert (sizes(found), found.evidence.proof.stopped_by) == ([45], "warm-start")
    assert "a limit of 1010.00 MiB (now 1000.00 MiB)" in found.evidence.proof.statement


def test_a_limit_below_the_measured_peak_is_searched_from_the_measured_curve() -> None:
    """No probe is wasted on a size that cannot fit: the curve leads to the answer and the size above it."""
    found = again(answered(), Memory(), limit=700 * MIB)
    assert (found.largest_micro_batch_size, found.evidence.proof.stopped_by) == (30, "oom")
    assert max(sizes(found)) < 45
    assert len(sizes(found)) <= 3


def test_a_larger_limit_is_searched_since_more_may_fit() -> None:
    """The answer is exact for the larger limit, found from the curve in a few probes."""
    found = again(answered(), Memory(), limit=3000 * MIB)
    assert (found.largest_micro_batch_size, found.evidence.proof.stopped_by) == (145, "oom")
    assert len(sizes(found)) <= 3
    assert found.evidence.warm_start is not None
    assert found.evidence.expected == measured_peaks(answered())


def test_a_bound_needs_no_earlier_proof_whatever_the_limit() -> None:
    """A fit at the bound is a proof by itself, so that one probe is enough also where the limit grew."""
    earlier = answered(asking(max_micro_batch_size=40))
    assert earlier.evidence.proof.stopped_by == "bound"
    found = again(earlier, Memory(), limit=2 * LIMIT, max_micro_batch_size=40)
    assert (sizes(found), found.evidence.proof.stopped_by) == ([40], "bound")
    assert "rests-on-warm-start" not in {it.code for it in found.warnings}


@pytest.mark.parametrize("slope", [19.0, 19.7, 20.5, 25.0])
def test_a_peak_that_moved_is_searched(slope: float) -> None:
    """More than 1 % less or more memory at the earlier size: the answer is the exact one of today."""
    found = again(answered(), Memory(slope=slope))
    assert sizes(found)[0] == 45
    assert found.largest_micro_batch_size == Memory(slope=slope).largest(LIMIT)
    assert found.evidence.proof.stopped_by == "oom"


@pytest.mark.parametrize(("context", "probes"), [(500, 1), (560, 3)])
def test_memory_beside_the_tensors_that_moved_is_searched(context: int, probes: int) -> None:
    """The same tensors, but a context that took more: the next size was not seen to fail beside that one."""

    def on_a_card(taken: int) -> Callable[[ProbeRequest], ProbeResult]:
        def run(probe: ProbeRequest) -> ProbeResult:
            seen = Memory().run(probe)
            held = {"peak_allocated_bytes": seen.process_peak_bytes, "peak_reserved_bytes": seen.process_peak_bytes}
            return seen.model_copy(update={**held, "process_peak_bytes": None, "context_bytes": taken * MIB})

        return run

    then = course(asking(), THEN)
    while (probe := then.next_probe()) is not None:
        then.record(on_a_card(500)(probe))
    earlier = then.recommendation(identifier="rec_then", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    now = course(asking(), NOW, earlier)
    while (probe := now.next_probe()) is not None:
        now.record(on_a_card(context)(probe))
    assert (len(now.probes) == 1) == (probes == 1)


def test_the_fastest_plan_is_searched_and_timed_again() -> None:
    """A time is not confirmed by a peak: an earlier answer leads the search by its curve alone."""
    request = asking(objective="fastest")
    led = course(request, NOW).possible_warm_start(answered(request))
    assert led.size is None
    assert led.peaks is not None


def test_the_fewest_steps_are_confirmed_like_the_largest() -> None:
    """The next size is the next one that changes the steps, then as now."""
    request = asking(objective="fewest_steps")
    found = again(answered(request), Memory(), objective="fewest_steps")
    assert (sizes(found), found.evidence.proof.stopped_by) == ([42], "warm-start")


def test_an_infeasible_answer_leads_nothing() -> None:
    """Nothing was measured that fits: the tuning asks an estimate and searches as if there were none."""
    earlier = answered(memory=Memory(base=2000.0))
    assert not earlier.feasible
    tuning = course(asking(), NOW, earlier)
    assert tuning.expectation_request() is not None
    assert finish(tuning, Memory()).evidence.warm_start is None


def test_an_earlier_answer_takes_the_place_of_an_estimate() -> None:
    """What was measured is asked for no more."""
    assert course(asking(), NOW, answered()).expectation_request() is None


def test_chains_are_cut() -> None:
    """An answer that was only confirmed cannot confirm a third: the error names the one with the proof."""
    confirmed = again(answered(), Memory())
    with pytest.raises(SpecError, match="rests on rec_then"):
        course(asking(), {"torch": "2.14"}, confirmed)


def test_an_answer_that_was_led_but_proven_may_lead() -> None:
    """A full search that an earlier answer led has a proof of its own."""
    searched = again(answered(), Memory(), limit=3000 * MIB)
    found = finish(course(asking(3000 * MIB), {"torch": "2.14"}, searched), Memory())
    assert sizes(found) == [145]


@pytest.mark.parametrize(
    ("request_now", "named"),
    [
        (asking(spec=gpt_spec()), "spec.model.architecture.name"),
        (asking(spec=mlp_spec(precision="bf16-mixed")), "spec.precision"),
        (asking(effective_batch_size=400), "request.effective_batch_size"),
        (asking(memory_margin=0.1), "request.memory_margin"),
        (asking(granularity=8), "request.granularity"),
        (asking(objective="fewest_steps"), "request.objective"),
    ],
)
def test_another_question_is_refused_by_name(request_now: TuningRequest, named: str) -> None:
    """Every difference is named, with what it was."""
    with pytest.raises(SpecError, match=named) as caught:
        course(request_now, NOW, answered())
    assert named in {problem.field for problem in caught.value.problems}


@pytest.mark.parametrize("changes", [{"name": "another card"}, {"kind": "cuda", "id": "cuda:0"}])
def test_another_device_is_another_question(changes: dict[str, str]) -> None:
    """A like card elsewhere will do, another one will not."""
    device = CPU.model_copy(update=changes)
    with pytest.raises(SpecError, match=f"device.{next(iter(changes))}"):
        Tuning(asking(), device, environment={}, versions=NOW).warm_start_from(answered())


def test_another_allocator_setting_is_another_question() -> None:
    """The environment that probes run with changes what fits."""
    with pytest.raises(SpecError, match=r"environment\.A"):
        Tuning(asking(), CPU, environment={"A": "1"}, versions=NOW).warm_start_from(answered())


def test_an_answer_that_was_edited_is_refused() -> None:
    """Its fingerprint is not that of what it holds."""
    with pytest.raises(SpecError, match="fingerprint"):
        course(asking(), NOW, answered().model_copy(update={"versions": {"torch": "1.0"}}))


@pytest.mark.parametrize(("versions", "confirms"), [(NOW, False), (THEN, True)])
def test_a_kernels_own_limit_counts_for_the_same_versions_only(versions: dict[str, str], confirms: bool) -> None:  # noqa: FBT001 - a case
    """Another version may have lifted it; less memory has not."""
    earlier = answered(memory=Memory(largest_valid=40))
    assert earlier.evidence.proof.stopped_by == "invalid-size"
    led = course(asking(990 * MIB), versions).possible_warm_start(earlier)
    assert led.size == (40 if confirms else None)


def test_a_next_size_that_failed_in_less_memory_is_searched() -> None:
    """Other processes held 300 MiB when 46 failed... now they are gone, so that 45 fitting says nothing of 46."""
    crowded = answered(memory=Memory(other_processes=300))
    assert crowded.largest_micro_batch_size == 30
    found = again(crowded, Memory())
    assert sizes(found)[0] == 30
    assert (found.largest_micro_batch_size, found.evidence.proof.stopped_by) == (45, "oom")


def test_an_answer_with_contradictions_confirms_nothing() -> None:
    """Where a larger size had fitted after all, only a search tells."""
    earlier = answered()
    odd = (*earlier.evidence.probes, probe_result(60, used_bytes=MIB))
    evidence = Evidence(probes=odd, proof=earlier.evidence.proof)
    assert course(asking(), NOW).possible_warm_start(earlier.model_copy(update={"evidence": evidence})).size is None


def test_a_drop_that_lets_the_next_size_in_is_searched() -> None:
    """45 takes 0.6 % less than it did; 46 had failed by less than that, so that it is run."""
    earlier = answered(asking(1015 * MIB))
    found = again(earlier, Memory(base=94.0), limit=1015 * MIB)
    assert (sizes(found)[0], found.largest_micro_batch_size, found.evidence.proof.stopped_by) == (45, 46, "oom")


def test_a_lost_probe_is_run_again() -> None:
    """What ended it says nothing of the size; a second loss ends the tuning as ever."""
    tuning = course(asking(), NOW, answered())
    probe = tuning.next_probe()
    assert probe is not None
    tuning.record(probe_result(probe.micro_batch_size, Outcome.LOST, None))
    assert tuning.next_probe() == probe
    assert sizes(finish(tuning, Memory())) == [45, 45]


def test_an_earlier_answer_comes_before_the_first_probe() -> None:
    """Later it would change what was asked already."""
    tuning = course(asking(), NOW)
    probe = tuning.next_probe()
    assert probe is not None
    tuning.record(Memory().run(probe))
    with pytest.raises(SearchError, match="1 probes were recorded"):
        tuning.warm_start_from(answered())


@pytest.mark.parametrize("memory", [Memory(), Memory(slope=22.0), Memory(slope=18.0)])
def test_a_tuning_that_is_rebuilt_goes_on_as_if_nothing_had_happened(memory: Memory) -> None:
    """State is a function of the request, the earlier answer, and the recorded probes."""
    earlier = answered()
    whole = again(earlier, memory)
    for kept in range(len(whole.evidence.probes) + 1):
        rebuilt = course(asking(), NOW, earlier)
        for probe in whole.evidence.probes[:kept]:
            rebuilt.record(probe)
        assert finish(rebuilt, memory) == whole


def test_the_measured_curve_is_that_of_updates_that_accumulate() -> None:
    """The whole share holds no gradients while it runs; where fewer than two other sizes fitted, there is no curve."""
    fits = [probe_result(size, used_bytes=size * MIB, resident_bytes=MIB) for size in (8, 2)]
    whole = probe_result(500, used_bytes=400 * MIB, accumulates=False)
    peaks = measured_peaks(with_probes(*fits, whole))
    assert peaks is not None
    assert [(it.micro_batch_size, it.used_bytes) for it in peaks.points] == [(2, 2 * MIB), (8, 8 * MIB)]
    assert peaks.resident_bytes == MIB
    assert measured_peaks(with_probes(fits[0], whole)) is None


def test_a_curve_that_does_not_rise_leads_nothing() -> None:
    """Two sizes on a floor say nothing of where the limit is met."""
    assert measured_peaks(with_probes(probe_result(1, used_bytes=MIB), probe_result(2, used_bytes=MIB))) is None


def with_probes(*probes: ProbeResult) -> Recommendation:
    """An earlier answer with these probes."""
    earlier = answered()
    return earlier.model_copy(update={"evidence": earlier.evidence.model_copy(update={"probes": probes})})


memories = st.builds(
    Memory, base=st.floats(10, 300), slope=st.floats(0.5, 100), other_processes=st.sampled_from([0, 0, 50])
)
limits = st.integers(400, 3000).map(lambda mib: mib * MIB)


@settings(deadline=None, max_examples=150)
@given(then=memories, drift=st.sampled_from([0.9, 0.992, 1.0, 1.005, 1.2]), before=limits, today=limits)
def test_what_does_not_stand_on_an_earlier_proof_is_exact(then: Memory, drift: float, before: int, today: int) -> None:
    """Whatever changed: the answer is today's exact one, or it fits today, took what it took, and had no less room."""
    earlier = answered(asking(before), then)
    now = Memory(base=then.base * drift, slope=then.slope * drift)
    found = again(earlier, now, limit=today)
    proof = found.evidence.proof
    if proof.stopped_by != "warm-start":
        assert proof.fits == min(500, now.largest(today))
        return
    assert sizes(found) == [earlier.largest_micro_batch_size]
    assert now.used(proof.fits) <= today <= before
    assert abs(drift - 1.0) <= 0.01
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
def test_a_question_is_the_fingerprint_without_versions_and_limit(
    limit: int | None, torch: str, total: int, batch: int, name: str
) -> None:
    """Equal fingerprints are equal questions; versions, the limit and the device's memory alone keep the question."""
    device = DeviceInfo(id="cpu", kind="cpu", name=name, total_bytes=total)
    request = asking().model_copy(update={"memory_limit_bytes": limit, "effective_batch_size": batch})
    one = Tuning(request, device, environment={}, versions={"torch": torch})
    other = course(asking(), {"torch": "2.12"})
    assert (one.request_fingerprint == other.request_fingerprint) == ((batch, name) == (500, "test processor"))
    if one.fingerprint == other.fingerprint:
        assert one.request_fingerprint == other.request_fingerprint
