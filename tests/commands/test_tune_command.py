"""Tunings of small programs on the CPU: by arguments, a YAML file and the environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import called
from tuner.errors import TuningFailedError
from tuner.library.tuning import tune

LIMIT = 400 * 1024**2
PROGRAM = """
import json, os, sys, torch
{read}
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.randn(4096, 64), batch_size=size)
class Wide(torch.nn.Module):
    def forward(self, batch):
        return model(batch).sum() + torch.ones(len(batch), 12 * 2**18).sum()
wide = Wide()
for number, batch in enumerate(loader, 1):
    wide(batch).backward()
    if number % steps == 0:
        optimizer.step(); optimizer.zero_grad()
"""
BY_ARGUMENTS = PROGRAM.replace("{read}", "size, steps = int(sys.argv[1]), int(sys.argv[2])")
BY_YAML = PROGRAM.replace("{read}", "import yaml; size, steps = yaml.safe_load(open(sys.argv[1]))['train'].values()")
BY_ENVIRONMENT = PROGRAM.replace("{read}", "size, steps = int(os.environ['SIZE']), int(os.environ['STEPS'])")
SIZES = ("{micro_batch_size}", "{gradient_accumulation_steps}")


def spec(tmp_path: Path, code: str, *arguments: str, **fields: Any) -> dict[str, Any]:
    """The spec of a program."""
    script = tmp_path / "program.py"
    script.write_text(code)
    return {"model": {"kind": "command", "argv": (sys.executable, str(script), *arguments), **fields}}


@pytest.mark.parametrize(
    ("code", "arguments", "fields"),
    [
        (
            BY_YAML,
            ("{file:train.yaml}",),
            {"files": {"train.yaml": "train: {size: {micro_batch_size}, steps: {gradient_accumulation_steps}}\n"}},
        ),
        (BY_ENVIRONMENT, (), {"environment": {"SIZE": SIZES[0], "STEPS": SIZES[1]}}),
    ],
    ids=["by a file", "by the environment"],
)
def test_a_program_may_read_its_sizes_elsewhere(
    tmp_path: Path, code: str, arguments: tuple[str, ...], fields: dict[str, Any]
) -> None:
    """From a YAML file that is rendered for it, or from its environment."""
    described = spec(tmp_path, code, *arguments, **fields)
    found = tune(described, 6, memory_limit=LIMIT, device="cpu", max_micro_batch_size=3, progress=False)
    assert found.plan is not None
    assert found.plan.micro_batch_sizes == ((3, 3),)
    assert "2 backward passes of 3 samples per update: 6, as planned" in found.evidence.plan_proof


def test_a_program_that_ignores_its_accumulation_is_refused(tmp_path: Path) -> None:
    """The statement has the planned and the counted figures."""
    ignores = spec(tmp_path, BY_ARGUMENTS.replace("% steps", "% 4"), *SIZES)
    with pytest.raises(TuningFailedError, match="4 backward passes of 1 samples") as error:
        tune(ignores, 6, memory_limit=LIMIT, device="cpu", max_micro_batch_size=3, progress=False)
    assert error.value.reason == "plan-not-followed"


def test_a_command_is_tuned_and_verified_from_the_command_line(tmp_path: Path) -> None:
    """And the recommendation has its verification."""
    script, recommendation = tmp_path / "program.py", tmp_path / "recommendation.json"
    script.write_text(BY_ARGUMENTS)
    options = (
        "--effective-batch-size",
        "6",
        "--memory-limit",
        "400MiB",
        "--device",
        "cpu",
        "--max-micro-batch-size",
        "3",
    )
    done = called("tune", *options, "-o", str(recommendation), "--", sys.executable, str(script), *SIZES)
    assert done.returncode == 0, done.stderr
    assert "as planned" in done.stdout
    own = ("--", sys.executable, str(script))
    verified = called("verify", str(recommendation), "-o", str(recommendation), *own, "3", "2")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(recommendation.read_text())["verified"]["verdict"] == "as-planned"
    other = called("verify", str(recommendation), "--json", *own, "3", "3")
    assert other.returncode == 4
    assert json.loads(other.stdout)["verdict"] == "not-as-planned"
