"""Residuals of tunings, and the corrections that they give later estimates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import pytest

from batchwright.planning.accumulation import probe_window
from batchwright.planning.learning.correction import EstimateConditions, conditions_of, corrected
from batchwright.planning.learning.residual import residual_of
from batchwright.planning.learning.workload_family import family_of
from batchwright.planning.session import TuningSession
from batchwright.schemas.recommendation import Evidence, Recommendation
from batchwright.schemas.requests import ProbeRequest, TuningRequest
from batchwright.schemas.residuals import EstimateCorrection, EstimateResidual, PeakResidual
from batchwright.schemas.results import ExpectedPeak, ExpectedPeaks, Outcome, Phase, ProbeResult
from tests.support.factories import CUDA, gpt_spec, recommendation, residual

GIB = 1024**3
VERSIONS = {"torch": "2.8", "driver": "1.0"}
HERE = EstimateConditions("gpt", {"torch": "2.8"}, 8500, elastic=False)


def line(constant: float, slope: float) -> ExpectedPeaks:
    """An estimate ``constant + slope * size``."""
    used = {size: max(1, round(constant + slope * size)) for size in (1, 4096)}
    points = tuple(ExpectedPeak(micro_batch_size=size, used_bytes=peak) for size, peak in used.items())
    return ExpectedPeaks(points=points, resident_bytes=max(0, round(constant)))


def correction(residuals: Sequence[EstimateResidual], now: EstimateConditions = HERE) -> EstimateCorrection:
    """The correction of an estimate that has nothing at size 0."""
    found = corrected(line(0, 1000), residuals, now).correction
    assert found is not None
    return found


def failing(at: int) -> EstimateResidual:
    """A residual of a tuning in which memory ran out where the estimate was ``at`` bytes, under a limit of 8500."""
    fit = PeakResidual(micro_batch_size=80, expected_bytes=at - 50, measured_bytes=8450)
    return residual(fit=fit, failed_size=81, failed_expected_bytes=at + 50)


@dataclass(frozen=True)
class Truth:
    """Memory of a workload on a card, and its estimate.

    Attributes:
        limit: memory limit.
        constant: bytes at size 0.
        per_sample: bytes of each sample.
        missed: bytes at size 0 that the estimate misses.
        slope: growth of memory over the estimated growth.
        usable: share of the limit that can be used.
    """

    limit: int = 16 * GIB
    constant: float = 2 * GIB
    per_sample: float = 0.4 * GIB
    missed: float = 0.0
    slope: float = 1.0
    usable: float = 1.0

    @property
    def largest(self) -> int:
        """The largest size that fits."""
        return int((self.usable * self.limit - self.constant) / self.per_sample)

    @property
    def estimate(self) -> ExpectedPeaks:
        """The estimate."""
        return line(self.constant - self.missed, self.per_sample / self.slope)

    def probe(self, wanted: ProbeRequest) -> ProbeResult:
        """Run a probe."""
        size = wanted.micro_batch_size
        fits = size <= self.largest
        peak = round(self.constant + self.per_sample * size)
        return ProbeResult(
            micro_batch_size=size,
            accumulates=wanted.accumulates,
            micro_batch_sizes=probe_window(wanted),
            outcome=Outcome.FIT if fits else Outcome.OOM,
            phase=Phase.DONE if fits else Phase.WARMUP,
            failed_micro_batch=None if fits else 1,
            peak_allocated_bytes=peak if fits else None,
            peak_reserved_bytes=peak if fits else None,
            resident_bytes=round(self.constant) if fits else None,
        )


def tuned(  # noqa: PLR0913 - all that tells a tuning apart
    truth: Truth,
    residuals: Sequence[EstimateResidual] = (),
    *,
    versions: dict[str, str] = VERSIONS,
    bound: int = 4096,
    usable_bytes: int | None = None,
    reservable_bytes: int | None = None,
    context_bytes: int = 0,
) -> Recommendation:
    """A tuning that starts from its estimate, corrected by residuals. The limit of probes is without the context."""
    request = TuningRequest(
        spec=gpt_spec(),
        effective_batch_size=4096,
        max_micro_batch_size=bound,
        memory_limit_bytes=truth.limit + context_bytes,
        memory_margin=0.0,
    )
    device = CUDA.model_copy(update={"total_bytes": 80 * GIB})
    tuning = TuningSession(request, device, environment={}, versions=versions)
    by_replays = {"usable_bytes": usable_bytes, "reservable_bytes": reservable_bytes}
    estimate = truth.estimate.model_copy(update=by_replays)
    tuning.start_from_estimate(corrected(estimate, residuals, conditions_of(tuning)))
    while (wanted := tuning.next_probe()) is not None:
        result = truth.probe(wanted)
        tuning.record(result.model_copy(update={"context_bytes": context_bytes, "limit_bytes": truth.limit}))
    found = tuning.recommendation(identifier="rec", created_at=datetime.now(UTC), total_seconds=0.0)
    assert found.largest_micro_batch_size == min(truth.largest, bound)
    return found


def searched(found: Recommendation) -> int:
    """The number of probes of the search, without a run of the plan alone."""
    return sum(probe.shows_size for probe in found.evidence.probes)


def residual_from(
    truth: Truth, versions: dict[str, str] = VERSIONS, usable_bytes: int | None = None
) -> EstimateResidual:
    """The residual of a tuning from the estimate alone."""
    found = residual_of(tuned(truth, versions=versions, usable_bytes=usable_bytes), "card")
    assert found is not None
    return found


# --- residuals ---


def test_a_residual_has_the_fit_and_the_failure_of_its_tuning() -> None:
    """Estimated and measured bytes with their sizes, and what a later estimate is compared by."""
    truth = Truth(missed=GIB, slope=1.1)
    found = residual_from(truth)
    assert (found.hardware, found.family, found.versions) == ("card", family_of(gpt_spec()), VERSIONS)
    assert (found.limit_bytes, found.zero_expected_bytes) == (truth.limit, round(truth.estimate.used_bytes(0)))
    assert (found.fit.micro_batch_size, found.failed_size) == (truth.largest, truth.largest + 1)
    assert found.fit.measured_bytes == round(truth.constant + truth.per_sample * truth.largest)
    assert found.fit.expected_bytes == round(truth.estimate.used_bytes(truth.largest))
    assert found.failed_expected_bytes == round(truth.estimate.used_bytes(truth.largest + 1))


def test_a_tuning_without_an_estimate_leaves_no_residual() -> None:
    """Neither does one whose curve was measured by an earlier tuning, nor one in which no size ran out of memory."""
    assert residual_of(recommendation(), "card") is None
    found = tuned(Truth())
    start = {"recommendation_id": "rec_1", "created_at": found.created_at, "fingerprint": "f", "versions": {}}
    evidence = found.evidence.model_dump() | {"warm_start": {**start, "proof": found.evidence.proof.model_dump()}}
    assert residual_of(found.model_copy(update={"evidence": Evidence.model_validate(evidence)}), "card") is None
    assert residual_of(tuned(Truth(), bound=8), "card") is None


# --- corrections ---


def test_an_estimate_without_residuals_is_not_corrected() -> None:
    """Nor by those that tell nothing: of another model, other versions and a far limit."""
    far = residual(family="bert", versions={"torch": "1.0"}, limit_bytes=10**9)
    assert corrected(line(0, 1000), [], HERE).correction is None
    assert corrected(line(0, 1000), [far], HERE).correction is None


def test_the_level_is_that_at_which_sizes_failed() -> None:
    """The limit is effectively lower than the peaks say: estimates are right, and yet less fits."""
    fit = PeakResidual(micro_batch_size=72, expected_bytes=7200, measured_bytes=7200)
    early = residual(limit_bytes=8000, fit=fit, failed_size=73, failed_expected_bytes=7210)
    found = correction([early] * 20)
    assert found.level == pytest.approx(8000 / 7205, abs=0.015)
    assert found.usable == pytest.approx(7205 / 8000, abs=0.002)


def test_differences_that_have_no_common_cause_correct_nothing() -> None:
    """The usual errors of estimates explain right estimates, and errors of either sign, as well as a lesson does."""
    for places in ([8500], [8500, 8200, 8800], [8250, 8750] * 5):
        assert corrected(line(0, 1000), [failing(at) for at in places], HERE).correction is None


def test_the_limit_itself_is_trusted_unless_sizes_failed_below_it() -> None:
    """Peaks that end at the limit say so the more often they do; sizes that fail far below it show fragmentation."""
    whole = [correction([failing(7500)] * count).whole_limit for count in (1, 2, 4)]
    assert 0.9 < whole[0] < whole[1] < whole[2] < 1.0
    fit = PeakResidual(micro_batch_size=72, expected_bytes=7200, measured_bytes=7900)
    early = residual(fit=fit, failed_size=73, failed_expected_bytes=7300)
    assert correction([early] * 4).whole_limit < 0.01


def test_a_replayed_estimate_is_compared_with_the_place_where_its_memory_runs_out() -> None:
    """Fragmentation that replays foresee is no error: it leaves no residual, and moves no later estimate."""
    truth = Truth(usable=0.9)
    usable = round(truth.estimate.used_bytes(truth.largest + 0.5))
    found = tuned(truth, usable_bytes=usable)
    assert searched(found) == 2
    left = residual_of(found, "card")
    assert left is not None
    assert left.limit_bytes == usable
    assert abs(1 - (left.fit.expected_bytes + left.failed_expected_bytes) / 2 / left.limit_bytes) < 0.001
    conditions = EstimateConditions(left.family, VERSIONS, truth.limit, elastic=False)
    peaks = truth.estimate.model_copy(update={"usable_bytes": usable})
    again = corrected(peaks, [left] * 3, conditions).correction
    assert again is not None
    assert (again.level, again.slope) == (1.0, 1.0)


def replays(off: int = 0) -> list[tuple[Truth, int]]:
    """Models under several limits with the bytes at which replays run out of memory, ``off`` samples from the truth."""
    return [
        (truth, round(truth.estimate.used_bytes(truth.largest + off + 0.5)))
        for truth in (replace(model, usable=0.93) for model in limits_and_models())
    ]


def test_replays_that_were_right_are_trusted_to_a_sample() -> None:
    """Large sizes are then found by two probes too, where the usual error of replays is many samples."""
    residuals = [residual_from(truth, usable_bytes=usable) for truth, usable in replays()]
    large = Truth(limit=40 * GIB, per_sample=0.04 * GIB, usable=0.93)
    usable = round(large.estimate.used_bytes(large.largest + 0.5))
    assert searched(tuned(large, usable_bytes=usable)) > 2
    found = tuned(large, residuals, usable_bytes=usable)
    assert searched(found) == 2
    assert found.evidence.expected is not None
    trusted = found.evidence.expected.correction
    assert trusted is not None
    assert (trusted.level, trusted.slope) == (1.0, 1.0)
    assert trusted.level_error < 0.001


def test_replays_that_were_wrong_once_are_not_trusted_to_a_sample() -> None:
    """One tuning that ended far from its replays outweighs several that did not; a wrong lesson costs two at most."""
    right = [residual_from(truth, usable_bytes=usable) for truth, usable in replays()]
    wrong = residual_from(Truth(limit=24 * GIB, usable=0.9), usable_bytes=24 * GIB)
    now = Truth(limit=40 * GIB, per_sample=0.04 * GIB, usable=0.93)
    peaks = now.estimate.model_copy(update={"usable_bytes": round(0.93 * now.limit)})
    conditions = EstimateConditions(right[0].family, VERSIONS, now.limit, elastic=False)
    assert corrected(peaks, right, conditions).correction is not None
    mixed = corrected(peaks, [*right[:3], wrong], conditions).correction
    assert mixed is None or mixed.level_error > 0.001
    extra = {}
    for off in (-20, -2, 2, 20):
        usable = round(now.estimate.used_bytes(now.largest + off + 0.5))
        extra[off] = searched(tuned(now, right, usable_bytes=usable)) - searched(tuned(now, usable_bytes=usable))
    assert max(extra.values()) <= 2
    assert max(extra[-2], extra[2]) <= 0


def test_a_context_that_was_not_expected_is_no_residual_of_the_estimate() -> None:
    """It is kept as measured, and the place where memory ran out is compared with what the allocator could reserve."""
    truth = Truth(limit=12 * GIB)
    usable = round(truth.estimate.used_bytes(Truth().largest + 0.5))
    found = tuned(truth, usable_bytes=usable, reservable_bytes=16 * GIB, context_bytes=4 * GIB)
    left = residual_of(found, "card")
    assert left is not None
    assert left.context_bytes == 4 * GIB
    assert left.limit_bytes == round(usable * 12 / 16)
    assert abs(1 - (left.fit.expected_bytes + left.failed_expected_bytes) / 2 / left.limit_bytes) < 0.01


def test_residuals_of_several_limits_show_bytes_and_slope() -> None:
    """A GiB that is always missed is a larger share of a smaller limit; a share of the growth is missed everywhere."""
    errors: dict[str, Any] = {"missed": GIB, "slope": 1.1}
    before = [
        residual_from(replace(truth, **errors, limit=limit * GIB, per_sample=0.05 * GIB))
        for limit in (24, 32, 48)
        for truth in (Truth(constant=GIB), Truth(constant=8 * GIB))
    ]
    now = Truth(**errors)
    conditions = EstimateConditions(before[0].family, VERSIONS, now.limit, elastic=False)
    found = corrected(now.estimate, before, conditions).correction
    assert found is not None
    growing = 1 - now.estimate.used_bytes(0) / now.limit
    assert found.level_error < 0.02
    assert found.level == pytest.approx(1 + GIB / now.limit + 0.1 * growing, abs=2 * found.level_error)
    assert found.slope == pytest.approx(1.1, abs=0.04)


@pytest.mark.parametrize(
    "changes",
    [{"versions": {"torch": "2.9"}}, {"family": "bert"}, {"limit_bytes": 17000}],
    ids=["versions", "family", "limit"],
)
def test_a_residual_from_other_conditions_counts_less(changes: dict[str, Any]) -> None:
    """A distant residual moves the level less than one from the same conditions, and leaves a wider interval."""

    def low(limit_bytes: int = 8500, **changes: Any) -> EstimateResidual:
        scale = limit_bytes / 8500
        fit = PeakResidual(micro_batch_size=8, expected_bytes=round(7000 * scale), measured_bytes=round(8000 * scale))
        failed = round(7500 * scale)
        return residual(limit_bytes=limit_bytes, fit=fit, failed_expected_bytes=failed, **changes)

    near, far = correction([low()]), correction([low(**changes)])
    assert far.weight < near.weight == 1.0
    assert 1.0 < far.level < near.level
    assert far.level_error > near.level_error


def test_the_interval_is_that_of_the_residuals_spread() -> None:
    """More residuals that agree narrow the interval, and residuals that disagree widen it."""
    one, many = correction([failing(7500)]), correction([failing(7500)] * 20)
    assert many.level_error < one.level_error / 2
    assert (one.tunings, many.tunings) == (1, 20)
    apart = correction([failing(7000), failing(8000)] * 10)
    assert 0.04 < apart.level_error < 0.1
    assert many.level_error < 0.01


# --- tunings that learned ---


def limits_and_models() -> list[Truth]:
    """Models of one family under three limits, with right estimates."""
    return [
        Truth(limit=limit * GIB, constant=share * limit * GIB, per_sample=(1 - share) * limit * GIB / answer)
        for limit, share, answer in zip(
            (16, 24, 40) * 5, (0.1, 0.3, 0.2, 0.5, 0.15) * 3, (8.4, 37.3, 20.6, 12.5, 90.7) * 3, strict=True
        )
    ]


@pytest.mark.parametrize(
    "errors",
    [{"missed": 0.3 * GIB, "slope": 1.1}, {"slope": 0.85}, {"usable": 0.95}],
    ids=["too low", "too high", "fragmented"],
)
def test_what_a_family_shares_is_learned(errors: dict[str, Any]) -> None:
    """The median tuning takes two probes, one fit and one OOM; fewer than from the estimate alone."""
    residuals: list[EstimateResidual] = []
    alone, learned = [], []
    for truth in (replace(model, **errors) for model in limits_and_models()):
        alone.append(searched(tuned(truth)))
        found = tuned(truth, residuals)
        learned.append(searched(found))
        left = residual_of(found, "card")
        residuals = [left, *residuals] if left else residuals
    assert learned[0] == alone[0]
    assert median(learned[1:]) == 2
    assert sum(learned) < sum(alone)


def test_a_wrong_lesson_costs_a_probe_or_two_and_no_answer() -> None:
    """Ten tunings taught that estimates are a fifth too low; the next estimate is right."""
    lessons = [residual_from(replace(model, slope=1.25)) for model in limits_and_models()[:10]]
    extra = [searched(tuned(truth, lessons)) - searched(tuned(truth)) for truth in limits_and_models()]
    assert median(extra) <= 1
    assert max(extra) <= 2
