"""The command line as a user meets it: answers on standard output, progress on standard error, exit codes."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from batchwright.cli import running
from batchwright.cli.display import TrainingBar
from batchwright.errors import DeviceError, SpecError
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import (
    EvaluationReport,
    MicroBatchSplit,
    RunOutcome,
    TrainedFigures,
    TrainingProgress,
    TrainingResult,
)
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from tests.support.command import called
from tests.support.factories import CPU, CUDA, gpt_spec, mlp_spec, plan_of, recommendation, resnet_spec, tuning_request

pytestmark = pytest.mark.usefixtures("forked")

UNKNOWN_MODEL = """
model: {kind: transformers, task: causal-lm, config: {model_type: gpt9}}
batch: {sequence_length: 8}
"""


def batchwright(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "batchwright", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


CommandLine = Callable[..., subprocess.CompletedProcess[str]]
"""The command line in the test's own process, or in one of its own."""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    """A small spec on the disk."""
    path = tmp_path / "spec.json"
    path.write_text(gpt_spec().model_dump_json())
    return path


def test_help_names_every_command_and_exit_code() -> None:
    """`--help` is worth reading."""
    text = " ".join(called("--help").stdout.split())
    for word in ("tune", "plan", "train", "run", "serve", "devices", "Exit codes", "no micro-batch fits"):
        assert word in text


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every command, with the nearest name, whether the variable is the library's own or a service's."""
    monkeypatch.setenv("BATCHWRIGHT_PORT", "8001")
    assert called("formats").returncode == 0
    monkeypatch.setenv("BATCHWRIGHT_PRT", "8001")
    monkeypatch.setenv("BATCHWRIGHT_WORKSPACE", "workspaces.json")
    refused = called("formats")
    assert refused.returncode == 2
    for name in ("BATCHWRIGHT_PORT", "BATCHWRIGHT_WORKSPACES"):
        assert f"did you mean `{name}`?" in refused.stderr
    assert called("formats", "--help").returncode == 0


_LISTS_SERVICE = """
import sys
from typer.testing import CliRunner
from batchwright.cli.main import app
for command in ("plan", "serve"):
    print(CliRunner().invoke(app, [command, "--help"]).exit_code, "batchwright_service" in sys.modules)
"""


def test_commands_of_the_service_are_imported_when_they_are_asked_for() -> None:
    """They come from entry points, and every other command would wait for their imports."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
    command = [sys.executable, "-c", _LISTS_SERVICE]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert (ended.stdout.splitlines(), ended.stderr) == (["0 False", "0 True"], "")


def test_the_version_is_the_packages() -> None:
    """The version for a bug report is on standard output, without importing torch."""
    ended = batchwright("--version")
    assert (ended.returncode, ended.stdout) == (0, f"batchwright {metadata.version('batchwright')}\n")


def test_plan_as_json_and_as_text() -> None:
    """Without a device, in a moment."""
    arguments = ("plan", "--effective-batch-size", "100", "--max-micro-batch-size", "37")
    assert json.loads(called(*arguments, "--json").stdout)["micro_batch_sizes"] == [[34, 33, 33]]
    assert "34 + 33 + 33 = 100" in called(*arguments).stdout


def test_a_uniform_plan_says_what_it_changes() -> None:
    """Two ranks cannot repeat a size to reach 101."""
    arguments = (
        "plan",
        "--effective-batch-size",
        "101",
        "--max-micro-batch-size",
        "37",
        "--world-size",
        "2",
        "--uniform",
    )
    found = json.loads(called(*arguments, "--json").stdout)
    assert (found["effective_batch_size"], found["requested_effective_batch_size"], found["exact"]) == (100, 101, False)
    assert "100 instead of 101" in " ".join(called(*arguments).stdout.split())


