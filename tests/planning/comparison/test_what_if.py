"""What-ifs: the considered changes, the calibration of estimates, and their part in a recommendation."""

import errno
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from batchwright.cli.display import recommendation_panel
from batchwright.driving.loop import drive
from batchwright.errors import ProbeCancelledError, ProbeError, StorageError
from batchwright.hardware.inventory import find_device
from batchwright.planning.accumulation import probe_window
from batchwright.planning.comparison.what_if import Calibration, changed, choices, format_changes
from batchwright.planning.session import TuningSession
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import DeviceInfo, ExpectedPeak, ExpectedPeaks, Outcome, Phase, ProbeResult
from batchwright.schemas.workload import WorkloadSpec
from tests.support.factories import CPU, CUDA, gpt_spec, probe_result, tuning_request
from tests.support.oracles import OracleRunner

MIB = 1024**2
RESIDENT, SURPLUS, STEEPER = 100 * MIB, 30 * MIB, 1.1
"""Of the scripted workload: what stays between updates, what no estimate sees of it, and how much steeper it is."""

Expect = Callable[[ExpectationRequest], ExpectedPeaks | None]


def slope(spec: WorkloadSpec) -> int:
    """Estimated bytes of a sample: mixed precision halves them, checkpointing leaves a quarter."""
    halved = spec.precision != "fp32"
    return 8 * MIB // (2 if halved else 1) // (4 if spec.activation_checkpointing else 1)


def estimate(request: ExpectationRequest) -> ExpectedPeaks | None:
    """The estimate of the scripted workload."""
    points = [ExpectedPeak(micro_batch_size=item, used_bytes=RESIDENT + item * slope(request.spec)) for item in (1, 64)]
    return ExpectedPeaks(points=tuple(points), resident_bytes=RESIDENT)


def true_peak(spec: WorkloadSpec, size: int) -> int:
    """The true peak of the scripted workload."""
    return int(RESIDENT + SURPLUS + STEEPER * size * slope(spec))


def run(request: ProbeRequest) -> ProbeResult:
    """Probe the scripted workload, with several micro-batches in an update, as in the estimate."""
    used, limit = true_peak(request.workload, request.micro_batch_size), request.limit_bytes or 0
    outcome = Outcome.FIT if used <= limit else Outcome.OOM
    phase = Phase.DONE if used <= limit else Phase.MEASURE
    return probe_result(
        request.micro_batch_size,
        outcome,
        min(used, limit),
        phase=phase,
        resident_bytes=RESIDENT + SURPLUS,
        micro_batch_sizes=probe_window(request),
    )


def estimate_what_ifs(course: TuningSession, expect: Expect) -> None:
    """Drive a tuning whose probes have all run: only the estimates of its what-ifs are left."""
    drive(course, OracleRunner(run, expect))


def tuned(request: TuningRequest, expect: Expect = estimate, device: DeviceInfo = CPU) -> Recommendation:
    """Drive a tuning of the scripted workload to its end."""
    course = TuningSession(request, device, environment={}, versions={})
    while (probe := course.next_probe()) is not None:
        course.record(run(probe))
    estimate_what_ifs(course, expect)
    return course.recommendation(identifier="rec_1", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)


def request_under(limit_mib: int, **changes: Any) -> TuningRequest:
    """Build a request for what-ifs under a limit, with no margin."""
    fields = {"effective_batch_size": 1000, "what_if": True, "memory_margin": 0.0, **changes}
    return tuning_request(fields.pop("spec", gpt_spec()), memory_limit_bytes=limit_mib * MIB, **fields)


# --- which changes ---


def fields(spec: WorkloadSpec, device: DeviceInfo) -> list[tuple[str, object]]:
    """The changed fields."""
    return [change for single in choices(spec, device) for change in single]


def test_on_the_cpu_precision_and_checkpointing_are_considered() -> None:
    """The CPU's default optimizer is the loop, and its gradients gather in place: nothing to gain there."""
    assert fields(gpt_spec(), CPU) == [("precision", "bf16-mixed"), ("activation_checkpointing", True)]


