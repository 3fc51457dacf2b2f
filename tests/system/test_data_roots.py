"""Tests of the folders that a run may read: every path that leads outside is refused by name."""

import glob
import io
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from safetensors.torch import save_file

from batchwright.errors import DataOutsideRootsError, SpecError
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.data_roots import ROOTS_VARIABLE, DataRoots, expand_glob, why_unmatched
from batchwright.training.data.base import TrainingData
from batchwright.training.data.build import build_data
from batchwright.training.data.files import DataFolders
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.workloads.build import build_workload
from tests.support.factories import gpt_spec, mlp_spec, recommendation, resnet_spec
from tests.support.whole_runs import ENVIRONMENT, wait_for

SECRET = "the outside's secret text, long enough for a sample"  # noqa: S105 - a text
TEXT = "some text of the inside, which is long enough"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that may be read, beside one that may not."""
    for name in ("root", "outside"):
        (tmp_path / name).mkdir()
    return tmp_path / "root"


@pytest.fixture
def outside(root: Path) -> Path:
    """A folder that may not be read, with a file of each kind of data."""
    folder = root.parent / "outside"
    (folder / "s.txt").write_text(SECRET)
    (folder / "s.jsonl").write_text(json.dumps({"text": SECRET}) + "\n")
    (folder / "cat").mkdir()
    Image.new("RGB", (32, 32)).save(folder / "cat" / "s.png")
    np.savez(folder / "s.npz", inputs=np.zeros((4, 32), np.float32), labels=np.zeros(4, np.int64))
    arrays = {"inputs": torch.zeros(4, 32), "labels": torch.zeros(4, dtype=torch.int64)}
    save_file(arrays, folder / "s.safetensors")
    return folder


def read(spec: WorkloadSpec, root: Path) -> TrainingData:
    """The data of a spec, of which the run may read what is below ``root``."""
    return build_data(spec, build_workload(spec), DataFolders(DataRoots([str(root)]), root.parent / "cache"))


def refused(spec: WorkloadSpec, root: Path) -> str:
    """Return why a spec's data are refused: the problem of its field."""
    with pytest.raises(SpecError) as caught:
        read(spec, root)
    return str(caught.value)


def text(*paths: object, **fields: Any) -> WorkloadSpec:
    """A language model over text files."""
    return gpt_spec(data={"kind": "text", "paths": [str(path) for path in paths], **fields})


def records(*paths: object, **fields: Any) -> WorkloadSpec:
    """A language model over rows."""
    return gpt_spec(data={"kind": "records", "paths": [str(path) for path in paths], **fields})


def images(path: object) -> WorkloadSpec:
    """A classifier of images."""
    return resnet_spec(data={"kind": "images", "path": str(path)})


def arrays(path: object) -> WorkloadSpec:
    """A classifier of arrays."""
    return mlp_spec(data={"kind": "arrays", "path": str(path)})


ROUTES: dict[str, Callable[[Path], WorkloadSpec]] = {
    "text, a wildcard in a link": lambda root: text(root / "lin?" / "s.txt"),
    "text, a linked file": lambda root: text(root / "*.txt"),
    "text, any depth": lambda root: text(root / "**" / "s.txt"),
    "text, a folder's link by name": lambda root: text(root / "link" / "s.txt"),
    "text, above": lambda root: text(root / ".." / "outside" / "s.txt"),
    "text, beside": lambda root: text(root.parent / "outside" / "s.txt"),
    "records, a wildcard in a link": lambda root: records(root / "lin?" / "s.jsonl"),
    "records, a linked file": lambda root: records(root / "*.jsonl"),
    "records of text": lambda root: records(root / "[s].txt", format="text"),
    "tokenizer": lambda root: text(root / "a.md", tokenizer=str(root / "link" / "tokenizer.json")),
    "tokenizer of records": lambda root: records(root / "a.md", format="text", tokenizer=str(root / "t.json")),
    "images, a class's folder": lambda root: images(root / "classes"),
    "images, a file": lambda root: images(root / "files"),
    "images, the folder": lambda root: images(root / "link"),
    "arrays": lambda root: arrays(root / "link" / "s.npz"),
    "arrays, mapped": lambda root: arrays(root / "s.safetensors"),
}


@pytest.mark.parametrize("route", ROUTES)
def test_no_reader_reads_outside_the_folders(root: Path, outside: Path, route: str) -> None:
    """Links in folders, files, classes and patterns, and parent folders are refused by name, in the run."""
    (outside / "tokenizer.json").write_text("{}")
    (root / "a.md").write_text(TEXT)
    for link, target in {
        "link": outside,
        "s.txt": outside / "s.txt",
        "s.jsonl": outside / "s.jsonl",
        "s.safetensors": outside / "s.safetensors",
        "t.json": outside / "tokenizer.json",
    }.items():
        (root / link).symlink_to(target)
    (root / "classes").mkdir()
    (root / "classes" / "cat").symlink_to(outside / "cat")
    (root / "files" / "cat").mkdir(parents=True)
    (root / "files" / "cat" / "1.png").symlink_to(outside / "cat" / "s.png")
    assert "outside the folders that jobs may read" in refused(ROUTES[route](root), root)
    assert "BATCHWRIGHT_DATA_ROOTS" in refused(ROUTES[route](root), root)


