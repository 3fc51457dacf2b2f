"""Launchers carry the command of a recommendation: its arguments, its environment and its files, and nothing else."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchwright.errors import ExportError
from batchwright.exports.base import Export, ExportOptions
from batchwright.exports.registry import TARGETS, export
from tests.support.exports.plans import command_plan, plan
from tests.support.exports.starting import Called, start, write
from tests.support.factories import CPU

LAUNCHERS = [target.name for target in TARGETS.values() if target.kind == "launcher"]
FRAMEWORKS = [target.name for target in TARGETS.values() if target.kind == "framework"]
BESIDE = {"torchrun": "launch.sh", "slurm": "job.sbatch", "skypilot": "task.yaml"}
"""Targets whose job starts in the folder of the files, and their own file."""
HOSTILE = 'a b\'; touch injected; $(touch injected) `touch injected` "$HOME" $(HOME) $$ \\ # é: - { x }'
TEMPLATE = """
size: {micro_batch_size}
steps: {gradient_accumulation_steps}
out: '{output_dir}'
text: '$HOME `x` $(HOME)'
"""
SIZES = ("--size={micro_batch_size}", "--steps", "{gradient_accumulation_steps}")
REPORT = """
import json, os, pathlib, sys
told = {"arguments": sys.argv[1:], "size": os.environ["BATCHWRIGHT_MICRO_BATCH_SIZE"], "text": open(sys.argv[1]).read()}
pathlib.Path("told.json").write_text(json.dumps(told))
"""


def exported(name: str, *argv: str, options: dict[str, Any] | None = None, **fields: Any) -> Export:
    """An export of a command."""
    return export(command_plan(*argv, **fields), name, options=ExportOptions(**(options or {})))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_command_that_starts_its_ranks_is_not_wrapped(name: str, tmp_path: Path) -> None:
    """Its torchrun is the only one, with its own arguments and the figures of the plan."""
    argv = ("torchrun", "--standalone", "--nproc-per-node=2", "train.py", *SIZES, "{effective_batch_size*1024}")

    called = start(exported(name, *argv, world_size=2), tmp_path)

    assert called.arguments == [*argv[1:4], "--size=8", "--steps", "2", "32768"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_argument_arrives_as_it_was_tuned(name: str, tmp_path: Path) -> None:
    """Quotes, dollars and backquotes are read by no shell, and braces that name nothing stay."""
    argv = ("torchrun", HOSTILE, "", '{"zero": {"stage": 2}}', "{{micro_batch_size}}", "{micro_batch_size}")

    called = start(exported(name, *argv), tmp_path)

    assert called.arguments == [HOSTILE, "", '{"zero": {"stage": 2}}', "{micro_batch_size}", "8"]
    assert not (tmp_path / "injected").exists()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_environment_has_the_commands_variables_and_those_of_the_probes(name: str, tmp_path: Path) -> None:
    """The command's own come last."""
    recommendation = command_plan(
        "torchrun", environment={"SIZE": "{micro_batch_size}", "BATCHWRIGHT_WORLD_SIZE": "own"}
    ).model_copy(update={"environment": {"MALLOC_ARENA_MAX": "1"}})

    environment = start(export(recommendation, name), tmp_path).environment

    assert environment["SIZE"] == environment["BATCHWRIGHT_MICRO_BATCH_SIZE"] == "8"
    assert environment["BATCHWRIGHT_WORLD_SIZE"] == "own"
    assert environment["MALLOC_ARENA_MAX"] == "1"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_rendered_files_and_the_output_folder_are_there_when_the_command_starts(name: str, tmp_path: Path) -> None:
    """Beside the script, or written by the container's own shell."""
    job_name = f"test-{uuid.uuid4().hex[:8]}"
    given = exported(
        name,
        "torchrun",
        "--config={file:train.yaml}",
        files={"train.yaml": TEMPLATE},
        options={"job_name": job_name},
    )

    called = start(given, tmp_path)

    path = tmp_path / called.option("config")
    try:
        document = yaml.safe_load(path.read_text())
        assert document == {"size": 8, "steps": 2, "out": document["out"], "text": "$HOME `x` $(HOME)"}
        assert (tmp_path / document["out"]).is_dir() or name == "skypilot"
        assert called.option("config").startswith("/") is (name not in BESIDE)
    finally:
        if name not in BESIDE:
            shutil.rmtree(path.parent)
    codes = [advice.code for advice in given.warnings]
    assert ("output-folder" in codes) is (name not in BESIDE)
    assert "command-as-tuned" in codes


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_written_files_start_the_program(name: str, tmp_path: Path) -> None:
    """A program of Python, without any launcher of ranks."""
    (tmp_path / "report.py").write_text(REPORT)
    (tmp_path / "srun").write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    job_name = f"test-{uuid.uuid4().hex[:8]}"
    recommendation = command_plan(
        sys.executable, "-S", "report.py", "{file:a.json}", device=CPU, files={"a.json": '{"b": {micro_batch_size}}'}
    )

    command, variables = write(export(recommendation, name, options=ExportOptions(job_name=job_name)), tmp_path)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, cwd=tmp_path, env={"PATH": path, **variables}, check=True, timeout=60)

    told = json.loads((tmp_path / "told.json").read_text())
    if name not in BESIDE:
        shutil.rmtree(Path(told["arguments"][0]).parent)
    assert (json.loads(told["text"]), told["size"]) == ({"b": 8}, "8")


