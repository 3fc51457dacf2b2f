"""A whole tuning on oracles: the request's bounds, the recommendation, its evidence and its fingerprint."""

from datetime import UTC, datetime
from typing import Any

import pytest

from batchwright.device_traits import job_environment, traits_of
from batchwright.driving.loop import drive
from batchwright.errors import DeviceError, EstimateTimedOutError, PlanError, SearchError, SpecError, TuningFailedError
from batchwright.planning.accumulation import probe_window
from batchwright.planning.session import TuningSession
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import (
    DeviceInfo,
    ExpectedPeak,
    ExpectedPeaks,
    ModelSummary,
    Outcome,
    Phase,
    ProbeResult,
)
from tests.support.factories import CPU, CUDA, gpt_spec, mlp_spec, plan_of, probe_result, resnet_spec, tuning_request
from tests.support.oracles import OracleRunner

MIB = 1024**2
GIB = 1024**3
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "batchwright": "0.1.0"}


def tuning(request: TuningRequest, device: DeviceInfo = CPU, **changes: Any) -> TuningSession:
    """A tuning that has not begun."""
    return TuningSession(request, device, **{"environment": {"A": "1"}, "versions": VERSIONS, **changes})


def answer(probe: ProbeRequest, largest: int, **changes: Any) -> ProbeResult:
    """Probe a device that fits ``largest`` samples, with memory affine in the size."""
    fits = probe.micro_batch_size <= largest
    used = 1000 + 100 * probe.micro_batch_size
    return probe_result(
        probe.micro_batch_size,
        Outcome.FIT if fits else Outcome.OOM,
        used if fits else None,
        **{"accumulates": probe.accumulates, "micro_batch_sizes": probe_window(probe), **changes},
    )


def finish(course: TuningSession, largest: int, **changes: Any) -> Recommendation:
    """Drive a tuning to its end."""
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, largest, **changes))
    return course.recommendation(identifier="rec_1", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=12.5)


def test_a_recommendation_holds_the_decision_the_plan_and_the_evidence() -> None:
    """100 samples at most 37 at a time: 34 + 33 + 33, proven by a fit at 37 and an OOM at 38."""
    found = finish(tuning(tuning_request(effective_batch_size=100)), largest=37)
    assert found.feasible
    assert found.largest_micro_batch_size == 37
    assert plan_of(found).gradient_accumulation_steps == 3
    assert plan_of(found).micro_batch_sizes == ((34, 33, 33),)
    assert (plan_of(found).effective_batch_size, plan_of(found).exact) == (100, True)
    assert next(iter(found.model_dump())) == "plan"
    assert (found.evidence.proof.fits, found.evidence.proof.next_size) == (37, 38)
    assert found.evidence.proof.stopped_by == "oom"
    outcomes = {probe.micro_batch_size: probe.outcome for probe in found.evidence.probes}
    assert (outcomes[37], outcomes[38]) == (Outcome.FIT, Outcome.OOM)
    assert found.timings.probes == len(found.evidence.probes)
    assert found.environment == {"A": "1"}
    assert Recommendation.model_validate_json(found.model_dump_json()) == found


def test_several_ranks_share_the_batch() -> None:
    """A rank's share bounds the search: 100 over 3 ranks is 34 + 33 + 33, and nothing above 34 is probed."""
    spec = mlp_spec(parallelism={"world_size": 3})
    found = finish(tuning(tuning_request(spec, 100)), largest=1000)
    assert plan_of(found).micro_batch_sizes == ((34,), (33,), (33,))
    assert max(probe.micro_batch_size for probe in found.evidence.probes) == 34
    assert found.evidence.proof.stopped_by == "bound"
    assert "communication-buffers-not-probed" in {warning.code for warning in found.warnings}


