"""The search: exact on every monotone workload, few probes on ordinary ones, honest about the others."""

import math
from dataclasses import replace
from random import Random
from statistics import fmean, median

import pytest
from hypothesis import given, settings, strategies as st

from batchwright.errors import SearchError
from batchwright.planning.search import Failure, MicroBatchSearch
from batchwright.planning.search_space import SearchSpace
from batchwright.schemas.recommendation import Proof
from batchwright.schemas.residuals import EstimateCorrection
from batchwright.schemas.results import ExpectedPeak, ExpectedPeaks, Outcome, Phase, ProbeResult
from tests.support.oracles import (
    LIMIT_BYTES,
    Memory,
    Oracle,
    affine,
    biased,
    device,
    elastic,
    failures,
    floored,
    independent,
    per_sample,
    probe_result,
    run_search,
)

LARGEST = (37, 200, 3000)
SHARES = (0.0, 0.1, 0.3, 0.6, 0.9)
MIB = 1024**2
many = settings(max_examples=400, deadline=None, derandomize=True)


def space(  # noqa: PLR0913 - the fields of a space
    bound: int = 4096,
    *,
    granularity: int = 1,
    limit: int | None = LIMIT_BYTES,
    expected: ExpectedPeaks | None = None,
    sizes: tuple[int, ...] | None = None,
    elastic: bool = False,
) -> SearchSpace:
    """A space, by default of 4096 sizes and with a known limit."""
    return SearchSpace(bound, "the share of a rank", granularity, limit, expected, sizes, elastic)


def curve(memory: Memory | None, *, factor: float = 1.0, offset: float = 0.0, tilt: float = 1.0) -> ExpectedPeaks:
    """An estimate of ``memory``: all of it times ``factor``, its growing part times ``tilt``, and ``offset`` above it.

    The offset is a share of the limit; three quarters of the constant part are resident, as in ``affine``.
    """
    assert memory is not None
    constant, above = memory(0), offset * LIMIT_BYTES
    used = {size: (constant + (memory(size) - constant) * tilt) * factor + above for size in (1, 2, 64, 4096)}
    return ExpectedPeaks(
        points=tuple(
            ExpectedPeak(micro_batch_size=size, used_bytes=max(1, round(peak))) for size, peak in used.items()
        ),
        resident_bytes=max(0, round(0.75 * constant * factor + above)),
    )


def search(oracle: Oracle, bound: int = 4096) -> tuple[int, int]:
    """Probes and failures of a search, whose answer is checked."""
    course = MicroBatchSearch(space(bound, limit=oracle.limit_bytes))
    results = run_search(course, oracle)
    assert isinstance(course.verdict, Proof)
    assert course.verdict.fits == min(oracle.largest, bound)
    return len(results), failures(results)


def search_sizes(oracle: Oracle, bound: int) -> list[int]:
    """The sizes of a search, in order."""
    results = run_search(MicroBatchSearch(space(bound, limit=oracle.limit_bytes)), oracle)
    return [result.micro_batch_size for result in results]


def probe_limit(candidates: int) -> int:
    """The most probes the search promises to take."""
    return 2 * math.ceil(math.log2(candidates)) + 7


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    """Any space: small and huge bounds, any granularity, limit known or not, predictions anywhere."""
    bound = draw(st.one_of(st.integers(1, 40), st.integers(1, 10**6)))
    sizes = draw(st.one_of(st.none(), st.sets(st.integers(1, bound), min_size=1, max_size=60)))
    return space(
        bound,
        granularity=1 if sizes else draw(st.one_of(st.just(1), st.integers(2, 64))),
        limit=draw(st.sampled_from([LIMIT_BYTES, None])),
        expected=draw(st.one_of(st.none(), estimates(bound))),
        sizes=tuple(sorted(sizes)) if sizes else None,
        elastic=draw(st.booleans()),
    )


@st.composite
def estimates(draw: st.DrawFn, bound: int) -> ExpectedPeaks:
    """Any memory curve: good, bad, falling, far above or below the limit."""
    places = sorted(draw(st.sets(st.integers(1, 2 * bound), min_size=2, max_size=5)))
    used = st.one_of(st.integers(1, 2 * LIMIT_BYTES), st.sampled_from([1, LIMIT_BYTES, 10**18]))
    points = tuple(ExpectedPeak(micro_batch_size=place, used_bytes=draw(used)) for place in places)
    return ExpectedPeaks(
        points=points,
        usable_bytes=draw(st.one_of(st.none(), used)),
        reservable_bytes=draw(st.one_of(st.none(), used)),
        correction=draw(st.one_of(st.none(), corrections())),
    )


def corrections() -> st.SearchStrategy[EstimateCorrection]:
    """Any correction of an estimate: small and large, sure and unsure."""
    error = st.sampled_from([0.0, 1e-6, 0.01, 1.0])
    return st.builds(
        EstimateCorrection,
        tunings=st.just(1),
        weight=st.sampled_from([0.02, 1.0, 100.0]),
        level=st.floats(-1.0, 5.0),
        level_error=error,
        slope=st.floats(0.01, 10.0),
        slope_error=error,
        usable=st.one_of(st.none(), st.floats(0.0, 2.0)),
        usable_error=error,
        whole_limit=st.sampled_from([0.0, 0.5, 1.0]),
    )