@pytest.fixture(scope="module", params=[called, pytest.param(batchwright, marks=pytest.mark.thorough)])
def whole_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forked: None
) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """Return the output of a tuning, a run and its resume, and the folder of their files."""
    del forked
    folder, command_line = tmp_path_factory.mktemp("path"), request.param
    spec, rec = folder / "spec.json", folder / "rec.json"
    spec.write_text(gpt_spec().model_dump_json())
    limits = ("--effective-batch-size", "300", "--device", "cpu", "--memory-limit", "120MiB", "--baseline", "8x4")
    names = ("--name", "small GPT", "--project", "tests", "--label", "team=nlp", "--label", "example.com/tier=")
    tuned = command_line("tune", spec, *limits, *names, "--json", "-o", rec)
    train = (
        "train",
        spec,
        "--recommendation",
        rec,
        "--output-dir",
        folder / "run",
        "--checkpoint-every",
        "2",
        "--json",
    )
    return folder, [tuned, command_line(*train, "--updates", "2"), called(*train, "--updates", "3")]


def test_tune_then_train_then_resume(whole_path: tuple[Path, list[subprocess.CompletedProcess[str]]]) -> None:
    """The whole path: the answer alone on standard output, probes on standard error, a run, a resume."""
    folder, (tuned, *runs) = whole_path
    assert tuned.returncode == 0, tuned.stderr
    found = Recommendation.model_validate_json(tuned.stdout)
    assert found == Recommendation.model_validate_json((folder / "rec.json").read_text())
    assert (found.name, found.project) == ("small GPT", "tests")
    assert found.labels == {"team": "nlp", "example.com/tier": ""}
    assert sum(plan_of(found).micro_batch_sizes[0]) == 300
    assert found.gain is not None
    assert (found.gain.baseline.effective_batch_size, found.gain.memory_source) == (32, "measured")
    assert found.gain.speedup is not None
    steps, *probes = re.split(r"^probe ", tuned.stderr, flags=re.MULTILINE)
    assert len(probes) == len(found.evidence.probes)
    assert all(re.search(r"\d s\b", probe) for probe in probes)
    assert "checking the spec and estimating its memory ..." in steps.splitlines()
    first, second = (json.loads(run.stdout) for run in runs)
    assert (first["outcome"], first["updates"], first["resumed_from"]) == ("SUCCEEDED", 2, None)
    assert (second["outcome"], second["updates"], second["resumed_from"]) == ("SUCCEEDED", 3, 2)


def test_nothing_fits_ends_with_its_own_code(tmp_path: Path) -> None:
    """Exit code 3, and the reason in the answer."""
    architecture = {"name": "mlp", "hidden_features": 2048}
    spec = mlp_spec(model={"kind": "reference", "architecture": architecture})
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    limits = ("--effective-batch-size", "8", "--device", "cpu", "--memory-limit", "32MiB")
    tuned = called("tune", tmp_path / "spec.json", *limits, "--json")
    assert tuned.returncode == 3, tuned.stdout
    assert "does not fit" in json.loads(tuned.stdout)["infeasible_reason"]


