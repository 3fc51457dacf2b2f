"""Tuned constants of a tuning: of its search, its bounds, its warm start and the timing of plans. Pure data.

The constants of the search and of its posterior choose the order of probes: the largest size found for a monotone
workload depends on none of them. ``benchmarks/search_oracles.py`` counts the probes and OOMs of the search on oracles
whose answer is known. The rows that a change of a field moves most are named below; run the benchmark before and after
a change, and compare its JSON.
"""

import math
from dataclasses import dataclass

Levels = tuple[tuple[float, float], ...]
"""Values of a quantity that is not known, each with its prior probability."""
EstimateErrors = tuple[tuple[float, float, float], ...]
"""Errors of an estimate at the limit (as a share) and in its slope (as a share of the slope), each pair with its prior
probability."""


@dataclass(frozen=True)
class SearchParameters:
    """The constants, by the part of a tuning that uses them. Shares are of the memory limit unless stated."""

    # --- the order of probes (batchwright.planning.search) ---

    target_fit_probability: float = 0.6823
    """Probability to fit of the size to probe next, when an OOM costs three fits. A search is a code with symbols that
    last 1 (fit) and 3 (OOM): it carries most when the probability ``p`` of the short one solves ``p + p**3 = 1``
    (Shannon 1948). Lower values cost OOMs in every row with noise, most in "floor up to 0.3 of the answer"."""
    first_fit_probability: float = 0.85
    """Probability to fit of the first size where there is an estimate. This size is worth more when it fits: its
    measurement calibrates the estimate, and a few percent below the answer do that as well as the answer. Rows: "led by
    an estimate" that is low."""
    quick_fit_probability: float = 0.9
    """Probability to fit of the plan of a quick tuning, which is to be its only probe. A choice; no row."""
    last_size_probability: float = 0.5
    """Probability to fit of the next size below which the first probe may be the last one, and makes its two updates. A
    choice; no row."""
    slow_start_seconds: float = 60.0
    """Seconds before the first forward pass from which on a fit is preferred to an OOM. A choice; no row."""
    slow_start_fit_probability: float = 0.85
    """Probability to fit of the size to probe next where probes start so slowly: an OOM then costs minutes and leaves
    no plan to train with, which a fit always does. A choice; no row."""
    sure_share: float = 0.98
    """Share that the first jump without an estimate may fill: it leaves room for 2 % of noise. Rows: "floor up to 0.3
    of the answer", "device, +-0.9 % of total"."""
    good_jump: int = 4
    """Smallest ratio of a jump that surely fits to the measured size for which the jump is taken: the jump then shows
    the slope. Rows: those with noise."""
    failed_jump_share: float = 0.9
    """Share of a jump that failed above which the answer is expected: the resident memory of a command may have grown
    with the size, as it keeps the results of one micro-batch during the next. A choice; no row."""
    slack_probes: int = 6
    """Probes that memory figures may waste before doubling and halving take over; one less than the constant of the
    search's guarantee. It bounds the worst case. Row: "+-2 % of total", by little."""
    near_enough: float = 0.9
    """Smallest ratio of the largest fit to a size whose probe was inconclusive at which the fit ends the search: each
    further probe may cost the whole time limit of a probe. A choice; no row."""
    most_inconclusive_sizes: int = 3
    """Number of sizes with inconclusive probes after which the largest fit ends the search, for the same reason. A
    choice; no row."""
    longest_as_plan: float = 6.0
    """Most times that the last probe of a command's search may take longer for running the plan too, which saves the
    plan's own run if no larger size fits. A choice; no row."""
    most_lost_probes: int = 2
    """Number of lost probes of one size, or lost runs of one plan, after which no further one is made: it would hardly
    end otherwise. A choice; no row."""

    # --- the posterior (batchwright.planning.posterior) ---

    noise_levels: Levels = ((3e-5, 0.5), (3e-4, 0.2), (3e-3, 0.2), (3e-2, 0.1))
    """Noise of a measured peak, as a share. CUDA peaks lie within 0.05 % (typically) to 0.34 % of a line, and the peak
    of a CPU process within 0.9 % (``benchmarks/cpu_repeatability.py``); many are exact. Rows: "exact", "samples vary by
    2 %", "led by an estimate: right"."""
    limit_errors: Levels = ((0.0, 0.9), (0.05, 0.1))
    """Error of the nominal limit, as a share: fragmentation takes 0 to 12 %. Row: "limit really 5 % lower"."""
    replay_limit_errors: tuple[Levels, ...] = (
        ((0.0, 0.6), (0.02, 0.4)),
        ((0.01, 0.4), (0.05, 0.6)),
        ((0.05, 1.0),),
    )
    """As ``limit_errors`` where replays in the simulated allocator have fragmentation, by the number of sizes that fit
    although replays of them ran out of memory; the last one for all higher numbers. Without the second and the third, a
    place that is too low is left in small steps. Rows: "replayed"."""
    uninformed_weight: float = 0.02
    """Weight in the posterior that no memory figure can move: a cliff, a jump, a limit of another kind. Rows: "limit
    really 5 % lower", "led by an estimate"."""
    estimate_errors: EstimateErrors = ((0.003, 0.005, 0.3), (0.03, 0.05, 0.5), (0.15, 0.3, 0.2))
    """Published estimators reach a median error of 2.5 % to 3.6 %, some are far off. Rows: "led by an estimate:
    activations twice" and "20 % low"."""
    replay_errors: EstimateErrors = ((0.0003, 0.001, 0.45), (0.01, 0.01, 0.3), (0.05, 0.1, 0.25))
    """Errors where replays in the simulated allocator tell where memory runs out: to the byte on virtual cards, 1.2 %
    in the median against published peaks of real ones (``benchmarks/estimator.py``). Rows: "replayed"."""
    right_replay_errors: EstimateErrors = ((0.0003, 0.001, 1.0),)
    """Errors where earlier tunings show that replays are right: the smallest of the field above."""
    estimate_weight: float = 0.7
    """Weight of the calibrated estimate beside the straight line through the measurements, once there is a line. Rows:
    "led by an estimate", by little."""
    resident_noise: float = 2e-3
    """Noise, as a share, of the memory that one size shows between updates against the estimate at size 0. Rows: "led
    by an estimate", most where that is far off."""
    elastic_levels: Levels = ((0.0, 0.4), (0.03, 0.2), (0.06, 0.2), (0.1, 0.2))
    """Memory that a process requests but can do without, as a share. MKL works without its packing buffers where
    these are refused: one per thread, of 4.7 MB in a GPT-2 of 128 MiB on two cores. No row: the oracles of
    ``tests/planning/test_search.py`` are elastic, and ``benchmarks/cpu_math_buffers.py`` measures the buffers."""
    saturated_share: float = 0.97
    """Share above which a peak may be cut off by the limit where memory is reclaimable: such a peak is only a lower
    bound of the request. As for the field above."""
    clipped_ratio: float = 4.0
    """Ratios of peak to limit are clipped here, and as far below 0; larger values carry no information. Row: "led by an
    estimate: activations twice"."""
    flat_rise: float = 1e-4
    """Rise, relative to the peak, below which a curve counts as flat: the floor, or noise. Rows: "limit really 5 %
    lower", "samples vary by 2 %"."""
    kink_slope_ratio: float = 0.8
    """Ratio of a slope to the later one below which it belongs to another piece of the memory curve (the end of a
    floor). Row: "floor up to 0.3 of the answer"."""
    kink_size_ratio: float = 1.1
    """Ratio of a later measurement's size to the one before from which on a kink can be distinguished from noise. Row:
    as for the field above."""

    # --- corrections that were learned (batchwright.planning.learning, and their place in the posterior) ---

    learned_odds: float = 10.0
    """Prior weight of a learned correction from many tunings, beside 1 for all other hypotheses on the estimate's
    error. A higher one saves probes where families share their errors (20 in place of 6: 2 %), and costs probes where a
    lesson is wrong. ``benchmarks/learned.py``."""
    contradicting_errors: float = 2.0
    """Standard errors by which a probe must miss a learned level for the correction to be dropped."""
    residual_errors: tuple[float, float, float] = (0.03, 0.03, 0.15)
    """Errors of the three parts by which an estimate differs from the measurements, before residuals show them: a share
    of the limit, bytes as a share of the limit, a share of the memory that grows with the size."""
    least_growth: float = 0.1
    """Smallest ratio of an estimated to the real growth that residuals may show; a guard against absurd ones."""
    residual_spread: float = 0.01
    """Spread of the difference between tunings of a family, as a share of the limit, before residuals show it."""
    residual_prior_tunings: float = 1.0
    """Number of residuals that tell as much of the spread as the field above."""
    residual_slope_spread: float = 0.02
    """Spread of the slope between tunings of a family."""
    other_versions_weight: float = 0.25
    """Weight of a residual from other versions of the software. A choice, as the three below."""
    other_model_weight: float = 0.1
    """Weight of a residual of another architecture."""
    other_option_weight: float = 0.5
    """Weight of a residual for each other part of the family that differs: optimizer, precision, options, ranks."""
    table_context_weight: float = 0.5
    """Weight of the table's figure beside measured contexts (``batchwright.planning.learning.measured_context``): less
    than that of a single measurement under the same versions."""
    least_residual_weight: float = 0.02
    """Weight below which a residual is ignored."""

    # --- bounds (batchwright.planning.search_space) ---

    cpu_memory_share: float = 0.5
    """Share of the host's memory that a run on the CPU may take when no limit is given: the rest is for the system and
    for reading data. A choice."""

    # --- warm starts (batchwright.planning.warm_start) ---

    same_peak_tolerance: float = 0.01
    """Relative difference up to which two peaks of one size are the same: probes of one size on the CPU differ by 0.9 %
    (``benchmarks/cpu_repeatability.py``)."""
    same_cpu_peak_tolerance: float = 0.03
    """Relative difference of two equal peaks on the CPU, where the next size exceeds the limit by more than
    ``same_peak_tolerance`` all the same. Beside three busy processes on two cores, 54 probes of one MLP took 166.4 to
    170.1 MB, which is 2.2 %: threads that do not run at once hold less at once."""

    # --- the timing of plans (batchwright.planning.objectives.fastest) ---

    most_timed_plans: int = 4
    """Most plans that are timed, each in a process and some seconds: enough for the fewest steps, a neighbour, and two
    that promise more. A choice."""
    least_timed_plans: int = 2
    """Plans that are always timed: the one with the fewest steps and a neighbour. A choice."""
    considered_plans: int = 16
    """Plans, from the fewest steps upward, among which the fastest is searched. A choice."""
    listed_plans: int = 5
    """Plans, from the fewest steps upward, that a recommendation lists, besides those that were timed. A choice."""
    least_time_difference: float = 0.02
    """Relative difference in time of updates of two processes on an idle host: a smaller difference is none."""
    significant_errors: float = 2.0
    """Standard errors above which a difference in time is one. A choice."""

    @property
    def saturated_log_likelihood(self) -> float:
        """Logarithm of how likely a saturated peak is: it may be anywhere from ``saturated_share`` to the limit.

        The constant that a calibration's log evidence leaves out of a normal density is subtracted.
        """
        return 0.5 * math.log(2 * math.pi) - math.log(1 - self.saturated_share)


PARAMETERS = SearchParameters()
