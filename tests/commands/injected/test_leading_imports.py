"""Tests of the imports that run ahead of a program: which packages are installed, and where the imports end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from batchwright.commands.injected.leading_imports import LeadingImports

PACKAGE = "package_of_a_test"
PROGRAM = f"'''Train.'''\nimport json\nimport {PACKAGE}\n\nsize = 4\n"


@pytest.fixture
def leading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LeadingImports]:
    """Execute the imports of `app/train.py`, which imports a package that is in a folder of `sys.path`."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def execute(folder: str, source: str = PROGRAM) -> LeadingImports:
        package = tmp_path / folder / PACKAGE / "__init__.py"
        package.parent.mkdir(parents=True)
        package.write_text("import colorsys\nVALUE = 1\n")
        script = tmp_path / "app" / "train.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(source)
        monkeypatch.setattr(sys, "argv", [str(script)])
        sys.path.append(str(tmp_path / folder))
        monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
        imports = LeadingImports(None)
        imports.execute()
        return imports

    return execute


def describe(folder: Path, name: str, project: Path | None = None) -> None:
    """Write the metadata of a distribution into a folder, with its editable project."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    if project is not None:
        url = {"url": project.as_uri(), "dir_info": {"editable": True}}
        (metadata / "direct_url.json").write_text(json.dumps(url))


@pytest.mark.parametrize("folder", ["overlay/lib/python3/site-packages", "debian/dist-packages"])
def test_packages_in_a_site_folder_of_the_path_are_installed(
    leading: Callable[..., LeadingImports], folder: str
) -> None:
    """Those of a `.pth` file and of `PYTHONPATH` too, which the interpreter's own site folders do not contain."""
    found = leading(folder)
    assert PACKAGE in sys.modules
    assert (found.executed, found.place, found.reason) == (2, "train.py:5", "`size = 4`")


def test_packages_beside_metadata_are_installed(leading: Callable[..., LeadingImports], tmp_path: Path) -> None:
    """As `pip install --target` leaves them."""
    describe(tmp_path / "vendored", "another")
    assert leading("vendored").place == "train.py:5"


def test_packages_of_an_editable_project_are_installed(leading: Callable[..., LeadingImports], tmp_path: Path) -> None:
    """Its metadata are in a site folder."""
    site = tmp_path / "venv" / "site-packages"
    describe(site, "another", tmp_path / "a project")
    sys.path.append(str(site))
    assert leading("a project/src").place == "train.py:5"


def test_packages_of_a_project_with_an_egg_link_are_installed(
    leading: Callable[..., LeadingImports], tmp_path: Path
) -> None:
    """`setup.py develop` leaves the link in a site folder."""
    site = tmp_path / "venv" / "site-packages"
    site.mkdir(parents=True)
    (site / "another.egg-link").write_text(f"{tmp_path / 'project'}\n.")
    sys.path.append(str(site))
    assert leading("project").place == "train.py:5"


@pytest.mark.parametrize("folder", ["app", "app/src", "elsewhere"])
def test_a_module_of_the_programs_own_ends_the_imports(
    leading: Callable[..., LeadingImports], tmp_path: Path, folder: str
) -> None:
    """Also where the program is a part of an editable project. The imports with which the module begins run first."""
    describe(tmp_path / "venv" / "site-packages", "app", tmp_path / "app")
    sys.path.append(str(tmp_path / "venv" / "site-packages"))
    found = leading(folder)
    assert PACKAGE not in sys.modules
    assert found.executed == 2
    assert found.place.endswith(f"{PACKAGE}/__init__.py:2")
    assert found.reason == "`VALUE = 1`"


@pytest.mark.parametrize(
    ("source", "executed", "place", "reason"),
    [
        ("import json\nimport no_such_module\n", 1, "train.py:2", "`no_such_module` is a module of the program's own"),
        ("import json, csv, no_such_module\n", 2, "train.py:1", "`no_such_module` is a module of the program's own"),
        ("import json\nfrom json import no_such_name\n", 1, "train.py:2", "ImportError: cannot import name"),
        ("from . import parts\n", 0, "train.py:1", "a relative import"),
        ("import json\nthis is no Python\n", 0, "train.py", "SyntaxError: invalid syntax"),
        ("'''Nothing else.'''\nimport json\n", 1, "", ""),
    ],
)
def test_the_end_of_the_imports_is_told(
    leading: Callable[..., LeadingImports], source: str, executed: int, place: str, reason: str
) -> None:
    """By its place and the reason."""
    found = leading("unused/site-packages", source)
    assert (found.executed, found.place) == (executed, place)
    assert found.reason.startswith(reason)
    assert bool(found.reason) == bool(reason)
