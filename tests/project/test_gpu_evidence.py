"""`make gpu-evidence` on a host without a card, and its time limits."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.factories import CUDA
from tests.support.paths import ROOT

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


def test_the_limits_of_the_parts_are_within_nine_minutes(evidence: ModuleType) -> None:
    """All parts at their limits leave time for the program itself."""
    assert sum(evidence.PARTS.values()) <= evidence.TOTAL_SECONDS < 9 * 60


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
