"""The command after `--` on a command line, and the errors about it. No process is started."""

from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand

from batchwright.cli.trailing_command import CommandOptions, command_model
from tests.support.command import called
from tests.support.factories import recommendation

SIZES = ("--", "no-such-program", "{micro_batch_size}")
BATCH = ("tune", "--effective-batch-size", "8", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (BATCH, "SPEC: is required: a file that describes the workload, or the command that trains after `--`"),
        ((*BATCH, "spec.yaml", *SIZES), "is given, and a command after `--` as well"),
        ((*BATCH, "--env", "A=1"), "SPEC: is required"),
        ((*BATCH, "spec.yaml", "--env", "A=1"), "--env: is for a command after `--`"),
        ((*BATCH, "--env", "A", *SIZES), "--env: must be a name, `=` and a value"),
        ((*BATCH, "--probe-env", "A", *SIZES), "--probe-env: must be a name, `=` and a value"),
        ((*BATCH, "spec.yaml", "--allow-overwriting"), "--allow-overwriting: is for a command after `--`"),
        ((*BATCH, "--template", "a=none.yaml", *SIZES), "--template: cannot be read: No such file or directory"),
        ((*BATCH, "--", "python", "train.py"), "no placeholder `{micro_batch_size}`"),
        ((*BATCH, *SIZES[:2], "{micro_batch}"), "did you mean `{micro_batch_size}`?"),
        ((*BATCH, *SIZES), "model.argv.0: cannot be started"),
        (
            (*BATCH, "--", "no-such-program x {micro_batch_size}"),
            "not executable (got no-such-program)",
        ),
        ((*BATCH, "--", "LR=1", *SIZES[1:]), "not executable (got no-such-program)"),
        (
            (*BATCH, "--", "python t.py {micro_batch_size} | tee log"),
            "run it by a shell: `-- sh -c 'python t.py",
        ),
        ((*BATCH, "--", "python 't.py {micro_batch_size}"), "is one quoted word, and No closing quotation"),
        ((*BATCH, "python", "train.py", "--lr", "1"), "options of batchwright before it: ... -- python train.py"),
        (("run", "train.py", "{micro_batch_size}"), "before it: ... -- python train.py '{micro_batch_size}'"),
        (("tune", "train.py", *BATCH[1:]), "before it: ... -- python train.py (got train.py)"),
        ((*BATCH, "train.py"), "before it: ... -- python train.py (got train.py)"),
        ((*BATCH, "LR=1", "python", "train.py"), "before it: ... -- LR=1 python train.py"),
        ((*BATCH, "python train.py {micro_batch_size}"), "before it: ... -- python train.py {micro_batch_size}"),
        ((*BATCH, "-o", "no-such-folder/x.json", *SIZES), "--output: the folder no-such-folder does not exist"),
        ((*BATCH, "--quick", *SIZES), "`--quick` is not possible for a command"),
        ((*BATCH, "--what-if", *SIZES), "`--what-if` is not possible for a command"),
        ((*BATCH[:3], "--device", "cpu", "--world-size", "3", *SIZES), "8 cannot be split evenly over 3 ranks"),
    ],
)
def test_a_wrong_command_line_is_refused_before_any_work(arguments: tuple[str, ...], message: str) -> None:
    """The error names the wrong option and the allowed values."""
    done = called(*arguments, columns=400)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("command", "environment", "argv"),
    [
        (("LR=a=b", "N=", "python", "t.py", "X=1"), {"LR": "a=b", "N": ""}, ("python", "t.py", "X=1")),
        (("LR=1 python t.py 'two words'", "--last"), {"LR": "1"}, ("python", "t.py", "two words", "--last")),
        (("python", "-c", "a b; c"), {}, ("python", "-c", "a b; c")),
    ],
)
def test_variables_and_quotes_are_read_as_a_shell_reads_them(
    command: tuple[str, ...], environment: dict[str, str], argv: tuple[str, ...]
) -> None:
    """Variables before the program are those of `--env`, and a quoted program is several words."""
    context = typer.Context(TyperCommand("tune"))
    context.meta["batchwright.cli.trailing_command"] = command
    model = command_model(context, None, CommandOptions(env=["LR=0", "KEPT=1"]))
    assert model is not None
    assert model["environment"] == {"LR": "0", "KEPT": "1"} | environment
    assert model["argv"] == argv


def test_options_after_the_separator_are_the_commands_own(tmp_path: Path) -> None:
    """Options after the separator belong to the command, `--help` and `--json` included."""
    done = called(*BATCH, *SIZES, "--help", "--json", cwd=tmp_path, columns=400)
    assert done.returncode == 2
    assert "cannot be started" in done.stderr


@pytest.mark.parametrize("steps", [(), ("{gradient_accumulation_steps}",)], ids=["one", "several"])
def test_a_command_that_takes_no_accumulation_is_told_so_before_its_first_probe(steps: tuple[str, ...]) -> None:
    """Not by the recommendation, after all probes."""
    done = called(*BATCH, *SIZES, *steps, columns=400)
    assert done.stderr.startswith("Note: the command has no placeholder") is not bool(steps)


def test_the_usage_names_the_command() -> None:
    """And says how to separate it."""
    assert "[-- COMMAND...]" in called("tune", "--help").stdout


def test_a_verification_needs_a_command(tmp_path: Path) -> None:
    """The command follows the recommendation's file."""
    path = tmp_path / "recommendation.json"
    path.write_text(recommendation().model_dump_json())
    assert "COMMAND: is required" in called("verify", path, columns=400).stderr


def test_a_plan_of_two_sizes_is_verified_as_an_export_has_it(tmp_path: Path) -> None:
    """A framework repeats one size."""
    path = tmp_path / "recommendation.json"
    path.write_text(recommendation().model_dump_json())  # 10 samples, at most 4 at a time: 4 + 3 + 3
    done = called("verify", path, "--", "python", "train.py", columns=400)
    assert done.returncode == 2
    assert "micro-batches of 4 and 3 samples" in done.stderr
    assert "--format hugging-face" in done.stderr
