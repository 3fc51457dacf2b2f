"""Small operators of a virtual card are computed: losses, gradients, updates and random numbers are right."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from batchwright.virtual_gpu.description import VirtualHost
from batchwright.virtual_gpu.session import VirtualGpuSession
from tests.support.paths import ROOT

pytestmark = pytest.mark.virtual_gpu

MIB = 2**20
CARD = "A100-80GB"
"""Has flash attention for bfloat16, as the CPU has: a T4's bfloat16 takes the formula, with other rounding."""
EQUAL = ("mlp", "resnet", "gpt", "transformer", "masked", "group-norm", "lstm", "gru")
"""Workloads whose every operator the CPU's own kernel computes, in the same order."""
Open = Callable[..., VirtualGpuSession]
Comparisons = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def open_session() -> Iterator[Open]:
    """Open a session with one card."""
    with ExitStack() as stack:

        def start(limit_bytes: int = 4 * MIB, card: str = CARD) -> VirtualGpuSession:
            return stack.enter_context(VirtualGpuSession(VirtualHost.of(card), compute_limit_bytes=limit_bytes))

        yield start


def run(session: VirtualGpuSession, *arguments: str) -> str:
    """The output of a program on the host of a session."""
    environment = {**os.environ, **session.environment()}
    environment["PYTHONPATH"] += os.pathsep + str(ROOT)
    ended = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def compared(session: VirtualGpuSession, *arguments: str) -> Comparisons:
    """The differences between trainings on the card and on the CPU; no operator may be left out."""
    comparisons: Comparisons = json.loads(run(session, "-m", "tests.virtual_gpu.compute_program", *arguments))
    assert session.uncomputed() == []
    return comparisons


@pytest.fixture(scope="module")
def fp32(open_session: Open) -> Comparisons:
    """Trainings in float32."""
    return compared(open_session(), *EQUAL, "rms-norm", "grouped")


@pytest.mark.parametrize("workload", EQUAL)
def test_training_in_float32_equals_the_cpu(fp32: Comparisons, workload: str) -> None:
    """Bit by bit: losses, gradients, and parameters after three clipped updates of AdamW."""
    comparison = fp32[workload]
    assert all(cpu == card for cpu, card in comparison["losses"])
    assert comparison["equal_gradients"]
    assert comparison["parameter_difference"] == 0.0


@pytest.mark.parametrize("workload", ["rms-norm", "grouped"])
def test_training_with_other_kernels_than_the_cpus_equals_it_within_rounding(fp32: Comparisons, workload: str) -> None:
    """A fused RMSNorm and grouped queries add in another order than the CPU's composites."""
    assert fp32[workload]["losses"][0][0] == pytest.approx(fp32[workload]["losses"][0][1], rel=1e-6)
    assert fp32[workload]["gradient_difference"] < 1e-6


def test_mixed_precision_is_within_rounding(open_session: Open) -> None:
    """Under bfloat16 autocast, and under float16 with a scaled loss; autocast's lists differ between devices."""
    for precision in ("bf16", "fp16"):
        for comparison in compared(open_session(), "gpt", "transformer", "resnet", "--precision", precision).values():
            assert comparison["gradient_difference"] < 0.02
            assert all(cpu == pytest.approx(card, rel=2e-3) for cpu, card in comparison["losses"])


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_updates_equal_the_cpus(open_session: Open, optimizer: str, implementation: str) -> None:
    """Updates by each optimizer's implementations for GPUs equal those on the CPU."""
    options = ("--optimizer", optimizer, "--implementation", implementation)
    assert compared(open_session(), "mlp", *options)["mlp"]["parameter_difference"] < 1e-6


def test_computing_takes_no_memory_of_the_card(open_session: Open) -> None:
    """The peak is that of a session that computes nothing."""
    program = ("-m", "tests.virtual_gpu.compute_program", "gpt", "resnet")
    peaks = [
        {name: comparison["peak_allocated_bytes"] for name, comparison in json.loads(run(session, *program)).items()}
        for session in (open_session(), open_session(0))
    ]
    assert peaks[0] == peaks[1]


