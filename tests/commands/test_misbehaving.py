"""Programs that do what a prober may not expect: each has its outcome, and none leaves a process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.commands.program_list import FOLDER, Program, misbehaving
from tests.commands.trials import probe
from tuner.schemas.results import Outcome, ProbeResult

pytestmark = [pytest.mark.slow, pytest.mark.torch]

SIZE = 2
LARGE = 10
TIGHT = 160 * 1024**2
"""Too little for `LARGE` samples, which take 190 MiB, and enough for half of them, which take 130."""


def processes_naming(text: str) -> list[str]:
    """The command lines of this host in which a text occurs."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return [line for line in lines if text in line]


def ends_with(
    program: Program,
    folder: Path,
    size: int = SIZE,
    limit: int | None = None,
    **fields: Any,
) -> ProbeResult:
    """The result of a probe of a program, which is given a folder and leaves no process that names it."""
    named = replace(program, argv=(*program.argv, "--output-dir", str(folder)))
    result = probe(named, size, limit, **{"timeout_seconds": 120.0, **fields})
    assert processes_naming(str(folder)) == []
    return result


@pytest.mark.parametrize(
    "way", [pytest.param("ignores-accumulation", marks=pytest.mark.thorough), "drops-the-last-micro-batch"]
)
def test_a_program_that_does_not_accumulate_as_told_is_refused_with_both_figures(way: str, tmp_path: Path) -> None:
    """The program makes updates of one micro-batch, where the plan has two."""
    result = ends_with(misbehaving(way), tmp_path)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "plan-not-followed")
    assert "1 backward pass of 2 samples per update: 2; planned were 2 of 2 samples: 4" in result.message


@pytest.mark.thorough
def test_a_program_that_multiplies_its_batch_is_refused_with_both_figures(tmp_path: Path) -> None:
    """The program takes the batch of all ranks for that of each."""
    result = ends_with(misbehaving("multiplies-by-the-ranks"), tmp_path)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "plan-not-followed")
    assert "2 backward passes of 4 samples per update: 8; planned were 2 of 2 samples: 4" in result.message


@pytest.mark.parametrize(
    "is_fresh", [pytest.param(True, id="fresh", marks=pytest.mark.thorough), pytest.param(False, id="forked")]
)
def test_an_oom_that_the_program_survives_is_no_fit(tmp_path: Path, *, is_fresh: bool) -> None:
    """The program goes on with half of the batch, which would fit."""
    program = misbehaving("swallows-oom")

    assert ends_with(program, tmp_path, LARGE, TIGHT, runs_plan=is_fresh).outcome is Outcome.OOM
    assert ends_with(program, tmp_path, LARGE // 2, TIGHT, runs_plan=is_fresh).outcome is Outcome.FIT


def test_the_oom_of_one_rank_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    """A rank that catches its error keeps the other in a collective, which is no time-out."""
    result = ends_with(misbehaving("hangs-after-the-oom-of-a-rank", ranks=2), tmp_path, LARGE // 2, 5 * TIGHT // 4)

    assert result.outcome is Outcome.OOM
    assert "on rank 1" in result.message


@pytest.mark.parametrize(
    ("way", "is_fresh"),
    [
        pytest.param("forks-loader-workers", True, marks=pytest.mark.thorough),
        ("forks-loader-workers", False),
        ("executes-another-interpreter", True),
        pytest.param("executes-another-interpreter", False, marks=pytest.mark.thorough),
        pytest.param(
            "starts-a-shell", True, marks=pytest.mark.thorough
        ),  # forked, its child is as fresh as that of the program above
        pytest.param("prints-megabytes", True, marks=pytest.mark.thorough),
        pytest.param("prints-megabytes", False, marks=pytest.mark.thorough),
        pytest.param("traps-sigterm", True, marks=pytest.mark.thorough),
        ("traps-sigterm", False),
    ],
)
def test_an_unusual_program_is_counted_as_any_other(way: str, tmp_path: Path, *, is_fresh: bool) -> None:
    """Its updates are found in whichever process makes them, and all of its processes end."""
    result = ends_with(misbehaving(way), tmp_path, runs_plan=is_fresh)

    assert (result.outcome, result.forked) == (Outcome.FIT, not is_fresh)
    assert "2 backward passes of 2 samples per update: 4, as planned" in result.message
    assert len(result.model_dump_json()) < 20_000


@pytest.mark.parametrize(
    "way", [pytest.param("executes-another-interpreter", marks=pytest.mark.thorough), "starts-a-shell"]
)
def test_the_budget_holds_in_the_process_that_trains(way: str, tmp_path: Path) -> None:
    """A limit passes into an interpreter that another process started."""
    assert ends_with(misbehaving(way), tmp_path, LARGE, TIGHT).outcome is Outcome.OOM


def test_a_grandchild_with_a_session_of_its_own_ends_with_the_probe(tmp_path: Path) -> None:
    """Its parent has ended, so that no process group and no parent leads to it."""
    result = ends_with(misbehaving("leaves-grandchildren"), tmp_path)

    assert result.outcome is Outcome.FIT
    (identifier,) = (tmp_path / "grandchildren").read_text().split()
    assert not Path(f"/proc/{identifier}/cmdline").exists()


def test_what_a_program_writes_lies_where_it_was_told(tmp_path: Path) -> None:
    """A probe adds nothing to the folder that the program runs in."""
    program = misbehaving("writes-into-its-folder")
    here = tmp_path / "here"
    here.mkdir()
    program = replace(program, argv=(program.argv[0], str(FOLDER / program.argv[1]), *program.argv[2:]), folder=here)

    assert ends_with(program, tmp_path).outcome is Outcome.FIT
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoint.pt", "here", "log.txt"]


@pytest.mark.parametrize("way", ["steps-by-hand", pytest.param("never-steps", marks=pytest.mark.thorough)])
def test_passes_without_a_step_are_an_error_of_their_own(way: str, tmp_path: Path) -> None:
    """A step by anything else than an optimizer of torch is not counted, which the message says."""
    result = ends_with(misbehaving(way), tmp_path)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "never-steps")
    assert "backward passes were counted without a step" in result.message
    assert "torch.optim.Optimizer" in result.message


def test_steps_without_a_backward_pass_are_an_error_of_their_own(tmp_path: Path) -> None:
    """Steps without a backward pass train nothing."""
    result = ends_with(misbehaving("steps-without-backward"), tmp_path)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "no-backward")
    assert "without a backward pass" in result.message