def test_nothing_fits_is_an_infeasible_recommendation() -> None:
    """The reason has the numbers and the remedies."""
    summary = ModelSummary(parameters=1000, trainable_parameters=1000, parameter_bytes=4000)
    request = tuning_request(gpt_spec(), memory_limit_bytes=2 * GIB)
    found = finish(tuning(request), largest=0, model=summary)
    assert not found.feasible
    assert (found.plan, found.largest_micro_batch_size) == (None, None)
    reason = found.infeasible_reason or ""
    for part in ("micro-batch of 1", "2.00 GiB", "1.94 GiB", "1,000 parameters", "activation_checkpointing"):
        assert part in reason


def test_a_micro_batch_as_large_as_the_share_does_not_accumulate() -> None:
    """A probe of the whole share runs updates of one micro-batch; smaller ones keep gradients while the next runs."""
    course = tuning(tuning_request(effective_batch_size=20))
    accumulates: dict[int, bool] = {}
    while (probe := course.next_probe()) is not None:
        accumulates[probe.micro_batch_size] = probe.accumulates
        course.record(answer(probe, 20))
    assert accumulates.pop(20) is False
    assert accumulates
    assert all(accumulates.values())


UNIT = 2**14
GRADIENTS = ModelSummary(parameters=500 * UNIT, trainable_parameters=500 * UNIT, parameter_bytes=2000 * UNIT)


def with_gradients(probe: ProbeRequest) -> ProbeResult:
    """A device of 10,000 units: 100 a sample, 1000 always, and 2000 of gradients while an update accumulates."""
    used = UNIT * (1000 + 100 * probe.micro_batch_size + (2000 if probe.accumulates else 0))
    fits = used <= 10_000 * UNIT
    return probe_result(
        probe.micro_batch_size,
        Outcome.FIT if fits else Outcome.OOM,
        used if fits else None,
        model=GRADIENTS,
        accumulates=probe.accumulates,
        micro_batch_sizes=probe_window(probe),
    )


@pytest.mark.parametrize(
    ("share", "largest", "steps"), [(85, 85, 1), (90, 90, 1), (95, 70, 2), (70, 70, 1), (140, 70, 2)]
)
def test_the_whole_share_may_fit_where_less_does_not(share: int, largest: int, steps: int) -> None:
    """An update of one micro-batch holds no gradients: up to 90 samples fit as a whole, 70 when they accumulate."""
    request = tuning_request(effective_batch_size=share, memory_limit_bytes=10_000 * UNIT, memory_margin=0.0)
    course = tuning(request)
    while (probe := course.next_probe()) is not None:
        course.record(with_gradients(probe))
    found = course.recommendation(identifier="rec_1", created_at=datetime.now(UTC), total_seconds=1.0)
    assert (found.largest_micro_batch_size, plan_of(found).gradient_accumulation_steps) == (largest, steps)
    assert found.warnings == ()
    rebuilt = tuning(request)
    for result in course.probes:
        rebuilt.record(result)
    assert rebuilt.next_probe() is None


@pytest.mark.parametrize(
    ("device", "changes", "limit"),
    [
        (CPU, {}, int(8 * GIB * 0.97)),
        (CPU, {"memory_limit_bytes": 4 * GIB, "memory_margin": 0.0}, 4 * GIB),
        (CUDA, {"device": "cuda:0"}, int(16 * GIB * 0.97)),
        (CUDA, {"device": "cuda:0", "memory_limit_bytes": 8 * GIB, "memory_margin": 0.1}, int(8 * GIB * 0.9)),
    ],
)
def test_probes_run_under_the_limit_less_the_margin(device: DeviceInfo, changes: dict[str, Any], limit: int) -> None:
    """By default the whole card, or half of the host."""
    probe = tuning(tuning_request(**changes), device).next_probe()
    assert probe is not None
    assert probe.limit_bytes == limit


def test_a_limit_above_the_device_is_refused() -> None:
    """The message names both numbers and the remedy."""
    with pytest.raises(SpecError, match=r"memory_limit_bytes: is above the 16\.00 GiB of cpu") as caught:
        tuning(tuning_request(memory_limit_bytes="17GiB"))
    assert caught.value.problems[0].value == "17.00 GiB"


