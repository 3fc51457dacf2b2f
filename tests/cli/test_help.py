"""The help of every command, at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from batchwright.cli.main import app


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
    """What to tune comes first, and every option has its group but for the help itself."""
    shown = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "80"}).output
    titles = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[1:3] == ["What to tune:", "Device and memory:"]
    assert titles[-1] == "Other options:"
    assert shown.split("Other options:")[1].split() == ["--help", "Show", "this", "message", "and", "exit."]
