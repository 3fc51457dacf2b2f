"""The help of every command, at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from batchwright.cli.commands.tune import _next_steps
from batchwright.cli.display import recommendation_panel
from batchwright.cli.main import app
from tests.support.factories import recommendation


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below a group, with its words."""
    yield path, group
    for name in group.list_commands(None) if hasattr(group, "list_commands") else ():
        yield from commands(group.get_command(None, name), (*path, name))


ALL = dict(commands(get_command(app)))


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_no_name_is_cut_at_80_columns(words: tuple[str, ...]) -> None:
    """Each option has its whole name and its help, in lines of at most 80 columns."""
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert "…" not in shown.output
    assert [line for line in shown.output.splitlines()[1:] if line.endswith("...")] == []
    assert max(map(len, shown.output.splitlines())) <= 80
    names = [name for parameter in ALL[words].params if not parameter.hidden for name in parameter.opts]
    assert [name for name in names if name.startswith("--") and name not in shown.output] == []


def test_options_of_tune_are_in_groups() -> None:
    """What to tune comes first. Every option but `--help` has its group."""
    shown = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "80"}).output
    titles = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[1:3] == ["What to tune:", "Device and memory:"]
    assert titles[-1] == "Other options:"
    assert shown.split("Other options:")[1].split() == ["--help", "Show", "this", "message", "and", "exit."]


@pytest.mark.parametrize(
    ("spec", "output", "expected"),
    [
        (
            "spec.yaml",
            "found.json",
            "batchwright train spec.yaml --recommendation found.json\nbatchwright export found.json",
        ),
        (None, "found.json", "batchwright train found.json\nbatchwright export found.json --format slurm"),
        (
            "my spec.yaml",
            "my found.json",
            "batchwright train 'my spec.yaml' --recommendation 'my found.json'\nbatchwright export 'my found.json'",
        ),
        ("spec.yaml", None, "keep the recommendation with `-o FILE`"),
    ],
)
def test_the_panel_ends_with_what_to_do_next(spec: str | None, output: str | None, expected: str) -> None:
    """Commands with the files that the user typed."""
    steps = _next_steps(Path(spec) if spec else None, Path(output) if output else None)
    assert steps.startswith(expected)
    shown = StringIO()
    Console(file=shown, width=200).print(recommendation_panel(recommendation(), steps))
    assert shown.getvalue().splitlines()[-2].strip("│ ").endswith(steps.splitlines()[-1])