@pytest.mark.parametrize(("limit", "margin"), [(200 * MIB, 0.0), (205 * MIB, 0.03)])
def test_a_limit_that_the_context_takes_is_refused(limit: int, margin: float) -> None:
    """The message names the limit, the context's bytes and the remedy, and no probe has run."""
    card = CUDA.model_copy(update={"least_context_bytes": 200 * MIB})
    with pytest.raises(
        DeviceError,
        match=rf"{limit // MIB}\.00 MiB, less the margin of {100 * margin:.0f} %.*cuda:0 \(test card\) takes at least "
        r"200\.00 MiB\. Raise the limit, or leave it out",
    ):
        tuning(tuning_request(device="cuda:0", memory_limit_bytes=limit, memory_margin=margin), card)
    tuning(tuning_request(device="cuda:0", memory_limit_bytes=limit + 8 * MIB, memory_margin=margin), card)


def test_compiling_under_a_cpu_budget_is_refused() -> None:
    """The budget would count the compiler: the field is named before any probe."""
    with pytest.raises(SpecError, match="compile: is not supported on the CPU"):
        tuning(tuning_request(mlp_spec(compile=True)))


def test_a_device_that_cannot_be_used_is_a_device_error() -> None:
    """Not a fault of the workload."""
    course = tuning(tuning_request())
    lost = {"error_type": "batchwright.errors.DeviceError", "phase": Phase.START, "message": "torch sees no cuda:0"}
    course.record(probe_result(1, Outcome.ERROR, None, **lost))
    with pytest.raises(DeviceError, match="sees no cuda:0"):
        course.recommendation(identifier="rec_1", created_at=datetime.now(UTC), total_seconds=1.0)


def test_a_device_that_fails_above_a_fit_is_a_device_error() -> None:
    """Sizes that fitted before the device failed are not recommended."""
    course = tuning(tuning_request())
    course.record(probe_result(1))
    failed = {"error_type": "batchwright.errors.DeviceError", "phase": Phase.WARMUP, "message": "an ECC error"}
    probe = course.next_probe()
    assert probe is not None
    course.record(probe_result(probe.micro_batch_size, Outcome.ERROR, None, **failed))
    with pytest.raises(DeviceError, match="ECC"):
        course.recommendation(identifier="rec_1", created_at=datetime.now(UTC), total_seconds=1.0)


def test_a_fit_of_the_whole_share_needs_no_second_reason() -> None:
    """Where everything fits the proof says just that."""
    proof = finish(tuning(tuning_request(effective_batch_size=16)), largest=100).evidence.proof
    assert (
        proof.statement
        == "16 fits, and larger sizes were not tried: the bound is 16 (the 16 samples of a rank in one update)."
    )


def test_headroom_counts_what_is_there() -> None:
    """On a card: the context is taken, and what other processes hold is not free; the allocator's part is apart."""
    peaks = {
        "peak_allocated_bytes": 3 * GIB,
        "peak_reserved_bytes": 4 * GIB,
        "context_bytes": GIB,
        "other_processes_bytes": 6 * GIB,
    }
    room = finish(tuning(tuning_request(device="cuda:0"), CUDA), largest=20, **peaks).headroom
    assert room is not None
    assert (room.limit_bytes, room.peak_bytes, room.free_bytes) == (16 * GIB, 5 * GIB, 5 * GIB)
    assert (room.allocated_bytes, room.reserved_bytes, room.context_bytes) == (3 * GIB, 4 * GIB, GIB)


def test_a_rank_without_a_sample_is_refused() -> None:
    """Before any probe."""
    with pytest.raises(PlanError, match="without a sample"):
        tuning(tuning_request(mlp_spec(parallelism={"world_size": 4}), 3))


def test_a_request_whose_every_plan_is_too_long_is_refused_at_once() -> None:
    """Four million micro-batches of one: the error before any probe names possible numbers."""
    with pytest.raises(PlanError, match="takes 4194303 micro-batches of at most 1, more than the 262144"):
        tuning(tuning_request(effective_batch_size=2**22 - 1, max_micro_batch_size=1))