def test_links_within_the_folders_are_followed(root: Path, outside: Path) -> None:
    """An operator's own links stay usable, and an image counts to the class that lists it."""
    for name in ("s.txt", "s.jsonl", "s.npz", "s.safetensors", "cat"):
        (outside / name).rename(root / name)
    (root / "link").symlink_to(root)
    (root / "classes" / "dog").mkdir(parents=True)
    (root / "classes" / "ant").mkdir()
    (root / "classes" / "dog" / "1.png").symlink_to(root / "cat" / "s.png")
    shutil.copy(root / "cat" / "s.png", root / "classes" / "ant" / "2.png")
    assert len(read(text(root / "lin?" / "s.txt"), root))
    assert len(read(records(root / "link" / "*.jsonl"), root)) == 1
    assert len(read(arrays(root / "link" / "s.npz"), root)) == 4
    assert len(read(arrays(root / "link" / "s.safetensors"), root)) == 4
    assert read(images(root / "link" / "classes"), root).batch([0, 1])["labels"].tolist() == [0, 1]


def test_a_link_created_later_is_refused(root: Path, outside: Path) -> None:
    """An image that was replaced by a link after it was listed is not read, because the opened file is checked."""
    (root / "cat").mkdir()
    for name in ("1.png", "2.png"):
        shutil.copy(outside / "cat" / "s.png", root / "cat" / name)
    data = read(images(root), root)
    (root / "cat" / "2.png").unlink()
    (root / "cat" / "2.png").symlink_to(outside / "cat" / "s.png")
    data.batch([0])
    with pytest.raises(SpecError, match=r"data\.path: '.*2\.png' is outside"):
        data.batch([1])


