"""Programs as users write them, tuned and compared with a scan of the sizes around the answer, and small ones."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchwright.errors import TuningFailedError
from batchwright.library.tuning import tune
from batchwright.schemas.results import Outcome
from tests.commands.program_list import FOLDER, PLAIN, WITH_FRAMEWORKS, Program
from tests.commands.recorded import replayed_commands
from tests.commands.trials import EFFECTIVE_BATCH_SIZE, budget_for, scan, tune_program
from tests.support.command import called

pytestmark = pytest.mark.torch

LARGEST = 12
"""The size that each program is to be tuned to: the budget is half-way between its peak and that of one more."""
READS_ELSEWHERE = {"YAML", "environment"}
"""Programs that differ from the plain loop in how they read their sizes, as small ones below do."""
TUNING_LIMIT = 400 * 1024**2
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


def marks_of(program: Program) -> tuple[pytest.MarkDecorator, ...]:
    """Those that differ in little run with the programs of frameworks."""
    return (pytest.mark.exports,) if program.name in READS_ELSEWHERE else (pytest.mark.thorough,)


def check_exact(program: Program, scanned: range = range(LARGEST, LARGEST + 2)) -> None:
    """Tune, and compare the answer with a scan in fresh processes, and the count of the plan with what is known."""
    if reason := program.missing():
        pytest.skip(reason)
    budget = budget_for(program, LARGEST)

    found = tune_program(program, budget)

    outcomes = {it.micro_batch_size: it.outcome for it in found.evidence.probes}
    surely = {size: Outcome.FIT for size in scanned if size <= LARGEST - program.varies_by}
    surely |= {size: Outcome.OOM for size in scanned if size > LARGEST + program.varies_by}
    assert scan(program, surely, budget) == surely
    answer = found.largest_micro_batch_size
    assert answer is not None
    assert abs(answer - LARGEST) <= program.varies_by, outcomes
    assert (outcomes[answer], outcomes[answer + 1]) == (Outcome.FIT, Outcome.OOM)
    assert found.plan is not None
    assert found.plan.effective_batch_size == EFFECTIVE_BATCH_SIZE
    assert found.evidence.plan_proof is not None
    assert "as planned" in found.evidence.plan_proof


@pytest.mark.parametrize(
    "program",
    [pytest.param(it, marks=marks_of(it), id=it.name) for it in PLAIN],
)
def test_the_answer_is_exact_for_a_loop_of_the_users_own(program: Program) -> None:
    """One more sample does not fit, and the plan is run as it will be trained."""
    check_exact(program)


@pytest.mark.exports
@pytest.mark.parametrize("program", WITH_FRAMEWORKS, ids=lambda it: it.name)
def test_the_answer_is_exact_for_a_program_of_a_framework(program: Program) -> None:
    """One more sample does not fit, where a framework accumulates and multiplies by the ranks."""
    check_exact(program, range(LARGEST - 2, LARGEST + 3))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda it: it.name)
def test_a_program_imports_nothing_of_this_project(path: Path) -> None:
    """The programs are unmodified programs of users."""
    imported = {
        (name.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert not imported & {"batchwright", "batchwright_service", "tests"}


@pytest.mark.thorough
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
    found = tune(described, 6, memory_limit=TUNING_LIMIT, device="cpu", max_micro_batch_size=3, progress=False)
    assert found.plan is not None
    assert found.plan.micro_batch_sizes == ((3, 3),)
    assert "2 backward passes of 3 samples per update: 6, as planned" in found.evidence.plan_proof


@pytest.mark.thorough
def test_a_program_that_ignores_its_accumulation_is_refused(tmp_path: Path) -> None:
    """The statement has the planned and the counted figures."""
    ignores = spec(tmp_path, BY_ARGUMENTS.replace("% steps", "% 4"), *SIZES)
    with pytest.raises(TuningFailedError, match="4 backward passes of 1 samples") as error:
        tune(ignores, 6, memory_limit=TUNING_LIMIT, device="cpu", max_micro_batch_size=3, progress=False)
    assert error.value.reason == "plan-not-followed"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A program that was tuned from the command line, and the file of its recommendation."""
    folder = tmp_path_factory.mktemp("tuned")
    script, recommendation = folder / "program.py", folder / "recommendation.json"
    script.write_text(BY_ARGUMENTS)
    options = (
        *("--effective-batch-size", "4", "--memory-limit", "400MiB", "--device", "cpu"),
        *("--max-micro-batch-size", "2", "-o", str(recommendation)),
    )
    return called("tune", *options, "--", sys.executable, str(script), *SIZES), recommendation


def test_a_command_is_tuned_from_the_command_line(tuned: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """The plan was run as it will be trained."""
    done, recommendation = tuned
    assert done.returncode == 0, done.stderr
    assert "as planned" in done.stdout
    plan = json.loads(recommendation.read_text())["plan"]
    assert plan["micro_batch_sizes"] == [[2, 2]]


@pytest.mark.parametrize(
    ("name", "verdict", "status"),
    [
        ("forks-loader-workers", "as-planned", 0),
        ("drops-the-last-micro-batch", "not-as-planned", 4),
        ("swallows-oom", "does-not-fit", 4),
        ("raises", "not-known", 4),
    ],
)
def test_a_recommendation_has_its_verification(
    tuned: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path, name: str, verdict: str, status: int
) -> None:
    """The verdict on what a command reports, in the recommendation and in the exit code."""
    verified = tmp_path / "verified.json"
    with replayed_commands(name):
        done = called("verify", tuned[1], "-o", verified, "--json", "--", sys.executable, "train.py", "2", "2")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (status, verdict), done.stderr
    assert json.loads(verified.read_text())["verified"]["verdict"] == verdict


@pytest.mark.thorough
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
