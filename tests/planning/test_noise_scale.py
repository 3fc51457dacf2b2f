"""The gradient noise scale: unbiased for any division of an update, an interval that covers, and words."""

import math
from collections.abc import Sequence
from itertools import permutations, product
from random import Random
from statistics import fmean

import pytest

from batchwright.planning.noise_scale import (
    FEWEST_UPDATES,
    MOST_UPDATES,
    GradientPart,
    NoiseMeasurement,
    fieller_interval,
    measure,
    noise_scale,
    student_t,
)

Vector = tuple[float, ...]
SAMPLES: list[Vector] = [(3.0, 1.0), (-1.0, 0.5), (0.25, -2.0), (1.0, 1.0)]
"""Gradients of four samples."""


def squared(vector: Sequence[float]) -> float:
    """Squared norm."""
    return sum(value * value for value in vector)


def total(vectors: Sequence[Vector]) -> Vector:
    """Sum of vectors."""
    return tuple(map(sum, zip(*vectors, strict=True)))


def mean_and_variance(samples: Sequence[Vector], *, divisor: int) -> tuple[float, float]:
    """Squared norm of the mean gradient, and the trace of the covariance with this divisor."""
    mean = tuple(value / len(samples) for value in total(samples))
    spread = sum(squared([a - b for a, b in zip(sample, mean, strict=True)]) for sample in samples)
    return squared(mean), spread / divisor


def measured(drawn: Sequence[Vector], sizes: Sequence[int], parts: int) -> NoiseMeasurement | None:
    """Measure an update of ``drawn`` in micro-batches of these sizes, of which the first ``parts`` are measured."""
    count, start, found = len(drawn), 0, []
    for size in sizes[:parts]:
        part = total(drawn[start : start + size])
        found.append(GradientPart((size / count,), squared(part) / count**2))
        start += size
    return measure(found, squared(total(drawn)) / count**2, count)


@pytest.mark.parametrize(("sizes", "parts"), [((2, 2), 2), ((2, 2), 1), ((1, 3), 2), ((1, 3), 1), ((1, 2, 1), 2)])
def test_both_estimates_are_unbiased_for_any_division(sizes: tuple[int, ...], parts: int) -> None:
    """Over all 256 ways to draw four samples, the mean of each estimate is the true value."""
    found = [measured(drawn, sizes, parts) for drawn in product(SAMPLES, repeat=4)]
    mean, variance = mean_and_variance(SAMPLES, divisor=len(SAMPLES))
    assert fmean(each.squared_norm for each in found if each) == pytest.approx(mean, rel=1e-12)
    assert fmean(each.variance for each in found if each) == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize(("sizes", "parts"), [((1, 2), 1), ((1, 1, 1), 3), ((2, 1), 2)])
def test_both_are_unbiased_within_a_data_set(sizes: tuple[int, ...], parts: int) -> None:
    """Over all orders of four samples, updates of three have the mean gradient and covariance of the four."""
    found = [measured(drawn, sizes, parts) for drawn in permutations(SAMPLES, 3)]
    within = [each.within(len(SAMPLES)) for each in found if each]
    mean, variance = mean_and_variance(SAMPLES, divisor=len(SAMPLES) - 1)
    assert fmean(each.squared_norm for each in within) == pytest.approx(mean, rel=1e-12)
    assert fmean(each.variance for each in within) == pytest.approx(variance, rel=1e-12)


def test_equal_parts_give_the_published_estimators() -> None:
    """McCandlish et al., appendix A.1, with the mean of the small batches' squared norms."""
    small, large, b_small, b_large = 5.0, 2.0, 4, 16
    parts = [GradientPart((0.25,), norm / 16) for norm in (4.0, 6.0, 3.0, 7.0)]
    found = measure(parts, large, b_large)
    assert found is not None
    assert found.squared_norm == pytest.approx((b_large * large - b_small * small) / (b_large - b_small))
    assert found.variance == pytest.approx((small - large) / (1 / b_small - 1 / b_large))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [GradientPart((1.0,), 2.0)],
        [GradientPart((), 2.0)],
        [GradientPart((0.5, 0.4), 2.0)],
        [GradientPart((0.5,), 2.0), GradientPart((0.0,), 0.0)],
        [GradientPart((0.5,), math.inf)],
    ],
    ids=["no part", "the whole update", "no loss", "terms differ", "no weight", "not finite"],
)
def test_an_update_with_nothing_to_compare_is_not_measured(parts: list[GradientPart]) -> None:
    """There is no estimate, instead of a wrong one or a division by zero."""
    assert measure(parts, 2.0, 16) is None


def test_a_gradient_that_is_not_finite_is_not_measured() -> None:
    """The update of a skipped step has none."""
    assert measure([GradientPart((0.5,), 2.0)], math.inf, 16) is None


@pytest.mark.parametrize(("degrees", "expected"), [(9, 2.2622), (19, 2.0930), (30, 2.0423), (199, 1.9720)])
def test_students_t_is_that_of_the_tables(degrees: int, expected: float) -> None:
    """Two-sided 95 %."""
    assert student_t(0.975, degrees) == pytest.approx(expected, abs=1e-3)


