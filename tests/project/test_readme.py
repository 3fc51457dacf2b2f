"""The README runs as a reader would follow it, and its figures are those of the committed measurements."""

import json
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from statistics import median

import pytest

from batchwright.hardware.gpu_lookup import find_gpu
from tests.support.command import called
from tests.support.documents import ADDRESS, Reader, blocks_of
from tests.support.paths import EXAMPLES, ROOT
from tests.support.service.processes import LISTENS, spoken

README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
FINDERS = ("Batchwright", "accelerate (128)", "Lightning power", "Lightning binsearch")
"""The finders of ``benchmarks/finders.py`` in the order of the README's figures."""


def blocks(language: str) -> list[str]:
    """The README's code blocks in a language that are run, in order."""
    return [block.text for block in blocks_of(README) if block.language == language and block.reason is None]


def console() -> str:
    """The README's commands with what they print, in order."""
    return "\n".join(block.text for block in blocks_of(README) if block.language == "console")


def row(name: str) -> list[str]:
    """The cells of a table's row, without its name."""
    (line,) = re.findall(rf"^\| {re.escape(name)}.*$", README, flags=re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


# --- its blocks run ---


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A served service; gives its address."""
    data_dir = str(tmp_path_factory.mktemp("service"))
    with spoken(["-m", "batchwright", "serve", "--port", "0"], LISTENS, {"BATCHWRIGHT_DATA_DIR": data_dir}) as served:
        yield served.url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder after the commands. Each printed what the README shows."""
    path = tmp_path_factory.mktemp("reader")
    reader = Reader(path, lambda: ADDRESS)
    for block in blocks_of(README):
        if block.reason is None and block.language in {"yaml", "console"}:
            reader.assert_works(block)
    return path


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of the Python code, run as it stands in a process of its own."""
    (code,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path_factory.mktemp("code"),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_tune_and_print_what_is_shown(folder: Path) -> None:
    """The spec is written and tuned; the plan and the proof are printed as shown, but for their figures."""
    found = json.loads((folder / "recommendation.json").read_text())
    assert sum(found["plan"]["micro_batch_sizes"][0]) == 100


def test_the_python_code_finds_a_plan_with_its_proof(printed: str) -> None:
    """It prints micro-batches that add up to the effective batch, and the proof."""
    (code,) = blocks("python")
    plan, _, proof = printed.partition(") ")
    (effective,) = re.findall(r"effective_batch_size=(\d+)", code)
    assert sum(map(int, re.findall(r"\d+", plan))) == int(effective)
    assert "fits and the next size" in proof


def test_the_curl_call_is_accepted(service: str) -> None:
    """Run as it stands, it prints the tuning that it queued."""
    (text,) = blocks("bash")
    command = ["bash", "-c", text.replace(ADDRESS, service)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    tuning = json.loads(done.stdout)
    assert tuning["id"].startswith("tun_")
    assert tuning["effective_batch_size"] == 100


def test_the_wheel_is_built_as_named(tmp_path: Path) -> None:
    """It has the README's file name, the extras that the README installs, and the command."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (name, extras), *others = re.findall(r'"dist/(\S+\.whl)\[([\w,]+)\]"', README)
    assert others == []
    with zipfile.ZipFile(tmp_path / name) as wheel:
        about = wheel.read(f"batchwright-{metadata.version('batchwright')}.dist-info/METADATA").decode()
        scripts = wheel.read(f"batchwright-{metadata.version('batchwright')}.dist-info/entry_points.txt").decode()
    assert set(extras.split(",")) <= set(re.findall(r"^Provides-Extra: (\w+)$", about, flags=re.MULTILINE))
    assert "batchwright = " in scripts


def test_three_blocks_are_not_run() -> None:
    """Of the one that installs packages, the test above builds the wheel; the others need a program of the reader."""
    assert [block.reason for block in blocks_of(README) if block.reason is not None] == [
        "installs packages; a test builds the wheel",
        "a program of yours; docs/commands.md runs others",
        "a module of yours; tests/integrations runs others",
    ]


def test_it_is_read_in_five_minutes() -> None:
    """At most 120 lines, with its tables."""
    assert len(README.splitlines()) <= 120


# --- what it names exists ---


def test_every_make_target_named_exists() -> None:
    """No document sends a reader to a target that is not there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"`?make ([a-z-]+)", README + (ROOT / "CONTRIBUTING.md").read_text())
    assert set(named) <= targets
    assert {"install", "demo", "check", "test", "gpu-test"} <= set(named)


def test_every_command_and_option_exists() -> None:
    """Each `batchwright` line, of a block or of the text, names a command, and options that its help lists."""
    lines = re.findall(r"^\$ (batchwright [a-z].*?)(?: -- \\)?$", console(), flags=re.MULTILINE)
    lines += re.findall(r"`(batchwright [a-z][^`\n]*)`", README)
    assert len(lines) > 5
    for line in lines:
        words = shlex.split(line)[1:]
        shown = called(words[0], "--help", columns=200)
        assert shown.returncode == 0, line
        missing = [word for word in words if word.startswith("-") and not re.search(rf"{word}\b", shown.stdout)]
        assert missing == [], line
        assert all(find_gpu(words[number + 1]) for number, word in enumerate(words) if word == "--gpu")


def test_the_command_is_on_the_path_before_it_is_used() -> None:
    """A reader who follows it line by line finds every command."""
    lines = [line.removeprefix("$ ") for line in console().splitlines() if line.startswith("$ ")]
    first = next(number for number, line in enumerate(lines) if line.startswith("batchwright "))
    assert any(line.startswith("make install && source .venv/bin/activate") for line in lines[:first])


def test_continuous_integration_runs_the_readmes_command_after_lint() -> None:
    """Style and types fail first, within minutes; then the tests as a reader runs them."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    made = [line for line in lines if line.startswith("make ")]
    assert made == ["make lint", "make test"]
    assert "set -euo pipefail" in lines


# --- its figures ---


def test_its_figures_are_those_of_one_tuning() -> None:
    """The plan, the largest size and the proof agree, and the text has the size of the proof."""
    text = console()
    (sizes,) = re.findall(r"│ plan +([\d +]+) = 100", text)
    assert sum(map(int, sizes.split(" + "))) == 100
    (largest,) = map(int, re.findall(r"│ largest +a micro-batch of (\d+) fits", text))
    assert f"{largest} fits and the next size, {largest + 1}, ran out of memory" in text
    assert f"This run probed a few sizes up to {largest + 1}," in README


def test_the_errors_of_the_loops_are_those_of_the_example() -> None:
    """The rows have its loops; the tutorials' errors are of the size of the gradient, ours of its rounding."""
    example = (EXAMPLES / "own_loop.py").read_text()
    assert "loss / steps" in example
    assert "GradientAccumulation" in example
    assert all(float(error) > 1e-1 for error in row("most tutorials' loop"))
    assert all(float(error) < 1e-5 for error in row("`batchwright.GradientAccumulation`"))


def test_the_shares_are_those_that_were_measured() -> None:
    """Median and worst of each finder's answers, and the models on which it failed."""
    measured = json.loads((RESULTS / "finders.json").read_text())["workloads"]
    expected = []
    for finder in FINDERS:
        shares = [workload["finders"][finder]["share"] for workload in measured]
        found = [share for share in shares if share is not None]
        failed = len(shares) - len(found)
        expected.append((f"{median(found):.0%}", f"{min(found):.0%}", str(failed) if failed else ""))
    cells = " | ".join(row("share of the largest")).replace(" %", "%")
    assert re.findall(r"(\d+%) \((\d+%)\)(?:, fails on (\d+))?", cells) == expected
    assert f"over {len(measured)} models" in README.replace("\n", " ")


def test_the_times_are_those_that_were_measured() -> None:
    """Of the command, over the same models."""
    measured = json.loads((RESULTS / "finders.json").read_text())["workloads"]
    seconds = [workload["finders"]["Batchwright"]["seconds"] for workload in measured]
    assert f"`batchwright tune` took {min(seconds):.0f} to {max(seconds):.0f} s" in README.replace("\n", " ")


def test_the_gradient_errors_are_those_that_were_measured() -> None:
    """On ragged samples, by loop."""
    measured = json.loads((RESULTS / "accumulation_exactness.json").read_text())["one_process"]
    loops = ("ours", "accelerate", "Lightning", "HF Trainer, model takes **kwargs", "HF Trainer, model without")
    shown = re.findall(r"\d\.[\de-]+", " ".join(row("gradient error when it accumulates")))
    assert [float(it) for it in shown] == pytest.approx([measured[loop]["A"] for loop in loops], rel=0.01)
