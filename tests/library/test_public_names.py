"""``import batchwright``: its public names, and what importing them needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import batchwright
from tests.support.paths import ROOT

TRAINING = {name for module, names in batchwright._MODULES.items() if ".training." in module for name in names}
TORCH_FREE = sorted({*batchwright.__all__} - TRAINING)


def test_every_public_name_is_there() -> None:
    """The list, the lazy imports and ``dir`` agree."""
    assert dir(batchwright) == sorted(batchwright.__all__)
    for name in batchwright.__all__:
        assert getattr(batchwright, name) is not None


def test_an_unknown_name_lists_the_public_ones() -> None:
    """A name that is not listed is private."""
    with pytest.raises(AttributeError, match=r"no public name 'find_batchsize'; it has .*find_batch_size"):
        _ = batchwright.find_batchsize


def test_only_training_needs_torch() -> None:
    """The other names are imported without torch, transformers, NVML and the service's packages."""
    code = f"""
from tests.support.blocked_imports import block
block("torch", "transformers", "numpy", "fastapi", "sqlalchemy", "uvicorn", "pynvml", "plotly")
import batchwright
for name in {TORCH_FREE!r}:
    getattr(batchwright, name)
assert batchwright.plan(100, 34).micro_batch_sizes == ((34, 33, 33),)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    """The imports for type checkers and the lazy ones are of the same names, from the same modules."""
    tree = ast.parse((ROOT / "tuner" / "batchwright" / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        node.module: sorted(name.name for name in node.names)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    assert seen == {module: sorted(names) for module, names in batchwright._MODULES.items()}
    assert {*batchwright.__all__} == {name for names in seen.values() for name in names} | {
        "__version__",
        "errors",
        "integrations",
    }


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A user's project whose packages have names that are common, and that only its own programs may import."""
    for name in ("tuner", "service", "tests", "utils", "tools", "benchmarks", "examples", "client", "domain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise AssertionError('{name} of the user was imported')\n")
    return tmp_path


def run_there(folder: Path, *arguments: str) -> None:
    """Run Python in a folder; what it raises fails the test."""
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


IMPORTING = """
import batchwright, batchwright.cli.main
for name in {names!r}:
    assert getattr(batchwright, name) is not None
"""


def test_no_folder_of_a_user_is_imported(users_folder: Path) -> None:
    """A program there imports the command line and each public name that needs no torch."""
    run_there(users_folder, "-c", IMPORTING.format(names=TORCH_FREE))


@pytest.mark.thorough
def test_nothing_of_ours_needs_a_folder_of_a_user(users_folder: Path) -> None:
    """Nor do the names of training, a callback, the processes of the service, and the module as a command."""
    run_there(users_folder, "-c", IMPORTING.format(names=sorted(TRAINING)))
    run_there(users_folder, "-c", "import batchwright.integrations.hugging_face")
    run_there(users_folder, "-c", "import batchwright_service.entrypoints.serve, batchwright_service.entrypoints.work")
    run_there(users_folder, "-m", "batchwright", "serve", "--help")
