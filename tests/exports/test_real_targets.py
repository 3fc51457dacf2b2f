"""Exports as the frameworks themselves take them: loaded, and trained with on the CPU.

Each training is a user's program (`programs/`) in a process of its own, started from a folder with the export's files.
It counts the samples that went through the model before each of the optimizer's steps.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchwright.device_traits import traits_of
from batchwright.exports.base import Export, ExportOptions
from batchwright.exports.registry import export
from batchwright.schemas.recommendation import Recommendation
from tests.support.exports.plans import plan
from tests.support.factories import CPU, CUDA, gpt_spec, mlp_spec

pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]

PROGRAMS = Path(__file__).parent / "programs"
APART = Path(sys.prefix) / "exports"
"""Where `make test-exports` installs frameworks that ask for other versions than ours, or would disturb others."""

Counted = list[list[list[int]]]
"""For each update, the samples of each micro-batch."""


def on_cpu(effective_batch_size: int, world_size: int = 1, **changes: Any) -> Recommendation:
    """The recommendation of a small MLP, micro-batches of at most 4 on the CPU."""
    environment = traits_of("cpu").environment_from({})
    spec = mlp_spec(**changes)
    return plan(effective_batch_size, world_size, 4, spec, device=CPU, environment=environment)


class Job:
    """A user's folder with an export in it.

    Attributes:
        folder: where programs run.
        made: the export.
        samples: in the data.
    """

    def __init__(self, folder: Path, made: Export, samples: int) -> None:
        self.folder = folder
        self.made = made
        self.samples = samples
        for file in made.files:
            (folder / file.name).write_text(file.content, encoding="utf-8")

    def run(self, *command: str | Path, framework: str = "") -> str:
        """Run a command to its end; gives what it printed."""
        paths = [str(PROGRAMS), *([str(APART / framework)] if framework else [])]
        settings = {"SAMPLES": str(self.samples), "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        found = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        ended = subprocess.run(
            [str(item) for item in command],
            cwd=self.folder,
            env={**os.environ, **self.made.environment, **settings, "PATH": found, "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
        return ended.stdout

    def counted(self) -> list[Counted]:
        """What each rank counted."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("counted-*.json"))]

    def check(self, *sizes: tuple[int, ...]) -> None:
        """Two updates of exactly the effective batch, in these micro-batches on each rank; each sample once."""
        ranks = self.counted()
        assert [[tuple(map(len, update)) for update in rank] for rank in ranks] == [[size, size] for size in sizes]
        each = [sum(len(part) for rank in ranks for part in rank[number]) for number in range(2)]
        assert each == [self.made.plan.requested_effective_batch_size] * 2
        assert sorted(item for rank in ranks for update in rank for part in update for item in part) == list(
            range(self.samples)
        )


def job(folder: Path, recommended: Recommendation, name: str, **options: Any) -> Job:
    """The folder of a user who exports for a framework, and has data for two updates."""
    made = export(recommended, name, options=ExportOptions(**options))
    return Job(folder, made, 2 * recommended.request.effective_batch_size)


def torchrun(processes: int, *arguments: str | Path) -> tuple[str | Path, ...]:
    """Ranks on this host."""
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *arguments)


# --- trained with ---


def test_hugging_faces_trainer_takes_exactly_the_effective_batch(tmp_path: Path) -> None:
    """From the file: ten samples are five micro-batches of two, the largest divisor that fits."""
    here = job(tmp_path, on_cpu(10), "hugging-face")

    printed = here.run(sys.executable, PROGRAMS / "hugging_face_trainer.py", "training_arguments.json")

    here.check((2,) * 5)
    assert "AdamW" in printed


def test_hugging_faces_trainer_reads_the_arguments(tmp_path: Path) -> None:
    """From the command line, as a launcher passes it on."""
    script = str(PROGRAMS / "hugging_face_trainer.py")
    here = job(tmp_path, on_cpu(10), "torchrun", arguments_of="hugging-face", script=script)

    here.run(*here.made.command)

    here.check((2,) * 5)


def test_hugging_faces_trainer_on_two_ranks(tmp_path: Path) -> None:
    """Each rank takes its half of every update."""
    here = job(tmp_path, on_cpu(16, 2), "hugging-face")

    here.run(*torchrun(2, PROGRAMS / "hugging_face_trainer.py", "training_arguments.json"))

    here.check((4, 4), (4, 4))


def test_accelerate_takes_exactly_the_effective_batch(tmp_path: Path) -> None:
    """Started by the exported script, with precision and steps of the export and the DataLoader's batch as it says."""
    script = str(PROGRAMS / "accelerate_loop.py")
    here = job(tmp_path, on_cpu(10, precision="bf16-mixed"), "accelerate", script=script)

    printed = here.run(*here.made.command)

    here.check((2,) * 5)
    assert "1 bf16 5" in printed