def test_run_tunes_and_trains(spec_file: Path, tmp_path: Path) -> None:
    """Both in one command; the result is the training's."""
    limits = ("--effective-batch-size", "6", "--device", "cpu", "--memory-limit", "1GiB")
    done = called("run", spec_file, *limits, "--updates", "2", "--output-dir", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["updates"] == 2
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model: {kind: transformer}", "did you mean 'transformers'? (got 'transformer')"),
        ("{model: [", "is not valid"),
        (UNKNOWN_MODEL, "did you mean"),
        ("model: {kind: python, target: 'nowhere:build'}", "no module `nowhere`"),
    ],
)
def test_a_wrong_spec_ends_with_code_2_and_no_traceback(tmp_path: Path, content: str, words: str) -> None:
    """Before any probe, naming the field."""
    (tmp_path / "spec.yaml").write_text(content)
    tuned = called("tune", tmp_path / "spec.yaml", "--effective-batch-size", "8", "--device", "cpu")
    assert tuned.returncode == 2
    assert words in tuned.stderr
    assert "Traceback" not in tuned.stderr
    assert "probe " not in tuned.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--device", "cuda:7"), 5, "there is no device cuda:7"),
        (("--device", "tpu:0"), 2, "device"),
        (("--memory-limit", "lots"), 2, "8GiB"),
        (("--baseline", "8 by 16"), 2, "--baseline: must be a micro-batch size"),
        (("--label", "team"), 2, "--label: must be a key and a value"),
        (("--label", "team=a b"), 2, "--label"),
        (("--name", ""), 2, "--name"),
        (("--memory-limit", "9" * 400), 2, "8GiB"),
        (("--output", "."), 2, "--output: is a folder"),
        (("--output", f"{__file__}/answer.json"), 2, f"--output: cannot be written: {__file__} is not a folder"),
        (("--output", "/proc/answer.json"), 2, "--output: cannot be written: no such file or directory"),
        (("--output", "/proc/nowhere/answer.json"), 2, "--output: the folder /proc/nowhere does not exist"),
        (("--output", "a" * 300 + ".json"), 2, "--output: cannot be written: file name too long"),
        (("--memory-limit", "9000GiB", "--device", "cpu"), 2, "--memory-limit: is above the"),
        (("--world-size", "16", "--device", "cpu"), 2, "without a sample"),
        (("--effective-batch-size", "0"), 2, "effective-batch-size"),
    ],
)
def test_wrong_arguments_have_their_codes(spec_file: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    """Each names the value and the remedy."""
    tuned = called("tune", spec_file, "--effective-batch-size", "8", *arguments)
    assert tuned.returncode == code, tuned.stderr
    assert words in tuned.stderr
    assert "Traceback" not in tuned.stderr


def test_a_bug_in_the_workload_ends_with_code_4(tmp_path: Path) -> None:
    """Never called out of memory; the message is the workload's own."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class W:\n"
        "    def build_model(self): return torch.nn.Linear(2, 1)\n"
        "    def make_batch(self, size): return torch.randn(size, 3)\n"
        "    def loss_terms(self, model, batch): return {'l': (model(batch).sum(), len(batch))}\n"
        "def build(): return W()\n"
    )
    (tmp_path / "spec.yaml").write_text("model: {kind: python, target: 'mine:build'}")
    tuned = called("tune", "spec.yaml", "--effective-batch-size", "8", "--device", "cpu", cwd=tmp_path)
    assert tuned.returncode == 4
    assert "mat1 and mat2 shapes cannot be multiplied" in tuned.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--tracker", "wandbb"),
            "--tracker.0: must be one of 'mlflow', 'tensorboard', 'wandb'; did you mean 'wandb'?",
        ),
        (("--output-dir", __file__), "is not a folder"),
        (("--seed", str(2**63)), "--seed: must be below"),
    ],
)
def test_wrong_arguments_of_a_run_are_found_before_it(spec_file: Path, arguments: tuple[str, ...], words: str) -> None:
    """Exit code 2 before anything is tuned or written."""
    done = called("run", spec_file, "--effective-batch-size", "8", "--device", "cpu", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "probe " not in done.stderr


def test_training_into_a_file_is_refused(spec_file: Path, tmp_path: Path) -> None:
    """Exit code 2, and the option is named."""
    (tmp_path / "rec.json").write_text(recommendation(gpt_spec()).model_dump_json())
    trained = called("train", spec_file, "--recommendation", tmp_path / "rec.json", "--output-dir", spec_file)
    assert trained.returncode == 2
    assert "is not a folder" in trained.stderr


def test_training_another_model_than_was_tuned_is_refused(spec_file: Path, tmp_path: Path) -> None:
    """What changes memory must be tuned again; the field is named."""
    (tmp_path / "rec.json").write_text(recommendation(mlp_spec()).model_dump_json())
    trained = called("train", spec_file, "--recommendation", tmp_path / "rec.json")
    assert trained.returncode == 2
    assert "model: differs from the spec that was tuned" in trained.stderr


def train(spec: WorkloadSpec, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Two updates of ten samples in micro-batches of at most four."""
    (directory / "spec.json").write_text(spec.model_dump_json())
    (directory / "rec.json").write_text(recommendation(spec).model_dump_json())
    files: tuple[str | Path, ...] = ("--recommendation", directory / "rec.json", "--output-dir", directory / "run")
    return called("train", directory / "spec.json", *files, "--updates", "2", *options)


def test_two_processes_share_the_effective_batch(tmp_path: Path) -> None:
    """Each takes half of every window, with data loaded ahead, and TensorBoard's events are there."""
    done = train(gpt_spec(), tmp_path, "--nproc-per-node", "2", "--workers", "1", "--tracker", "tensorboard", "--json")
    assert done.returncode == 0, done.stderr
    assert TrainingResult.model_validate_json(done.stdout).samples_seen == 20
    paths = RunPaths(tmp_path / "run")
    made = ProgressLog(paths.progress).new_lines()
    assert [(item.samples, sum(item.micro_batch_sizes)) for item in made] == [(10, 5), (10, 5)]
    assert len(list(paths.tensorboard.iterdir())) == 1


def test_the_option_says_how_often_the_noise_scale_is_measured(tmp_path: Path) -> None:
    """Every update of a short run without the option, and none with 0."""
    measured = train(gpt_spec(), tmp_path, "--json")
    assert measured.returncode == 0, measured.stderr
    assert TrainingResult.model_validate_json(measured.stdout).noise_scale is not None
    (tmp_path / "none").mkdir()
    without = train(gpt_spec(), tmp_path / "none", "--noise-scale-every", "0", "--json")
    assert TrainingResult.model_validate_json(without.stdout).noise_scale is None


def test_a_loss_that_couples_samples_is_refused_unless_allowed(tmp_path: Path) -> None:
    """BatchNorm: exit code 6 and the setting named; allowed, the run makes its updates and the result says so."""
    spec = resnet_spec(data={"kind": "synthetic", "samples": 20})
    refused = train(spec, tmp_path)
    assert refused.returncode == 6
    assert "allow_batch_coupling" in refused.stdout
    allowed = train(spec, tmp_path, "--allow-batch-coupling")
    assert allowed.returncode == 0, allowed.stderr
    assert "SUCCEEDED: 2 updates made" in allowed.stdout
    assert "Note: A batch of" in allowed.stdout


def test_a_loss_that_couples_samples_fails_before_any_probe(tmp_path: Path) -> None:
    """Two ranks share the batch: exit code 4 with a reason for scripts, of `tune` and of `run`; nothing is probed."""
    (tmp_path / "spec.json").write_text(resnet_spec(parallelism={"world_size": 2}).model_dump_json())
    options = ("--effective-batch-size", "8", "--device", "cpu", "--memory-limit", "512MiB", "--json")
    tuned = called("tune", tmp_path / "spec.json", *options)
    assert tuned.returncode == 4
    assert json.loads(tuned.stdout)["reason"] == "coupled-loss"
    assert "BatchNorm2d" in json.loads(tuned.stdout)["message"]
    assert "FIT" not in tuned.stderr
    run = called("run", tmp_path / "spec.json", *options, "--output-dir", tmp_path / "run")
    assert (run.returncode, json.loads(run.stdout)["reason"]) == (4, "coupled-loss")


@pytest.mark.parametrize("command_line", [called, pytest.param(batchwright, marks=pytest.mark.thorough)])
def test_a_device_that_fails_before_the_first_probe_ends_the_tuning(tmp_path: Path, command_line: CommandLine) -> None:
    """Exit code 5 and the device's error, though the next process could use it: the second tuning does."""
    path = tmp_path / "spec.json"
    arguments = {"way": "breaks-the-device-once", "argument": str(tmp_path / "failed")}
    model = {"kind": "python", "target": "tests.support.misbehaving:build", "arguments": arguments}
    path.write_text(mlp_spec(model=model).model_dump_json())
    command = ("tune", path, "--effective-batch-size", "8", "--device", "cpu", "--memory-limit", "64MiB", "--json")
    ended = command_line(*command)
    assert ended.returncode == 5, ended.stderr
    assert "the device failed: CUDA error: uncorrectable ECC error" in json.loads(ended.stdout)["message"]
    assert command_line(*command).returncode == 0


def test_a_loss_that_couples_samples_is_tuned_where_that_is_allowed(tmp_path: Path) -> None:
    """One permission is enough for tuning and training."""
    spec = resnet_spec(data={"kind": "synthetic", "samples": 20})
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    limits = ("--device", "cpu", "--memory-limit", "512MiB", "--max-micro-batch-size", "4")
    done = called(
        "run",
        tmp_path / "spec.json",
        *("--effective-batch-size", "8", *limits, "--updates", "1", "--output-dir", tmp_path / "run"),
        "--allow-batch-coupling",
    )
    assert done.returncode == 0, done.stderr
    found = Recommendation.model_validate_json(RunPaths(tmp_path / "run").recommendation.read_bytes())
    assert found.evidence.coupling is not None
    assert found.evidence.coupling.verdict == "coupled"
    assert "Note: A batch of 4 and its two parts differ" in " ".join(done.stdout.split())


def test_more_processes_than_samples_are_refused(tmp_path: Path) -> None:
    """Exit code 2 before anything is written."""
    done = train(gpt_spec(), tmp_path, "--nproc-per-node", "16")
    assert done.returncode == 2
    assert "leaves 6 of 16 ranks without a sample" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()


def test_more_processes_than_cards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA each process has a card; the message says how many there are and what to do."""
    monkeypatch.setattr(running, "find_device", lambda _: CUDA)
    monkeypatch.setattr(running, "devices", lambda: (CUDA, CPU))
    running.check_run(tuning_request(), TrainingRequest(processes_per_node=1), "cuda:0")
    with pytest.raises(DeviceError, match=r"2 processes need 2 CUDA devices.* has cuda:0 .*--nproc-per-node 1"):
        running.check_run(tuning_request(), TrainingRequest(processes_per_node=2), "cuda:0")
    planned = tuning_request(mlp_spec(parallelism={"world_size": 3}))
    with pytest.raises(DeviceError, match="3 processes"):
        running.check_run(planned, TrainingRequest(), "cuda:0")


def test_missing_tensorboard_is_found_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the training process, after a tuning of minutes."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    running.check_run(tuning_request(), TrainingRequest(), "cpu")
    with pytest.raises(SpecError, match=r"batchwright\[tensorboard\]"):
        running.check_run(tuning_request(), TrainingRequest(trackers=("tensorboard",)), "cpu")


@pytest.mark.parametrize("field", ["data", "evaluation.data"])
def test_missing_files_are_found_before_any_work(tmp_path: Path, field: str) -> None:
    """Those of the evaluation too: by the field, with the folder that relative paths start at."""
    there, missing = ({"kind": "text", "paths": [str(tmp_path / name)]} for name in ("there*", "missing*"))
    (tmp_path / "there.txt").write_text("some text")
    given = {"data": there, "evaluation.data": there} | {field: missing}
    spec = gpt_spec(data=given["data"], evaluation={"data": given["evaluation.data"]})
    with pytest.raises(SpecError, match=rf"{field}\.paths: no file matches .*missing\*"):
        running.check_run(tuning_request(spec), TrainingRequest(), "cpu")
    running.check_run(tuning_request(gpt_spec(data=there)), TrainingRequest(), "cpu")


def shown(*updates: TrainingProgress) -> list[str]:
    """What the progress of a run looks like where there is no terminal."""
    console = Console(file=io.StringIO(), width=120)
    with TrainingBar(console, updates[0].updates) as bar:
        for update in updates:
            bar.show(update)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def progress(update: int = 1, **changes: Any) -> TrainingProgress:
    """An update of ten samples in a tenth of a second."""
    given: dict[str, Any] = {"loss": 2.5, "terms": {"loss": 2.5}, "weights": {"loss": 10.0}, "gradient_norm": 1.5}
    fixed: dict[str, Any] = {"updates": 100, "learning_rate": 0.1, "samples_seen": 10, "epoch": 0, "peak_bytes": None}
    sizes: dict[str, Any] = {"samples": 10, "micro_batch_sizes": (5, 5), "seconds": 0.1, "skipped": False}
    return TrainingProgress(update=update, **{**given, **fixed, **sizes, **changes})


def test_the_speed_is_in_tokens_where_the_loss_weighs_tokens() -> None:
    """In samples otherwise; the loss and the gradient's norm are beside it."""
    assert shown(progress()) == ["update 1/100  loss 2.5000  norm 1.5  100 samples/s  (5 + 5)"]
    assert shown(progress(weights={"loss": 160.0})) == ["update 1/100  loss 2.5000  norm 1.5  1,600 tokens/s  (5 + 5)"]


def test_a_micro_batch_that_did_not_fit_has_a_line() -> None:
    """With the rank, and the sizes it goes on with."""
    split = MicroBatchSplit(rank=1, size=32, parts=(16, 16), message="out of memory")
    assert shown(progress(2, splits=(split,))) == [
        "micro-batch of 32 did not fit on rank 1: 16 + 16 from here on",
    ]


def test_an_evaluation_has_a_line() -> None:
    """With its figures, and whether it is the best; batches that did not fit, and a sample that does not, are named."""
    split = MicroBatchSplit(rank=0, size=9, parts=(5, 4), message="out of memory")
    fields: dict[str, Any] = {"terms": {}, "weights": {}, "samples": 9, "micro_batch_size": 5, "seconds": 0.1}
    best = EvaluationReport(update=2, loss=0.5, metrics={"accuracy": None}, splits=(split,), is_best=True, **fields)
    failed = EvaluationReport(update=2, loss=None, message="a single held-out sample did not fit", **fields)
    beside = TrainedFigures(loss=0.75, terms={})
    both = EvaluationReport(update=2, loss=0.5, of_averages=True, trained=beside, **fields)
    assert shown(progress(2, evaluations=(best, failed, both))) == [
        "evaluation: micro-batch of 9 did not fit on rank 0: 5 + 4 from here on",
        "evaluation after update 2: loss 0.5000  accuracy not known  (best so far)",
        "evaluation after update 2: a single held-out sample did not fit",
        "evaluation of the moving averages after update 2: loss 0.5000  loss of the trained weights 0.7500",
    ]


def test_the_first_of_several_skipped_updates_has_a_line() -> None:
    """With the reason: a gradient, or a window without targets."""
    skipped = {"skipped": True, "gradient_norm": None}
    infinite = [progress(update, **skipped) for update in (2, 3, 4)]
    empty = progress(6, weights={"loss": 0.0}, **skipped)
    assert shown(*infinite, progress(5), empty) == [
        "update 2 skipped: a gradient was not finite",
        "update 6 skipped: no sample of it has a target",
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_while_tuning_leaves_no_process(
    spec_file: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """Interrupted by Ctrl-C or a scheduler: the signal's exit code, no fork server and no probe behind."""
    marker = f"BATCHWRIGHT_TEST_MARK={tmp_path.name}"
    environment = {**os.environ, "BATCHWRIGHT_TEST_MARK": tmp_path.name}
    command = [
        sys.executable,
        "-m",
        "batchwright",
        "tune",
        str(spec_file),
        "--effective-batch-size",
        "100000",
        "--device",
        "cpu",
        "--memory-limit",
        "200MiB",
    ]
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        first = next(line for line in process.stderr if not line.endswith("...\n"))
        process.send_signal(number)
        process.communicate(timeout=120)
    assert first.startswith("probe ")
    assert process.returncode == status
    deadline = time.monotonic() + 120.0
    while any(_has(path, marker) for path in Path("/proc").glob("[0-9]*/environ")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trains_without_end(spec_file: Path, folder: Path) -> tuple[tuple[str | Path, ...], RunPaths]:
    """The words of a command that trains, and its run."""
    (folder / "rec.json").write_text(recommendation(gpt_spec(), 40, 2).model_dump_json())
    run = RunPaths(folder / "run")
    files = ("--recommendation", folder / "rec.json", "--output-dir", run.directory)
    return ("train", spec_file, *files, "--updates", "100000", "--checkpoint-every", "100000", "--json"), run


def test_sigterm_while_training_leaves_a_checkpoint(spec_file: Path, tmp_path: Path) -> None:
    """A scheduler's SIGTERM, sent twice, ends the run: STOPPED, exit code 143, the last update on the disk."""
    words, run = trains_without_end(spec_file, tmp_path)

    def terminate() -> None:
        while not run.progress.exists():
            time.sleep(0.02)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # a second one may come after the command
    sender = threading.Thread(target=terminate, daemon=True)
    sender.start()
    try:
        done = called(*words)
        sender.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    result = TrainingResult.model_validate_json(done.stdout)
    assert (done.returncode, result.outcome) == (143, RunOutcome.STOPPED)
    assert result.updates == run.checkpointed_update()


def _has(path: Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except OSError:
        return False


def test_trying_an_output_leaves_nothing(spec_file: Path, tmp_path: Path) -> None:
    """No file, when the command then ends for another reason."""
    output = tmp_path / "answer.json"
    tuned = called("tune", spec_file, "--effective-batch-size", "8", "--device", "cuda:7", "-o", output)
    assert tuned.returncode == 5
    assert not output.exists()
