"""What probes are expected to measure, against what they do measure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.factories import CPU, gpt_spec, mlp_spec
from tuner.errors import EstimateCancelledError, SpecError
from tuner.estimation.client import expect
from tuner.probing.supervisor import ProbeSupervisor
from tuner.schemas.requests import ExpectationRequest, ProbeRequest
from tuner.schemas.results import ExpectedPeaks
from tuner.schemas.workload import WorkloadSpec

MIB = 1024**2


@pytest.fixture(scope="module")
def runner(forked: None) -> Iterator[ProbeSupervisor]:
    """A supervisor of the CPU."""
    del forked
    with ProbeSupervisor(CPU) as found:
        yield found


def asked(spec: WorkloadSpec, **changes: object) -> ExpectationRequest:
    """For an effective batch of 256 samples in at most 512 MiB."""
    fields = {"samples_per_window": 256, "largest_micro_batch": 256, "limit_bytes": 512 * MIB, **changes}
    return ExpectationRequest.model_validate({"spec": spec, **fields})


GPT = gpt_spec(
    model={
        "kind": "reference",
        "architecture": {"name": "gpt", "layers": 3, "heads": 4, "width": 128, "vocabulary_size": 512},
    },
    batch={"sequence_length": 128},
)

pytestmark = pytest.mark.usefixtures("forked")


@pytest.mark.parametrize(
    ("changes", "size", "kept_mib"),
    [
        ({}, 48, 8),
        ({"activation_checkpointing": True}, 48, 8),
        ({"precision": "bf16-mixed"}, 24, 32),  # a smaller size, as bf16 takes a CPU long
    ],
    ids=str,
)
def test_a_probe_measures_what_was_expected(
    runner: ProbeSupervisor, changes: dict[str, object], size: int, kept_mib: int
) -> None:
    """Within 5 % at a size far from the traced ones, but for what libraries keep whatever the size.

    Where a CPU has instructions for bf16, oneDNN keeps the code that it generates for each shape: 20 MB here.
    """
    spec = WorkloadSpec.model_validate({**GPT.model_dump(), **changes})
    expected = runner.expect(asked(spec))
    assert expected is not None
    measured = runner.run(
        ProbeRequest(spec=spec, micro_batch_size=size, samples_per_window=256, device="cpu", limit_bytes=2**31)
    )
    assert measured.used_bytes is not None
    assert measured.resident_bytes is not None
    assert expected.resident_bytes is not None
    kept = kept_mib * MIB
    assert expected.used_bytes(size) == pytest.approx(measured.used_bytes, rel=0.05, abs=kept)
    assert expected.resident_bytes == pytest.approx(measured.resident_bytes, abs=kept)


def test_the_curve_rises_and_ends_far_above_the_limit(runner: ProbeSupervisor) -> None:
    """Its points are enough to find where it meets the limit, and no more."""
    expected = runner.expect(asked(GPT, samples_per_window=2**20, largest_micro_batch=2**20))
    assert expected is not None
    used = [point.used_bytes for point in expected.points]
    assert used == sorted(used)
    assert used[-1] > 512 * MIB
    assert expected.points[-1].micro_batch_size < 2**20


def test_a_workload_that_cannot_be_traced_is_probed_without_an_estimate(runner: ProbeSupervisor) -> None:
    """No estimate is no error: the search does without."""
    spec = mlp_spec(model={"kind": "python", "target": "no_such_package:factory"})
    assert runner.expect(asked(spec)) is None


def test_a_card_is_expected_without_one(runner: ProbeSupervisor) -> None:
    """Traced in a process that sees no card: bytes that tensors hold, where an update takes more than its model."""
    expected = runner.expect(asked(GPT, compute_capability=(8, 0)))
    assert isinstance(expected, ExpectedPeaks)
    parameters = 4 * (512 * 128 + 128 * 128 + 3 * 12 * 128 * 128)
    assert expected.resident_bytes is not None
    assert 3 * parameters < expected.resident_bytes < 4 * parameters + 32 * MIB
    assert expected.used_bytes(200) > expected.used_bytes(100) > expected.resident_bytes


def test_a_card_is_expected_as_its_allocator_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks are rounded up to half powers of two, all of them take more."""
    request = asked(GPT, compute_capability=(8, 0))
    plain = expect(request)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:2")
    rounded = expect(request)
    assert plain.resident_bytes is not None
    assert rounded.resident_bytes is not None
    assert rounded.resident_bytes > plain.resident_bytes
    assert rounded.used_bytes(200) > plain.used_bytes(200)


def test_an_expectation_is_given_up_on_request() -> None:
    """The process that traces is gone when the call returns."""
    with pytest.raises(EstimateCancelledError):
        expect(asked(GPT, compute_capability=(8, 0)), lambda: True)


def test_a_workload_that_a_card_cannot_run_is_an_error() -> None:
    """The field at fault is named, as where the workload is built."""
    spec = mlp_spec(model={"kind": "python", "target": "no_such_package:factory"})
    with pytest.raises(SpecError, match=r"model\.target: no module `no_such_package`"):
        expect(asked(spec, compute_capability=(8, 0)))