def test_accelerate_on_two_ranks_of_the_cpu(tmp_path: Path) -> None:
    """`accelerate launch` would start one; the exported script starts both."""
    here = job(tmp_path, on_cpu(16, 2), "accelerate", script=str(PROGRAMS / "accelerate_loop.py"))

    printed = here.run(*here.made.command)

    here.check((4, 4), (4, 4))
    assert "2 no 2" in printed


def test_lightning_takes_exactly_the_effective_batch(tmp_path: Path) -> None:
    """`LightningCLI` reads the file."""
    here = job(tmp_path, on_cpu(10, gradient_clipping=0.5), "lightning")

    here.run(sys.executable, PROGRAMS / "lightning_cli.py", "fit", "--config", "lightning.yaml")

    here.check((2,) * 5)


def test_lightning_reads_the_arguments(tmp_path: Path) -> None:
    """`LightningCLI` reads the command line that a launcher passes on."""
    script = str(PROGRAMS / "lightning_cli.py")
    here = job(tmp_path, on_cpu(10), "torchrun", arguments_of="lightning", script=script)

    here.run(*here.made.command)

    here.check((2,) * 5)


def test_lightning_on_two_ranks(tmp_path: Path) -> None:
    """The Trainer starts the second one itself."""
    here = job(tmp_path, on_cpu(16, 2), "lightning")

    here.run(*torchrun(2, PROGRAMS / "lightning_cli.py", "fit", "--config", "lightning.yaml"))

    here.check((4, 4), (4, 4))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_deepspeed_takes_exactly_the_effective_batch(tmp_path: Path, precision: str) -> None:
    """The engine has batch, clipping and optimizer from the file; parameters and state keep the type they had."""
    here = job(tmp_path, on_cpu(10, precision=precision), "deepspeed")

    here.run(*torchrun(1, PROGRAMS / "deepspeed_engine.py", "deepspeed.json", precision), framework="deepspeed")

    here.check((2,) * 5)
    report = json.loads((tmp_path / "report.json").read_text())
    dtype = "torch.bfloat16" if precision == "bf16" else "torch.float32"
    assert (report["batch"], report["clipping"], report["optimizer"]) == (10, 0.0, "torch.AdamW")
    assert [report["parameters"], report["state"]["exp_avg"]] == [dtype, dtype]


def test_deepspeed_on_two_ranks(tmp_path: Path) -> None:
    """Its assertion holds for as many ranks as were planned."""
    here = job(tmp_path, on_cpu(16, 2, gradient_clipping=0.5), "deepspeed")

    arguments = ("deepspeed.json", "ranks")
    here.run(*torchrun(2, PROGRAMS / "deepspeed_engine.py", *arguments), framework="deepspeed")

    assert [[tuple(map(len, update)) for update in rank] for rank in here.counted()] == [[(4, 4)] * 4] * 2
    assert json.loads((tmp_path / "report.json").read_text())["clipping"] == 0.5


def test_our_script_takes_exactly_the_effective_batch(tmp_path: Path) -> None:
    """Uneven micro-batches, as recommended."""
    here = job(tmp_path, on_cpu(10, precision="bf16-mixed"), "pytorch")

    here.run(sys.executable, PROGRAMS / "own_script.py", "train.py", "--updates", "2")

    here.check((4, 3, 3))


def test_our_script_on_two_ranks_that_share_unevenly(tmp_path: Path) -> None:
    """21 samples are 11 and 10."""
    here = job(tmp_path, on_cpu(21, 2), "pytorch")

    here.run(*torchrun(2, PROGRAMS / "own_script.py", "train.py", "--updates", "2"))

    here.check((4, 4, 3), (4, 3, 3))


def test_our_script_runs_as_it_is(tmp_path: Path) -> None:
    """Every option of a spec that it writes is code that runs, on the stand-in that it comes with."""
    options: dict[str, Any] = {
        "precision": "bf16",
        "gradient_clipping": 0.5,
        "ema_decay": 0.9,
        "gradient_gathering": "scratch",
        "schedule": {"name": "cosine", "warmup_updates": 2},
        "optimizer": {"name": "sgd", "momentum": 0.9, "implementation": "foreach"},
    }
    here = job(tmp_path, on_cpu(10, **options), "pytorch")

    printed = here.run(sys.executable, *here.made.command[1:], "--updates", "3")

    assert [line.split(", loss")[0] for line in printed.splitlines()] == [
        "update 1: batch of 10",
        "update 2: batch of 10",
        "update 3: batch of 1",
    ]


def test_our_script_refuses_another_number_of_ranks(tmp_path: Path) -> None:
    """Started alone, a plan for two says so."""
    here = job(tmp_path, on_cpu(16, 2), "pytorch")

    with pytest.raises(AssertionError, match="1 ranks were started, and the plan is for 2"):
        here.run(sys.executable, "train.py")


