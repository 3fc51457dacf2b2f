"""The accumulation engine on a CUDA device: real out-of-memory errors in a window, recovered without a leak."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from batchwright.errors import OutOfMemoryError
from batchwright.hardware.inventory import find_device
from batchwright.hardware.memory_devices.cuda import CudaDevice
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.training.accumulation.collectives import single_rank_group
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from batchwright.training.micro_batches.loss_window import UpdateReport
from batchwright.training.micro_batches.splitting import split_batch
from batchwright.workloads.base import LossTerms
from tests.gpu import RECOVERIES
from tests.support.factories import gpt_spec, recommendation
from tests.support.whole_runs import run_to_end

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other versions deprecate other things

MIB = 1024**2
GIB = 1024**3
SAMPLES, LENGTH, WIDTH = 64, 512, 512
"""Activations of a block of ``Chain`` take 1 MiB a sample and layer: all 64 samples need about 2 GiB."""


@pytest.fixture
def card() -> Iterator[CudaDevice]:
    """The card in this process, in full fp32; any limit is taken back in the end."""
    device = open_device("cuda:0")
    assert isinstance(device, CudaDevice)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield device
    torch.backends.cuda.matmul.allow_tf32 = allowed
    device.lift_limit()
    device.release()


class Chain(nn.Module):
    """Layers whose activations are kept, with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(16))

    def forward(self, states: Tensor) -> Tensor:
        """``(n, length, width)`` to the same shape."""
        for layer in self.layers:
            states = torch.tanh(layer(states)) + states
        return states


def chain_loss(model: nn.Module, batch: Tensor) -> LossTerms:
    """Squares, weighted by samples."""
    return {"squares": (model(batch).square().sum(), float(len(batch)))}


def chain(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    return Chain().to("cuda:0", dtype)


def samples() -> Tensor:
    """The same inputs every time, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)


def gradient(card: CudaDevice, size: int, gathering: str, limit: int | None) -> tuple[Tensor, UpdateReport]:
    """The gradient of all samples in micro-batches of ``size`` under ``limit``."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulation = GradientAccumulation(model, optimizer, memory=card, gathering=gathering)  # type: ignore[arg-type]
    if limit is not None:
        card.limit(limit)
    report = accumulation.accumulate(split_batch(samples(), size), chain_loss)
    card.lift_limit()
    return torch.cat([it.grad.flatten() for it in model.parameters() if it.grad is not None]), report


@pytest.mark.physical_gpu("gradients of activations of 64 MiB each would be computed by the CPU")
@pytest.mark.parametrize("gathering", ["scratch", "in-place"])
def test_a_real_oom_in_a_window_is_recovered_exactly(card: CudaDevice, gathering: str) -> None:
    """A limit that 64 samples exceed: in parts they give the gradient of roomy micro-batches within 1e-4."""
    truth, undisturbed = gradient(card, 4, gathering, None)
    card.release()
    found, report = gradient(card, SAMPLES, gathering, 1 * GIB + (card.context_bytes() or 0))
    assert undisturbed.splits == ()
    assert report.splits
    assert sum(report.micro_batch_sizes) == SAMPLES
    assert float((found - truth).abs().max() / truth.abs().max()) < 1e-4


def test_recoveries_leave_no_growth(card: CudaDevice) -> None:
    """Windows that each run out of memory once: what is held and reserved afterwards stays the same."""
    model = chain()
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=1e-6), memory=card)
    card.limit(1 * GIB + (card.context_bytes() or 0))
    held: list[tuple[int, int]] = []
    batch = samples()
    for _ in range(RECOVERIES):
        accumulation.largest_micro_batch = None
        report = accumulation.update(split_batch(batch, SAMPLES), chain_loss)
        assert report.splits
        card.release()
        held.append((card.used_bytes(), torch.cuda.memory_reserved()))
    assert held[-1] == held[1]


def test_one_sample_that_does_not_fit_is_a_clear_failure(card: CudaDevice) -> None:
    """Nothing is left to split."""
    model = chain()
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=1.0), memory=card)
    card.limit(160 * MIB + (card.context_bytes() or 0))
    with pytest.raises(OutOfMemoryError, match="one sample"):
        accumulation.update([torch.randn(1, 200 * LENGTH, WIDTH)], chain_loss)


@pytest.mark.physical_gpu("a teraflop in bf16 would be computed by the CPU")
def test_bf16_parameters_are_summed_in_fp32(card: CudaDevice) -> None:
    """64 micro-batches of one sample: within 1e-6 of the fp64 sum of the same bf16 gradients."""
    model = chain(torch.bfloat16)
    parameters = list(model.parameters())
    inputs = samples()
    exact = [torch.zeros_like(it, dtype=torch.float64) for it in parameters]
    for one in torch.split(inputs, 1):
        model.zero_grad()
        loss, _ = chain_loss(model, one.to("cuda:0", torch.bfloat16))["squares"]
        torch.autograd.backward(loss / SAMPLES)
        for total, parameter in zip(exact, parameters, strict=True):
            assert parameter.grad is not None
            total.add_(parameter.grad)
    model.zero_grad()
    accumulation = GradientAccumulation(
        model, torch.optim.SGD(parameters, lr=1.0), memory=card, floating=torch.bfloat16
    )
    accumulation.accumulate(split_batch(inputs, 1), chain_loss, lambda batch: {"squares": float(len(batch))})
    sums = accumulation.gradients.tensors()
    error = torch.cat([(a - b).flatten() for a, b in zip(sums, exact, strict=True)]).norm()
    assert float(error / torch.cat([it.flatten() for it in exact]).norm()) < 1e-6


@pytest.mark.physical_gpu("NCCL's sums are not computed")
def test_nccl_sums_and_gathers(card: CudaDevice) -> None:
    """A group of this process alone: words over gloo, tensors over NCCL, in buckets and where they are."""
    ranks = single_rank_group(card.torch_device)
    try:
        tensors = [torch.ones(5, device="cuda:0"), torch.ones(8_000_000, device="cuda:0")]
        ranks.sum_(tensors)
        ranks.broadcast_(tensors)
        assert ranks.gather({"words": 1}) == [{"words": 1}]
        assert all(bool((it == 1).all()) for it in tensors)
    finally:
        ranks.close()


def test_a_run_out_of_memory_goes_on_in_smaller_micro_batches(tmp_path: Path) -> None:
    """A recommendation that is too large for its limit: the training process splits and succeeds."""
    spec = gpt_spec(
        model={"kind": "reference", "architecture": {"name": "gpt", "layers": 4, "heads": 8, "width": 512}},
        batch={"sequence_length": 512},
        data={"kind": "synthetic", "samples": 512},
    )
    found = recommendation(spec, 256, 256, limit_bytes=6 * GIB, device=find_device("cuda:0"))
    result = run_to_end(tmp_path, found, TrainingRequest(updates=3))
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    made = ProgressLog(RunPaths(tmp_path).progress).new_lines()
    assert made[0].splits
    assert [it.samples for it in made] == [256, 256, 256]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_over_all_cards(tmp_path: Path, strategy: str) -> None:
    """One rank per card of this host, over NCCL; with a single card its one rank."""
    cards = torch.cuda.device_count()
    spec = gpt_spec(precision="bf16-mixed", parallelism={"world_size": cards, "strategy": strategy})
    found = recommendation(spec, 40, 7, limit_bytes=4 * GIB, device=find_device("cuda:0"), world_size=cards)
    result = run_to_end(tmp_path, found, TrainingRequest(updates=5, workers=1))
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
