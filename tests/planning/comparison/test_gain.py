"""The gain over a baseline: measured, estimated, or of memory alone, and never made up."""

from typing import Any

import pytest
from pydantic import ValidationError

from batchwright.cli.arguments import baseline
from batchwright.errors import SpecError
from batchwright.planning.comparison.gain import gain_of, with_gain
from batchwright.planning.fingerprint import request_fields
from batchwright.planning.plan_figures import PlanCandidates, alternatives
from batchwright.schemas.recommendation import Gain, Recommendation
from batchwright.schemas.requests import Baseline, Objective
from batchwright.schemas.results import Outcome
from tests.planning.test_objectives import Device, finish, holding, tuning
from tests.support.factories import plan_of, recommendation

DEVICE = holding(47, seconds=lambda size: 0.01 + 0.001 * size)
SHARE = 512


def tuned(size: int, steps: int | None = None, objective: Objective = "largest", **changes: Any) -> Recommendation:
    """The recommendation of a tuning with a baseline."""
    before = Baseline(micro_batch_size=size, accumulation_steps=steps)
    return finish(tuning(objective, SHARE, baseline=before, **changes), DEVICE)


def gained(*given: Any, **changes: Any) -> Gain:
    """The gain of such a recommendation."""
    found = tuned(*given, **changes).gain
    assert found is not None
    return found


def true_speedup(before: int, now: int) -> float:
    """The ratio of the oracle's times of both plans."""
    return DEVICE.update_seconds(SHARE, before) / DEVICE.update_seconds(SHARE, now)


def test_one_probe_of_the_baseline_shows_what_is_gained() -> None:
    """Its peak is measured; the speed is estimated from the step times of single updates, and is said to be so."""
    found = tuned(8)
    without = finish(tuning("largest", SHARE), DEVICE)
    gain = found.gain
    assert gain is not None
    probed = [probe.micro_batch_size for probe in found.evidence.probes]
    assert sorted(probed) == sorted([*(probe.micro_batch_size for probe in without.evidence.probes), 8])
    assert (found.plan, found.evidence.proof) == (without.plan, without.evidence.proof)
    assert gain.speedup == pytest.approx(true_speedup(8, 47), rel=0.01)
    assert (gain.speed_source, gain.memory_source, gain.baseline_fits) == ("estimated", "measured", True)
    assert gain.baseline_peak_bytes == round(DEVICE.used(8, accumulates=True))
    assert gain.baseline.gradient_accumulation_steps == 64
    assert gain.statement == (
        "64 x 8 -> 6 x 47 + 5 x 46: about 1.82x faster (estimated); memory use 25 % -> 99 % of 1000.00 MiB."
    )


def test_the_objective_fastest_measures_both_plans() -> None:
    """The plan of the baseline is timed after the others, over several updates."""
    found = tuned(8, objective="fastest")
    gain = found.gain
    assert gain is not None
    assert gain.speed_source == "measured"
    assert gain.speedup == pytest.approx(true_speedup(8, plan_of(found).micro_batch_size), rel=0.01)
    assert "(measured)" in gain.statement


def test_a_baseline_of_another_batch_is_told() -> None:
    """Eight in sixteen steps are 128 samples: samples per second compare, updates do not."""
    gain = gained(8, 16, objective="fastest")
    assert (gain.baseline.effective_batch_size, gain.baseline.exact) == (128, False)
    assert gain.speed_source == "estimated"
    assert "effective batch is 128, not 512" in gain.statement
    assert gained(8, 64).baseline.exact


def test_a_baseline_that_does_not_fit_gains_no_figures() -> None:
    """A size above the proven largest has no time and no peak, and is not probed."""
    found = tuned(64)
    assert found.gain is not None
    assert (found.gain.baseline_fits, found.gain.speedup, found.gain.baseline_peak_bytes) == (False, None, None)
    assert "does not fit" in found.gain.statement
    probed = [probe for probe in found.evidence.probes if probe.micro_batch_size == 64]
    assert all(probe.outcome is Outcome.OOM for probe in probed)


