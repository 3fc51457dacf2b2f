"""Errors as JSON: with `--json`, every command prints every error as one document."""

import errno
import io
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand

from batchwright.cli import running
from batchwright.cli.main import main
from batchwright.schemas.recommendation import Recommendation
from tests.cli.test_help_and_panel import ALL
from tests.support.command import called
from tests.support.factories import gpt_spec, recommendation
from tests.support.scarce import small_disk

COMMANDS = [
    words
    for words, command in ALL.items()
    if not hasattr(command, "list_commands") and not command.context_settings.get("ignore_unknown_options")
]
BATCH = ("--effective-batch-size", "8")


def error_of(printed: str) -> dict[str, Any]:
    """The error, which is the only thing that was printed."""
    document: dict[str, Any] = json.loads(printed)
    assert {"error", "message"} <= document.keys()
    assert document["message"]
    return document


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_unknown_option_is_an_error_in_json(words: tuple[str, ...]) -> None:
    """It is named, and nothing else is printed."""
    done = called(*words, "--json", "--no-such-option")
    assert (done.returncode, done.stderr) == (2, "")
    assert "No such option" in error_of(done.stdout)["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune", "spec.yaml", "--json"), "Missing option '--effective-batch-size'"),
        (("tune", "spec.yaml", *BATCH, "--memory-limit", "lots", "--json"), "'lots' is not a size"),
        (("tune", "spec.yaml", *BATCH, "--time-limit", "soon", "--json"), "'soon' is not a duration"),
        (("tune", "absent.yaml", *BATCH, "--json"), "absent.yaml: cannot be read"),
        (("tune", "spec.yaml", *BATCH, "--json"), "batch.sequence_length"),
        (("tune", "spec.yaml", *BATCH, "-o", "absent/x.json", "--json"), "--output: the folder absent does not exist"),
        (("run", "spec.yaml", "--json", "--effective-batch-size", "x"), "'x' is not a valid int"),
        (("estimate", "absent.yaml", "--gpu", "T4", "--json"), "absent.yaml: cannot be read"),
        (("train", "absent.json", "--json"), "absent.json: cannot be read"),
        (("verify", "absent.json", "--json"), "absent.json: cannot be read"),
        (("export", "absent.json", "--format", "slurm", "--json"), "absent.json: cannot be read"),
        (("export", "absent.json", "--json"), "Missing option '--format'"),
        (("plan", "--json", *BATCH, "--max-micro-batch-size", "0"), "--max-micro-batch-size"),
        (("no-such-command", "--json"), "No such command"),
        (("estimate", "spec.yaml", "--loop", "lightening", "--json"), "did you mean `lightning`?"),
        (("admin", "keys", "create", "x", "--scope", "jobs:write", "--json"), "did you mean `jobs:run`?"),
    ],
)
def test_wrong_input_is_an_error_in_json(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """Wrong values, files and folders, found by any layer."""
    (tmp_path / "spec.yaml").write_text("model: {kind: reference, architecture: {name: gpt}}")
    done = called(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "")
    assert message in error_of(done.stdout)["message"]


@pytest.mark.parametrize("command", ["devices", "gpus", "formats"])
@pytest.mark.parametrize(
    ("raised", "code", "kind"),
    [
        (KeyboardInterrupt(), 130, "EndedBySignalError"),
        (ModuleNotFoundError("no torch", name="torch"), 2, "SpecError"),
        (RuntimeError("a bug"), 1, "RuntimeError"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "OSError"),
        (AssertionError(), 1, "AssertionError"),
    ],
)
def test_what_nobody_expected_is_an_error_in_json(
    monkeypatch: pytest.MonkeyPatch, command: str, raised: BaseException, code: int, kind: str
) -> None:
    """An interrupt, a missing package, or an internal error, whose traceback is on standard error."""

    def invoke(*_: object) -> None:
        raise raised

    monkeypatch.setattr(TyperCommand, "invoke", invoke)
    printed = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["batchwright", command, "--json"])
    with redirect_stdout(printed), pytest.raises(SystemExit if code > 1 else type(raised)) as ended:
        main()
    assert getattr(ended.value, "code", 1) == code
    assert error_of(printed.getvalue())["error"] == kind


@pytest.mark.parametrize("as_json", [True, False])
def test_a_recommendation_that_cannot_be_written_is_still_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, as_json: bool
) -> None:
    """The folder became a file during the search: exit code 2, the answer alone on standard output."""
    folder, found, spec = tmp_path / "answers", recommendation(gpt_spec()), tmp_path / "spec.json"
    spec.write_text(gpt_spec().model_dump_json())
    folder.mkdir()

    def tune(*_: object) -> Recommendation:
        folder.rmdir()
        folder.write_text("in the way")
        return found

    monkeypatch.setattr(running, "tune", tune)
    options: tuple[str | Path, ...] = ("--effective-batch-size", "8", "-o", folder / "answer.json")
    tuned = called("tune", spec, *options, *(["--json"] if as_json else []))
    assert tuned.returncode == 2
    assert f"{folder / 'answer.json'} cannot be written" in tuned.stderr
    if as_json:
        assert error_of(tuned.stderr)["error"] == "SpecError"
        assert Recommendation.model_validate_json(tuned.stdout) == found
    else:
        assert "effective batch" in tuned.stdout


def test_a_full_disk_of_the_output_is_not_that_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is another folder, although the user's file lies in that for temporary files."""
    spec = tmp_path / "spec.json"
    spec.write_text(gpt_spec().model_dump_json())
    monkeypatch.setattr(running, "tune", lambda *_: recommendation(gpt_spec()))
    with small_disk(tmp_path / "disk", 4096) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        tuned = called("tune", spec, *BATCH, "--device", "cpu", "-o", disk / "x.json")
    assert tuned.returncode == 2
    assert "choose a folder on another disk; the result is on standard output" in tuned.stderr
