"""Programs as users write them, each tuned and compared with a scan of the sizes around the answer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.commands.program_list import FOLDER, PLAIN, WITH_FRAMEWORKS, Program
from tests.commands.trials import budget_for, scan, tune_program
from tuner.schemas.results import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.torch]

LARGEST = 12
"""The size that each program is to be tuned to: the budget is half-way between its peak and that of one more."""
READS_ELSEWHERE = {"YAML", "environment"}
"""Programs that differ from the plain loop in how they read their sizes, as those of test_tune_command do."""


def marks_of(program: Program) -> tuple[pytest.MarkDecorator, ...]:
    """The plain loop is tuned by every run of the tests; the ranks of a launcher are those of test_launched_ranks."""
    if program.name in READS_ELSEWHERE:
        return (pytest.mark.exports,)
    return () if program.name == "plain loop" else (pytest.mark.thorough,)


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
    assert found.plan.effective_batch_size == program.effective_batch_size
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
    assert not imported & {"batchwright", "tuner", "service", "tests"}
