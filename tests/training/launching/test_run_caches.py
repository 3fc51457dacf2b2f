"""A run leaves no files outside its folder."""

import json
from pathlib import Path

import pytest

from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.training.launching.run_directory import RunPaths
from tests.support.factories import gpt_spec, mlp_spec, recommendation
from tests.support.whole_runs import ENVIRONMENT, run_to_end

pytestmark = pytest.mark.usefixtures("forked")
TEXT = "a text that nobody else has, which is long enough for a sample"
VARIABLES = ["HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of a user who has set nothing: the home, and the one for temporary files."""
    folders = {"HOME": tmp_path / "home", "TMPDIR": tmp_path / "temporary"}
    for name, folder in folders.items():
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return list(folders.values())


def rows(path: Path) -> dict[str, object]:
    """Records of one text."""
    path.write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(20)))
    return {"kind": "records", "paths": [str(path)]}


def left_in(folders: list[Path]) -> list[Path]:
    """The files that are left there."""
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


def test_copies_of_the_data_are_in_the_folder_of_the_run(tmp_path: Path, elsewhere: list[Path]) -> None:
    """Neither the user's caches nor the temporary folder have copies: removing the run's folder removes the data."""
    paths = RunPaths(tmp_path / "run")
    found = recommendation(gpt_spec(data=rows(tmp_path / "rows.jsonl")), 8, 4, environment=ENVIRONMENT)
    assert run_to_end(paths.directory, found, TrainingRequest(updates=1, workers=1)).outcome is RunOutcome.SUCCEEDED
    assert any(TEXT.encode() in path.read_bytes() for path in paths.cache.rglob("*") if path.is_file())
    assert left_in(elsewhere) == []


def test_caches_of_libraries_are_in_the_folder_of_the_run(tmp_path: Path) -> None:
    """Data, code of models, and compiled code, by variables that the libraries read."""
    paths = RunPaths(tmp_path)
    variables = paths.cache_variables()
    assert {"HF_DATASETS_CACHE", "HF_MODULES_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} <= set(variables)
    assert all(Path(folder).is_relative_to(paths.cache) for folder in variables.values())


@pytest.mark.thorough
def test_compiled_code_is_in_the_folder_of_the_run(
    tmp_path: Path, elsewhere: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code goes with the run; torch's headers, compiled once for all in the temporary folder, are no run's."""
    monkeypatch.delenv("TMPDIR")
    paths = RunPaths(tmp_path / "run")
    found = recommendation(mlp_spec(compile=True), 8, 4, environment=ENVIRONMENT)
    assert run_to_end(paths.directory, found, TrainingRequest(updates=1)).outcome is RunOutcome.SUCCEEDED
    assert list((paths.cache / "inductor").rglob("*.so"))
    assert left_in(elsewhere) == []


def test_caches_that_the_operator_has_set_stay(
    tmp_path: Path, elsewhere: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared folder for compiled code is used; the copies of the data still stay in the run's."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(elsewhere[0] / "shared"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(elsewhere[0] / "compiled"))
    found = recommendation(gpt_spec(data=rows(tmp_path / "rows.jsonl")), 8, 4, environment=ENVIRONMENT)
    assert run_to_end(tmp_path / "run", found, TrainingRequest(updates=1)).outcome is RunOutcome.SUCCEEDED
    assert list(RunPaths(tmp_path / "run").cache.rglob("*.arrow"))
    assert [path for path in left_in(elsewhere) if TEXT.encode() in path.read_bytes()] == []
