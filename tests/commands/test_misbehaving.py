"""Programs that do what a prober may not expect: each has its outcome, and none leaves a process.

The outcomes are shown by what the programs once reported (`recorded.py`), and at length by the programs themselves.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchwright.commands.outcomes import EndedCommand, result_of
from batchwright.schemas.results import Outcome, ProbeResult
from tests.commands.program_list import FOLDER, Program, misbehaving
from tests.commands.recorded import CASES, JOBS, LARGE, SIZE, TIGHT, replay, run_case, shape, stored
from tests.commands.trials import probe

End = Callable[[str], ProbeResult]


def processes_naming(text: str) -> list[str]:
    """The command lines of this host in which a text occurs."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return [line for line in lines if text in line]


@pytest.fixture(
    params=["recorded", pytest.param("real", marks=[pytest.mark.thorough, pytest.mark.torch])],
)
def end(request: pytest.FixtureRequest, tmp_path: Path) -> End:
    """The results of cases: of their records, or of runs, which report what the records have."""

    def found(name: str) -> ProbeResult:
        ended = replay(name, tmp_path) if request.param == "recorded" else really_ended(name, tmp_path)
        assert ended.ending.name == stored(name)["ending"]
        return result_of(ended)

    return found


def really_ended(name: str, folder: Path) -> EndedCommand:
    """Run a case, which leaves no process and reports what its record has."""
    ended, record = run_case(name, folder)
    assert processes_naming(str(folder)) == []
    assert shape(record) == shape(stored(name))
    return ended


def ends_with(program: Program, folder: Path, limit: int | None = None, **fields: Any) -> ProbeResult:
    """The result of a probe of a program, which is given a folder and leaves no process that names it."""
    named = replace(program, argv=(*program.argv, "--output-dir", str(folder)))
    result = probe(named, fields.pop("size", SIZE), limit, **{"timeout_seconds": 120.0, **fields})
    assert processes_naming(str(folder)) == []
    return result


def test_every_record_is_of_a_case() -> None:
    """None is left of a case that went."""
    assert {path.stem for path in (FOLDER.parent / "reports").iterdir()} == {*CASES, *(f"job-{mode}" for mode in JOBS)}


@pytest.mark.parametrize("way", ["ignores-accumulation", "drops-the-last-micro-batch"])
def test_a_program_that_does_not_accumulate_as_told_is_refused_with_both_figures(way: str, end: End) -> None:
    """The program makes updates of one micro-batch, where the plan has two."""
    result = end(way)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "plan-not-followed")
    assert "1 backward pass of 2 samples per update: 2; planned: 2 of 2 samples: 4" in result.message


def test_a_program_that_multiplies_its_batch_is_not_verified(end: End) -> None:
    """It takes the batch of all ranks for that of each. Without a data loader, two rows may be one sample."""
    result = end("multiplies-by-the-ranks")

    assert result.outcome is Outcome.FIT
    assert result.counted is not None
    assert result.counted.as_planned is None
    assert "2 backward passes of 4 samples per update: 8; not verified to be the 4 planned samples" in result.message


def test_an_oom_that_the_program_survives_is_no_fit(end: End) -> None:
    """The program goes on with half of the batch, which would fit."""
    assert end("swallows-oom").outcome is Outcome.OOM


def test_half_of_the_batch_fits(end: End) -> None:
    """The program of the test above fits with half of its batch under the same limit."""
    assert end("swallows-no-oom").outcome is Outcome.FIT