@pytest.mark.parametrize(
    ("way", "told"),
    [("ends-early", "1 of 2 updates"), pytest.param("ends-at-once", "usage: train", marks=pytest.mark.thorough)],
)
def test_a_program_that_ends_before_its_updates_is_no_fit(way: str, told: str, tmp_path: Path) -> None:
    """The program exits with 0, and the result has its updates and its output."""
    result = ends_with(misbehaving(way), tmp_path)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "ended-early")
    assert told in f"{result.message} {result.details} {result.traceback}"


def test_an_isolated_interpreter_is_not_reached_and_the_result_says_so(tmp_path: Path) -> None:
    """`python -I` reads no PYTHONPATH."""
    result = ends_with(misbehaving("ends-early", isolated=True), tmp_path)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "not-reached")
    assert "-I" in result.message


@pytest.mark.parametrize(
    ("argv", "error_type"),
    [
        (("/bin/echo", "{micro_batch_size}"), "no-python"),
        ((sys.executable, "-c", "pass", "{micro_batch_size}"), "no-torch"),
    ],
)
def test_a_command_without_python_or_torch_is_told_apart(argv: tuple[str, ...], error_type: str) -> None:
    """Neither command could train."""
    result = probe(Program("other", argv), SIZE)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, error_type)


def test_a_hang_before_the_first_pass_counts_as_loading(tmp_path: Path) -> None:
    """Loading has a time limit of its own."""
    program = replace(misbehaving("hangs-before-the-first-pass"), loading_timeout_seconds=2.0)

    result = ends_with(program, tmp_path)

    assert (result.outcome, result.error_type) == (Outcome.TIMED_OUT, "loading-timed-out")


def test_a_hang_in_training_is_shown_with_its_stack(tmp_path: Path) -> None:
    """The time limit counts from the first forward pass."""
    result = ends_with(misbehaving("hangs-after-the-first-pass"), tmp_path, timeout_seconds=2.0)

    assert result.outcome is Outcome.TIMED_OUT
    assert "hangs_after_the_first_pass" in f"{result.details} {result.traceback}"


def test_an_error_of_the_program_is_shown_as_it_printed_it(tmp_path: Path) -> None:
    """The message is its last line, and the traceback is there."""
    result = ends_with(misbehaving("raises"), tmp_path)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "exit status 1")
    assert "no column is called `labels`" in result.message
    assert "in raises" in (result.traceback or "")
