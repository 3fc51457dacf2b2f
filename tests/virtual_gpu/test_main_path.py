"""The whole main path on virtual cards, as a user runs it: devices, estimate, tune, run and train."""

import json

import pytest

from batchwright.schemas.estimates import Estimate
from batchwright.schemas.results import DeviceInfo, Outcome
from batchwright.schemas.training import TrainingResult
from batchwright.schemas.workload import parse_spec
from batchwright.virtual_gpu.description import DeviceLost, VirtualGpu
from tests.support.factories import gpt_spec, transformers_spec
from tests.virtual_gpu.conftest import StartHost

pytestmark = pytest.mark.virtual_gpu

MIB = 1024**2
GPT2 = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 1024}, precision="bf16-mixed")
"""The GPT-2 of docs/estimate.md."""
SMALL = gpt_spec(
    model={"kind": "reference", "architecture": {"name": "gpt", "layers": 2, "heads": 2, "width": 64}},
    batch={"sequence_length": 64},
    data={"kind": "synthetic", "samples": 512},
)
"""Small enough for the CPU to compute what the card would."""


def test_devices_lists_the_cards_and_what_others_hold(start_host: StartHost) -> None:
    """Both cards by their names, with NVML's totals and the use of a process that has nothing to do with us."""
    host = start_host("T4", "H100-80GB")
    host.session.occupy(1, 10 * 1024 * MIB)
    ended = host.batchwright("devices", "--json")
    assert ended.returncode == 0, ended.stderr
    found = [DeviceInfo.model_validate_json(line) for line in ended.stdout.splitlines()]
    described = [(card.name, card.nvml_total_bytes) for card in (VirtualGpu.of("T4"), VirtualGpu.of("H100-80GB"))]
    assert [(it.name, it.total_bytes) for it in found[:2]] == described
    assert [it.used_bytes for it in found[:2]] == [0, 10 * 1024 * MIB]
    assert [it.id for it in found] == ["cuda:0", "cuda:1", "cpu"]


def test_an_estimate_takes_no_memory_of_the_card(start_host: StartHost) -> None:
    """An estimate needs no card of this host, and succeeds where the only one is lost."""
    host = start_host("T4", failures=(DeviceLost(),))
    ended = host.batchwright("estimate", host.written(SMALL), "--gpu", "A10G", "--json")
    assert ended.returncode == 0, ended.stderr
    assert Estimate.model_validate_json(ended.stdout).decisions == "cuda"


@pytest.mark.parametrize(("card", "effective_batch_size"), [("T4", 64), ("H100-80GB", 512), ("H100-80GB", 64)])
def test_a_tuning_finds_what_was_estimated(start_host: StartHost, card: str, effective_batch_size: int) -> None:
    """The largest size is proven by two probes, lies between `sure` and `perhaps`, and takes what was estimated."""
    host = start_host(card)
    found = host.tuned_patiently(GPT2, effective_batch_size)
    proof = found.evidence.proof
    assert proof is not None
    assert found.largest_micro_batch_size is not None
    assert (proof.fits, proof.stopped_by) == (found.largest_micro_batch_size, "oom")
    assert proof.next_size == proof.fits + 1
    assert [it.micro_batch_size for it in found.evidence.probes if not it.runs_plan] == [proof.fits, proof.next_size]
    sizes = ("--micro-batch-size", str(proof.fits), "--effective-batch-size", str(effective_batch_size))
    ended = host.batchwright("estimate", host.written(GPT2), "--gpu", card, *sizes, "--json")
    (estimated,) = Estimate.model_validate_json(ended.stdout).gpus
    assert estimated.surely_fits is not None
    assert estimated.may_fit is not None
    assert estimated.surely_fits <= found.largest_micro_batch_size <= estimated.may_fit
    peak = estimated.peak
    assert peak is not None
    measured = next(it for it in found.evidence.probes if it.micro_batch_size == proof.fits)
    assert measured.outcome is Outcome.FIT
    assert measured.peak_reserved_bytes == pytest.approx(peak.reserved_bytes, rel=0.01)
    assert host.session.used_bytes(0) == 0


@pytest.mark.parametrize(("image_size", "verdict"), [(8, "separate"), (64, "not-compared")])
def test_a_batch_that_the_virtual_card_does_not_compute_is_not_compared(
    start_host: StartHost, image_size: int, verdict: str
) -> None:
    """A virtual card leaves out large operators, of the batch more than of its parts: that couples no samples."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    config = {"model_type": "vit", "image_size": image_size, "patch_size": 4, **sizes}
    spec = transformers_spec("image-classification", config)
    found = start_host("T4").tuned(spec, 8, "--max-micro-batch-size", "4")
    assert found.evidence.coupling is not None
    assert found.evidence.coupling.verdict == verdict
    assert ("left out" in found.evidence.coupling.message) is (verdict == "not-compared")


def test_run_tunes_and_trains_and_the_loss_falls(start_host: StartHost) -> None:
    """In one command; the operators of a small model are really computed, so its loss says that it learns the data."""
    host = start_host("T4", compute_limit_bytes=64 * MIB)
    spec = parse_spec({**SMALL.model_dump(mode="json"), "data": {"kind": "synthetic", "samples": 32}})
    options = ("--effective-batch-size", "32", "--max-micro-batch-size", "20", "--updates", "10", "--json")
    ended = host.batchwright("run", host.written(spec), *options, "--output-dir", host.folder / "run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = TrainingResult.model_validate_json(ended.stdout)
    first = json.loads((host.folder / "run" / "progress.jsonl").read_text().splitlines()[0])
    assert (result.updates, first["samples"]) == (10, 32)
    assert first["loss"] == pytest.approx(5.55, abs=0.2)  # the logarithm of 256 tokens
    assert result.loss is not None
    assert result.loss < first["loss"] - 0.05
