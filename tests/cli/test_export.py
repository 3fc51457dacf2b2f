"""`batchwright export` and `batchwright formats` as a user meets them: files, words, exit codes."""

import json
from pathlib import Path

import pytest

from batchwright.cli.main import main
from batchwright.exports.base import Export
from batchwright.exports.registry import TARGETS, export
from tests.support.factories import CPU, recommendation

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A recommendation of three uneven micro-batches on the disk."""
    path = tmp_path / "recommendation.json"
    path.write_text(recommendation(effective_batch_size=100, largest_micro_batch_size=37).model_dump_json())
    return path


def batchwright(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run the command line; gives its exit code."""
    monkeypatch.setattr("sys.argv", ["batchwright", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_file_goes_to_standard_output(stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    """Alone, so that it can be piped; what to know about it goes to standard error."""
    assert batchwright(monkeypatch, "export", stored, "--format", "hugging-face") == 0
    printed = capsys.readouterr()
    made = export(recommendation(effective_batch_size=100, largest_micro_batch_size=37), "hugging-face")
    assert printed.out == made.files[0].content
    assert "100 samples per update" in printed.err
    assert "warning: 4 accumulation steps instead of 3" in " ".join(printed.err.split())


def test_variables_that_no_file_sets_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """The allocator's settings are part of what was measured; a launcher's script sets them itself."""
    path = tmp_path / "found.json"
    path.write_text(recommendation(environment={"MALLOC_ARENA_MAX": "1 2"}).model_dump_json())
    printed = {}
    for name in ("hugging-face", "torchrun"):
        assert batchwright(monkeypatch, "export", path, "--format", name, "--allow-inexact") == 0
        printed[name] = capsys.readouterr().err

    assert "set in the environment: 'MALLOC_ARENA_MAX=1 2'" in printed["hugging-face"]
    assert "MALLOC_ARENA_MAX" not in printed["torchrun"]
    *others, verification = printed["hugging-face"].splitlines()
    assert verification.endswith(f"batchwright verify {path} --format hugging-face -- COMMAND")  # a line to copy
    assert max(map(len, others)) <= 80


def test_a_device_cannot_write_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """Its name may come from elsewhere: what a terminal would obey is escaped."""
    path = tmp_path / "recommendation.json"
    device = CPU.model_copy(update={"name": "x\x1b]0;title\x07"})
    path.write_text(recommendation(device=device).model_dump_json())
    assert batchwright(monkeypatch, "export", path, "--format", "torchrun") == 0
    printed = capsys.readouterr()

    assert "\x1b" not in printed.out + printed.err
    assert "x\\x1b]0;title\\x07" in printed.err


def test_the_export_as_a_document(stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    """`--json` prints all of it, with the options in it."""
    options = ("--script", "my train.py", "--json")
    assert batchwright(monkeypatch, "export", stored, "-f", "torchrun", *options) == 0
    made = Export.model_validate_json(capsys.readouterr().out)
    assert (made.format, made.plan.exact) == ("torchrun", True)
    assert any("my train.py" in file.content for file in made.files)


def test_files_are_written_and_never_overwritten_by_accident(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """All of them, into a folder that is made; a second time only with `--force`."""
    folder = tmp_path / "new" / "folder"
    command = ("export", stored, "-f", "torchrun", "-o", folder)
    assert batchwright(monkeypatch, *command) == 0
    made = export(recommendation(effective_batch_size=100, largest_micro_batch_size=37), "torchrun")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        file.name: file.content for file in made.files
    }
    assert capsys.readouterr().out == ""
    (folder / made.files[0].name).write_text("mine")
    assert batchwright(monkeypatch, *command) == 2
    assert "--force" in capsys.readouterr().err
    assert (folder / made.files[0].name).read_text() == "mine"
    assert batchwright(monkeypatch, *command, "--force") == 0
    assert (folder / made.files[0].name).read_text() == made.files[0].content


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--format", "excel"), 2, "there is no export format 'excel'"),
        (("--format", "slrum"), 2, "there is no export format 'slrum'; did you mean 'slurm'?"),
        (("--format", "hugging-face", "--target-version", "0.1"), 2, "not for '0.1'"),
        (("--format", "hugging-face", "--arguments-of", "megatron"), 2, "is for launchers"),
        (("--format", "torchrun", "--script", "a\nb"), 2, "script"),
        (("--format", "torchrun", "--processes-per-node", "0"), 2, "--processes-per-node: must be at least 1"),
    ],
)
def test_wrong_arguments(  # noqa: PLR0913, PLR0917 - the command and its expected message
    stored: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Printed,
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    """Each ends with its exit code and says what is wrong; nothing is on standard output."""
    assert batchwright(monkeypatch, "export", stored, *arguments) == code
    printed = capsys.readouterr()
    assert words in " ".join(printed.err.split())
    assert printed.out == ""


def test_what_does_not_fit_has_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """Exit code 3, as for `tune`; as JSON with the reason."""
    nothing = recommendation().model_copy(
        update={
            "feasible": False,
            "plan": None,
            "largest_micro_batch_size": None,
            "infeasible_reason": "8 GiB are not enough",
        }
    )
    path = tmp_path / "nothing.json"
    path.write_text(nothing.model_dump_json())
    assert batchwright(monkeypatch, "export", path, "-f", "hugging-face", "--json") == 3
    error = json.loads(capsys.readouterr().out)
    assert (error["error"], error["reason"]) == ("ExportError", "infeasible")
    assert "8 GiB are not enough" in error["message"]


def test_formats_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    """One a line, and as JSON lines for a script."""
    assert batchwright(monkeypatch, "formats") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in TARGETS)
    assert batchwright(monkeypatch, "formats", "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["format"] for line in lines] == list(TARGETS)
