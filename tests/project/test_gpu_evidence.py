"""`make gpu-evidence` on a host without a card, and its time limits."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from batchwright.hardware.workspace_tables import FILE, VARIABLE, measured_workspaces
from batchwright.schemas.gpus import KernelProfile, WorkspaceFile
from tests.support.factories import CUDA
from tests.support.paths import ROOT
from tests.support.service.processes import wait_until

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_evidence")


def run_parts(evidence: ModuleType, output: Path, *parts: str, factor: float = 1.0) -> dict[str, Any]:
    """Run parts for a card that this host has not, and read the file that they leave."""
    evidence.measure(CUDA, Namespace(parts=parts, output=output, time_factor=factor))
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_without_a_card_nothing_is_written(tmp_path: Path) -> None:
    """Exit code 1, and the devices that there are instead."""
    command = [sys.executable, str(BENCHMARKS / "gpu_evidence.py"), "--output", str(tmp_path / "found.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no evidence without a CUDA card: there is no device cuda:0; this host has cpu" in done.stderr
    assert not (tmp_path / "found.json").exists()


@pytest.mark.thorough
def test_a_part_that_fails_does_not_end_the_others(
    evidence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure is in the file, with its last words; a part that is not begun in time says so."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = run_parts(evidence, tmp_path / "found.json", "versions", "context", factor=50.0)
    assert {name: row["status"] for name, row in found["parts"].items()} == {"versions": "failed", "context": "failed"}
    for row in found["parts"].values():
        assert "ended with exit code 1" in row["message"]
        assert "DeviceError: there is no device cuda:0" in row["message"]
    late = run_parts(evidence, tmp_path / "late.json", "versions", factor=0.0)
    assert late["parts"]["versions"]["message"] == "no time was left to begin"


def test_a_part_ends_at_its_limit(evidence: ModuleType, tmp_path: Path) -> None:
    """A second is less than a part needs to import torch."""
    found = run_parts(evidence, tmp_path / "found.json", "versions", factor=0.001)
    row = found["parts"]["versions"]
    assert (row["status"], row["result"]) == ("timed-out", {})
    assert "ended at its limit" in row["message"]


def test_a_run_that_is_ended_leaves_what_its_part_had_found(tmp_path: Path) -> None:
    """The file has it while the part still runs; SIGTERM ends the part's process too."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    shutil.copy(BENCHMARKS / "gpu_evidence.py", folder)
    (folder / "gpu_evidence_parts.py").write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[3]).write_text('{\"first\": %d}' % os.getpid())\n"
        "time.sleep(600)\n"
    )
    program = (
        "import gpu_evidence, sys\n"
        "from tests.support.factories import CUDA\n"
        "gpu_evidence.find_device = lambda _name: CUDA\n"
        "sys.exit(gpu_evidence.main())\n"
    )
    output = tmp_path / "found.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-c", program, "--parts", "context", "--time-factor", "20", "--output", str(output)]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        wait_until(output.exists)
        process.terminate()
        assert process.wait(timeout=60.0) == 128 + signal.SIGTERM
    row = json.loads(output.read_text())["parts"]["context"]
    assert row["status"] == "running"
    wait_until(lambda: not Path(f"/proc/{row['result']['first']}").exists())


def test_the_limits_of_the_parts_are_within_twenty_minutes(evidence: ModuleType) -> None:
    """All parts at their limits leave time for the program itself."""
    assert sum(evidence.PARTS.values()) <= evidence.TOTAL_SECONDS < 20 * 60