def test_a_search_that_ends_at_a_size_too_small_to_plan_with_says_so() -> None:
    """Where only three samples fit of a batch of four million, the error names them and possible numbers."""
    with pytest.raises(PlanError, match=r"takes 1398101 micro-batches of at most 3.* at least 16"):
        finish(tuning(tuning_request(effective_batch_size=2**22 - 1)), largest=3)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [(Outcome.ERROR, "workload-error"), (Outcome.TIMED_OUT, "probe-timed-out"), (Outcome.LOST, "probe-lost")],
)
def test_a_failure_unrelated_to_the_size_ends_the_tuning(outcome: Outcome, reason: str) -> None:
    """With a stable word and the probe's message."""
    course = tuning(tuning_request())
    while (probe := course.next_probe()) is not None:
        course.record(probe_result(probe.micro_batch_size, outcome, None, message="labels must be below 10"))
    with pytest.raises(TuningFailedError, match="labels must be below 10") as caught:
        course.recommendation(identifier="rec_1", created_at=datetime.now(UTC), total_seconds=1.0)
    assert caught.value.reason == reason


def test_an_unfinished_tuning_has_no_recommendation() -> None:
    """Requesting a recommendation too early is an error."""
    with pytest.raises(TuningFailedError, match="has not finished"):
        tuning(tuning_request()).recommendation(identifier="x", created_at=datetime.now(UTC), total_seconds=0.0)


def test_a_result_that_was_not_requested_is_refused() -> None:
    """A size above the share cannot belong to this tuning."""
    with pytest.raises(SearchError):
        tuning(tuning_request(effective_batch_size=10)).record(probe_result(11))


WITH_BATCH_NORM = ModelSummary(
    parameters=1, trainable_parameters=1, parameter_bytes=4, batch_coupled_modules=("bn (BatchNorm2d)",)
)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model": WITH_BATCH_NORM}, "batch-coupled-modules"),
        ({"model": GRADIENTS.model_copy(update={"in_eval_mode": True})}, "model-in-eval-mode"),
        ({"model": GRADIENTS.model_copy(update={"config_notes": ("No field.",)})}, "undeclared-config-fields"),
        ({"other_processes_bytes": 3 * GIB}, "shared-device"),
        ({"allocator_retries": 2}, "thrashing-fit"),
    ],
)
def test_what_a_probe_saw_becomes_a_warning(changes: dict[str, Any], code: str) -> None:
    """BatchNorm, a field of a config that may have no effect, a shared card, a thrashing fit."""
    found = finish(tuning(tuning_request(resnet_spec())), largest=20, **changes)
    assert [warning.code for warning in found.warnings] == [code]


def test_a_uniform_plan_is_made_on_request() -> None:
    """101 samples are only divisible one at a time: the plan names the nearest effective batches."""
    found = finish(tuning(tuning_request(effective_batch_size=101, uniform=True)), largest=37)
    assert found.uniform is not None
    assert found.uniform.micro_batch_size == 1
    assert [item.effective_batch_size for item in found.uniform.nearest] == [100, 102]


BASE = tuning_request(gpt_spec())


@pytest.mark.parametrize(
    "other",
    [
        BASE.model_copy(update={"effective_batch_size": 101}),
        BASE.model_copy(update={"granularity": 8}),
        BASE.model_copy(update={"memory_margin": 0.1}),
        BASE.model_copy(update={"memory_limit_bytes": GIB}),
        tuning_request(gpt_spec(precision="bf16-mixed")),
        tuning_request(gpt_spec(gradient_clipping=1.0)),
        tuning_request(gpt_spec(batch={"sequence_length": 15})),
        tuning_request(gpt_spec(optimizer={"name": "sgd"})),
        tuning_request(gpt_spec(optimizer={"weight_decay": 0.1})),
    ],
)
def test_what_changes_memory_changes_the_fingerprint(other: TuningRequest) -> None:
    """A stored recommendation is never reused for another request."""
    assert tuning(other).fingerprint != tuning(BASE).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        tuning_request(gpt_spec(data={"kind": "synthetic", "samples": 7})),
        tuning_request(gpt_spec(optimizer={"learning_rate": 0.5})),
        tuning_request(gpt_spec(schedule={"name": "cosine"})),
        BASE.model_copy(update={"probe_timeout_seconds": 5.0}),
    ],
)
def test_what_does_not_change_memory_keeps_the_fingerprint(other: TuningRequest) -> None:
    """Data, rates and time-outs are no reason to probe again."""
    assert tuning(other).fingerprint == tuning(BASE).fingerprint