@st.composite
def oracles(draw: st.DrawFn, within: SearchSpace) -> Oracle:
    """Any monotone workload, and any memory figures, sensible or not."""
    largest = draw(st.one_of(st.integers(0, min(50, 2 * within.bound)), st.integers(0, 2 * within.bound)))
    rising = affine(max(largest, 1), share=draw(st.sampled_from(SHARES))).memory
    assert rising is not None
    cliff, seed = draw(st.integers(1, within.bound)), draw(st.integers(0, 10**6))
    memory = draw(
        st.sampled_from(
            [
                None,
                lambda _size: 0.0,
                lambda _size: LIMIT_BYTES / 3,
                lambda size: LIMIT_BYTES / 3 if size < cliff else LIMIT_BYTES * 0.9,
                lambda size: rising(size // 16 * 16 + 16),
                lambda size: rising(min(size, cliff)),
                lambda size: max(rising(size), rising(cliff)),
                lambda size: LIMIT_BYTES / size,
                lambda size: 2 * rising(size),
                lambda size: rising(size) / 2,
                lambda size: rising(size) * Random(f"{seed}/{size}").uniform(0.98, 1.02),
                lambda size: Random(f"{seed}/{size}").choice([0.0, 1.0, rising(size), 1e15]),
                lambda size: Random(f"{seed}/{size}").choice([0.0, rising(size)]),
                rising,
            ]
        )
    )
    return Oracle(
        largest,
        memory=memory,
        resident_bytes=draw(st.sampled_from([None, 0, LIMIT_BYTES // 10, 2 * LIMIT_BYTES])),
        failure=draw(st.sampled_from([Outcome.OOM, Outcome.INVALID_SIZE])),
    )


@settings(many, max_examples=100)
@given(st.data())
def test_the_answer_is_exact_and_proven_for_every_monotone_workload(data: st.DataObject) -> None:
    """Whatever the memory figures say, the largest candidate that fits is found, within the promised probes."""
    check_answer(data)


@pytest.mark.thorough
@many
@given(st.data())
def test_the_answer_is_exact_and_proven_for_many_monotone_workloads(data: st.DataObject) -> None:
    """Four times as many workloads."""
    check_answer(data)


def check_answer(data: st.DataObject) -> None:
    """Run a search, and compare its answer with the largest candidate that fits."""
    within = data.draw(spaces())
    oracle = data.draw(oracles(within))
    course = MicroBatchSearch(within)
    results = run_search(course, oracle)
    fits = {result.micro_batch_size for result in results if result.outcome is Outcome.FIT}
    failed = {result.micro_batch_size for result in results} - fits
    steps = range(2 * within.granularity, within.bound + 1, within.granularity)
    candidates = list(within.sizes or (within.size(1), *steps))
    expected = max((size for size in candidates if size <= oracle.largest), default=0)
    proof = course.verdict
    assert isinstance(proof, Proof)
    assert proof.fits == expected
    assert expected == 0 or expected in fits
    if proof.stopped_by == "bound":
        assert (expected, proof.next_size) == (candidates[-1], None)
    else:
        assert proof.next_size == candidates[candidates.index(expected) + 1 if expected else 0]
        assert proof.next_size in failed
    assert len(fits) + len(failed) == len(results) <= probe_limit(len(candidates))
    assert course.warnings == ()


@settings(many, max_examples=50)
@given(st.data())
def test_what_is_proven_has_made_its_two_updates(data: st.DataObject) -> None:
    """Also where a second update takes more memory than the one of a probe that brackets."""
    within = data.draw(spaces())
    one_update = data.draw(oracles(within))
    two_updates = replace(one_update, largest=max(0, one_update.largest - data.draw(st.integers(0, 3))))
    course, results = MicroBatchSearch(within), list[ProbeResult]()
    while (size := course.ask()) is not None:
        brackets = not course.may_end_with(size)
        results.append((one_update if brackets else two_updates)(size).model_copy(update={"brackets": brackets}))
        course.tell(results[-1])
        assert len(results) <= 2 * probe_limit(within.count)
    proof = course.verdict
    assert isinstance(proof, Proof)
    sizes = map(within.size, range(1, within.count + 1))
    assert proof.fits == max((size for size in sizes if size <= two_updates.largest), default=0)
    proven = {result.micro_batch_size for result in results if result.outcome is Outcome.FIT and not result.brackets}
    assert not proof.fits or proof.fits in proven
    assert course.warnings == ()


def test_a_search_that_is_stopped_proves_no_fit_of_one_update() -> None:
    """The answer is the largest size that has made two updates, if any has."""
    course = MicroBatchSearch(space(100))
    for size, brackets in ((10, False), (20, True)):
        course.tell(probe_result(size).model_copy(update={"brackets": brackets}))
    course.stopped_by = "interrupted"
    assert isinstance(course.verdict, Proof)
    assert course.verdict.fits == 10


@settings(many, max_examples=50)
@given(st.data())
def test_a_search_rebuilt_from_its_results_goes_on_in_the_same_way(data: st.DataObject) -> None:
    """After every prefix of the results a new search asks for the size that the first one asked for."""
    check_rebuilt(data)


@pytest.mark.thorough
@settings(many, max_examples=300)
@given(st.data())
def test_many_searches_rebuilt_from_their_results_go_on_in_the_same_way(data: st.DataObject) -> None:
    """Six times as many searches, each with all of its prefixes."""
    check_rebuilt(data)


def check_rebuilt(data: st.DataObject) -> None:
    """Run a search, and rebuild it from every prefix of its results."""
    within = data.draw(spaces())
    oracle = data.draw(oracles(within))
    course = MicroBatchSearch(within)
    results: list[ProbeResult] = []
    while (size := course.ask()) is not None:
        rebuilt = MicroBatchSearch(within)
        for result in results:
            rebuilt.tell(ProbeResult.model_validate_json(result.model_dump_json()))
        assert rebuilt.ask() == course.ask() == size
        results.append(oracle(size))
        course.tell(results[-1])


@settings(many, max_examples=100)
@given(spaces(), st.integers(0, 10**6))
def test_a_search_ends_with_a_bracket_even_when_fitting_is_not_monotone(within: SearchSpace, seed: int) -> None:
    """Random outcomes, some told beforehand: the answer is a fit below every failure, and the next size failed."""
    check_bracket(within, seed)


@pytest.mark.thorough
@settings(many, max_examples=300)
@given(spaces(), st.integers(0, 10**6))
def test_many_searches_end_with_a_bracket_when_fitting_is_not_monotone(within: SearchSpace, seed: int) -> None:
    """Three times as many searches."""
    check_bracket(within, seed)


def check_bracket(within: SearchSpace, seed: int) -> None:
    """Search among random outcomes, and check that the verdict brackets a fit and a failure."""

    def oracle(size: int) -> ProbeResult:
        outcome = Random(f"{seed}/{size}").choice([Outcome.FIT, Outcome.FIT, Outcome.OOM, Outcome.INVALID_SIZE])
        return probe_result(size, outcome, used_bytes=Random(f"{seed}/{size}").randrange(LIMIT_BYTES))

    course = MicroBatchSearch(within)
    recorded = [oracle(within.size(Random(f"{seed}/{number}").randint(1, within.count))) for number in range(seed % 4)]
    for result in recorded:
        course.tell(result)
    results = recorded + run_search(course, oracle)
    assert isinstance(course.verdict, Proof)
    outcomes = {result.micro_batch_size: result.outcome for result in results}
    failed = {size for size, outcome in outcomes.items() if outcome is not Outcome.FIT}
    assert course.verdict.fits == max((size for size in outcomes if size < min(failed, default=size + 1)), default=0)
    assert course.verdict.next_size == min(failed, default=None)


@pytest.mark.parametrize("bound", [4096, 100_000])
@pytest.mark.parametrize("knows_resident", [True, False])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("largest", LARGEST)
def test_affine_memory_takes_at_most_six_probes(largest: int, share: float, knows_resident: bool, bound: int) -> None:  # noqa: FBT001
    """Exact affine memory: at most 6 probes and 2 OOMs, wherever between two sizes the limit is met."""
    for fraction in (0.02, 0.25, 0.5, 0.75, 0.98):
        probes, ooms = search(affine(largest, share=share, knows_resident=knows_resident, fraction=fraction), bound)
        assert probes <= 6
        assert ooms <= 2


@pytest.mark.parametrize("bound", [4096, 100_000])
@pytest.mark.parametrize("largest", LARGEST)
def test_samples_of_varying_cost_take_hardly_more(largest: int, bound: int) -> None:
    """Samples of 2 % more or less memory: at most 2 OOMs, and 97 in 100 searches within 6 probes, none above 8."""
    courses = [
        search(affine(largest, share=share, noise=per_sample(0.02, seed)), bound)
        for share in SHARES
        for seed in range(20)
    ]
    assert max(ooms for _, ooms in courses) <= 2
    assert max(probes for probes, _ in courses) <= 8
    assert sum(probes <= 6 for probes, _ in courses) >= 97


@pytest.mark.parametrize(("largest", "probes", "ooms"), [(37, 4.6, 1.6), (200, 5.3, 1.4), (3000, 8.0, 2.3)])
def test_noise_of_a_real_device_costs_the_probes_that_it_hides(largest: int, probes: float, ooms: float) -> None:
    """Peaks off by 0.05 % hide up to 60 of 3000 sizes: the mean grows by the bits that are missing, no more."""
    courses = [
        search(affine(largest, share=share, noise=device(0.0005, seed))) for share in SHARES for seed in range(20)
    ]
    assert fmean(taken for taken, _ in courses) <= probes
    assert fmean(failed for _, failed in courses) <= ooms


@pytest.mark.parametrize(("largest", "probes"), [(37, 7), (200, 9), (3000, 15)])
def test_independent_noise_of_two_percent_is_survived(largest: int, probes: float) -> None:
    """Every peak off by up to 2 % by itself: still exact, in about as many probes as there are bits to find."""
    courses = [
        search(affine(largest, share=share, noise=independent(0.02, seed, total=True)))
        for share in SHARES
        for seed in range(20)
    ]
    assert fmean(taken for taken, _ in courses) <= probes


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("until", [0.05, 0.3, 0.7])
def test_a_floor_of_memory_is_left_behind(largest: int, until: float) -> None:
    """Where an optimizer step is the peak of small sizes, the line is taken from the sizes above it."""
    assert search(floored(largest, share=0.3, until=until))[0] <= 15


@pytest.mark.parametrize("bias", [0.02, 0.05, 0.15, -0.03])
def test_a_limit_that_is_effectively_another_is_learned(bias: float) -> None:
    """Fragmentation takes a part of the limit: the first surprise widens the search, and the answer stays exact."""
    assert search(biased(37, share=0.3, bias=bias))[0] <= 8
    assert search(biased(3000, share=0.3, bias=bias))[0] <= 19


def test_a_gpt_on_a_large_card_is_found_in_few_probes() -> None:
    """GPT-124M in bf16 (1,679 + 820 MiB a sample, with Adam) within 40 GiB: 47 samples."""
    limit = 40 * 1024 * MIB
    oracle = Oracle(47, lambda size: (1679 + 820 * size) * MIB, 1500 * MIB, limit)
    assert search_sizes(oracle, 512) == [1, 39, 47, 48]


@pytest.mark.parametrize("fraction", [0.05, 0.95])
def test_a_small_answer_follows_from_one_measurement(fraction: float) -> None:
    """A command holds its gradients between two micro-batches, so that the line to its answer begins there."""
    limit = 256 * MIB
    slope = 160 * MIB / (12 + fraction)
    oracle = Oracle(12, lambda size: 96 * MIB + slope * size, 96 * MIB, limit)
    assert search_sizes(oracle, 120) == [1, 12, 13]


def test_a_jump_that_failed_is_followed_by_a_size_near_it() -> None:
    """Memory that the program keeps between two micro-batches hides a part of the slope: 13 is tried first."""
    limit = 256 * MIB
    oracle = Oracle(12, lambda size: (96 + 12.8 * size) * MIB, 97 * MIB, limit)
    assert search_sizes(oracle, 120) == [1, 13, 12]


def test_an_infeasible_workload_takes_one_probe() -> None:
    """When the smallest size runs out of memory, the answer is that none fits."""
    course = MicroBatchSearch(space(granularity=8))
    course.tell(probe_result(8, Outcome.OOM, message="CUDA out of memory"))
    assert course.ask() is None
    assert isinstance(course.verdict, Proof)
    assert (course.verdict.fits, course.verdict.stopped_by, course.verdict.next_size) == (0, "oom", 8)
    assert course.verdict.statement == (
        "No micro-batch fits: the smallest size, 8, ran out of memory (CUDA out of memory)."
    )


@pytest.mark.parametrize(("bound", "granularity", "only"), [(1, 1, 1), (5, 8, 5), (8, 8, 8), (15, 8, 8)])
def test_a_space_of_one_size_takes_one_probe(bound: int, granularity: int, only: int) -> None:
    """Where the bound leaves one candidate, a fit there ends the search."""
    course = MicroBatchSearch(space(bound, granularity=granularity))
    assert [item.micro_batch_size for item in run_search(course, Oracle(100))] == [only]
    assert isinstance(course.verdict, Proof)
    assert (course.verdict.fits, course.verdict.stopped_by, course.verdict.next_size) == (only, "bound", None)


def test_the_bound_is_probed_as_soon_as_it_surely_fits() -> None:
    """Memory for 1000 samples, and a plan that can use 64: the smallest, then the largest size."""
    course = MicroBatchSearch(space(64))
    assert [item.micro_batch_size for item in run_search(course, affine(1000, share=0.0))] == [1, 64]
    assert isinstance(course.verdict, Proof)
    assert course.verdict.statement == (
        "64 fits, and larger sizes were not tried: the bound is 64 (the share of a rank)."
    )


def seeded(oracle: Oracle, estimate: ExpectedPeaks) -> tuple[int, int]:
    """Run a search that an estimate seeds, check its answer, and count probes and failures."""
    course = MicroBatchSearch(space(expected=estimate))
    results = run_search(course, oracle)
    assert isinstance(course.verdict, Proof)
    assert course.verdict.fits == oracle.largest
    return len(results), failures(results)


@pytest.mark.parametrize("largest", [37, 200, 400])
@pytest.mark.parametrize("off", [{}, {"factor": 1.03}, {"factor": 0.98}, {"tilt": 1.05}, {"offset": 0.05}], ids=str)
def test_an_estimate_as_good_as_published_ones_takes_three_probes(largest: int, off: dict[str, float]) -> None:
    """Near the expected size, whose measurement calibrates the curve; then the answer; then the next size fails."""
    courses = [
        seeded(oracle, curve(oracle.memory, **off)) for oracle in (affine(largest, share=item) for item in SHARES)
    ]
    assert median(probes for probes, _ in courses) <= 3
    assert max(courses) <= (4, 1)


def replayed(oracle: Oracle, answer: int) -> ExpectedPeaks:
    """An estimate of the oracle's memory, whose replays run out of memory between ``answer`` and the next size."""
    estimate = curve(oracle.memory)
    return estimate.model_copy(update={"usable_bytes": round(estimate.used_bytes(answer + 0.5))})


@pytest.mark.parametrize("largest", [2, 4, 51, 120, 200])
@pytest.mark.parametrize("lost", [0.0, 0.02, 0.1])
def test_replays_that_are_right_take_two_probes(largest: int, lost: float) -> None:
    """The answer and the size above it, whatever the context and fragmentation take of the limit."""
    oracle = biased(largest, share=0.3, bias=lost)
    assert seeded(oracle, replayed(oracle, largest)) == (2, 1)


@pytest.mark.parametrize(("largest", "most"), [(20, 5), (51, 7), (200, 11)])
@pytest.mark.parametrize("off", [-0.1, -0.02, 0.02, 0.1])
def test_replays_that_are_wrong_cost_a_few_probes(largest: int, most: int, off: float) -> None:
    """The replays' answer is off by 2 or 10 %, although the measured curve is the estimated one."""
    oracle = biased(largest, share=0.3, bias=0.05)
    probes, ooms = seeded(oracle, replayed(oracle, round(largest * (1 + off))))
    assert probes <= most
    assert ooms <= 4


def test_a_place_of_the_replays_that_is_too_low_is_left_in_long_steps() -> None:
    """Each fit beyond the place lets the search trust it less: few fits until one fails, at any scale of the sizes."""
    for largest in (200, 3000):
        oracle = biased(largest, share=0.3, bias=0.05)
        place = round(0.92 * largest)
        course = MicroBatchSearch(space(4096, expected=replayed(oracle, place)))
        sizes = [result.micro_batch_size for result in run_search(course, oracle)]
        steps = [size for size in sizes[: next(i for i, size in enumerate(sizes) if size > largest)] if size > place]
        assert len(steps) <= 3, sizes


def test_a_context_that_was_not_expected_costs_one_failure() -> None:
    """The first probe runs out of memory, and shows what the allocator could reserve: the answer follows from it."""
    oracle = affine(100, share=0.0)
    estimate = replayed(oracle, 120).model_copy(update={"reservable_bytes": round(1.2 * LIMIT_BYTES)})
    course, sizes = MicroBatchSearch(space(expected=estimate)), []
    while (size := course.ask()) is not None:
        sizes.append(size)
        course.tell(oracle(size).model_copy(update={"limit_bytes": LIMIT_BYTES}))
    assert sizes == [120, 100, 101]


def test_a_bound_that_fits_in_replays_takes_one_probe() -> None:
    """The allocator of the replays has room to spare at the bound."""
    oracle = biased(100, share=0.3, bias=0.1)
    course = MicroBatchSearch(space(64, expected=replayed(oracle, 70)))
    assert [result.micro_batch_size for result in run_search(course, oracle)] == [64]


@pytest.mark.parametrize("off", [{"tilt": 0.9}, {"tilt": 0.8}, {"factor": 0.95}], ids=str)
def test_an_estimate_that_is_too_low_costs_one_failure_more(off: dict[str, float]) -> None:
    """The first probe fails; the next one calibrates the curve, which gives the answer."""
    oracle = affine(200, share=0.3)
    assert seeded(oracle, curve(oracle.memory, **off)) <= (5, 2)


@pytest.mark.parametrize(
    "off",
    [{"factor": 0.3}, {"factor": 0.6}, {"factor": 10.0}, {"tilt": 0.2}, {"tilt": 5.0}, {"offset": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("largest", LARGEST)
def test_a_wrong_estimate_costs_probes_only(largest: int, off: dict[str, float]) -> None:
    """From any estimate the answer is the same, in at most five probes more than without one."""
    for oracle in (affine(largest, share=item) for item in SHARES):
        probes, _ = seeded(oracle, curve(oracle.memory, **off))
        assert probes <= 11


def elastic_search(largest: int, give: float, off: float, seed: int) -> list[ProbeResult]:
    """The probes of a search whose peaks are cut off at the limit, from an estimate of the irreclaimable memory."""
    estimate = curve(affine(largest, share=0.15).memory, factor=1 + off)
    course = MicroBatchSearch(space(1024, expected=estimate, elastic=True))
    results = run_search(course, elastic(largest, share=0.15, give=give, seed=seed, fraction=Random(seed).random()))
    assert isinstance(course.verdict, Proof)
    assert course.verdict.fits == largest
    return results


thorough = pytest.mark.thorough


@pytest.mark.parametrize("give", [0.0, pytest.param(0.03, marks=thorough), pytest.param(0.06, marks=thorough), 0.09])
@pytest.mark.parametrize("largest", [20, pytest.param(33, marks=thorough), pytest.param(45, marks=thorough)])
def test_peaks_that_the_limit_cuts_off_do_not_make_the_search_creep(largest: int, give: float) -> None:
    """A peak at the limit is only a lower bound of the request: the search leaps, and takes 4 probes, median."""
    taken = [len(elastic_search(largest, give, off, seed)) for off in (-0.02, 0.0, 0.01, 0.03) for seed in range(10)]
    assert median(taken) <= 4
    assert fmean(taken) <= 3.9
    assert max(taken) <= 7


def test_a_fit_at_the_limit_is_followed_by_a_leap() -> None:
    """Where memory is reclaimable, the peak at the limit shows little about larger sizes."""
    size = 290
    used = {at: round(0.97 * LIMIT_BYTES * at / size) for at in (1, 400)}
    points = tuple(ExpectedPeak(micro_batch_size=at, used_bytes=peak) for at, peak in used.items())
    jumps = []
    for elastic_memory in (False, True):
        course = MicroBatchSearch(space(1024, expected=ExpectedPeaks(points=points), elastic=elastic_memory))
        course.tell(probe_result(size, used_bytes=round(0.9935 * LIMIT_BYTES)))
        jumps.append((course.ask() or 0) - size)
    assert jumps[1] >= 2 * jumps[0]


def test_an_estimate_that_nothing_fits_begins_with_the_smallest_size() -> None:
    """A model that is expected to take twice the limit takes one probe to be refused."""
    course = MicroBatchSearch(space(expected=curve(lambda size: 2.0 * LIMIT_BYTES + size)))
    assert [item.micro_batch_size for item in run_search(course, Oracle(0))] == [1]


def test_only_the_given_sizes_are_probed() -> None:
    """Sizes that a plan tells apart: the largest of them that fits, proven by the next of them."""
    sizes = (1, 2, 3, 7, 13, 25, 50, 100)
    course = MicroBatchSearch(space(100, sizes=sizes))
    results = run_search(course, affine(37))
    assert isinstance(course.verdict, Proof)
    assert (course.verdict.fits, course.verdict.next_size) == (25, 50)
    assert {result.micro_batch_size for result in results} <= set(sizes)


@pytest.mark.parametrize("sizes", [(), (0, 5), (3, 3), (5, 4), (1, 101)])
def test_sizes_that_are_no_candidates_are_refused(sizes: tuple[int, ...]) -> None:
    """None, zero, repeated, falling, or above the bound."""
    with pytest.raises(SearchError, match="sizes must rise"):
        space(100, sizes=sizes)


def test_figures_that_are_missing_in_some_results_do_no_harm() -> None:
    """A device that reports its peak at the smallest size only: no size is probed twice, and the answer is exact."""
    course = MicroBatchSearch(space())
    results = run_search(course, Oracle(300, memory=lambda size: LIMIT_BYTES / 50 if size == 1 else 0.0))
    assert len({result.micro_batch_size for result in results}) == len(results) <= probe_limit(4096)
    assert isinstance(course.verdict, Proof)
    assert course.verdict.fits == 300


def test_a_kernel_limit_is_distinguished_from_memory() -> None:
    """A size that a kernel rejects bounds the search like an OOM, and the proof names the reason."""
    course = MicroBatchSearch(space(1000))
    run_search(course, Oracle(500, memory=lambda size: 1000.0 * size, failure=Outcome.INVALID_SIZE))
    assert isinstance(course.verdict, Proof)
    assert (course.verdict.fits, course.verdict.stopped_by, course.verdict.next_size) == (500, "invalid-size", 501)


def test_a_fit_above_an_oom_is_reported_and_ignored() -> None:
    """The answer stays below the smallest failure, closed by a bracket, with a warning that names both sizes."""
    course = MicroBatchSearch(space(100))
    course.tell(probe_result(40, Outcome.OOM))
    course.tell(probe_result(60))
    assert [warning[:40] for warning in course.warnings] == ["Micro-batch 60 fits although 40 failed ("]
    run_search(course, Oracle(39))
    assert isinstance(course.verdict, Proof)
    assert (course.verdict.fits, course.verdict.next_size) == (39, 40)


@pytest.mark.parametrize(
    ("outcome", "reason", "remedy"),
    [
        (Outcome.ERROR, "workload-error", "Fix the workload"),
        (Outcome.TIMED_OUT, "probe-timed-out", "probe_timeout_seconds"),
    ],
)
def test_a_failure_unrelated_to_the_size_ends_the_search(outcome: Outcome, reason: str, remedy: str) -> None:
    """Where nothing is known to fit, the failure names the size, the evidence and the remedy."""
    course = MicroBatchSearch(space())
    course.tell(probe_result(16, outcome, message="KeyError: 'labels'"))
    assert course.ask() is None
    assert isinstance(course.verdict, Failure)
    assert course.verdict.reason == reason
    assert all(part in course.verdict.message for part in ("micro-batch 16", "KeyError: 'labels'", remedy))


def test_a_failure_names_its_kind_once() -> None:
    """The kind of an error stands before the message only if the message lacks it."""
    for kind, message in (("exit status 2", "ended with exit status 2"), ("tests.Fault", "Fault in the warm-up")):
        course = MicroBatchSearch(space())
        result = probe_result(16, Outcome.ERROR, message=message)
        course.tell(result.model_copy(update={"error_type": kind}))
        assert isinstance(course.verdict, Failure)
        assert f"s: {message}. " in course.verdict.message


@pytest.mark.parametrize(
    ("peak", "kind", "told"),
    [
        (30, None, "30 % of the limit was in use, so memory is probably"),
        (90, None, "may be the cause: 90 %"),
        (90, "ModuleNotFoundError", "Fix"),
        (None, None, "Fix"),
    ],
)
def test_memory_is_ruled_out_as_the_cause_of_an_error_only_by_a_peak(
    peak: int | None, kind: str | None, told: str
) -> None:
    """An error near the limit may have any cause, except one that says what is missing."""
    course = MicroBatchSearch(space())
    fields = {"process_peak_bytes": peak, "limit_bytes": 100, "error_type": kind}
    course.tell(probe_result(16, Outcome.ERROR).model_copy(update=fields))
    assert isinstance(course.verdict, Failure)
    assert told in course.verdict.message


@pytest.mark.parametrize(
    ("outcome", "stopped_by", "remedy"),
    [
        (Outcome.TIMED_OUT, "timeout", "Raise `probe_timeout_seconds`"),
        (Outcome.LOST, "lost", "Find out what ends processes"),
    ],
)
def test_the_largest_fit_is_the_answer_below_an_inconclusive_size(
    outcome: Outcome, stopped_by: str, remedy: str
) -> None:
    """143 fits, 152 is inconclusive: the proof names both, and the sizes that were not tried."""
    course = MicroBatchSearch(space())
    course.tell(probe_result(143, used_bytes=1000))
    for _ in range(2 if outcome is Outcome.LOST else 1):
        course.tell(probe_result(152, outcome, message="it was in phase measure"))
    assert course.ask() is None
    proof = course.verdict
    assert isinstance(proof, Proof)
    assert (proof.fits, proof.stopped_by, proof.next_size) == (143, stopped_by, 152)
    assert (proof.is_conclusive, proof.shows_larger_fail) == (False, False)
    parts = ("143 fits.", "152", "it was in phase measure", "between 143 and 152 were not tried", remedy)
    assert all(part in proof.statement for part in parts), proof.statement


def test_the_next_size_that_times_out_leaves_none_untried() -> None:
    """Where the two sizes are neighbours, the proof names no untried sizes."""
    course = MicroBatchSearch(space())
    course.tell(probe_result(9))
    course.tell(probe_result(10, Outcome.TIMED_OUT))
    assert isinstance(course.verdict, Proof)
    assert "were not tried" not in course.verdict.statement


def test_far_above_the_last_fit_a_time_out_has_the_search_go_on_below() -> None:
    """1 fits and 512 times out: sizes between are tried, until one that fits is near, or three have timed out."""
    slow = MicroBatchSearch(space())
    slow.tell(probe_result(1))
    tried = []
    while (size := slow.ask()) is not None:
        tried.append(size)
        slow.tell(probe_result(size, Outcome.FIT if size <= 100 else Outcome.TIMED_OUT))
    assert isinstance(slow.verdict, Proof)
    assert slow.verdict.stopped_by == "timeout"
    assert 1 < slow.verdict.fits <= 100
    assert sum(size > 100 for size in tried) <= 3


def test_below_a_size_that_timed_out_an_out_of_memory_still_proves_the_answer() -> None:
    """The smallest failure decides what stopped the search."""
    course = MicroBatchSearch(space())
    course.tell(probe_result(10))
    course.tell(probe_result(100, Outcome.TIMED_OUT))
    run_search(course, Oracle(37, memory=lambda size: LIMIT_BYTES / 40 * size))
    assert isinstance(course.verdict, Proof)
    assert (course.verdict.fits, course.verdict.stopped_by, course.verdict.next_size) == (37, "oom", 38)


def test_sizes_that_a_program_refuses_are_left_out_and_named() -> None:
    """It may assert that its total is a multiple of the size: 7 fits, 8 and 9 raise, and 12 is the largest."""

    def outcome(size: int) -> Outcome:
        return Outcome.OOM if size > 12 else Outcome.ERROR if size in {8, 9} else Outcome.FIT

    for first in (8, 9):
        course = MicroBatchSearch(space())
        course.tell(probe_result(7))
        refused = probe_result(first, Outcome.ERROR, message="AssertionError: no multiple")
        course.tell(refused.model_copy(update={"phase": Phase.BUILD}))
        while (size := course.ask()) is not None:
            course.tell(probe_result(size, outcome(size)))
        assert isinstance(course.verdict, Proof)
        assert (course.verdict.fits, course.verdict.stopped_by, course.verdict.next_size) == (12, "oom", 13)
        assert f"{first} was left out: AssertionError: no multiple" in course.verdict.statement


def test_a_program_that_fails_above_a_size_ends_the_search_there() -> None:
    """The error does not come from a few sizes: after three of them the next one bounds the search."""
    course = MicroBatchSearch(space())
    course.tell(probe_result(1))
    tried = []
    while (size := course.ask()) is not None:
        tried.append(size)
        course.tell(probe_result(size, Outcome.FIT if size <= 100 else Outcome.ERROR))
    assert isinstance(course.verdict, Proof)
    assert (course.verdict.stopped_by, course.verdict.is_conclusive) == ("error", False)
    assert sum(size > 100 for size in tried) <= 6


def test_refused_sizes_above_the_largest_fit_are_the_proof() -> None:
    """No size is left between the fit and the bound."""
    course = MicroBatchSearch(space(bound=3))
    course.tell(probe_result(2))
    course.tell(probe_result(3, Outcome.ERROR, message="AssertionError: 3"))
    assert isinstance(course.verdict, Proof)
    assert (course.verdict.fits, course.verdict.stopped_by, course.verdict.next_size) == (2, "invalid-size", 3)


@pytest.mark.parametrize("of_command", [True, False])
def test_a_program_may_refuse_one_sample_before_its_first_update(*, of_command: bool) -> None:
    """As a contrastive loss does. The build of a spec does not depend on the size."""
    course = MicroBatchSearch(space(8), of_command=of_command)
    course.tell(probe_result(1, Outcome.ERROR).model_copy(update={"phase": Phase.BUILD}))
    assert isinstance(course.verdict, Failure) is not of_command
    if of_command:
        run_search(course, affine(4))
        assert isinstance(course.verdict, Proof)
        assert course.verdict.fits == 4


def test_an_error_of_the_device_ends_the_search() -> None:
    """A missing card is no size that a program refuses."""
    course = MicroBatchSearch(space())
    course.tell(probe_result(143))
    error = {"error_type": "batchwright.errors.DeviceError"}
    course.tell(probe_result(152, Outcome.ERROR).model_copy(update=error))
    assert isinstance(course.verdict, Failure)


def test_an_error_at_one_is_forgiven_when_larger_sizes_run() -> None:
    """BatchNorm over a single value raises: the search continues above that, with a warning."""
    course = MicroBatchSearch(space())
    oracle = affine(37)
    course.tell(probe_result(1, Outcome.ERROR, message="ValueError: Expected more than 1 value per channel"))
    results = run_search(course, oracle)
    assert isinstance(course.verdict, Proof)
    assert (course.verdict.fits, len(results) <= 6) == (37, True)
    assert "A micro-batch of 1 fails, though larger ones fit: ValueError" in course.warnings[0]


@pytest.mark.parametrize("second", [Outcome.ERROR, Outcome.OOM])
def test_an_error_at_one_ends_the_search_when_nothing_larger_runs(second: Outcome) -> None:
    """Two probes show a bug, also for a workload where only one sample would fit."""
    course = MicroBatchSearch(space())
    course.tell(probe_result(1, Outcome.ERROR, message="KeyError: 'labels'"))
    assert course.ask() == 2
    course.tell(probe_result(2, second, message="KeyError: 'labels'"))
    assert isinstance(course.verdict, Failure)
    assert course.verdict.reason == "workload-error"
    assert ("No larger size works instead: 2 does not fit." in course.verdict.message) == (second is Outcome.OOM)


@pytest.mark.parametrize("error_type", ["ModuleNotFoundError", "no-optimizer"])
def test_an_error_that_no_size_changes_ends_the_search_at_one(error_type: str) -> None:
    """A command that cannot import a module would only fail again, minutes later."""
    course = MicroBatchSearch(space(), of_command=True)
    course.tell(probe_result(1, Outcome.ERROR).model_copy(update={"phase": Phase.BUILD, "error_type": error_type}))
    assert isinstance(course.verdict, Failure)


def test_a_lost_probe_is_repeated_once() -> None:
    """A probe ended from outside does not depend on its size: it is repeated, and a second loss ends the search."""
    course = MicroBatchSearch(space())
    size = course.ask()
    assert size is not None
    course.tell(probe_result(size, Outcome.LOST))
    assert (course.ask(), course.verdict) == (size, None)
    course.tell(probe_result(size, Outcome.LOST, message="killed by signal 9"))
    assert course.ask() is None
    assert isinstance(course.verdict, Failure)
    assert course.verdict.reason == "probe-lost"
    assert f"micro-batch {size}" in course.verdict.message
    assert "killed by signal 9" in course.verdict.message


@pytest.mark.parametrize("size", [1, 7, 12, 104])
def test_a_size_outside_the_space_is_refused(size: int) -> None:
    """The error for a size that is not a candidate names the size and the candidates."""
    with pytest.raises(SearchError, match=rf"micro-batch {size} .* multiples of 8 from 8 to 96"):
        MicroBatchSearch(space(100, granularity=8)).tell(probe_result(size))


@pytest.mark.parametrize(("bound", "granularity"), [(0, 1), (1, 0)])
def test_a_space_without_sizes_is_refused(bound: int, granularity: int) -> None:
    """A bound or granularity below one is an error that shows both."""
    with pytest.raises(SearchError, match=f"got {bound} and {granularity}"):
        space(bound, granularity=granularity)