@pytest.mark.thorough
@pytest.mark.torch
def test_an_oom_that_a_forked_program_survives_is_no_fit(tmp_path: Path) -> None:
    """The limit holds in a forked process."""
    program = misbehaving("swallows-oom")

    assert ends_with(program, tmp_path, TIGHT, size=LARGE, runs_plan=False).outcome is Outcome.OOM
    assert ends_with(program, tmp_path, TIGHT, size=LARGE // 2, runs_plan=False).outcome is Outcome.FIT


def test_the_oom_of_one_rank_ends_those_that_wait_for_it(end: End) -> None:
    """A rank that catches its error keeps the other in a collective, which is no time-out."""
    result = end("hangs-after-the-oom-of-a-rank")

    assert result.outcome is Outcome.OOM
    assert "on rank 1" in result.message


def test_the_updates_of_all_ranks_are_counted(end: End) -> None:
    """In the processes that a launcher started."""
    result = end("two-ranks")

    assert (result.outcome, result.counted and result.counted.world_size) == (Outcome.FIT, 2)
    assert result.counted is not None
    assert result.counted.statement == "2 backward passes of 2 samples per update on each of 2 ranks: 8, as planned"


@pytest.mark.parametrize("way", ["forks-loader-workers", "executes-another-interpreter", "starts-a-shell"])
def test_updates_are_found_in_whichever_process_makes_them(way: str, end: End) -> None:
    """Other processes of the program report too."""
    assert_counted(end(way))


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.parametrize(
    ("way", "is_fresh"),
    [
        ("forks-loader-workers", False),
        ("executes-another-interpreter", False),
        ("prints-megabytes", True),
        ("prints-megabytes", False),
        ("traps-sigterm", True),
        ("traps-sigterm", False),
    ],  # forked, the child of a shell is as fresh as that of another interpreter
)
def test_an_unusual_program_is_counted_as_any_other(way: str, tmp_path: Path, *, is_fresh: bool) -> None:
    """Its updates are found in whichever process makes them, and all of its processes end."""
    result = ends_with(misbehaving(way), tmp_path, runs_plan=is_fresh)

    assert result.forked is not is_fresh
    assert_counted(result)


def assert_counted(result: ProbeResult) -> None:
    """The result is that of any other program."""
    assert result.outcome is Outcome.FIT, result
    assert "2 backward passes of 2 samples per update: 4, as planned" in result.message
    assert len(result.model_dump_json()) < 20_000


@pytest.mark.parametrize("name", ["oom-of-another-interpreter", "oom-behind-a-shell"])
def test_the_budget_holds_in_the_process_that_trains(name: str, end: End) -> None:
    """Not only in the one that was started."""
    assert end(name).outcome is Outcome.OOM


@pytest.mark.thorough
@pytest.mark.torch
def test_a_grandchild_with_a_session_of_its_own_ends_with_the_probe(tmp_path: Path) -> None:
    """Its parent has ended, so that no process group and no parent leads to it."""
    result = ends_with(misbehaving("leaves-grandchildren"), tmp_path)

    assert result.outcome is Outcome.FIT
    (identifier,) = (tmp_path / "grandchildren").read_text().split()
    assert not Path(f"/proc/{identifier}/cmdline").exists()


@pytest.mark.thorough
@pytest.mark.torch
def test_what_a_program_writes_lies_where_it_was_told(tmp_path: Path) -> None:
    """A probe adds nothing to the folder that the program runs in."""
    program = misbehaving("writes-into-its-folder")
    here = tmp_path / "here"
    here.mkdir()
    program = replace(program, argv=(program.argv[0], str(FOLDER / program.argv[1]), *program.argv[2:]), folder=here)

    assert ends_with(program, tmp_path).outcome is Outcome.FIT
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoint.pt", "here", "log.txt"]


def test_updates_without_an_optimizer_of_torch_are_counted(end: End) -> None:
    """Parameters that the program changes by itself show them, as those of Keras and fastai do."""
    result = end("steps-by-hand")

    assert_counted(result)
    assert result.counted is not None
    assert "evaluation-not-seen" not in result.counted.unseen, "what runs without gradients is the update"


def test_passes_without_a_step_are_an_error_of_their_own(end: End) -> None:
    """The optimizer that the program has makes none."""
    result = end("never-steps")

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "never-steps")
    assert not result.fails_at_any_size, "its steps may depend on the size"
    assert "64 backward passes were counted without a step" in result.message
    assert "torch.optim.Optimizer" in result.message


def test_a_program_without_an_optimizer_is_told_so_whatever_it_accumulates(end: End) -> None:
    """One that takes no accumulation may have any of its own, but this one can never make a step that is counted."""
    result = end("has-no-optimizer")

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "no-optimizer")
    assert "and the command has none, and no parameter changed" in result.message


def test_steps_without_a_backward_pass_are_an_error_of_their_own(end: End) -> None:
    """Steps without a backward pass train nothing."""
    result = end("steps-without-backward")

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "no-backward")
    assert "without a backward pass" in result.message


@pytest.mark.parametrize(("way", "told"), [("ends-early", "1 of 2 updates"), ("ends-at-once", "usage: train")])
def test_a_program_that_ends_before_its_updates_is_no_fit(way: str, told: str, end: End) -> None:
    """The program exits with 0, and the result has its updates and its output."""
    result = end(way)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "ended-early")
    assert told in f"{result.message} {result.details} {result.traceback}"


def test_an_isolated_interpreter_is_not_reached_and_the_result_says_so(end: End) -> None:
    """`python -I` reads no PYTHONPATH."""
    result = end("isolated")

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "not-reached")
    assert "-I" in result.message


@pytest.mark.parametrize("name", ["no-python", "no-torch"])
def test_a_command_without_python_or_torch_is_told_apart(name: str, end: End) -> None:
    """Neither command could train."""
    result = end(name)

    assert (result.outcome, result.error_type) == (Outcome.ERROR, name)


@pytest.mark.parametrize("name", ["no-python", "no-torch"])
def test_a_process_without_torch_really_ends(name: str, tmp_path: Path) -> None:
    """The end of the real command is that of the record, and takes a moment."""
    assert result_of(really_ended(name, tmp_path)).error_type == name


def test_a_hang_before_the_first_pass_counts_as_loading(end: End) -> None:
    """Loading has a time limit of its own."""
    result = end("hangs-before-the-first-pass")

    assert (result.outcome, result.error_type) == (Outcome.TIMED_OUT, "loading-timed-out")
    assert "within 30 s (loading_timeout_seconds); it was before training" in result.message


def test_a_hang_in_training_is_shown_with_its_stack(end: End) -> None:
    """The time limit counts from the first forward pass."""
    result = end("hangs-after-the-first-pass")

    assert (result.outcome, result.error_type) == (Outcome.TIMED_OUT, "timed-out")
    assert result.seconds.warmup is not None
    assert result.seconds.warmup >= 2.0
    assert "hangs_after_the_first_pass" in f"{result.details} {result.traceback}"


def test_an_error_of_the_program_is_shown_as_it_printed_it(end: End) -> None:
    """The message is its last line, and the traceback is there. The peak shows whether memory may be the cause."""
    result = end("raises")

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "exit status 1")
    assert "no column is called `labels`" in result.message
    assert "in raises" in (result.traceback or "")
    assert (result.process_peak_bytes or 0) > 0


def test_a_missing_module_fails_at_every_size(tmp_path: Path) -> None:
    """The error is not tried again at another size, as that of a program which refuses one sample is."""
    output = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'lightning'\n"
    result = result_of(replace(replay("raises", tmp_path), output=output))

    assert (result.outcome, result.error_type) == (Outcome.ERROR, "ModuleNotFoundError")
    assert result.fails_at_any_size
    assert "No module named 'lightning'" in result.message