def test_on_a_card_the_optimizer_and_gathering_are_considered_too() -> None:
    """Their defaults there take temporaries."""
    found = fields(gpt_spec(precision="bf16-mixed", activation_checkpointing=True), CUDA)
    assert found == [("optimizer.implementation", "fused"), ("gradient_gathering", "in-place")]


@pytest.mark.parametrize(("capability", "precision"), [("7.5", "fp16-mixed"), ("8.0", "bf16-mixed")])
def test_cards_that_emulate_bf16_are_offered_fp16(capability: str, precision: str) -> None:
    """A T4 has no units for bf16, an A100 has."""
    card = CUDA.model_copy(update={"compute_capability": capability})
    assert ("precision", precision) in fields(gpt_spec(), card)


def test_a_spec_that_has_chosen_everything_is_left_alone() -> None:
    """Without a possible change, nothing is estimated."""
    spec = gpt_spec(precision="bf16-mixed", activation_checkpointing=True)
    assert choices(spec, CPU) == ()
    assert tuned(request_under(400, spec=spec), expect=refuse).what_ifs == ()


def refuse(request: ExpectationRequest) -> ExpectedPeaks | None:
    """Fail if an estimate is requested."""
    raise AssertionError(request)


def test_a_changed_spec_differs_in_what_was_changed() -> None:
    """Dotted paths reach into parts of a spec."""
    spec = changed(gpt_spec(), (("optimizer.implementation", "fused"), ("activation_checkpointing", True)))
    assert spec == gpt_spec(optimizer={"implementation": "fused"}, activation_checkpointing=True)
    words = format_changes({"precision": "bf16-mixed", "activation_checkpointing": True})
    assert words == "precision: bf16-mixed + activation_checkpointing: true"


# --- bending an estimate ---


def line(resident: int | None, low: int, high: int) -> ExpectedPeaks:
    """An estimate with a straight curve through sizes 1 and 11."""
    points = (ExpectedPeak(micro_batch_size=1, used_bytes=low), ExpectedPeak(micro_batch_size=11, used_bytes=high))
    return ExpectedPeaks(points=points, resident_bytes=resident)


def test_the_calibration_equals_the_hand_calculation() -> None:
    """The smallest fit holds 50 above the estimate's 100; above that the largest took 360 where 300 were expected."""
    probes = [probe_result(2, used_bytes=999, resident_bytes=150), probe_result(11, used_bytes=510, resident_bytes=190)]
    calibration = Calibration.of(line(100, 200, 400), probes)
    assert calibration == Calibration(surplus_bytes=50.0, ratio=1.2, measured=True)
    assert calibration.curve(line(60, 80, 180))(11) == pytest.approx(60 + 50 + 1.2 * 120)


@pytest.mark.parametrize("used", [101, 400, 5000])
@pytest.mark.parametrize("resident", [None, 100])
@pytest.mark.parametrize("seen", [None, 90])
def test_the_calibrated_curve_meets_the_largest_fit(used: int, resident: int | None, seen: int | None) -> None:
    """Also with an implausible ratio, or without a measurement between updates."""
    expected = line(resident, 200, 400)
    calibration = Calibration.of(expected, [probe_result(11, used_bytes=used, resident_bytes=seen)])
    assert calibration.curve(expected)(11) == pytest.approx(used)
    assert 0.5 <= calibration.ratio <= 2.0


def test_no_ratio_is_computed_from_next_to_nothing() -> None:
    """Where nearly all memory stays between updates, the rest gives no ratio."""
    probe = probe_result(11, used_bytes=410, resident_bytes=396)
    assert Calibration.of(line(396, 398, 400), [probe]) == Calibration(surplus_bytes=10.0, ratio=1.0, measured=True)


def test_without_a_fit_only_the_surplus_is_known() -> None:
    """A probe that ran out of memory in its second update has shown what stays between updates."""
    failed = probe_result(1, Outcome.OOM, 300, resident_bytes=150)
    assert Calibration.of(line(100, 200, 400), [failed]) == Calibration(surplus_bytes=50.0, ratio=1.0, measured=False)
    assert Calibration.of(line(100, 200, 400), [probe_result(1, Outcome.OOM, None)]) == Calibration()