@pytest.mark.parametrize("name", BESIDE)
def test_a_file_with_the_name_of_the_script_is_refused(name: str) -> None:
    """One would overwrite the other."""
    own = BESIDE[name]
    with pytest.raises(ExportError, match=f"'{own}' has the name of a file of this export"):
        exported(name, "program", f"{{file:{own}}}", files={own: "{micro_batch_size}"})


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_command_asks_for_the_updates_that_it_needs(name: str, tmp_path: Path) -> None:
    """An export cannot guess the length of the run."""
    argv = ("torchrun", "--size={micro_batch_size}", "--updates={updates}")
    with pytest.raises(ExportError, match="`updates`"):
        exported(name, *argv)

    called: Called = start(exported(name, *argv, options={"updates": 700}), tmp_path)

    assert called.arguments == ["--size=8", "--updates=700"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_command_is_not_spread_over_nodes(name: str) -> None:
    """It starts its own ranks, and only on its node; a node with all of them is requested."""
    argv = ("torchrun", "{micro_batch_size}")
    with pytest.raises(ExportError, match=r"the command starts its 16 ranks itself, on one node"):
        exported(name, *argv, world_size=16, options={"processes_per_node": 8})

    given = exported(name, *argv, world_size=16)

    assert any("16 devices" in advice.message for advice in given.warnings)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_is_not_configured_for_a_command(name: str) -> None:
    """The error names what starts the command."""
    with pytest.raises(ExportError, match=r"batchwright train recommendation\.json.*slurm") as error:
        exported(name, "program", "{micro_batch_size}")
    assert error.value.reason == "not-expressible"


def test_a_command_takes_no_arguments_of_a_framework() -> None:
    """It has placeholders for its figures."""
    with pytest.raises(ExportError, match="leave `arguments_of` out"):
        exported("slurm", "program", "{micro_batch_size}", options={"arguments_of": "hugging-face"})


def test_options_of_programs_and_commands_are_told_apart() -> None:
    """A command has no script, and a script takes no updates."""
    codes = {"command": exported("slurm", "program", "{micro_batch_size}", options={"script": "x.py"})}
    codes["script"] = export(plan(16), "slurm", options=ExportOptions(updates=3))

    unused = {
        kind: [advice.message for advice in given.warnings if advice.code == "option-not-used"]
        for kind, given in codes.items()
    }

    assert unused == {
        "command": ["An export to Slurm batch script does not use `script`."],
        "script": ["An export to Slurm batch script does not use `updates`."],
    }


def test_files_too_large_for_a_manifest_are_refused() -> None:
    """Linux takes 128 KiB in an argument."""
    files = {"a.txt": "{micro_batch_size}" + "x" * 110_000}
    with pytest.raises(ExportError, match="put them into the image"):
        exported("kubernetes", "program", "{file:a.txt}", files=files)
