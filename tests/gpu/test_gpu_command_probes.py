"""Probes of commands on a card: the allocator's limit, its out-of-memory observer, and its peaks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tuner.commands.command_supervisor import CommandSupervisor
from tuner.hardware.inventory import find_device
from tuner.schemas.command import CommandSpec
from tuner.schemas.requests import ProbeRequest
from tuner.schemas.results import Outcome, ProbeResult

pytestmark = pytest.mark.gpu

LIMIT = 2 * 1024**3
PROGRAM = """
import sys, torch
size, steps = int(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(256, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
number = 0
while True:
    try:
        (model(torch.randn(size, 1024, 256, device="cuda")).square().mean() / steps).backward()
    except torch.OutOfMemoryError:
        size //= 2
        continue
    number += 1
    if number % steps == 0:
        optimizer.step(); optimizer.zero_grad()
"""
"""Its activations take 64 MiB a sample, and it lowers its batch where they do not fit."""


def probe(tmp_path: Path, size: int) -> ProbeResult:
    """Probe the program at a size, with two micro-batches in an update."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    argv = (sys.executable, str(script), "{micro_batch_size}", "{gradient_accumulation_steps}")
    spec = CommandSpec.model_validate({"model": {"kind": "command", "argv": argv}})
    request = ProbeRequest(
        spec=spec, micro_batch_size=size, samples_per_window=2 * size, device="cuda:0", limit_bytes=LIMIT
    )
    with CommandSupervisor(find_device("cuda:0")) as supervisor:
        return supervisor.run(request)


def test_a_command_fits_within_the_limit_of_its_card(tmp_path: Path) -> None:
    """Its peaks are the allocator's, and the context is outside of them."""
    result = probe(tmp_path, 4)
    assert result.outcome is Outcome.FIT, result
    assert result.counted is not None
    assert result.counted.statement == "2 backward passes of 4 samples per update: 8, as planned"
    assert 0 < (result.peak_allocated_bytes or 0) <= (result.peak_reserved_bytes or 0) < LIMIT
    assert (result.context_bytes or 0) > 0
    assert (result.limit_bytes or 0) == LIMIT - (result.context_bytes or 0)


def test_an_oom_that_the_command_catches_is_observed(tmp_path: Path) -> None:
    """The allocator's observer reports the OOM: the program itself would go on with half of its batch."""
    result = probe(tmp_path, 64)
    assert result.outcome is Outcome.OOM, result
    assert result.message.startswith("asked for ")