def test_the_limits_are_longer_on_a_virtual_card(
    evidence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file says by which factor; a factor that is given holds on any card."""

    def factor(given: float | None) -> object:
        options = Namespace(parts=(), output=tmp_path / "found.json", time_factor=given)
        return evidence.measure(CUDA, options)["time_factor"]

    monkeypatch.delenv("VIRTUAL_GPU_SESSION", raising=False)
    assert factor(None) == 1.0
    monkeypatch.setenv("VIRTUAL_GPU_SESSION", "session")
    assert factor(None) == 4.0
    assert factor(2.0) == 2.0


@pytest.mark.parametrize(
    ("target", "arguments"),
    [("lstm", {"width": 8, "layers": 1, "length": 4}), ("mlp", {"width": 8, "layers": 1, "features": 4, "rows": 2})],
)
def test_the_models_of_our_targets_are_built_where_they_are_traced(
    evidence: ModuleType, target: str, arguments: dict[str, int]
) -> None:
    """A model that exists before it is asked for is on the CPU, so that no estimate for a card could be traced."""
    del evidence  # only its folder is of use here: that of the targets
    workload = getattr(importlib.import_module("finders_workloads"), target)(**arguments)
    with torch.device("meta"):
        model = workload.build_model()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_virtual_card_leaves_no_result_of_a_card(evidence: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is that of the card, torch and the driver, marked and elsewhere where the card is virtual."""
    monkeypatch.delenv("OUT", raising=False)
    card = CUDA.model_copy(update={"name": "NVIDIA H100 80GB HBM3", "driver_version": "580.65.06"})
    real = evidence.output_path(card, {"torch": "2.13.0"}, virtual=False)
    assert real == BENCHMARKS / "results/gpu/nvidia-h100-80gb-hbm3_torch-2.13.0_driver-580.65.06.json"
    virtual = evidence.output_path(card, {"torch": "2.13.0"}, virtual=True)
    assert virtual == ROOT / "runs/gpu_evidence/virtual_nvidia-h100-80gb-hbm3_torch-2.13.0_driver-580.65.06.json"
    assert evidence.is_virtual({"VIRTUAL_GPU_SESSION": "session"})
    assert not evidence.is_virtual({})


def card_evidence(**fields: Any) -> dict[str, Any]:
    """Evidence as a card would leave it, with figures of this test: three calls, of which one is of a library alone."""
    convolution = {
        "workspace_bytes": 3000,
        "persistent_bytes": 0,
        "operators": ["aten.convolution.default"],
        "library_calls": [{"kind": "convolution fp32 contiguous", "operand_bytes": 1000}],
    }
    product = {"workspace_bytes": 0, "persistent_bytes": 8192, "operators": ["aten.mm.default"], "library_calls": []}
    mixed = {**convolution, "operators": ["aten.convolution.default", "aten.add.Tensor"]}
    rows = [
        {"operator": "mm", "shape": "a", "forward": product, "backward": product},
        {"operator": "conv2d", "shape": "b", "forward": convolution, "backward": mixed},
        {"operator": "attentions", "failed": "RuntimeError: no kernel"},
    ]
    versions = {"torch_sees": {"compute_capability": [9, 0]}, "libraries": {"cudnn": 92000}}
    return {
        "date": "2026-01-31",
        "virtual": False,
        "device": CUDA.model_copy(update={"driver_version": "580.65.06"}).model_dump(mode="json"),
        "versions": {"torch": "2.13.0"},
        "parts": {"versions": {"result": versions}, "workspaces": {"result": {"operators": rows}}},
        **fields,
    }


@pytest.fixture
def workspace_table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that makes a table of evidence, as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("workspace_table")


def test_evidence_becomes_a_table_that_estimates_read(workspace_table: ModuleType, tmp_path: Path) -> None:
    """A table has calls of libraries alone; it replaces an older one of its capability and keeps those of others."""
    source, output = tmp_path / "evidence.json", tmp_path / "tables.json"
    source.write_text(json.dumps(card_evidence()))
    older = workspace_table.table_of(card_evidence(date="2025-01-31"))
    other = older.model_copy(update={"compute_capability": (8, 0)})
    output.write_text(WorkspaceFile(tables=(other, older)).model_dump_json())
    assert workspace_table.main([str(source), "--output", str(output)]) == 0
    profile = KernelProfile(compute_capability=(9, 0), kind="cuda")
    found = measured_workspaces(profile, {VARIABLE: str(output)})
    assert found is not None
    table = found.table
    assert (table.date, table.torch, table.cudnn, table.blas_workspace_bytes) == ("2026-01-31", "2.13.0", "92000", 8192)
    share = found.share("convolution fp32 contiguous")
    assert share is not None
    assert share.expected == 3
    assert len(table.workspaces) == 1
    assert [each.compute_capability for each in WorkspaceFile.model_validate_json(output.read_text()).tables] == [
        (8, 0),
        (9, 0),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"virtual": True}, "whose workspaces are invented"),
        ({"parts": {}}, "lacks the part `versions`"),
        ({"parts": {"versions": card_evidence()["parts"]["versions"]}}, "has no workspace of a library"),
    ],
)
def test_no_table_is_made_of_what_is_not_evidence(
    workspace_table: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    message: str,
) -> None:
    """The tables of the package stay as they are."""
    before = FILE.read_text()
    source = tmp_path / "evidence.json"
    source.write_text(json.dumps(card_evidence(**fields)))
    assert workspace_table.main([str(source)]) == 1
    assert message in capsys.readouterr().err
    assert FILE.read_text() == before
