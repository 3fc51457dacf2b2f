"""The programs of `programs/` as commands: how each is started, and how its sizes reach it."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "commands" / "programs"
APART = Path(sys.prefix) / "exports"
"""The folders into which `make test-commands` installs frameworks that require other versions than ours."""
BIN = Path(sys.executable).parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Two cores are shared by tests and ranks."""

HUGGING_FACE = {
    "output_dir": "{output_dir}",
    "per_device_train_batch_size": "{micro_batch_size}",
    "gradient_accumulation_steps": "{gradient_accumulation_steps}",
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": "true",
}
"""Arguments of HF Trainer."""
ARGUMENTS = """{
  "output_dir": "{output_dir}",
  "per_device_train_batch_size": {micro_batch_size},
  "gradient_accumulation_steps": {gradient_accumulation_steps},
  "save_strategy": "no",
  "report_to": "none",
  "use_cpu": true
}
"""
DEEPSPEED = """{
  "train_micro_batch_size_per_gpu": {micro_batch_size},
  "gradient_accumulation_steps": {gradient_accumulation_steps},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": true}}
}
"""
SETTINGS = """
data:
  batch_size: {micro_batch_size}
  drop_last: true
optimizer: {lr: 0.1, momentum: 0.9}
training:
  gradient_accumulation_steps: {gradient_accumulation_steps}
"""


@dataclass(frozen=True)
class Program:
    """A program, as a user starts it from its folder.

    Attributes:
        name: in tests and tables.
        argv: the command, with placeholders.
        environment: variables that it needs, with placeholders.
        files: templates of its configuration files.
        world_size: ranks that the command starts.
        needs: modules of frameworks, without which it cannot run.
        apart: the folder below `APART` that holds its framework.
        folder: where it starts.
        loading_timeout_seconds: its time until the first forward pass.
        varies_by: samples by which two answers may differ, where peaks of equal runs do.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    needs: tuple[str, ...] = ()
    apart: str | None = None
    folder: Path = FOLDER
    loading_timeout_seconds: float = 300.0
    varies_by: int = 0

    def missing(self) -> str | None:
        """The reason why it cannot run here, if there is one."""
        if self.apart and not (APART / self.apart / "ready").exists():
            return f"{self.apart} is not installed: `make test-commands` installs it"
        absent = [module for module in self.needs if find_spec(module) is None]
        return f"{', '.join(absent)} cannot be imported: `make test-commands` installs it" if absent else None

    def spec(self) -> dict[str, Any]:
        """The program as a spec of Batchwright."""
        environment = {**ONE_THREAD, **self.environment}
        if self.apart:
            environment["PYTHONPATH"] = os.pathsep.join([str(APART / self.apart), os.environ.get("PYTHONPATH", "")])
        model = {
            "kind": "command",
            "argv": list(self.argv),
            "environment": environment,
            "files": dict(self.files),
            "working_directory": str(self.folder),
            "loading_timeout_seconds": self.loading_timeout_seconds,
        }
        return {"model": model, "parallelism": {"world_size": self.world_size}}


def _python(script: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, script, *arguments)


def _torchrun(ranks: int, *arguments: str) -> tuple[str, ...]:
    return (str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", *arguments)


def _sizes(size: str = "--batch-size", accumulation: str = "--accumulate") -> tuple[str, ...]:
    return (size, "{micro_batch_size}", accumulation, "{gradient_accumulation_steps}")


def _flags(settings: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(part for name, value in settings.items() for part in (f"--{name}", value))


_LIGHTNING = (
    *_sizes("--data.batch_size", "--trainer.accumulate_grad_batches"),
    *("--trainer.default_root_dir", "{output_dir}"),
)
_TRL = {**HUGGING_FACE, "max_length": "256", "packing": "true", "packing_strategy": "wrapped"}

PLAIN = (
    Program("plain loop", _python("plain_loop.py", *_sizes(), "--output-dir", "{output_dir}")),
    Program("YAML", _python("yaml_settings.py", "{file:settings.yaml}"), files={"settings.yaml": SETTINGS}),
    Program(
        "environment",
        _python("environment_settings.py"),
        {"BATCH_SIZE": "{micro_batch_size}", "GRAD_ACCUM": "{gradient_accumulation_steps}"},
    ),
    Program("DDP", _torchrun(2, "two_ranks.py", "--strategy", "ddp", *_sizes()), world_size=2),
    Program("FSDP2", _torchrun(2, "two_ranks.py", "--strategy", "fsdp", *_sizes()), world_size=2),
)
"""Programs that need torch alone."""

WITH_FRAMEWORKS = (
    Program(
        "accelerate",
        (
            *(str(BIN / "accelerate"), "launch", "--cpu", "--num_processes=1", "--num_machines=1"),
            *("--mixed_precision=no", "--dynamo_backend=no", "accelerate_training.py"),
            *_sizes("--per_device_train_batch_size", "--gradient_accumulation_steps"),
        ),
        needs=("accelerate",),
    ),
    Program(
        "HF Trainer, arguments",
        _python("hugging_face_training.py", *_flags(HUGGING_FACE)),
        needs=("transformers", "accelerate"),
    ),
    Program(
        "HF Trainer, JSON",
        _python("hugging_face_training.py", "{file:arguments.json}"),
        files={"arguments.json": ARGUMENTS},
        needs=("transformers", "accelerate"),
    ),
    Program("TRL, LoRA, packing", _python("trl_fine_tuning.py", *_flags(_TRL)), needs=("trl", "peft", "datasets")),
    Program(
        "LightningCLI",
        _python("lightning_training.py", "fit", *_LIGHTNING),
        needs=("lightning", "jsonargparse"),
    ),
    Program(
        "DeepSpeed",
        _torchrun(1, "deepspeed_training.py", "--deepspeed", "--deepspeed_config", "{file:deepspeed.json}"),
        {"DS_ACCELERATOR": "cpu"},
        {"deepspeed.json": DEEPSPEED},
        apart="deepspeed",
        varies_by=1,  # its peak at 12 samples was 308, 314 and 320 MiB: glibc finds room for a buffer, or does not
    ),
)
"""Programs of frameworks (`make test-commands`)."""


def misbehaving(way: str, *extra: str, ranks: int = 1, isolated: bool = False) -> Program:
    """The loop of `misbehaving_loop.py` in one of its ways."""
    script = ("misbehaving_loop.py", way, *_sizes(), *extra)
    argv = _torchrun(ranks, *script) if ranks > 1 else _python(*(("-I",) if isolated else ()), *script)
    return Program(way, argv, world_size=ranks)
