"""The scripts of examples/side_by_side do what their page says, and its figures are those of the measurement."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import EXAMPLES, ROOT

PAGE = (ROOT / "docs" / "side-by-side.md").read_text()
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "side_by_side.json").read_text())
WAYS = MEASURED["ways"]
EXACT = 1e-5
"""Largest error of a gradient that is the full batch's, in fp32."""
WRONG = 1e-3
"""Errors above this are not those of rounding."""


def measured(name: str, folder: Path) -> dict[str, Any]:
    """The figures of one script, run now, without the true largest size and the run with a long sample."""
    output = folder / "results.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "side_by_side.py"), "--quick", "--only", name]
    done = subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, check=False, cwd=folder, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(output.read_text())["ways"][name]
    return found


# --- the scripts ---


@pytest.mark.thorough
def test_ours_trains_with_the_effective_batch_and_the_gradient_of_the_full_one(tmp_path: Path) -> None:
    """Two updates of 50 samples and one of the 25 that are left, whatever size was found."""
    way = measured("Batchwright", tmp_path)
    assert way["effective_batch_sizes"] == [50, 50, 25]
    assert max(way["errors"]) < EXACT
    assert way["found"] in way["tried"]


@pytest.mark.exports
@pytest.mark.parametrize(
    ("name", "is_exact"), [("accelerate", False), ("accelerate, by token", True), ("Lightning", False)]
)
def test_the_others_train_over_all_samples(tmp_path: Path, name: str, *, is_exact: bool) -> None:
    """Each sample is in one update; only the loop that counts tokens has the gradient of the full batch."""
    way = measured(name, tmp_path)
    assert sum(way["effective_batch_sizes"]) == 125
    assert way["found"] in way["tried"] or name == "Lightning"
    assert (max(way["errors"]) < EXACT) is is_exact
    assert is_exact or min(way["errors"]) > WRONG


# --- the page ---


def row(name: str) -> list[str]:
    """The cells of a row of the page's table, without its name."""
    (line,) = re.findall(rf"^\| {re.escape(name)} \|.*$", PAGE, flags=re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def numbers(cells: list[str]) -> list[list[int]]:
    """The whole numbers of each cell."""
    return [[int(number) for number in re.findall(r"\d+", cell)] for cell in cells]


def test_the_columns_are_the_scripts_that_were_run() -> None:
    """In order; and each script is on the page."""
    (head,) = re.findall(r"^\| \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert head.split(" | ") == list(WAYS)
    assert all(f'--8<-- "examples/side_by_side/{way["script"]}"' in PAGE for way in WAYS.values())


def test_the_lines_are_those_of_the_scripts() -> None:
    """Line counts are those of the scripts, without docstrings, comments and blank lines."""
    lines = []
    for way in WAYS.values():
        text = (EXAMPLES / "side_by_side" / way["script"]).read_text()
        code = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
        lines.append(sum(bool(line.strip()) and line.strip()[0] != "#" for line in code.splitlines()))
    assert numbers(row("lines of code")) == [[count] for count in lines]
    assert lines == [way["code_lines"] for way in WAYS.values()]


def test_the_sizes_and_updates_are_those_that_were_measured() -> None:
    """Found and tried sizes beside the truth, and the samples of each update in both runs."""
    found = row(f"largest size found, of {MEASURED['truth']['largest']} that fit")
    assert numbers(found) == [[way["found"]] for way in WAYS.values()]
    assert numbers(row("sizes tried")) == [way["tried"] for way in WAYS.values()]
    requested = MEASURED["task"]["effective_batch_size"]
    updates = row(f"samples of each update, {requested} requested")
    assert numbers(updates) == [way["effective_batch_sizes"] for way in WAYS.values()]
    long = row("updates with a sample that is too long")
    assert numbers(long) == [way["with_long_sample"]["effective_batch_sizes"] for way in WAYS.values()]
    ended = [way["with_long_sample"]["error"] is not None for way in WAYS.values()]
    assert ["then an error" in cell for cell in long] == ended


@pytest.mark.parametrize("window", ["full window", "short last window"])
def test_the_errors_are_those_that_were_measured(window: str) -> None:
    """To two digits."""
    measured_errors = [way[f"error_{window.removeprefix('short ').replace(' ', '_')}"] for way in WAYS.values()]
    shown = [f"{float(cell):.1e}" for cell in row(f"error of the gradient, {window}")]
    assert shown == [f"{error:.1e}" for error in measured_errors]


def test_the_text_has_the_figures_of_the_measurement() -> None:
    """The versions, the limit, the samples, the scan, our division, and the sizes of accelerate's restarts."""
    text = " ".join(PAGE.split())
    versions, task, truth = MEASURED["versions"], MEASURED["task"], MEASURED["truth"]
    assert f"accelerate {versions['accelerate'].rpartition('.')[0]}" in text
    assert f"Lightning {versions['lightning'].rpartition('.')[0]}" in text
    assert f"{task['samples']} samples" in text
    assert f"{task['memory_limit_bytes'] // 1024**2} MiB" in text
    largest = truth["largest"]
    assert truth["largest_ever"] == largest
    assert f"{largest} always fits, and {largest + 1} never does" in text
    divided = re.findall(r"\d+", WAYS["Batchwright"]["with_long_sample"]["printed"][-1])
    assert f"({' + '.join(divided)} in place of" in text
    for name in ("accelerate", "accelerate, by token"):
        restarts = WAYS[name]["with_long_sample"]["passes"][len(WAYS[name]["tried"]) :]
        assert f"smaller sizes ({', '.join(map(str, restarts))})" in text
