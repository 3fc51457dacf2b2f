"""Each sentence of the documentation of ``tune`` and ``estimate``, run once."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright import WorkloadSpec, estimate, tune
from batchwright.errors import (
    DeviceError,
    EstimateError,
    PlanError,
    SpecError,
    StorageError,
    TuningFailedError,
    VirtualGpuError,
    WorkloadError,
)
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.results import Outcome
from tests.support.factories import mlp_spec, python_spec
from tests.support.scarce import fill, small_disk

pytestmark = pytest.mark.usefixtures("tracing")
SPEC = mlp_spec()
MAPPING: dict[str, Any] = {
    "model": {
        "kind": "reference",
        "architecture": {"name": "mlp", "input_features": 32, "hidden_features": 32, "classes": 4},
    },
    "data": {"kind": "synthetic", "samples": 50},
}
"""The same as in a spec's file."""
MISBEHAVING = "tests.support.misbehaving:build"


def test_a_mapping_is_tuned_on_the_default_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """By real updates, and with the probes as they end on standard error."""
    found = tune(MAPPING, 4, device="cpu")

    assert found.request.spec == SPEC
    assert found.plan is not None
    assert sum(map(sum, found.plan.micro_batch_sizes)) == 4
    assert found.headroom is not None
    assert found.headroom.limit_bytes == open_device("cpu").total_bytes() // 2
    fits = [probe for probe in found.evidence.probes if probe.outcome is Outcome.FIT]
    assert max(probe.micro_batch_size for probe in fits) == found.largest_micro_batch_size == 4
    shown = capfd.readouterr()
    assert "probe 4" in shown.err
    assert shown.out == ""


def test_a_spec_is_tuned_within_bytes_for_an_objective(capfd: pytest.CaptureFixture[str]) -> None:
    """Without progress nothing is shown."""
    found = tune(SPEC, 2, memory_limit=2**30, progress=False, device="cpu", objective="fastest")

    assert isinstance(found.request.spec, WorkloadSpec)
    assert found.headroom is not None
    assert found.headroom.limit_bytes == 2**30
    assert found.request.objective == "fastest"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("spec", "options", "kind", "words"),
    [
        (SPEC, {"objective": "cheapest"}, SpecError, "objective"),
        (SPEC, {"device": "cuda:99"}, DeviceError, "no device cuda:99"),
        (mlp_spec(parallelism={"world_size": 4}), {}, PlanError, "2 of 4 ranks without a sample"),
        ("none.yaml", {}, SpecError, "none.yaml: cannot be read: No such file or directory"),
    ],
    ids=["argument", "device", "plan", "file"],
)
def test_wrong_arguments_of_a_tuning_end_it_before_any_probe(
    spec: WorkloadSpec | str,
    options: dict[str, Any],
    kind: type[Exception],
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Which would be shown."""
    with pytest.raises(kind, match=words):
        tune(spec, 2, **{"device": "cpu", **options})
    assert "probe" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (python_spec(MISBEHAVING, way="raises"), "labels must be below 10"),
        (python_spec("tests.support.coupled:centred"), "samples are coupled"),
    ],
    ids=["another reason than the size", "coupled samples"],
)
def test_a_tuning_fails_for_its_workload(spec: WorkloadSpec, words: str) -> None:
    """A probe fails for another reason than its size, or the plan would divide a loss that couples samples."""
    with pytest.raises(TuningFailedError, match=words):
        tune(spec, 4, device="cpu", memory_limit="1GiB", progress=False, max_micro_batch_size=2)


def test_a_full_disk_ends_a_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files is named."""
    with small_disk(tmp_path / "disk", 64 * 1024) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        fill(disk)
        with pytest.raises(StorageError, match="disk is full"):
            tune(SPEC, 4, device="cpu", progress=False)


def test_gpus_that_are_not_at_hand_are_estimated(tmp_path: Path) -> None:
    """By name and by memory size, with the plan and the size that was asked for; the spec is read from its file."""
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(MAPPING))
    found = estimate(path, ["A100-40GB", "16GiB"], effective_batch_size=64, micro_batch_size=8)

    assert found.engine == "trace"
    assert [gpu.gpu for gpu in found.gpus] == ["A100-40GB", "16GiB"]
    for gpu in found.gpus:
        assert gpu.plan is not None
        assert sum(map(sum, gpu.plan.micro_batch_sizes)) == 64
        assert gpu.peak is not None


@pytest.mark.parametrize(
    ("spec", "gpu", "kind", "words"),
    [
        (SPEC, "A100:40GiB", EstimateError, "similar names are A100-40GB"),
        (python_spec(MISBEHAVING, way="raises"), "T4", EstimateError, "labels must be below 10"),
        (python_spec("builtins:dict"), "T4", WorkloadError, "returned a dict without build_model"),
        (python_spec(MISBEHAVING), "T4", SpecError, "missing a required argument"),
    ],
    ids=["unknown GPU", "not traceable", "contract", "spec"],
)
def test_what_cannot_be_estimated_is_named(spec: WorkloadSpec, gpu: str, kind: type[Exception], words: str) -> None:
    """With the errors of the documentation."""
    with pytest.raises(kind, match=words):
        estimate(spec, [gpu])


@pytest.mark.skipif(torch.version.cuda is not None, reason="virtual cards run with torch's CUDA build")
def test_virtual_cards_need_the_cuda_build() -> None:
    """The error says what is missing."""
    with pytest.raises(VirtualGpuError, match="torch's CUDA build"):
        estimate(SPEC, ["T4"], engine="virtual", timeout_seconds=60.0)
