"""Expected peaks, compared with the peaks that probes measure."""

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


def expectation_request(spec: WorkloadSpec, **changes: object) -> ExpectationRequest:
    """Request expected peaks for an effective batch of 256 samples in at most 512 MiB."""
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
def test_a_probe_measures_the_expected_peak(
    runner: ProbeSupervisor, changes: dict[str, object], size: int, kept_mib: int
) -> None:
    """The error is at most 5 % at a size far from the traced ones, apart from the fixed memory of libraries.

    Where a CPU has instructions for bf16, oneDNN keeps the code that it generates for each shape: 20 MB here.
    """
    spec = WorkloadSpec.model_validate({**GPT.model_dump(), **changes})
    expected = runner.expect(expectation_request(spec))
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
    """The curve has enough points to find where it reaches the limit, and ends soon after."""
    expected = runner.expect(expectation_request(GPT, samples_per_window=2**20, largest_micro_batch=2**20))
    assert expected is not None
    used = [point.used_bytes for point in expected.points]
    assert used == sorted(used)
    assert used[-1] > 512 * MIB
    assert expected.points[-1].micro_batch_size < 2**20


def test_a_workload_that_cannot_be_traced_is_probed_without_an_estimate(runner: ProbeSupervisor) -> None:
    """A failed estimate is no error: the search starts without it."""
    spec = mlp_spec(model={"kind": "python", "target": "no_such_package:factory"})
    assert runner.expect(expectation_request(spec)) is None


def test_peaks_of_a_gpu_are_expected_without_a_gpu(runner: ProbeSupervisor) -> None:
    """The peak of an update, traced in a process that sees no GPU, exceeds the bytes of the model."""
    expected = runner.expect(expectation_request(GPT, compute_capability=(8, 0)))
    assert isinstance(expected, ExpectedPeaks)
    parameters = 4 * (512 * 128 + 128 * 128 + 3 * 12 * 128 * 128)
    assert expected.resident_bytes is not None
    assert 3 * parameters < expected.resident_bytes < 4 * parameters + 32 * MIB
    assert expected.used_bytes(200) > expected.used_bytes(100) > expected.resident_bytes


def test_expected_peaks_follow_the_allocator_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take more memory if sizes are rounded up to half powers of two."""
    request = expectation_request(GPT, compute_capability=(8, 0))
    plain = expect(request)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:2")
    rounded = expect(request)
    assert plain.resident_bytes is not None
    assert rounded.resident_bytes is not None
    assert rounded.resident_bytes > plain.resident_bytes
    assert rounded.used_bytes(200) > plain.used_bytes(200)


def test_an_expectation_can_be_cancelled() -> None:
    """The tracing process is gone when the call returns."""
    with pytest.raises(EstimateCancelledError):
        expect(expectation_request(GPT, compute_capability=(8, 0)), lambda: True)


def test_a_workload_that_a_card_cannot_run_is_an_error() -> None:
    """The invalid field is named, as when the workload is built."""
    spec = mlp_spec(model={"kind": "python", "target": "no_such_package:factory"})
    with pytest.raises(SpecError, match=r"model\.target: no module `no_such_package`"):
        expect(expectation_request(spec, compute_capability=(8, 0)))