def test_nothing_is_made_up_where_nothing_was_timed() -> None:
    """Probes without times show memory alone, and the sentence says so."""
    found = tuned(8)
    probes = tuple(probe.model_copy(update={"timing": None}) for probe in found.evidence.probes)
    plans = tuple(plan.model_copy(update={"samples_per_second": None}) for plan in found.alternatives)
    evidence = found.evidence.model_copy(update={"probes": probes})
    gain = gain_of(found.model_copy(update={"evidence": evidence, "alternatives": plans}))
    assert gain is not None
    assert (gain.speedup, gain.speed_source, gain.samples_per_second) == (None, None, None)
    assert gain.memory_source == "measured"
    assert "The earlier plan was not timed." in gain.statement


def test_a_baseline_below_all_probes_is_not_extrapolated_in_time() -> None:
    """Stored evidence without a probe of the baseline's size has no figure of its speed beyond the probed sizes."""
    found = tuned(8)
    request = found.request.model_copy(update={"baseline": Baseline(micro_batch_size=3)})
    probes = tuple(probe for probe in found.evidence.probes if probe.micro_batch_size >= 8)
    evidence = found.evidence.model_copy(update={"probes": probes})
    gain = gain_of(found.model_copy(update={"request": request, "evidence": evidence}))
    assert gain is not None
    assert gain.speedup is None
    assert gain.memory_source == "estimated"
    assert gain.baseline_peak_bytes == pytest.approx(DEVICE.used(3, accumulates=True), rel=0.01)


def test_the_same_plan_gains_nothing() -> None:
    """The largest micro-batch as its own baseline is as fast, without another probe."""
    gain = gained(47)
    assert gain.speedup == pytest.approx(1.0, abs=0.02)
    assert gain.peak_bytes == gain.baseline_peak_bytes


def test_a_whole_batch_as_baseline_has_one_step() -> None:
    """Its single micro-batch holds no gradients; its time stands for no other number of steps."""
    device = Device(per_sample=1024)
    before = Baseline(micro_batch_size=16)
    found = finish(tuning("largest", 16, baseline=before), device).gain
    assert found is not None
    assert found.baseline.gradient_accumulation_steps == 1
    assert found.speedup == pytest.approx(1.0)


def test_a_baseline_changes_no_fingerprint() -> None:
    """Equal requests with other baselines share their evidence."""
    given, other = tuning("largest", SHARE, baseline=Baseline(micro_batch_size=8)), tuning("largest", SHARE)
    assert request_fields(given.request) == request_fields(other.request)
    assert given.fingerprint == other.fingerprint


def test_without_a_baseline_there_is_no_gain() -> None:
    """Neither where none is named, nor where nothing fits."""
    assert with_gain(recommendation()).gain is None


def test_the_option_takes_a_size_and_steps() -> None:
    """``8`` and ``8x16`` are read; anything else is refused with the option's name."""
    assert baseline(None) is None
    assert baseline("8") == {"micro_batch_size": 8, "accumulation_steps": None}
    assert baseline("8x16") == {"micro_batch_size": 8, "accumulation_steps": 16}
    for text in ("", "x", "8x", "x8", "8.5", "-8", "8x16x2"):
        with pytest.raises(SpecError, match="--baseline"):
            baseline(text)


@pytest.mark.parametrize("field", ["micro_batch_size", "accumulation_steps"])
def test_a_baseline_has_at_least_one_sample_and_step(field: str) -> None:
    """Zero is refused."""
    with pytest.raises(ValidationError):
        Baseline.model_validate({"micro_batch_size": 8, field: 0})


def test_a_fit_of_one_update_is_no_measured_baseline() -> None:
    """Its probe only narrowed the search: the baseline is not measured by it, nor is the alternative of its size."""
    found = tuned(8)
    probes = [
        probe.model_copy(update={"brackets": True, "timing": None}) if probe.micro_batch_size == 8 else probe
        for probe in found.evidence.probes
    ]
    evidence = found.evidence.model_copy(update={"probes": tuple(probes)})
    gain = gain_of(found.model_copy(update={"evidence": evidence}))
    assert gain is not None
    assert gain.memory_source == "estimated"
    assert {
        plan.source for plan in alternatives(PlanCandidates(SHARE, 47, probes), 8) if plan.micro_batch_size == 8
    } == {"modelled"}