def test_versions_and_environment_are_part_of_the_fingerprint() -> None:
    """Another torch or allocator setting changes the fingerprint; an unused transformers does not."""
    ours = tuning(BASE).fingerprint
    assert tuning(BASE, versions={**VERSIONS, "torch": "2.12.0"}).fingerprint != ours
    assert tuning(BASE, environment={}).fingerprint != ours
    assert tuning(BASE, versions={**VERSIONS, "transformers": "4.0"}).fingerprint == ours


def test_on_the_cpu_mkl_gives_its_buffers_back() -> None:
    """MKL's buffers depend on the make of the CPU; the setting is part of the fingerprint and of the job."""
    environment = traits_of("cpu").environment_from({})
    assert environment["MKL_DISABLE_FAST_MM"] == "1"
    without = {name: value for name, value in environment.items() if name != "MKL_DISABLE_FAST_MM"}
    assert tuning(BASE, environment=environment).fingerprint != tuning(BASE, environment=without).fingerprint
    assert job_environment(environment, {"MKL_DISABLE_FAST_MM": "0"})["MKL_DISABLE_FAST_MM"] == "1"


def test_a_jobs_environment_is_that_of_the_probes() -> None:
    """Allocator settings that the probes ran without are taken out, the rest of the environment stays."""
    ours = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "HOME": "/home/me"}
    assert job_environment({"MALLOC_ARENA_MAX": "1"}, ours) == {"HOME": "/home/me", "MALLOC_ARENA_MAX": "1"}
    assert job_environment(dict(ours), ours) == ours


def test_an_estimate_seeds_the_search_without_changing_the_answer() -> None:
    """With the true memory curve at most four probes are needed; the estimate is kept in the evidence."""
    course = tuning(tuning_request())
    question = course.expectation_request()
    assert question is not None
    assert (question.samples_per_window, question.limit_bytes) == (100, course.conditions.probe_limit_bytes)
    slope = course.conditions.probe_limit_bytes // 38
    points = tuple(ExpectedPeak(micro_batch_size=item, used_bytes=item * slope) for item in (1, 100))
    course.start_from_estimate(ExpectedPeaks(points=points))
    while (probe := course.next_probe()) is not None:
        fits = probe.micro_batch_size <= 37
        used = probe.micro_batch_size * slope if fits else None
        outcome = Outcome.FIT if fits else Outcome.OOM
        course.record(probe_result(probe.micro_batch_size, outcome, used, micro_batch_sizes=probe_window(probe)))
    found = finish(course, largest=37)
    assert found.largest_micro_batch_size == 37
    assert sum(not probe.runs_plan for probe in found.evidence.probes) <= 4
    assert found.evidence.expected == ExpectedPeaks(points=points)