# --- loaded ---


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library, as far from the network as it can be."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return importlib.import_module("transformers")


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"])
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"name": "adamw", "weight_decay": 0.1, "betas": (0.8, 0.9)}, "adamw_torch"),
        ({"name": "adam", "implementation": "fused"}, "adamw_torch_fused"),
        ({"name": "sgd", "momentum": 0.9}, "sgd"),
    ],
)
def test_transformers_reads_all_arguments(
    transformers: Any, tmp_path: Path, precision: str, optimizer: dict[str, Any], expected: str
) -> None:
    """Every key is an argument, with the value that the spec has."""
    changes: dict[str, Any] = {
        "precision": precision,
        "optimizer": optimizer,
        "schedule": {"name": "constant", "warmup_updates": 7},
    }
    path = tmp_path / "arguments.json"
    path.write_text(export(on_cpu(10, activation_checkpointing=True, **changes), "hugging-face").files[0].content)

    (read,) = transformers.HfArgumentParser([transformers.TrainingArguments]).parse_json_file(str(path))

    assert (read.optim, read.max_grad_norm, read.activation_checkpointing) == (expected, 0.0, True)
    assert (read.bf16, read.fp16, read.use_cpu) == (precision == "bf16-mixed", False, True)
    assert (read.lr_scheduler_type, read.warmup_steps, read.seed) == ("constant_with_warmup", 7, 42)
    assert read.train_batch_size * read.gradient_accumulation_steps == 10


@pytest.mark.parametrize(
    ("world_size", "strategy", "kind", "machines"),
    [(1, "ddp", "NO", 1), (8, "ddp", "MULTI_GPU", 1), (16, "ddp", "MULTI_GPU", 2), (8, "fsdp", "FSDP", 1)],
)
def test_accelerate_launch_reads_the_configuration(
    tmp_path: Path, world_size: int, strategy: str, kind: str, machines: int
) -> None:
    """`ClusterConfig` takes every key, and the launcher derives the topology from it."""
    launch = importlib.import_module("accelerate.commands.launch")
    load = importlib.import_module("accelerate.commands.config.config_args").load_config_from_file
    path = tmp_path / "accelerate.yaml"
    spec = gpt_spec(precision="bf16-mixed", parallelism={"strategy": strategy}, compile=True)
    made = export(plan(16 * world_size, world_size, spec=spec), "accelerate")
    path.write_text(made.files[0].content)

    config = load(str(path))
    words = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = launch._validate_launch_command(words)

    assert (config.distributed_type.value, config.num_processes, config.num_machines) == (kind, world_size, machines)
    assert (arguments.mixed_precision, arguments.dynamo_backend) == ("bf16", "INDUCTOR")
    assert (arguments.multi_gpu, arguments.use_fsdp) == (kind == "MULTI_GPU", kind == "FSDP")


def test_accelerate_reads_the_steps_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable wins over what the program says."""
    accelerate = importlib.import_module("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name, value in export(on_cpu(10), "accelerate").environment.items():
        monkeypatch.setenv(name, value)

    assert accelerate.Accelerator(gradient_accumulation_steps=1).gradient_accumulation_steps == 5


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"])
def test_lightnings_trainer_takes_the_arguments(precision: str) -> None:
    """As keyword arguments."""
    trainer = importlib.import_module("lightning").Trainer
    made = export(on_cpu(10, precision=precision, gradient_clipping=0.5), "lightning")

    built = trainer(**yaml.safe_load(made.files[0].content)["trainer"], logger=False, enable_checkpointing=False)

    expected = {"fp32": "32-true", "bf16-mixed": "bf16-mixed", "bf16": "bf16-true"}
    assert (built.accumulate_grad_batches, built.gradient_clip_val) == (5, 0.5)
    assert (built.precision, built.num_devices) == (expected[precision], 1)


def test_lightnings_types_take_the_arguments_of_sixteen_cards(tmp_path: Path) -> None:
    """Read by the parser of `LightningCLI`, which checks them against the Trainer's annotations."""
    parser = importlib.import_module("jsonargparse").ArgumentParser()
    parser.add_class_arguments(importlib.import_module("lightning").Trainer, "trainer")
    parser.add_argument("--data.batch_size", type=int)
    path = tmp_path / "lightning.yaml"
    spec = gpt_spec(precision="fp16-mixed", parallelism={"strategy": "fsdp"})
    path.write_text(export(plan(256, 16, spec=spec, device=CUDA), "lightning").files[0].content)

    read = parser.parse_path(str(path))

    trainer = read.trainer
    assert (trainer.num_nodes, trainer.devices, trainer.strategy) == (2, 8, "fsdp")
    assert (trainer.precision, trainer.accumulate_grad_batches, read.data.batch_size) == ("16-mixed", 2, 8)


def test_deepspeeds_config_takes_the_file_of_eight_cards(tmp_path: Path) -> None:
    """Its assertion on batch, micro-batch, steps and ranks holds, and sharding becomes ZeRO 3."""
    spec = gpt_spec(precision="bf16-mixed", parallelism={"strategy": "fsdp"})
    here = Job(tmp_path, export(plan(256, 8, spec=spec), "deepspeed"), 0)

    printed = here.run(*torchrun(1, PROGRAMS / "deepspeed_config.py", "deepspeed.json"), framework="deepspeed")

    assert printed.splitlines()[-1] == "256 0.0 3 torch.bfloat16"
