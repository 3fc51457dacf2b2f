"""Tests of errors of a program that are no OOM, and of the memory that it takes after one."""

import sys
from pathlib import Path

import pytest

from batchwright.schemas.results import Outcome
from tests.commands.program_list import ONE_THREAD, Program
from tests.commands.trials import probe

PROGRAM = """
import sys
import torch

way, size = sys.argv[1], int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
try:
    model(torch.randn(1, 64))
except ValueError:
    if way != "goes on":
        state = torch.zeros(2**27)
    if way == "ends":
        raise
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(10):
    batch = torch.randn(2 * size if way != "takes more" else 2**22, 64)
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LIMIT = 256 * 1024**2
"""Half of the bytes of the program's state."""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("way", "outcome", "told"),
    [
        ("ends", Outcome.ERROR, "Expected more than 1 value per channel"),
        pytest.param("goes on", Outcome.FIT, "2 optimizer updates ran within the limit", marks=pytest.mark.thorough),
        pytest.param("takes more", Outcome.OOM, "asked for", marks=pytest.mark.thorough),
        pytest.param("keeps its state", Outcome.OOM, "above the limit", marks=pytest.mark.thorough),
    ],
)
def test_the_limit_hides_no_error_and_holds_again_in_training(
    way: str, outcome: Outcome, told: str, tmp_path: Path
) -> None:
    """A program that saves its state after an error may take more than the limit, unless it trains afterwards."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    program = Program(
        "errors", (sys.executable, str(file), way, "{micro_batch_size}"), environment=ONE_THREAD, folder=tmp_path
    )

    result = probe(program, 8, LIMIT)

    assert result.outcome is outcome, result
    assert told in result.message
