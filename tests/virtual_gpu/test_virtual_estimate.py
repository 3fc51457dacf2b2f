"""`estimate --engine virtual`, and both engines side by side. Everything here is of virtual cards."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from batchwright.driving.virtual_estimate import estimate_on_virtual_cards
from batchwright.schemas.estimates import Estimate, EstimateRequest, Verdict
from batchwright.schemas.workload import WorkloadSpec
from tests.support.factories import python_spec, transformers_spec
from tests.support.paths import ROOT
from tests.virtual_gpu.conftest import StartHost

pytestmark = pytest.mark.virtual_gpu

GIB = 1024**3
_TIMEOUT_SECONDS = 400.0
GPT2 = transformers_spec(
    "causal-lm", {"model_type": "gpt2", "n_layer": 4}, batch={"sequence_length": 1024}, precision="bf16-mixed"
)
"""A third of the GPT-2 of docs/estimate.md, which is built in a third of the time."""
COMPARED = (
    "GPT-2, bf16-mixed",
    "GPT-2 in 6 + 5 + 5",
    "Llama, bf16-mixed",
    "GPT-2 in one micro-batch",
    "BERT, Adam in a loop, clipped",
)


def estimated(folder: Path, spec: WorkloadSpec, *options: str, status: int = 0) -> Estimate:
    """The answer of the command on this host, which has no card."""
    path = folder / "spec.json"
    path.write_text(spec.model_dump_json())
    ended = subprocess.run(
        [sys.executable, "-m", "batchwright", "estimate", str(path), "--engine", "virtual", "--json", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_ALLOC_CONF": "max_split_size_mb:32"},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_SECONDS,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return Estimate.model_validate_json(ended.stdout)


def test_the_virtual_engine_finds_what_a_tuning_on_the_card_finds(tmp_path: Path, start_host: StartHost) -> None:
    """Size, plan and peaks are those of `tune` on the same virtual card, whatever allocator settings the user has."""
    found = estimated(tmp_path, GPT2, "--gpu", "T4", "--effective-batch-size", "64")
    (card,) = found.gpus
    tuned = start_host("T4").tuned(GPT2, 64)
    assert (found.engine, found.measured, found.decisions) == ("virtual", False, "cuda")
    assert (card.largest_micro_batch_size, card.plan) == (tuned.largest_micro_batch_size, tuned.plan)
    assert tuned.headroom is not None
    assert card.peak is not None
    assert card.peak.verdict is card.feasible is Verdict.FITS
    assert (card.peak.allocated_bytes, card.peak.reserved_bytes) == (
        tuned.headroom.allocated_bytes,
        tuned.headroom.reserved_bytes,
    )
    assert card.peak.device_bytes.expected == tuned.headroom.peak_bytes
    assert card.peak.device_bytes.expected <= card.usable_bytes
    assert card.probes >= 2  # a fit and an OOM, whatever the load leaves of the estimate that leads the search
    assert found.parameters == next(it.model.parameters for it in tuned.evidence.probes if it.model is not None)
    assert "not measured" in found.notes[0]


def test_a_size_that_does_not_fit_runs_on_a_larger_card(tmp_path: Path) -> None:
    """Exit code 3, with the memory that the size takes where there is enough; no effective batch is needed."""
    options = ("--gpu", "T4", "--micro-batch-size", "64", "--allocator", "expandable-segments")
    (card,) = estimated(tmp_path, GPT2, *options, status=3).gpus
    assert card.feasible is Verdict.FITS
    assert card.peak is not None
    assert (card.peak.micro_batch_size, card.peak.accumulates) == (64, True)
    assert card.peak.verdict is Verdict.DOES_NOT_FIT
    assert card.peak.allocated_bytes > card.usable_bytes
    assert card.peak.reserved_bytes < 1.1 * card.peak.allocated_bytes  # as segments grow by mapping
    assert (card.plan, card.surely_fits, card.may_fit) == (None, None, None)


def test_a_compiled_model_runs_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled, and fused ones keep fewer activations."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    model = {"model_type": "gpt2", "n_layer": 1, "n_embd": 128, "n_head": 4}
    spec = transformers_spec("causal-lm", model, batch={"sequence_length": 256})
    allocated = []
    for changed in (spec, spec.model_copy(update={"compile": True})):
        (card,) = estimated(tmp_path, changed, "--gpu", "A10G", "--effective-batch-size", "16").gpus
        assert card.peak is not None
        allocated.append(card.peak.allocated_bytes)
    uncompiled, compiled = allocated
    assert compiled < uncompiled
    assert list(tmp_path.rglob("*.cubin"))


def test_a_card_on_which_the_workload_fails_has_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other cards have their estimates."""
    monkeypatch.chdir(ROOT)
    spec = python_spec("tests.support.misbehaving:build", way="needs-compute-capability", argument="8.0")
    request = EstimateRequest(spec=spec, gpus=("T4", "A10G"), effective_batch_size=4)
    steps: list[str] = []
    old, new = estimate_on_virtual_cards(request, steps.append).gpus
    assert (old.feasible, old.peak, old.largest_micro_batch_size) == (Verdict.UNCERTAIN, None, 0)
    assert "cannot be run on a virtual card for this GPU" in old.notes[-1]
    assert "needs compute capability 8.0" in old.notes[-1]
    assert (new.feasible, new.largest_micro_batch_size) == (Verdict.FITS, 4)
    assert "running updates at micro-batch 4 on a virtual NVIDIA A10G" in steps


# --- both engines ---


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as a module."""
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder)]))
    return importlib.import_module("virtual_gpu")


def test_both_engines_agree(comparison: ModuleType) -> None:
    """Allocated and reserved peaks of the trace are within one percent of those on the virtual card."""
    wanted = [case for case in comparison.cases() if case.name in COMPARED]
    rows = list(comparison.compared(wanted))
    assert len(rows) == len(COMPARED)
    for row in rows:
        for kind, error in row["errors"].items():
            assert abs(error) <= 0.01, (row["name"], kind, error)
