"""The README runs: its spec parses, its workload trains, its curl and its SDK code work against a real service."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.command import called
from tests.support.factories import python_spec
from tests.support.paths import ROOT
from tuner.hardware.gpu_lookup import find_gpu
from tuner.hardware.memory_devices.factory import open_device
from tuner.schemas.workload import parse_spec
from tuner.training.micro_batches.splitting import sliced
from tuner.training.update_engine import UpdateEngine
from tuner.workloads.build import build_model, build_workload

README = (ROOT / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    """The README's code blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A served service; gives its address."""
    environment = {**os.environ, "BATCHWRIGHT_DATA_DIR": str(tmp_path_factory.mktemp("service"))}
    command = [sys.executable, "-m", "tuner.cli", "serve", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if " listens on " in line)
    yield line.split()[-1]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 0


def test_the_spec_is_one() -> None:
    """The YAML block is a valid spec."""
    (text,) = blocks("yaml")
    assert parse_spec(yaml.safe_load(text)).batch.sequence_length == 64


def test_the_estimate_can_be_asked_for() -> None:
    """Its spec is one, and every GPU that a command names is known."""
    (spec,) = re.findall(r"^\$ cat gpt2\.yaml\n(.*?)^\$", README, flags=re.MULTILINE | re.DOTALL)
    assert parse_spec(yaml.safe_load(spec)).precision == "bf16-mixed"
    words = [shlex.split(line) for line in re.findall(r"^\$ (batchwright estimate .*)$", README, flags=re.MULTILINE)]
    names = [line[index + 1] for line in words for index, word in enumerate(line) if word == "--gpu"]
    assert len(names) > 3
    assert all(find_gpu(name).total_bytes for name in names)


def test_the_curl_call_is_accepted(service: str) -> None:
    """Its body, posted as it stands, starts a tuning."""
    (command,) = blocks("bash")
    words = shlex.split(command)
    body = json.loads(words[words.index("-d") + 1])
    url = next(word for word in words if word.startswith(ADDRESS))
    answer = httpx.post(url.replace(ADDRESS, service), json=body)
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/tunings/{answer.json()['id']}"


def test_the_sdk_code_tunes_and_trains(service: str, tmp_path: Path) -> None:
    """Run as it stands, it prints an exact plan with its proof, and a job that succeeded."""
    code = next(block for block in blocks("python") if "service.client" in block).replace(ADDRESS, service)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=200
    )
    assert done.returncode == 0, done.stderr
    plan, job = done.stdout.splitlines()
    assert "fits and the next size" in plan
    assert job.startswith("SUCCEEDED ")


def test_the_workload_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python block is a workload that the engine takes."""
    (tmp_path / "readme_workload.py").write_text(next(it for it in blocks("python") if "class Workload" in it))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = python_spec("readme_workload:build")
    workload = build_workload(spec)
    engine = UpdateEngine(spec, workload, build_model(spec, workload), open_device("cpu"))
    report = engine.update([sliced(workload.make_batch(3)), sliced(workload.make_batch(2))])
    assert 0 < report.loss < 10


def test_the_loop_of_ones_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Two updates, of four micro-batches and of the one that is left."""
    code = next(block for block in blocks("python") if "GradientAccumulation(" in block)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - our own README
    first, second = capsys.readouterr().out.splitlines()
    assert "micro_batch_sizes=(4, 4, 4, 4)" in first
    assert "micro_batch_sizes=(4,)" in second


def test_every_make_target_named_exists() -> None:
    """No document sends a reader to a target that is not there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"`?make ([a-z-]+)", README + (ROOT / "CONTRIBUTING.md").read_text())
    assert set(named) <= targets
    assert {"demo", "test"} <= set(named)


def console() -> str:
    """The README's commands with what they print, in order."""
    return "\n".join(blocks("console"))


def test_its_figures_are_those_of_one_tuning() -> None:
    """The probes, the answer, the proof and the export name the same sizes."""
    text = console()
    outcomes = dict(re.findall(r"^probe (\d+)  (FIT|OOM)", text, flags=re.MULTILINE))
    largest = max(int(size) for size, outcome in outcomes.items() if outcome == "FIT")
    assert outcomes[str(largest + 1)] == "OOM"
    assert f"│ largest          a micro-batch of {largest} fits" in text
    assert f"{largest} fits and the next size, {largest + 1}, ran out of memory" in text
    assert f"the largest size up to {largest} that" in text
    (sizes,) = re.findall(r"│ plan +([\d +]+) = 100", text)
    assert sum(map(int, sizes.split(" + "))) == 100
    peaks = re.findall(rf"^probe {largest}  FIT  (\S+ MiB)", text, flags=re.MULTILINE)
    assert f"│ memory           {peaks[0]} of 128.00 MiB" in text


def test_the_command_is_on_the_path_before_it_is_used() -> None:
    """A reader who follows it line by line finds every command."""
    lines = [line.removeprefix("$ ") for line in console().splitlines() if line.startswith("$ ")]
    first = next(number for number, line in enumerate(lines) if line.startswith("batchwright "))
    before = [line.split("#")[0].strip() for line in lines[:first]]
    assert before.index("make install") < before.index("source .venv/bin/activate")


def test_every_command_and_option_exists() -> None:
    """Each `batchwright` line names a command, and options that its help lists."""
    lines = re.findall(r"^\$ (batchwright [a-z].*)$", console(), flags=re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        words = words[: words.index(">")] if ">" in words else words
        command = words[:2] if words[0] == "keys" else words[:1]
        shown = called(*command, "--help", columns=200)
        assert shown.returncode == 0, line
        missing = [word for word in words if word.startswith("-") and not re.search(rf"{word}\b", shown.stdout)]
        assert missing == [], line


def test_the_first_key_can_make_others() -> None:
    """From the first key on every caller needs one, so that it has to be an admin's."""
    scopes = re.findall(r"^\$ batchwright keys create \w+ (.*)$", console(), flags=re.MULTILINE)
    assert scopes[0] == "--scope admin"
    assert len(scopes) > 1


def test_the_version_is_the_packages() -> None:
    """As `batchwright --version` prints it."""
    assert f"$ batchwright --version\nbatchwright {metadata.version('batchwright')}\n" in console()


def test_continuous_integration_runs_the_readmes_command_after_lint() -> None:
    """Style and types fail first, within minutes; then the tests as a reader runs them."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    made = [line for line in lines if line.startswith("make ")]
    assert made == ["make lint", "make test"]
    assert "set -euo pipefail" in lines
