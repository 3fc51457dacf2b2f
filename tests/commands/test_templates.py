"""Tests of ``batchwright.commands.templates``."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from batchwright.commands.templates import Figures, check_command, contents_of_files, render
from batchwright.errors import SpecError
from batchwright.schemas.command import CommandModel

FIGURES = Figures(micro_batch_size=25, accumulation_steps=4, world_size=2, updates=2)


def model(*argv: str, **fields: Any) -> CommandModel:
    """A command with the size that every command needs."""
    environment = {"SIZE": "{micro_batch_size}", **fields.pop("environment", {})}
    return CommandModel(kind="command", argv=argv or (sys.executable,), environment=environment, **fields)


def test_every_placeholder_is_replaced(tmp_path: Path) -> None:
    """In arguments, also inside of one."""
    argv = ("x", "a={micro_batch_size},{gradient_accumulation_steps}", "{effective_batch_size}", "{updates}")
    assert render(model(*argv), FIGURES, tmp_path).argv == ("x", "a=25,4", "200", "2")


def test_double_braces_are_literal(tmp_path: Path) -> None:
    """And other braces are left."""
    assert render(model("x", "{{updates}} {} ${{HOME}}"), FIGURES, tmp_path).argv[1] == "{updates} {} ${HOME}"


def test_the_output_folder_is_in_the_probes_own(tmp_path: Path) -> None:
    """Which is removed after it."""
    assert render(model("x", "{output_dir}"), FIGURES, tmp_path).argv[1] == str(tmp_path / "output")


def test_a_json_template_needs_no_escapes(tmp_path: Path) -> None:
    """Its rendered file is named in the arguments."""
    files = {"c.json": '{"train": {"batch": {micro_batch_size}, "steps": [{gradient_accumulation_steps}]}}'}
    rendered = render(model("x", "--config={file:c.json}", files=files), FIGURES, tmp_path)
    rendered.write_files()
    path = Path(rendered.argv[1].removeprefix("--config="))
    assert json.loads(path.read_text()) == {"train": {"batch": 25, "steps": [4]}}


def test_the_environment_has_the_figures(tmp_path: Path) -> None:
    """The variables have the user's names, and ours."""
    environment = render(model(), FIGURES, tmp_path).environment
    assert environment["SIZE"] == "25"
    assert environment["BATCHWRIGHT_EFFECTIVE_BATCH_SIZE"] == "200"


def test_only_probes_have_their_arguments(tmp_path: Path) -> None:
    """A job trains on all samples, not on the longest, and its tracker is on."""
    longest = model("x", probe_arguments=("--longest",), probe_environment={"SIZE": "of {updates}", "TRACKER": "off"})
    probe, job = render(longest, FIGURES, tmp_path), render(longest, FIGURES, tmp_path, for_probe=False)
    assert probe.argv == ("x", "--longest")
    assert (probe.environment["SIZE"], probe.environment["TRACKER"]) == (f"of {FIGURES.updates}", "off")
    assert job.argv == ("x",)
    assert (job.environment["SIZE"], job.environment.get("TRACKER")) == ("25", None)


def test_a_program_that_is_not_there_is_found_before_any_probe() -> None:
    """The error names the wrong field."""
    with pytest.raises(SpecError, match=r"model\.argv\.0: cannot be started"):
        check_command(model("no-such-program-here"))


def test_a_folder_that_is_not_there_is_found_before_any_probe(tmp_path: Path) -> None:
    """The error names the wrong field."""
    with pytest.raises(SpecError, match=r"model\.working_directory: is not a folder"):
        check_command(model(working_directory=str(tmp_path / "none")))


def test_a_relative_program_is_in_the_commands_folder(tmp_path: Path) -> None:
    """Relative paths are relative to the working directory."""
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o700)
    check_command(model("./run.sh", working_directory=str(tmp_path)))


def test_the_contents_of_named_files_are_part_of_the_versions(tmp_path: Path) -> None:
    """A changed script may take other memory."""
    script = tmp_path / "train.py"
    script.write_text("one")
    command = model("python", "train.py", "--config=train.py", "other", working_directory=str(tmp_path))
    first = contents_of_files(command)
    script.write_text("two")
    assert set(first) == {"file train.py", "file --config=train.py"}
    assert contents_of_files(command) != first
