"""The rehearsal of `make gpu-evidence`: invented workspaces of a virtual card become a table, and reach estimates."""

import json

import pytest

from batchwright.hardware.workspace_tables import VARIABLE
from batchwright.schemas.estimates import Estimate, PeakEstimate
from batchwright.virtual_gpu.description import VirtualGpu
from tests.support.factories import resnet_spec
from tests.support.paths import ROOT
from tests.virtual_gpu.conftest import MIB, StartHost

pytestmark = pytest.mark.virtual_gpu
WORKSPACE_BYTES = 4 * MIB


def test_workspaces_of_a_card_reach_its_estimates(start_host: StartHost) -> None:
    """CuDNN's plans request 4 MiB each: a table has them, and the estimate with it counts them and is narrower."""
    card = VirtualGpu.of("RTX 3090").model_copy(update={"cudnn_workspace_bytes": WORKSPACE_BYTES})
    host = start_host(card)
    evidence, tables = host.folder / "evidence.json", host.folder / "tables.json"
    parts = ("--parts", "versions", "workspaces", "--time-factor", "5")
    ended = host.run(ROOT / "benchmarks" / "gpu_evidence.py", *parts, "--output", evidence)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(part["status"] == "done" for part in json.loads(evidence.read_text())["parts"].values()), ended.stdout
    ended = host.run(ROOT / "benchmarks" / "workspace_table.py", evidence, "--output", tables)
    assert ended.returncode == 0, ended.stderr
    table = json.loads(tables.read_text())["tables"][0]
    assert table["virtual"]
    assert table["compute_capability"] == [8, 6]
    held = {row["kind"]: row["workspace_bytes"] for row in table["workspaces"]}
    assert held["convolution fp32 contiguous"] >= WORKSPACE_BYTES

    spec = host.written(resnet_spec(precision="fp32"))
    command = ("estimate", spec, "--gpu", "RTX 3090", "--micro-batch-size", "16", "--json")
    without, measured = (
        Estimate.model_validate_json(host.batchwright(*command, **variables).stdout)
        for variables in ({}, {VARIABLE: str(tables)})
    )
    assert any("a virtual card: they are invented" in note for note in measured.gpus[0].notes)
    assert not any("virtual" in note for note in without.gpus[0].notes)
    assert _width(measured) < _width(without)


def _width(found: Estimate) -> float:
    peak = found.gpus[0].peak
    assert isinstance(peak, PeakEstimate)
    return (peak.device_bytes.high - peak.device_bytes.low) / peak.capacity_bytes
