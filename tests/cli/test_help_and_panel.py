"""The help of every command, at 80 columns."""

import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from batchwright.cli.commands.tune import _next_steps
from batchwright.cli.display import table_of
from batchwright.cli.main import app
from batchwright.cli.output import print_rows
from batchwright.schemas.base import load_document
from batchwright.schemas.recommendation import Recommendation
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
    ("spec", "output", "train", "export"),
    [
        ("spec.yaml", "found.json", "spec.yaml --recommendation found.json", "found.json --format pytorch"),
        (None, "found.json", "found.json", "found.json --format slurm"),
        ("my spec.yaml", "my found.json", "'my spec.yaml' --recommendation 'my found.json'", "'my found.json' --"),
    ],
)
def test_what_to_do_next_are_commands_to_copy(spec: str | None, output: str, train: str, export: str) -> None:
    """One line each, with the files that the user typed; nothing in it breaks a shell's line."""
    lines = _next_steps(recommendation(), Path(spec) if spec else None, Path(output)).splitlines()
    assert lines[0] == f"Next: batchwright train {train}"
    assert lines[1].strip().startswith(f"batchwright export {export}")
    assert shlex.split(lines[1], comments=True)[-1] in ("pytorch", "slurm")


def test_a_recommendation_that_no_option_writes_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a temporary file that the next commands name; if it cannot be written, they ask for `-o`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = recommendation()
    train, _ = _next_steps(found, None, None).splitlines()
    (kept,) = tmp_path.glob("*/*")
    assert shlex.split(train, comments=True)[-1] == str(kept)
    assert load_document(Recommendation, kept, "recommendation") == found
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert _next_steps(found, None, None).startswith("Next: tune again with `-o FILE`")


def test_a_table_prints_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the markup of rich nor its names of emoji."""
    table = table_of("name")
    table.add_row(":smile: [red]")
    print_rows([], table, json=False)
    assert capsys.readouterr().out.split("\n")[1].strip() == ":smile: [red]"
