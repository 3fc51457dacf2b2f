"""The guide to exports describes the targets of the registry."""

import re
from typing import get_args

import pytest

from batchwright.errors import ExportRefusal
from batchwright.exports.base import ExportOptions, Target
from batchwright.exports.registry import TARGETS, export
from tests.support.exports.plans import plan
from tests.support.paths import ROOT

GUIDE = (ROOT / "docs" / "exports.md").read_text("utf-8")
KINDS = {"Frameworks": "framework", "Launchers": "launcher"}


def rows(heading: str) -> list[dict[str, str]]:
    """The cells of a section's table by their column."""
    section = GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


def words(cell: str) -> list[str]:
    """What is written as code in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def follows(target: Target) -> str:
    """The plans that a target follows, as in the guide."""
    return "no" if target.repeats_one_size else "yes"


def passes_on(target: Target) -> str:
    """The arguments of a target that a launcher passes on, as in the guide."""
    return "no" if target.arguments is None else "figures alone" if target.arguments_leave else "yes"


@pytest.mark.parametrize("heading", KINDS)
def test_the_tables_have_the_registrys_targets_and_versions(heading: str) -> None:
    """Exactly those, in its order."""
    documented = [(words(row["format"]), words(row["versions"])) for row in rows(heading)]

    assert documented == [
        ([target.name], list(target.versions)) for target in TARGETS.values() if target.kind == KINDS[heading]
    ]


@pytest.mark.parametrize("heading", KINDS)
def test_the_tables_say_what_each_target_writes_and_follows(heading: str) -> None:
    """Its files, whether it follows uneven plans, and whether a launcher can pass its figures on."""
    for row in rows(heading):
        target = TARGETS[words(row["format"])[0]]

        assert words(row["writes"]) == [file.name for file in export(plan(16), target.name).files]
        assert row["uneven plans"] == follows(target)
        assert row.get("arguments", "no") == passes_on(target)


def test_every_row_says_how_it_was_checked() -> None:
    """By a release, or against what was recorded of one."""
    for heading in KINDS:
        assert all(re.search(r"\d+\.\d+|recorded", row["checked"]) for row in rows(heading))


@pytest.mark.parametrize("name", sorted({*ExportOptions.model_fields} - {"allow_inexact", "arguments_of"}))
def test_the_table_of_options_says_who_takes_them(name: str) -> None:
    """Exactly the targets that write an option."""
    launchers = {target.name for target in TARGETS.values() if target.kind == "launcher"}
    (taken,) = [row["for"] for row in rows("Options") if words(row["option"]) == [f"--{name.replace('_', '-')}"]]

    documented = {*words(taken)} | (launchers if taken.startswith("launchers") else set())

    assert documented == {target.name for target in TARGETS.values() if name in target.takes}


def test_every_refusal_is_documented() -> None:
    """The codes of its problems over HTTP."""
    codes = [words(row["`code` of the problem"])[0] for row in rows("Exit codes, and answers over HTTP")]

    assert codes == [f"export-{arg}" for arg in get_args(ExportRefusal)]