def led_by_a_late_estimate(after: int | None) -> Recommendation:
    """A tuning of 1,000 samples, of which 437 fit, with an estimate that is there after so many probes."""
    course = tuning(tuning_request(effective_batch_size=1000))
    slope = course.conditions.probe_limit_bytes // 438
    points = tuple(ExpectedPeak(micro_batch_size=item, used_bytes=item * slope) for item in (1, 1000))

    def late() -> ExpectedPeaks | None:
        return ExpectedPeaks(points=points) if after is not None and len(course.probes) >= after else None

    def too_long(_: ExpectationRequest) -> ExpectedPeaks:
        raise EstimateTimedOutError("it was not ready within 30 s")

    def run(probe: ProbeRequest) -> ProbeResult:
        outcome = Outcome.FIT if probe.micro_batch_size <= 437 else Outcome.OOM
        return probe_result(probe.micro_batch_size, outcome, None, micro_batch_sizes=probe_window(probe))

    drive(course, OracleRunner(run, too_long, late))
    return finish(course, largest=437)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_search_goes_on_with_an_estimate_that_took_too_long(after: int) -> None:
    """The warning says after how many probes; the proof is that of a search without an estimate, from fewer probes."""
    led, alone = led_by_a_late_estimate(after), led_by_a_late_estimate(None)
    assert led.largest_micro_batch_size == alone.largest_micro_batch_size == 437
    assert led.evidence.proof == alone.evidence.proof
    assert led.evidence.probes[:after] == alone.evidence.probes[:after]
    assert len(led.evidence.probes) < len(alone.evidence.probes)
    assert led.evidence.expected is not None
    (warning,) = led.warnings
    assert warning.code == "search-without-estimate"
    assert "not ready within 30 s. The estimate was used after" in warning.message
    assert f" {after} probe" in warning.message


def test_a_search_that_ends_without_its_estimate_says_so() -> None:
    """An estimate that never comes is named, with its reason, and so is one that failed."""
    found = led_by_a_late_estimate(None)
    assert found.evidence.expected is None
    (warning,) = found.warnings
    assert warning.code == "search-without-estimate"
    assert "ended without one: it was not ready within 30 s. This may cost extra probes" in warning.message


def test_a_warm_start_comes_before_the_first_probe() -> None:
    """Later it would change what follows from the recorded probes."""
    stored = finish(tuning(tuning_request()), largest=37)
    course = tuning(tuning_request())
    course.record(probe_result(1))
    with pytest.raises(SearchError, match="1 probes were recorded before"):
        course.warm_start_from(stored)


def test_a_space_of_one_size_requests_no_estimate() -> None:
    """The first probe is known without an estimate."""
    assert tuning(tuning_request(max_micro_batch_size=1)).expectation_request() is None


# --- quick tunings ---


def expected_line() -> ExpectedPeaks:
    """A memory curve by which 40 samples fit in 5,000 units."""
    sizes = (1, 1000)
    return ExpectedPeaks(
        points=tuple(ExpectedPeak(micro_batch_size=size, used_bytes=UNIT * (1000 + 100 * size)) for size in sizes)
    )


LIMIT: dict[str, Any] = {"memory_limit_bytes": 5000 * UNIT, "memory_margin": 0.0}


def quick_tuning(batch: int, **fields: Any) -> TuningSession:
    """A quick tuning that has its estimate."""
    course = tuning(tuning_request(effective_batch_size=batch, quick=True, **LIMIT, **fields))
    course.start_from_estimate(expected_line())
    return course


@pytest.mark.parametrize("batch", [20, 100, 1000])
@pytest.mark.parametrize("fields", [{}, {"granularity": 8}, {"objective": "fewest_steps"}])
def test_a_quick_tuning_runs_one_plan(batch: int, fields: dict[str, Any]) -> None:
    """The plan fits by the estimate, and its own run proves it; that larger sizes were not tried is a warning."""
    course = quick_tuning(batch, **fields)
    found = finish(course, largest=40)
    run = found.evidence.probes[-1]
    plan = plan_of(found)
    assert 10 <= max(plan.micro_batch_sizes[0]) <= max(run.micro_batch_sizes) <= 40
    assert "granularity" in fields or max(plan.micro_batch_sizes[0]) == max(run.micro_batch_sizes)
    assert found.largest_micro_batch_size == max(max(each.micro_batch_sizes) for each in found.evidence.probes)
    assert len(found.evidence.probes) <= 1 + ("granularity" in fields)  # a size of its grid, and then the plan
    assert plan.effective_batch_size == batch
    if batch > 20:
        assert (found.evidence.proof.stopped_by, found.evidence.proof.is_conclusive) == ("quick", False)
        assert "larger-sizes-not-known" in {warning.code for warning in found.warnings}
    again = quick_tuning(batch, **fields)
    for probe in found.evidence.probes:
        again.record(probe)
    assert again.next_probe() is None