def test_the_opened_file_is_checked(root: Path, outside: Path) -> None:
    """The kernel's path of the file is checked; a file that is not regular is refused without blocking."""
    roots = DataRoots([str(root)])
    (root / "a.txt").write_text(TEXT)
    with roots.open(root / "a.txt") as stream:
        assert stream.read() == TEXT.encode()
    with pytest.raises(DataOutsideRootsError, match=r"s\.txt"):
        roots.open(outside / "s.txt")
    os.mkfifo(root / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        roots.open(root / "pipe")


def test_a_file_swapped_while_it_is_opened_is_refused(
    root: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that appears between the check of the path and the open is refused."""
    path = root / "a.txt"
    path.write_text(TEXT)
    really_open = os.open

    def swap_then_open(name: Path, flags: int) -> int:
        path.unlink()
        path.symlink_to(outside / "s.txt")
        return really_open(name, flags)

    monkeypatch.setattr(os, "open", swap_then_open)
    with pytest.raises(DataOutsideRootsError, match=r"a\.txt"):
        DataRoots([str(root)]).open(path)


@pytest.mark.parametrize("folder", ["a::", "zip::", "hf:", "https:", "file:"])
def test_names_that_look_like_addresses_stay_files(root: Path, outside: Path, folder: str) -> None:
    """`x::/path` would chain to another file: such a name is refused, and no other is taken for an address."""
    path = root / folder / str(outside / "s.jsonl").lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"text": TEXT}) + "\n")
    if "::" in folder:
        assert "`::`" in refused(records(path), root)
    else:
        assert bytes(read(records(path), root).samples[0]["input_ids"].tolist()) == TEXT.encode()[:16]


@pytest.mark.parametrize("address", ["hf://datasets/a/b.jsonl", "http://127.0.0.1:9/a.jsonl", "zip://a::b.zip"])
@pytest.mark.parametrize("kind", [text, records])
def test_an_address_is_no_file(root: Path, kind: Callable[[str], WorkloadSpec], address: str) -> None:
    """An address matches no file, and nothing is downloaded."""
    assert "no file matches" in refused(kind(address), root) or "outside the folders" in refused(kind(address), root)


def test_an_archive_is_not_unpacked(root: Path, outside: Path) -> None:
    """Members and links of archives, whatever the file's name, are not read."""
    with zipfile.ZipFile(root / "a.jsonl", "w") as packed:
        packed.writestr(f"x::{outside}/s.jsonl", "{}")
    with tarfile.open(root / "b.jsonl", "w") as packed:
        member = tarfile.TarInfo("rows.jsonl")
        member.type, member.linkname = tarfile.SYMTYPE, str(outside / "s.jsonl")
        packed.addfile(member, io.BytesIO())
    for name in ("a.jsonl", "b.jsonl"):
        assert "is an archive" in refused(records(root / name), root)


def test_an_image_of_another_format_is_not_opened(root: Path) -> None:
    """PostScript, which Pillow hands to another program, hides behind no suffix."""
    (root / "cat").mkdir()
    (root / "cat" / "1.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n")
    with pytest.raises(Exception, match=r"cannot be read: .*cannot identify"):
        read(images(root), root)


# --- patterns ---

_NAMES = st.sampled_from(["a", "b", "ab", ".h", "[x]", "a.txt", "b.txt"])
_PARTS = st.sampled_from(["a", "*", "**", "?", "[ab]", "*.txt", ".*", "a*", "[!a]", "[[]x]", "b.txt"])


@given(st.lists(st.lists(_NAMES, min_size=1, max_size=3), max_size=8), st.lists(_PARTS, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_patterns_match_as_those_of_glob(tmp_path: Path, files: list[list[str]], parts: list[str]) -> None:
    """The same files as with Python's `glob` are found; a folder that links to itself causes no endless walk."""
    tree = tmp_path / str(len(list(tmp_path.iterdir())))
    tree.mkdir()
    for names in files:
        path = tree.joinpath(*names)
        if not any(parent.is_file() for parent in [path, *path.parents]) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    pattern = str(tree.joinpath(*parts))
    found = {str(path) for path in expand_glob(pattern) if path.is_file()}
    wanted = {name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)}  # noqa: PTH113, PTH207 - glob gives `a/` for a file `a` and `a/**`
    assert found == wanted
    (tree / "self").symlink_to(tree)
    assert {str(path) for path in expand_glob(pattern) if path.is_file()} >= found


def test_a_search_ends_after_max_entries(tmp_path: Path) -> None:
    """A pattern that matches nothing examines at most the given number of entries."""
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "x").write_text("")
    assert len(list(expand_glob(f"{tmp_path}/**/x"))) == 20
    assert len(list(expand_glob(f"{tmp_path}/**/x", max_entries=15))) == 15


# --- whole runs ---


def run_in(directory: Path, spec: WorkloadSpec, roots: DataRoots) -> tuple[RunOutcome, str]:
    """Run one update, and return its outcome and message."""
    process = TrainingProcess(directory, data_roots=roots)
    process.start(recommendation(spec, 8, 4, environment=ENVIRONMENT), TrainingRequest(updates=1, workers=1))
    result = wait_for(process)
    return result.outcome, result.message


@pytest.mark.usefixtures("forked")
def test_a_run_reads_below_its_folders_alone(root: Path, outside: Path, tmp_path: Path) -> None:
    """The allowed folders reach the processes that read; a link to outside ends the run with its name."""
    (root / "a.txt").write_text(TEXT * 40)
    spec, roots = text(root / "*.txt"), DataRoots([str(root)])
    assert run_in(tmp_path / "one", spec, roots)[0] is RunOutcome.SUCCEEDED
    (root / "b.txt").symlink_to(outside / "s.txt")
    outcome, message = run_in(tmp_path / "two", spec, roots)
    assert outcome is RunOutcome.FAILED
    assert "data.paths" in message
    assert "b.txt" in message
    assert "BATCHWRIGHT_DATA_ROOTS" in message
    assert run_in(tmp_path / "three", spec, DataRoots(None))[0] is RunOutcome.SUCCEEDED


@pytest.mark.usefixtures("forked")
def test_without_folders_no_file_may_be_read(root: Path, tmp_path: Path) -> None:
    """An empty list of folders allows no file."""
    (root / "a.txt").write_text(TEXT * 40)
    outcome, message = run_in(tmp_path / "run", text(root / "a.txt"), DataRoots([]))
    assert outcome is RunOutcome.FAILED
    assert "allowed: none" in message


def test_the_folders_are_passed_in_the_environment(root: Path) -> None:
    """The folders are passed as resolved paths, so that a later change of a link has no effect."""
    link = root.parent / "link"
    link.symlink_to(root)
    variables = DataRoots([str(link)]).to_environment()
    assert json.loads(variables[ROOTS_VARIABLE]) == [str(root)]
    assert DataRoots.from_environment(variables).folders == (root,)
    assert DataRoots.from_environment({}).folders is None


def test_a_path_that_is_no_file_is_named_as_what_it_is(tmp_path: Path) -> None:
    """A folder and a pipe are there, but hold no data that can be read."""
    os.mkfifo(tmp_path / "pipe")
    assert why_unmatched(str(tmp_path)) == f"is a folder: name files in it, such as {tmp_path}/*"
    assert why_unmatched(f"{tmp_path}/pipe").startswith("is not a regular file but a pipe")
    assert why_unmatched(f"{tmp_path}/*.txt").startswith("no file matches")
