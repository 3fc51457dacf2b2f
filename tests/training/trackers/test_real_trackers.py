"""Weights & Biases and MLflow themselves, without a server: what they read back is what the run reported.

`make test-exports` installs them into a folder (`BATCHWRIGHT_TEST_TRACKERS`) that is on the path of the runs alone.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from tests.support.factories import gpt_spec, recommendation
from tests.support.whole_runs import run_to_end

pytestmark = pytest.mark.exports
_READ_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}")
found = client.search_runs([client.get_experiment_by_name("batchwright").experiment_id])
print(json.dumps([
    {
        "status": run.info.status,
        "name": run.info.run_name,
        "settings": run.data.params,
        **{name: [[point.step, point.value] for point in client.get_metric_history(run.info.run_id, name)]
           for name in run.data.metrics},
    }
    for run in found
]))
"""
_READ_WANDB = """
import json, pathlib, struct, sys
from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER = 32768, 7

def records(data):
    # the log format of LevelDB: blocks of pieces with checksum, length and kind (whole, first, middle, last)
    at, whole = HEADER, b""
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield whole
            whole = b""

runs = []
for file in sorted(pathlib.Path(sys.argv[1], "wandb").glob("offline-run-*/*.wandb")):
    found = {"points": []}
    for data in records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                found |= {"id": record.run.run_id, "name": record.run.display_name}
                found["settings"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            case "history":
                found["points"].append({
                    (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
                })
            case "exit":
                found["exit_code"] = record.exit.exit_code
    runs.append(found)
print(json.dumps(runs))
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed trackers, on the path of the processes that are started."""
    installed = os.environ.get("BATCHWRIGHT_TEST_TRACKERS")
    if installed is None:
        pytest.skip("the trackers are not installed: `make test-exports`")
    monkeypatch.setenv("PYTHONPATH", str(Path(installed).resolve()))
    monkeypatch.syspath_prepend(str(Path(installed).resolve()))  # for the check that they are installed
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)


def read(program: str, path: Path) -> list[dict[str, Any]]:
    """Return the JSON that a tracker's own reader prints."""
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def found() -> Recommendation:
    """A recommendation with a name."""
    return recommendation(gpt_spec()).model_copy(update={"name": "small"})


def stopped_and_resumed(directory: Path, tracker: Any) -> None:
    """A run of which one process was stopped after an update at least, and another made the rest."""
    process = TrainingProcess(directory)
    process.start(found(), TrainingRequest(updates=100_000, trackers=(tracker,)))
    while process.poll() is None and not process.new_progress():
        time.sleep(0.02)
    stopped = process.stop(60.0)
    assert stopped.outcome is RunOutcome.STOPPED, stopped
    resumed = run_to_end(directory, found(), TrainingRequest(updates=stopped.updates + 2, trackers=(tracker,)))
    assert (resumed.outcome, resumed.notes) == (RunOutcome.SUCCEEDED, ())


def losses(directory: Path) -> list[list[float]]:
    """Update and loss of the run's own progress."""
    return [[made.update, made.loss or 0.0] for made in ProgressLog(RunPaths(directory).progress).new_lines()]


def test_mlflow_has_every_update_of_a_resumed_run(tmp_path: Path) -> None:
    """One run, in the folder's database, with the figures of both processes and the settings."""
    stopped_and_resumed(tmp_path, "mlflow")
    (run,) = read(_READ_MLFLOW, RunPaths(tmp_path).mlflow)
    assert (run["status"], run["name"]) == ("FINISHED", "small")
    assert run["settings"]["effective_batch_size"] == str(found().request.effective_batch_size)
    assert run["loss/total"] == losses(tmp_path)
    headroom = found().headroom
    assert headroom is None or {value for _, value in run["memory/limit_bytes"]} == {headroom.limit_bytes}


def test_mlflow_writes_nothing_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own default is a database there, which no run of ours uses."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    result = run_to_end(tmp_path / "run", found(), TrainingRequest(updates=2, trackers=("mlflow",)))
    assert (result.outcome, result.notes) == (RunOutcome.SUCCEEDED, ())
    (run,) = read(_READ_MLFLOW, RunPaths(tmp_path / "run").mlflow)
    assert run["loss/total"] == losses(tmp_path / "run")
    assert list(here.iterdir()) == []


def test_weights_and_biases_has_every_update_of_a_resumed_run(tmp_path: Path) -> None:
    """One id, offline, with the figures of both processes and the settings."""
    stopped_and_resumed(tmp_path, "wandb")
    first, second = read(_READ_WANDB, tmp_path)
    assert first["id"] == second["id"]
    assert (second["name"], second["exit_code"]) == ("small", 0)
    assert first["settings"]["effective_batch_size"] == found().request.effective_batch_size
    points = [[point["update"], point["loss/total"]] for run in (first, second) for point in run["points"]]
    assert points == losses(tmp_path)


def test_a_server_that_is_not_there_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is a note of the result and in the log."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = run_to_end(tmp_path, found(), TrainingRequest(updates=2, trackers=("mlflow",)))
    assert (result.outcome, result.updates) == (RunOutcome.SUCCEEDED, 2)
    (note,) = result.notes
    assert note.startswith("`mlflow` no longer tracks this run: ")
    assert note in RunPaths(tmp_path).log.read_text()