RANDOM = """
import torch
from torch.nn import functional as F

def drawn():
    return torch.randn(20_000, device="cuda")

torch.manual_seed(1)
first, second = drawn(), drawn()
torch.manual_seed(1)
assert torch.equal(drawn(), first) and not torch.equal(first, second)
assert abs(first.mean().item()) < 0.05 and abs(first.std().item() - 1) < 0.05
state = torch.cuda.get_rng_state()
uniform = torch.rand(20_000, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(20_000, device="cuda"), uniform)
assert 0 <= uniform.min() < 0.01 and 0.99 < uniform.max() < 1 and abs(uniform.mean().item() - 0.5) < 0.02
generator = torch.Generator("cuda")
assert torch.equal(
    torch.randint(9, (99,), device="cuda", generator=generator.manual_seed(5)),
    torch.randint(9, (99,), device="cuda", generator=generator.manual_seed(5)),
)
assert torch.equal(torch.randperm(500, device="cuda").sort().values, torch.arange(500, device="cuda"))
ones = torch.ones(20_000, device="cuda", requires_grad=True)
dropped = F.dropout(ones, 0.25)
dropped.sum().backward()
assert abs((dropped == 0).float().mean().item() - 0.25) < 0.02 and abs(dropped.max().item() - 1 / 0.75) < 1e-6
assert torch.equal(ones.grad, dropped)
"""

ATTENTION_DROPOUT = """
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 40, 16, device="cuda", dtype=torch.half) for _ in range(3))
    value.requires_grad_()
    with sdpa_kernel(backend):
        outputs = [F.scaled_dot_product_attention(query, key, value, dropout_p=0.3) for _ in range(2)]
    assert not torch.equal(*outputs)
    weights = torch.randn_like(outputs[0])
    (outputs[0] * weights).sum().backward()
    linear = (outputs[0].float() * weights).sum().item()
    assert abs((value.grad.float() * value).sum().item() - linear) < 0.02 * abs(linear) + 0.5
"""

INDEXING = """
import threading
import torch

values = torch.arange(12, device="cuda").reshape(3, 4)
assert values[values % 3 == 0].tolist() == [0, 3, 6, 9]
assert torch.nonzero(values > 9).tolist() == [[2, 2], [2, 3]]
assert torch.unique(values // 5).tolist() == [0, 1, 2]
values[values > 9] = -1
assert values.sum().item() == 45 - 2 and values.float().mul(1.5).max().item() == 13.5
assert (2.0 ** values[0]).tolist() == [1, 2, 4, 8]
assert (values + 0.5).dtype == torch.float32 and torch.where(values > 3, values, 0).sum().item() == 39
assert torch.equal(values.t().contiguous().cpu(), values.cpu().t()) and values.half().t().cpu().dtype == torch.half
with torch.device("cuda"):
    assert (torch.ones(3) + torch.eye(3)).sum().item() == 12
sums = []
thread = threading.Thread(target=lambda: sums.append((values.double() @ values.double().t()).trace().item()))
thread.start(); thread.join()
assert sums == [(values * values).sum().item()]
"""

OUT_OF_MEMORY = """
import torch

inputs = torch.zeros(2**28, device="cuda", requires_grad=True)
loss = inputs.sin().sum()
filler = torch.empty(torch.cuda.mem_get_info()[0] - 2**29, dtype=torch.uint8, device="cuda")
try:
    loss.backward()
except torch.OutOfMemoryError as error:
    assert str(error).startswith("CUDA out of memory"), error
else:
    raise AssertionError("no error")
"""


@pytest.mark.parametrize(
    "program", [RANDOM, ATTENTION_DROPOUT, INDEXING], ids=["random", "attention-dropout", "indexing"]
)
def test_operators_are_computed(open_session: Open, program: str) -> None:
    """Random numbers, shapes that values decide, scalars, other threads: nothing is left out."""
    session = open_session()
    run(session, "-c", program)
    assert session.uncomputed() == []


def test_out_of_memory_in_a_backward_pass_is_torchs_own_error(open_session: Open) -> None:
    """An error from a thread of autograd keeps its class and its message."""
    run(open_session(card="T4"), "-c", OUT_OF_MEMORY)


LARGE = """
import torch

def stale():
    torch.full((100_000,), float("nan")).cuda()

stale()
assert torch.zeros(100_000, device="cuda").cpu().abs().sum() == 0
stale()
large = torch.sin(torch.empty(100_000, device="cuda"))
assert large.cpu().abs().sum() == 0 and large.mean().item() == 0
assert torch.ones(10, device="cuda").sum().item() == 10
"""


def test_operators_left_out_are_zero_and_listed(open_session: Open) -> None:
    """Earlier contents of memory are no result; a zero fill is right at any size."""
    session = open_session(65_536)
    run(session, "-c", LARGE)
    assert {entry.operator for entry in session.uncomputed()} == {"aten::sin", "aten::mean.dim"}
