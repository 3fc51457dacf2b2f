"""Traced updates compared with what the same updates take on this host's card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from traced import most_bytes, traced_on_cuda

from factories import gpt_spec, mlp_spec, resnet_spec
from tuner.memory.inventory import find_device
from tuner.probing.supervisor import ProbeSupervisor
from tuner.requests import ProbeRequest
from tuner.results import Outcome
from tuner.specs import WorkloadSpec

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other versions deprecate other things

TOLERANCE = 0.05
LARGE_MLP = {
    "kind": "reference",
    "architecture": {"name": "mlp", "input_features": 4096, "hidden_features": 8192, "classes": 1000},
}
LARGE_GPT = {
    "kind": "reference",
    "architecture": {"name": "gpt", "layers": 6, "heads": 8, "width": 512, "vocabulary_size": 32000},
}
LARGE_RESNET = {"kind": "reference", "architecture": {"name": "resnet"}}
CASES: dict[str, tuple[WorkloadSpec, int]] = {
    "mlp": (mlp_spec(model=LARGE_MLP), 512),
    "gpt, fp32": (gpt_spec(model=LARGE_GPT, batch={"sequence_length": 512}), 8),
    "gpt, bf16-mixed": (gpt_spec(model=LARGE_GPT, batch={"sequence_length": 512}, precision="bf16-mixed"), 8),
    "gpt, fp16-mixed": (gpt_spec(model=LARGE_GPT, batch={"sequence_length": 512}, precision="fp16-mixed"), 8),
    "gpt, bf16": (gpt_spec(model=LARGE_GPT, batch={"sequence_length": 512}, precision="bf16"), 8),
    "resnet": (resnet_spec(model=LARGE_RESNET, batch={"image_size": 224}), 32),
}


@pytest.fixture(scope="module")
def supervisor() -> Iterator[ProbeSupervisor]:
    """A supervisor of the first card."""
    with ProbeSupervisor(find_device("cuda:0")) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("accumulates", [True, False])
def test_traced_peaks_are_those_of_the_card(
    name: str, supervisor: ProbeSupervisor, tmp_path: Path, *, accumulates: bool
) -> None:
    """The peak that a trace has is what a probe measures, within five percent."""
    spec, size = CASES[name]
    window = size * 4 if accumulates else size
    probe = ProbeRequest(spec=spec, micro_batch_size=size, samples_per_window=window, device="cuda:0", limit_bytes=None)
    measured = supervisor.run(probe)
    assert measured.outcome is Outcome.FIT, measured.message
    case = {
        "name": name,
        "spec": spec.model_dump(mode="json"),
        "sizes": [size],
        "accumulates": accumulates,
        "compute_capability": list(torch.cuda.get_device_capability(0)),
    }
    traced = traced_on_cuda([case], tmp_path / "cache")[name][0]
    assert most_bytes(traced, stretch="measured-update") == pytest.approx(measured.peak_allocated_bytes, rel=TOLERANCE)