def test_the_plan_of_a_quick_tuning_may_be_beside_its_grid_after_a_restart() -> None:
    """The run of the plan shows that the size before was the sure one."""
    again = tuning(tuning_request(effective_batch_size=100, quick=True, granularity=8))
    again.record(probe_result(40))
    again.record(probe_result(34, micro_batch_sizes=(34, 33, 33)))
    assert again.next_probe() is None


def test_the_baseline_of_a_quick_tuning_may_be_beside_its_grid_after_a_restart() -> None:
    """A plan of equal micro-batches does not show that a plan ran."""
    baseline = {"micro_batch_size": 7}
    again = tuning(tuning_request(effective_batch_size=64, quick=True, granularity=8, baseline=baseline))
    again.record(probe_result(8))
    again.record(probe_result(7))
    assert finish(again, largest=8).largest_micro_batch_size == 8


@pytest.mark.parametrize("largest", [1, 3, 7, 13, 20, 29])
def test_a_quick_tuning_goes_on_after_an_oom(largest: int) -> None:
    """A plan that the estimate was wrong of is followed by others, until one fits that is not much smaller."""
    found = finish(quick_tuning(100), largest=largest)
    probes = found.evidence.probes
    failed = min(probe.micro_batch_size for probe in probes if probe.outcome is Outcome.OOM)
    assert failed / 2 <= max(plan_of(found).micro_batch_sizes[0]) <= largest
    assert len(probes) <= (4 if largest >= 13 else 7)
    assert found.evidence.proof.stopped_by == "quick" or found.evidence.proof.shows_larger_fail


def test_a_quick_tuning_of_which_not_even_a_sample_fits_is_not_feasible() -> None:
    """As the whole one."""
    assert not finish(quick_tuning(100), largest=0).feasible


def test_a_quick_tuning_whose_estimate_was_late_ends_after_an_error_of_its_plan() -> None:
    """The estimate would lead to the same plan again; sizes are probed instead."""
    course = tuning(tuning_request(effective_batch_size=100, quick=True, **LIMIT))
    course.record(probe_result(1))
    course.start_from_estimate(expected_line())
    plan = course.next_probe()
    assert plan is not None
    assert plan.runs_plan
    course.record(probe_result(plan.micro_batch_size, Outcome.ERROR, micro_batch_sizes=probe_window(plan)))
    assert finish(course, largest=40).feasible


@pytest.mark.parametrize(("batch", "held"), [(100, 40), (80, 40), (100, 1)])
def test_a_quick_tuning_makes_two_updates_of_a_size_that_one_update_closed_in(batch: int, held: int) -> None:
    """The search without an estimate left no size between the one that made one update and the next."""
    course = tuning(tuning_request(effective_batch_size=batch, quick=True, **LIMIT))
    course.record(probe_result(held, brackets=True))
    course.record(probe_result(held + 1, Outcome.OOM))
    course.start_from_estimate(expected_line())
    found = finish(course, largest=held)
    assert len(found.evidence.probes) == 3
    assert not found.evidence.probes[-1].brackets
    assert found.largest_micro_batch_size == found.evidence.probes[-1].micro_batch_size <= held


def test_a_quick_tuning_repeats_no_plan_of_equal_micro_batches_that_failed() -> None:
    """An estimate would lead to it again: sizes are probed instead."""
    course = quick_tuning(80)
    plan = course.next_probe()
    assert plan is not None
    course.record(probe_result(plan.micro_batch_size, Outcome.ERROR))
    again = course.next_probe()
    assert again is None or again.micro_batch_size != plan.micro_batch_size