def normal_pairs(random: Random, top: float, bottom: float, count: int = 20) -> list[tuple[float, float]]:
    """Correlated normal pairs, of these means and standard deviation 1."""
    pairs = []
    for _ in range(count):
        common = random.gauss(0.0, 0.8)
        pairs.append((top + common + random.gauss(0.0, 0.6), bottom - common + random.gauss(0.0, 0.6)))
    return pairs


@pytest.mark.parametrize("bottom", [5.0, 1.0, 0.3, 0.05])
def test_the_interval_covers_the_ratio_as_often_as_it_says(bottom: float) -> None:
    """Of 2,000 intervals of normal pairs 95 % contain the ratio, whether or not they have an upper end."""
    random = Random(1)
    hits = 0
    for _ in range(2000):
        found = fieller_interval(normal_pairs(random, 6.0, bottom))
        hits += found.lower is not None and found.lower <= 6.0 / bottom <= (found.upper or math.inf)
    assert 0.935 <= hits / 2000 <= 0.965


def test_a_denominator_that_may_be_zero_leaves_no_upper_end() -> None:
    """The lower end is known all the same."""
    found = fieller_interval(normal_pairs(Random(2), 20.0, 0.0))
    assert found.estimate is None
    assert found.upper is None
    assert found.lower is not None
    assert found.lower > 10


def test_a_denominator_that_is_negative_beyond_chance_leaves_nothing() -> None:
    """No batch has such gradients: the samples are not independent."""
    found = fieller_interval(normal_pairs(Random(2), 20.0, -5.0))
    assert (found.estimate, found.lower, found.upper) == (None, None, None)


def test_noise_that_may_be_zero_begins_the_interval_at_zero() -> None:
    """The upper end is known all the same."""
    found = fieller_interval([(1.0 if number % 2 else -1.0, 20.0 + number % 3) for number in range(20)])
    assert found.lower == 0.0
    assert found.upper is not None
    assert found.upper < 0.1


def updates(variance: float, squared_norm: float, count: int = 20) -> list[NoiseMeasurement]:
    """Measurements that deviate by a tenth, up and down."""
    return [
        NoiseMeasurement(variance * (1.1 if number % 2 else 0.9), squared_norm * (1.1 if number % 4 < 2 else 0.9))
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("effective_batch_size", "words"),
    [(8, "is below it: a larger batch"), (100, "is within this interval"), (4096, "is above it: a smaller batch")],
)
def test_the_suggested_batch_is_compared_with_the_runs_own(effective_batch_size: int, words: str) -> None:
    """The ratio of the means is the suggestion, and the message says on which side the run is."""
    found = noise_scale(updates(100.0, 1.0), effective_batch_size)
    assert found.suggested_effective_batch_size == 100
    assert found.lower_samples is not None
    assert found.upper_samples is not None
    assert found.lower_samples < 100 < found.upper_samples
    assert words in found.message
    assert "about 100 samples" in found.message


def test_where_noise_dominates_only_a_lower_end_is_said() -> None:
    """No batch is suggested, and the message says why."""
    noisy = [NoiseMeasurement(100.0, 5.0 if number % 2 else -4.9) for number in range(40)]
    found = noise_scale(noisy, 8)
    assert (found.samples, found.upper_samples, found.suggested_effective_batch_size) == (None, None, None)
    assert found.lower_samples is not None
    assert "at least" in found.message
    assert "noise dominates" in found.message


@pytest.mark.parametrize(
    "measurements",
    [updates(100.0, 1.0), [NoiseMeasurement(1e4, 5.0 if number % 2 else -4.9) for number in range(40)]],
)
def test_a_batch_that_exceeds_the_data_is_named_as_such(measurements: list[NoiseMeasurement]) -> None:
    """The suggestion, or its lower end, is more than an update can have, and the message says how many that is."""
    assert "The data has only 99 samples" in noise_scale(measurements, 8, 99).message
    assert "The data has only" not in noise_scale(measurements, 8, 10**6).message


def test_few_measurements_give_no_estimate() -> None:
    """The message names how many there are, and how many it takes."""
    found = noise_scale(updates(100.0, 1.0, FEWEST_UPDATES - 1), 8)
    assert (found.samples, found.lower_samples) == (None, None)
    assert f"needs {FEWEST_UPDATES} measured updates; the run has {FEWEST_UPDATES - 1}" in found.message


def test_a_run_without_measurements_says_what_they_need() -> None:
    """One micro-batch on one rank has nothing to compare with."""
    found = noise_scale([], 8)
    assert found.gradient_variance is None
    assert "at least two micro-batches per update" in found.message


def test_signal_and_noise_that_chance_explains_say_nothing() -> None:
    """Neither end of the interval is known."""
    found = noise_scale([NoiseMeasurement(1.0 if n % 2 else -1.0, 1.0 if n % 3 else -2.0) for n in range(20)], 8)
    assert (found.lower_samples, found.upper_samples) == (None, None)
    assert "cannot be determined" in found.message


def test_only_the_newest_updates_are_averaged() -> None:
    """The noise scale of the end of a run is that of its end."""
    found = noise_scale([*updates(1.0, 1.0, 500), *updates(100.0, 1.0, MOST_UPDATES)], 8)
    assert found.measured_updates == MOST_UPDATES
    assert found.suggested_effective_batch_size == pytest.approx(100, abs=2)
