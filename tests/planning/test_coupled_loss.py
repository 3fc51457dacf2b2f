"""Tunings of losses that couple the samples of a batch: detected before any probe, exact undivided or refused."""

from typing import Any

import pytest

from batchwright.errors import TuningFailedError
from batchwright.planning.proofs.coupled_loss import coupling_request
from batchwright.planning.session import TuningSession
from batchwright.schemas.recommendation import CouplingCheck
from batchwright.schemas.results import DeviceInfo, Outcome
from tests.planning.test_session import GIB, answer, finish, tuning
from tests.support.factories import CPU, CUDA, mlp_spec, plan_of, probe_result, tuning_request

SEPARATE = CouplingCheck(verdict="separate", message="A sum.", samples=4, precision="fp64")
COUPLED = CouplingCheck(verdict="coupled", message="BatchNorm is at fault.", gradient_error=0.5)
UNKNOWN = CouplingCheck(verdict="not-compared", message="Out of memory.")


def checked_tuning(check: CouplingCheck, **changes: Any) -> TuningSession:
    """Build a tuning of 100 samples with a recorded check."""
    course = tuning(tuning_request(**changes))
    course.record(check)
    return course


def test_a_sum_over_samples_is_tuned_as_usual() -> None:
    """The evidence holds the check, and nothing is warned of."""
    found = finish(checked_tuning(SEPARATE), largest=37)
    assert plan_of(found).micro_batch_sizes == ((34, 33, 33),)
    assert found.evidence.coupling == SEPARATE
    assert found.warnings == ()


def test_a_coupled_loss_is_probed_undivided_alone() -> None:
    """The whole batch in one micro-batch is exact: one probe, a plan of one step, and a warning."""
    found = finish(checked_tuning(COUPLED), largest=100)
    assert [probe.micro_batch_size for probe in found.evidence.probes] == [100]
    assert plan_of(found).micro_batch_sizes == ((100,),)
    assert [plan.gradient_accumulation_steps for plan in found.alternatives] == [1]
    (warning,) = found.warnings
    assert warning.code == "coupled-loss"
    assert "BatchNorm is at fault. This plan is exact" in warning.message


@pytest.mark.parametrize("objective", ["largest", "fewest_steps", "fastest"])
def test_a_coupled_loss_that_does_not_fit_undivided_fails(objective: str) -> None:
    """After the one probe that could have made it exact, with the culprit and the remedy."""
    course = checked_tuning(COUPLED, objective=objective)
    words = r"BatchNorm is at fault\. 100 samples do not fit .*--allow-batch-coupling"
    with pytest.raises(TuningFailedError, match=words) as caught:
        finish(course, largest=99)
    assert caught.value.reason == "coupled-loss"
    assert [probe.micro_batch_size for probe in course.probes] == [100]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec": mlp_spec(parallelism={"world_size": 2})}, "on 2 ranks"),
        ({"max_micro_batch_size": 50}, "micro-batches of at most 50"),
        ({"granularity": 8}, "micro-batches of at most 96"),
    ],
)
def test_a_coupled_loss_fails_at_once_where_no_plan_is_exact(changes: dict[str, object], words: str) -> None:
    """Several ranks, or a bound below the batch: no probe could help."""
    with pytest.raises(TuningFailedError, match=words) as caught:
        checked_tuning(COUPLED, **changes)
    assert caught.value.reason == "coupled-loss"


def test_a_coupled_loss_that_is_allowed_is_tuned_as_usual() -> None:
    """With a warning that names what is at fault."""
    found = finish(checked_tuning(COUPLED, allow_batch_coupling=True), largest=37)
    assert plan_of(found).micro_batch_sizes == ((34, 33, 33),)
    assert [(advice.code, advice.message) for advice in found.warnings] == [("coupled-loss", "BatchNorm is at fault.")]


def test_a_loss_that_cannot_be_compared_is_tuned_as_usual() -> None:
    """A warning states that the loss was not compared."""
    found = finish(checked_tuning(UNKNOWN), largest=37)
    assert plan_of(found).micro_batch_sizes == ((34, 33, 33),)
    assert [advice.code for advice in found.warnings] == ["coupling-not-checked"]
    assert "Out of memory." in found.warnings[0].message


def test_a_lost_probe_of_the_whole_batch_is_repeated() -> None:
    """A loss is unrelated to memory."""
    course = checked_tuning(COUPLED)
    first = course.next_probe()
    assert first is not None
    course.record(probe_result(first.micro_batch_size, Outcome.LOST, None))
    again = course.next_probe()
    assert again is not None
    assert again.micro_batch_size == 100
    course.record(answer(again, largest=100))
    assert plan_of(finish(course, largest=100)).gradient_accumulation_steps == 1


def test_a_workloads_error_is_not_taken_for_coupling() -> None:
    """The probe of the whole batch fails: its own reason is reported."""
    course = checked_tuning(COUPLED)
    course.record(probe_result(100, Outcome.ERROR, None))
    with pytest.raises(TuningFailedError) as caught:
        finish(course, largest=100)
    assert caught.value.reason == "workload-error"


def test_one_sample_on_one_rank_needs_no_check() -> None:
    """There is nothing to accumulate; two ranks share an update."""
    assert tuning(tuning_request(effective_batch_size=1)).coupling_request() is None
    assert tuning(tuning_request(mlp_spec(parallelism={"world_size": 2}), 2)).coupling_request() is not None


def test_a_recorded_check_is_not_requested_again() -> None:
    """As of a virtual card, which computes no loss."""
    assert tuning(tuning_request()).coupling_request() is not None
    assert checked_tuning(UNKNOWN).coupling_request() is None


@pytest.mark.parametrize(
    ("device", "limit", "allowed"),
    [(CPU, 2**26, CPU.total_bytes // 4), (CPU, CPU.total_bytes // 2, CPU.total_bytes // 2), (CUDA, 8 * GIB, 8 * GIB)],
)
def test_the_check_has_memory_and_time_of_its_own(device: DeviceInfo, limit: int, allowed: int) -> None:
    """On a card that of the run; on the CPU a quarter of the host where a run has less. No longer than a probe."""
    request = tuning_request(probe_timeout_seconds=7.0)
    made = coupling_request(request, device, share=100, limit_bytes=limit)
    assert made is not None
    assert (made.limit_bytes, made.timeout_seconds, made.device) == (allowed, 7.0, device.id)


def test_allowing_coupling_changes_the_fingerprint() -> None:
    """It allows other plans; requests without it keep their fingerprints."""
    plain, allowed = tuning(tuning_request()), tuning(tuning_request(allow_batch_coupling=True))
    assert plain.fingerprint != allowed.fingerprint
    assert plain.request_fingerprint != allowed.request_fingerprint
