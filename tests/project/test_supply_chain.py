"""Tests of what is installed: by hash, in the versions of constraints.txt, with its licences listed."""

import re
import subprocess
import sys
import tomllib
import zipfile
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tools.licenses import LISTED, canonical, license_of, names_in
from tools.lock import GROUPS

_REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
NOT_BY_HASH = {"torch"}


def pinned(text: str) -> dict[str, str]:
    """The version of each project that a file of requirements or constraints names."""
    found = (_REQUIREMENT.match(line) for line in text.splitlines())
    return {canonical(it[1]): it[2] for it in found if it is not None}


def direct(extras: tuple[str, ...]) -> set[str]:
    """The projects that our own metadata name for some extras, those that extras name in turn included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named: list[str] = list(project["dependencies"])
    wanted = list(extras)
    while wanted:
        for requirement in project["optional-dependencies"][wanted.pop()]:
            own = re.match(r"batchwright\[(.*)\]", requirement)
            wanted += own[1].split(",") if own else []
            named += [] if own else [requirement]
    return {canonical(re.split(r"[\[<>=!~; ]", it)[0]) for it in named}


@pytest.mark.parametrize("group", GROUPS)
def test_everything_but_torch_is_pinned_by_hash(group: str) -> None:
    """Every direct dependency of the group is there, and each requirement has hashes, in the versions we test with."""
    text = (ROOT / "requirements" / f"{group}.txt").read_text()
    versions, tested = pinned(text), pinned((ROOT / "constraints.txt").read_text())
    assert direct(GROUPS[group]) - set(versions) == (NOT_BY_HASH if group != "docs" else set())
    assert {name: it for name, it in versions.items() if tested.get(name, it) != it} == {}
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(versions)
    assert [block.splitlines()[0] for block in blocks if not _HASH.search(block)] == []


def test_every_base_image_is_pinned_by_its_digest() -> None:
    """A tag alone may be another image tomorrow."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    given = dict(re.findall(r"^ARG (\w+)=(\S+)", text, flags=re.MULTILINE))
    froms = re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, flags=re.MULTILINE))
    bases = [re.sub(r"\$\{(\w+)\}", lambda it: given[it[1]], base) for base in froms if base not in stages]
    assert bases
    assert [base for base in bases if not re.search(r"@sha256:[0-9a-f]{64}$", base)] == []


def test_every_way_of_installing_checks_hashes() -> None:
    """The Makefile and the image take no package but torch and ourselves without one."""
    dockerfile, makefile = (ROOT / "docker" / "Dockerfile").read_text(), (ROOT / "Makefile").read_text()
    installs = [line for line in dockerfile.splitlines() if "pip install" in line]
    assert [("--require-hashes" in it, it.rstrip(" \\").split()[-1]) for it in installs] == [
        (True, "requirements/torch.txt"),
        (False, "torch"),
        (True, '"requirements/${REQUIREMENTS}.txt"'),
        (False, "/wheels/*.whl"),
        (True, "requirements/sbom.txt"),
    ]
    assert "HASHED := " in makefile
    assert "--no-deps --require-hashes" in makefile
    main = makefile.partition("# Frameworks that exports")[0]
    unhashed = re.findall(r"^\t\$\(PIP\) (.*)$", main, flags=re.MULTILINE)
    assert set(unhashed) == {"torch", "--no-deps --no-build-isolation -e .", "-e '.[bench]'"}


@pytest.mark.parametrize("tampered", [False, True])
def test_another_file_of_the_same_version_is_refused(tmp_path: Path, tampered: bool) -> None:  # noqa: FBT001 - a parameter
    """pip, called as the Makefile does, installs a file whose hash is listed, and no other of that name."""
    wheel = tmp_path / "pinned_here-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "pinned_here-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pinned-here\nVersion: 1.0\n"
        )
        archive.writestr(
            "pinned_here-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("pinned_here-1.0.dist-info/RECORD", "")
    digest = sha256(wheel.read_bytes() + (b"other" if tampered else b"")).hexdigest()
    (tmp_path / "pins.txt").write_text(f"pinned-here==1.0 --hash=sha256:{digest}\n")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--require-hashes", "--no-index", "--no-cache-dir"]
    command += ["--find-links", str(tmp_path), "--target", str(tmp_path / "there"), "-r", str(tmp_path / "pins.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode == 0) is not tampered, done.stderr
    assert ("DO NOT MATCH" in done.stderr) is tampered


def test_the_licences_of_direct_dependencies_are_listed() -> None:
    """As the installed packages state them: after an upgrade `make licenses` renews the list."""
    rows = [line.strip("| ").split(" | ") for line in LISTED.read_text().splitlines() if line.startswith("| [")]
    listed = {row[0].partition("]")[0].strip("["): (row[1], row[2]) for row in rows}
    wanted = {}
    for name in direct(("dev", "docs")):
        package = metadata.distribution(name)
        wanted[name] = (package.version.partition("+")[0], license_of(package).replace("|", "/"))
    assert {name: listed.get(name) for name in wanted} == wanted
    files = [ROOT / "requirements" / f"{group}.txt" for group in ("dev", "docs", "image")]
    assert set(listed) <= set().union(*map(names_in, files)) | {"torch"}