def test_a_quick_tuning_repeats_no_size_that_failed_beside_its_plan() -> None:
    """Its plan has smaller micro-batches, of no size that is searched: the size itself was probed."""
    course = quick_tuning(100, granularity=4)
    asked: list[int] = []
    while (probe := course.next_probe()) is not None and len(asked) < 20:
        asked.append(probe.micro_batch_size)
        failed = {"outcome": Outcome.ERROR} if probe.micro_batch_size == 16 else {}
        course.record(answer(probe, 8).model_copy(update=failed))
    assert asked.count(16) == 1
    assert course.proof_of_search().fits == 8


def test_a_quick_tuning_without_an_estimate_is_a_whole_one() -> None:
    """Nothing says which plan fits."""
    request = tuning_request(effective_batch_size=100, quick=True)
    assert finish(tuning(request), largest=37).evidence.proof.stopped_by == "oom"


def test_a_quick_tuning_is_completed_by_a_warm_start_from_it() -> None:
    """Its fingerprint is that of the whole tuning, which has its estimate from it."""
    quick = finish(quick_tuning(100), largest=37)
    whole = tuning(tuning_request(effective_batch_size=100, **LIMIT))
    assert whole.fingerprint == quick.fingerprint
    whole.warm_start_from(quick)
    assert whole.expectation_request() is None
    found = finish(whole, largest=37)
    assert (found.evidence.proof.fits, found.evidence.proof.stopped_by) == (37, "oom")


@pytest.mark.parametrize("fields", [{}, {"baseline": {"micro_batch_size": 4}}, {"objective": "fewest_steps"}])
@pytest.mark.parametrize(("batch", "largest"), [(100, 37), (100, 20), (80, 40), (80, 20), (64, 3)])
def test_a_quick_tuning_goes_on_from_its_recorded_probes(batch: int, fields: dict[str, Any], largest: int) -> None:
    """A restart makes the estimate again; also after plans of equal micro-batches, which look like probes of a size."""
    request = tuning_request(effective_batch_size=batch, quick=True, **LIMIT, **fields)
    recorded = finish(quick_tuning(batch, **fields), largest).evidence
    for count in range(1, len(recorded.probes) + 1):
        rebuilt = tuning(request)
        for result in recorded.probes[:count]:
            rebuilt.record(result)
        if rebuilt.begins_search:
            rebuilt.start_from_estimate(expected_line())
        found = finish(rebuilt, largest).evidence
        assert (found.probes, found.proof) == (recorded.probes, recorded.proof)


@pytest.mark.parametrize("quick", [True, False])
def test_a_quick_tuning_also_probes_its_baseline(*, quick: bool) -> None:
    """After its plan, or after the search where there is no estimate."""
    request = tuning_request(effective_batch_size=100, quick=True, baseline={"micro_batch_size": 4}, **LIMIT)
    course = tuning(request)
    if quick:
        course.start_from_estimate(expected_line())
    found = finish(course, largest=37)
    assert 4 in [probe.micro_batch_size for probe in found.evidence.probes]
    assert found.gain is not None


def test_a_quick_tuning_keeps_a_proof_that_its_warm_start_confirms() -> None:
    """One probe is enough to know the largest size, as in a whole tuning."""
    stored = finish(tuning(tuning_request(effective_batch_size=100, **LIMIT)), largest=37)
    course = tuning(tuning_request(effective_batch_size=100, quick=True, **LIMIT))
    course.warm_start_from(stored)
    found = finish(course, largest=37)
    assert (found.evidence.proof.fits, found.evidence.proof.stopped_by) == (37, "warm-start")


def test_what_a_quick_tuning_cannot_do_is_refused() -> None:
    """It compares no plans."""
    with pytest.raises(ValueError, match="`quick` runs one plan"):
        tuning_request(quick=True, objective="fastest")


def test_a_second_update_that_takes_far_more_does_not_end_sizes_one_by_one() -> None:
    """One update fits 101 samples, and two fit 5: fits of one update are dropped."""
    course = tuning(tuning_request(effective_batch_size=100))
    while (probe := course.next_probe()) is not None:
        course.record(answer(probe, 101 if probe.brackets else 5, brackets=probe.brackets))
        assert len(course.probes) < 40
    assert course.proof_of_search().fits == 5
