"""The job of a command from the command line: output, exit codes, and options that a command has none of."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import called
from tests.support.exports.plans import command_plan
from tests.support.factories import CPU, recommendation as of_a_workload

GREETS = "import sys; print('hello', *sys.argv[1:]); print('to stderr', file=sys.stderr); sys.exit(int(sys.argv[1]))"
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
print("ready", flush=True)
time.sleep(600)
"""
BATCH = ("run", "--effective-batch-size", "8", "--device", "cpu")
SIZES = ("--", "no-such-program", "{micro_batch_size}")


def recommendation(tmp_path: Path, code: str, *arguments: str, **fields: Any) -> Path:
    """The file of a recommendation for a program."""
    found = command_plan(sys.executable, "-S", "-c", code, *arguments, "{micro_batch_size}", device=CPU, **fields)
    path = tmp_path / "recommendation.json"
    path.write_text(found.model_dump_json())
    return path


def test_the_output_of_the_command_is_passed_on(tmp_path: Path) -> None:
    """With the result behind it."""
    done = called("train", recommendation(tmp_path, GREETS, "0"), "--output-dir", tmp_path / "job", columns=200)

    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()[:2]) == ["hello 0 8", "to stderr"]
    assert "SUCCEEDED: the command ended with exit status 0 after 0 updates" in done.stdout


def test_a_document_stands_alone_on_standard_output(tmp_path: Path) -> None:
    """The output of the command is then on standard error."""
    path = recommendation(tmp_path, GREETS, "0")
    done = called("train", path, "--output-dir", tmp_path / "job", "--json")

    assert json.loads(done.stdout)["outcome"] == "SUCCEEDED"
    assert "hello 0 8" in done.stderr


def test_a_failed_command_is_a_failed_training(tmp_path: Path) -> None:
    """The message has its own exit status."""
    done = called("train", recommendation(tmp_path, GREETS, "3"), "--output-dir", tmp_path / "job", columns=200)

    assert done.returncode == 6
    assert "FAILED: the command ended with exit status 3 after 0 updates" in done.stdout


def test_sigterm_is_passed_to_the_command(tmp_path: Path) -> None:
    """The exit code is that of a stopped run, whatever the command's own is."""
    path = recommendation(tmp_path, WAITS)
    line = [sys.executable, "-m", "batchwright", "train", str(path), "--output-dir", str(tmp_path / "job")]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "job" / "log.txt"
    while not log.exists() or "ready" not in log.read_text():  # pytest's limit ends a wait in vain
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)

    assert process.returncode == 143
    assert printed.startswith("ready\nsaved\n")
    assert "stopped by SIGTERM after 0 updates, and ended with exit status 0" in " ".join(printed.split())


@pytest.mark.parametrize(
    "option", [("--seed", "1"), ("--workers", "2"), ("--tracker", "tensorboard"), ("--checkpoint-every", "5")]
)
def test_options_of_the_engine_are_not_the_commands(tmp_path: Path, option: tuple[str, ...]) -> None:
    """They would have no effect."""
    for line in (("train", str(recommendation(tmp_path, GREETS, "0")), *option), (*BATCH, *option, *SIZES)):
        done = called(*line, cwd=tmp_path, columns=200)
        assert done.returncode == 2
        assert f"{option[0]}: is for runs that Batchwright trains itself" in done.stderr


def test_updates_need_their_placeholder(tmp_path: Path) -> None:
    """A command without it ends by itself."""
    done = called("train", recommendation(tmp_path, GREETS, "0"), "--updates", "3", cwd=tmp_path, columns=200)
    assert done.returncode == 2
    assert "no placeholder `{updates}`" in done.stderr

    given = called("train", recommendation(tmp_path, GREETS, "0", "{updates}"), "--updates", "3", cwd=tmp_path)
    assert given.returncode == 0
    assert "hello 0 3 8" in given.stdout


def test_the_spec_of_another_command_is_refused(tmp_path: Path) -> None:
    """The plan is that of the command that was tuned."""
    path = recommendation(tmp_path, GREETS, "0")
    spec = tmp_path / "spec.yaml"
    spec.write_text("model: {kind: command, argv: [other, '{micro_batch_size}']}\n")
    done = called("train", spec, "--recommendation", path, cwd=tmp_path, columns=200)
    assert done.returncode == 2
    assert "model.argv: differs from the command that was tuned" in done.stderr

    workload = tmp_path / "workload.json"
    workload.write_text(of_a_workload().model_dump_json())
    other = called("train", spec, "--recommendation", workload, cwd=tmp_path, columns=200)
    assert other.returncode == 2
    assert "model.kind: differs from the spec that was tuned" in other.stderr


def test_a_command_that_is_not_there_is_refused_before_any_work(tmp_path: Path) -> None:
    """With the field and its value."""
    done = called(*BATCH, *SIZES, cwd=tmp_path, columns=200)
    assert done.returncode == 2
    assert "model.argv.0: cannot be started" in done.stderr


@pytest.mark.usefixtures("forked")
def test_a_recommendation_alone_trains_what_was_tuned(tmp_path: Path) -> None:
    """It has the spec, of a workload as of a command."""
    path = tmp_path / "recommendation.json"
    path.write_text(of_a_workload().model_dump_json())

    done = called("train", path, "--updates", "2", "--output-dir", tmp_path / "job", columns=200)

    assert done.returncode == 0, done.stderr
    assert "SUCCEEDED: 2 updates made" in done.stdout