def test_updates_of_one_micro_batch_calibrate_nothing() -> None:
    """They hold no gradients while they run, as the estimate's updates do."""
    assert Calibration.of(line(100, 200, 400), [probe_result(1, used_bytes=150, accumulates=False)]) == Calibration()


# --- what would fit ---


def largest(spec: WorkloadSpec, limit_mib: int) -> int:
    """The truth about the scripted workload."""
    return next(size for size in range(1, 1000) if true_peak(spec, size + 1) > limit_mib * MIB)


def test_what_is_expected_to_fit_is_what_would() -> None:
    """The estimate is 30 MiB and 10 % off; calibrated, it gives the largest size of each change and of all combined."""
    found = tuned(request_under(500))
    assert found.largest_micro_batch_size == largest(gpt_spec(), 500) == 42
    both: dict[str, Any] = {"precision": "bf16-mixed", "activation_checkpointing": True}
    wanted: list[dict[str, Any]] = [both, {"activation_checkpointing": True}, {"precision": "bf16-mixed"}]
    assert [item.changes for item in found.what_ifs] == wanted
    for what_if in found.what_ifs:
        spec = gpt_spec(**what_if.changes)
        assert what_if.largest_micro_batch_size == largest(spec, 500)
        assert what_if.peak_bytes == pytest.approx(true_peak(spec, what_if.largest_micro_batch_size), rel=1e-6)
        assert what_if.plan is not None
        assert what_if.plan.gradient_accumulation_steps == -(-1000 // what_if.largest_micro_batch_size)
        assert what_if.surely_fits < what_if.largest_micro_batch_size < what_if.may_fit
        assert (what_if.measured, what_if.source) == (False, "estimated")


@settings(deadline=None)
@given(limit_mib=st.integers(140, 4000), granularity=st.sampled_from([1, 8, 100]))
def test_the_sizes_of_a_what_if_are_ordered_and_can_be_planned(limit_mib: int, granularity: int) -> None:
    """Surely is at most likely is at most perhaps, all of the sizes that were searched, and more than was found."""
    found = tuned(request_under(limit_mib, granularity=granularity))
    for item in found.what_ifs:
        assert item.surely_fits <= item.largest_micro_batch_size <= item.may_fit <= 1000
        assert item.largest_micro_batch_size % granularity == 0
        assert item.largest_micro_batch_size > (found.largest_micro_batch_size or -1)


def test_a_limit_that_is_effectively_lower_is_seen() -> None:
    """Fragmentation that takes a tenth of the memory with the requested spec also counts for a changed spec."""

    def fragmented(request: ProbeRequest) -> ProbeResult:
        return run(request.model_copy(update={"limit_bytes": 9 * (request.limit_bytes or 0) // 10}))

    course = TuningSession(request_under(500), CPU, environment={}, versions={})
    while (probe := course.next_probe()) is not None:
        course.record(fragmented(probe))
    estimate_what_ifs(course, estimate)
    found = course.recommendation(identifier="rec_1", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
    sizes = {tuple(item.changes): item.largest_micro_batch_size for item in found.what_ifs}
    truth = largest(gpt_spec(precision="bf16-mixed"), 450)
    assert truth <= sizes["precision",] <= truth + 2  # between the fit and the failure only the line is known


def test_a_change_that_does_not_help_is_not_listed() -> None:
    """The change is not part of the combination either."""

    def precision_does_not_help(request: ExpectationRequest) -> ExpectedPeaks | None:
        return estimate(request.model_copy(update={"spec": request.spec.model_copy(update={"precision": "fp32"})}))

    found = tuned(request_under(500), expect=precision_does_not_help)
    assert [item.changes for item in found.what_ifs] == [{"activation_checkpointing": True}]


def test_a_change_that_fits_no_larger_micro_batch_is_not_listed() -> None:
    """It takes less memory, but not by as much as the next size on the grid takes."""
    request = request_under(500, granularity=20, spec=gpt_spec(activation_checkpointing=True))
    found = tuned(request, expect=saving_little)
    assert (found.largest_micro_batch_size, found.what_ifs) == (160, ())


def saving_little(request: ExpectationRequest) -> ExpectedPeaks | None:
    """A mixed precision that takes 4 % less than fp32 does."""
    whole = estimate(request.model_copy(update={"spec": request.spec.model_copy(update={"precision": "fp32"})}))
    if whole is None or request.spec.precision == "fp32":
        return whole
    points = tuple(point.model_copy(update={"used_bytes": point.used_bytes * 96 // 100}) for point in whole.points)
    return whole.model_copy(update={"points": points})


@pytest.mark.parametrize("changes", [{"what_if": False}, {"max_micro_batch_size": 8}])
def test_nothing_is_estimated_where_memory_is_not_the_limit(changes: dict[str, Any]) -> None:
    """What-ifs were not requested, or a bound, not memory, stopped the search."""
    assert tuned(request_under(500, **changes), expect=refuse).what_ifs == ()


def test_an_estimate_that_seeded_the_search_is_not_repeated() -> None:
    """Only the two changes and their combination are requested."""
    course = TuningSession(request_under(500), CPU, environment={}, versions={})
    request = course.expectation_request()
    assert request is not None
    course.start_from_estimate(estimate(request))
    while (probe := course.next_probe()) is not None:
        course.record(run(probe))
    specs: list[WorkloadSpec] = []

    def remember(request: ExpectationRequest) -> ExpectedPeaks | None:
        specs.append(request.spec)
        return estimate(request)

    estimate_what_ifs(course, remember)
    assert [(item.precision, item.activation_checkpointing) for item in specs] == [
        ("bf16-mixed", False),
        ("fp32", True),
        ("bf16-mixed", True),
    ]


# --- what cannot be estimated ---


def fails(request: ExpectationRequest) -> ExpectedPeaks | None:
    """An estimator whose machinery breaks."""
    raise ProbeError(f"the fork server did not start ({request.limit_bytes})")


def finds_no_space(request: ExpectationRequest) -> ExpectedPeaks | None:
    """An estimator on a full disk."""
    raise StorageError(f"the disk is full ({request.limit_bytes})", errno.ENOSPC, 1)


@pytest.mark.parametrize("expect", [lambda _: None, fails, finds_no_space])
def test_a_workload_that_cannot_be_estimated_leaves_a_warning(expect: Expect) -> None:
    """The tuning still has its recommendation."""
    found = tuned(request_under(500), expect=expect)
    assert (found.largest_micro_batch_size, found.what_ifs) == (42, ())
    assert [warning.code for warning in found.warnings] == ["what-if-not-estimated"]


def test_one_change_that_cannot_be_estimated_leaves_the_others() -> None:
    """The warning names it."""

    def no_mixed_precision(request: ExpectationRequest) -> ExpectedPeaks | None:
        return estimate(request) if request.spec.precision == "fp32" else None

    found = tuned(request_under(500), expect=no_mixed_precision)
    assert [item.changes for item in found.what_ifs] == [{"activation_checkpointing": True}]
    assert "precision: bf16-mixed" in found.warnings[0].message


def test_a_cancelled_estimate_cancels_the_tuning() -> None:
    """The remaining estimates are skipped."""

    def cancelled(request: ExpectationRequest) -> ExpectedPeaks | None:
        raise ProbeCancelledError(str(request.limit_bytes))

    with pytest.raises(ProbeCancelledError):
        tuned(request_under(500), expect=cancelled)


# --- where nothing fits ---


def test_where_nothing_fits_the_reason_names_what_ifs() -> None:
    """Both changes combined; the failed probe has shown the surplus, but not the slope of the curve."""
    found = tuned(request_under(134))
    assert not found.feasible
    assert found.what_ifs[0].largest_micro_batch_size == 4
    wanted = "precision: bf16-mixed + activation_checkpointing: true (estimate: a micro-batch of 4 fits)"
    assert wanted in (found.infeasible_reason or "")


def test_where_no_change_suffices_the_reason_names_the_missing_memory() -> None:
    """The change with the smallest peak is named, with that peak."""
    found = tuned(request_under(120))
    assert [item.largest_micro_batch_size for item in found.what_ifs] == [0, 0, 0]
    assert [item.plan for item in found.what_ifs] == [None, None, None]
    wanted = "precision: bf16-mixed + activation_checkpointing: true, with some of the following (alone it would"
    assert wanted in (found.infeasible_reason or "")


def test_a_remedy_that_was_found_to_be_none_is_not_offered() -> None:
    """Without an estimate the reason offers both changes."""

    def precision_does_not_help(request: ExpectationRequest) -> ExpectedPeaks | None:
        return estimate(request.model_copy(update={"spec": request.spec.model_copy(update={"precision": "fp32"})}))

    reasons = [
        tuned(request_under(120), expect=item).infeasible_reason or ""
        for item in (precision_does_not_help, lambda _: None)
    ]
    assert ["bf16-mixed" in reason for reason in reasons] == [False, True]
    assert ["activation_checkpointing: true" in reason for reason in reasons] == [True, True]


# --- the request, the display ---


def test_requesting_what_ifs_changes_the_request_fingerprint() -> None:
    """A stored recommendation without what-ifs is not reused."""
    course = [
        TuningSession(request_under(500, what_if=item), CPU, environment={}, versions={}) for item in (False, True)
    ]
    assert course[0].fingerprint != course[1].fingerprint


def test_what_ifs_are_shown_as_estimated() -> None:
    """The panel has each change on a line of its own, even on a narrow terminal."""
    found = tuned(request_under(500))
    console = Console(width=80)
    with console.capture() as captured:
        console.print(recommendation_panel(found))
    size = found.what_ifs[0].largest_micro_batch_size
    for words in ("estimated, not run", "bf16-mixed", "+ activation checkpointing", f"~{size}"):
        assert words in captured.get()


# --- against real tunings ---


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.usefixtures("forked")
def test_a_what_if_agrees_with_a_tuning_of_the_changed_spec() -> None:
    """With activation checkpointing a GPT fits several times as much; the estimate is within 15 % of the truth."""
    architecture = {"name": "gpt", "layers": 4, "heads": 4, "width": 64, "vocabulary_size": 256}
    model = {"kind": "reference", "architecture": architecture}
    plain = gpt_spec(model=model, batch={"sequence_length": 64})
    with ProbeSupervisor(find_device("cpu")) as supervisor:
        found = really_tuned(supervisor, plain)
        truth = really_tuned(supervisor, plain.model_copy(update={"activation_checkpointing": True}), what_if=False)
    what_if = next(item for item in found.what_ifs if item.changes == {"activation_checkpointing": True})
    assert truth.largest_micro_batch_size is not None
    assert found.largest_micro_batch_size is not None
    assert what_if.largest_micro_batch_size > 1.5 * found.largest_micro_batch_size
    assert what_if.largest_micro_batch_size == pytest.approx(truth.largest_micro_batch_size, rel=0.15)


def really_tuned(supervisor: ProbeSupervisor, spec: WorkloadSpec, *, what_if: bool = True) -> Recommendation:
    """The answer of real probes under a small budget; no mixed precision is estimated, which takes time."""
    request = tuning_request(spec, 256, memory_limit_bytes=64 * MIB, what_if=what_if)
    course = TuningSession(request, supervisor.device, environment=supervisor.environment(), versions={})
    expectation = course.expectation_request()
    assert expectation is not None
    course.start_from_estimate(supervisor.expect(expectation))
    while (probe := course.next_probe()) is not None:
        course.record(supervisor.run(probe))
    estimate_what_ifs(course, lambda request: supervisor.expect(request) if request.spec.precision == "fp32" else None)
    return course.recommendation(identifier="rec_1", created_at=datetime(2026, 1, 1, tzinfo=UTC), total_seconds=1.0)
