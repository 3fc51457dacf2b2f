"""The module ``sitecustomize`` of command probes and of virtual cards, in an interpreter of its own without torch."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.system import startup
from tests.support.paths import ROOT

STARTUP = str(Path(startup.__file__).parent)
OWN = """
import os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
print("the user's own ran")
others = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
spec = PathFinder.find_spec("sitecustomize", others)
if spec is not None:
    spec.loader.exec_module(module_from_spec(spec))
"""
"""A user's module that runs the one it believes to hide, as other tools have: which is ours again."""
SHOWS = """
import os, sys
import sitecustomize
print(os.path.basename(os.path.dirname(sitecustomize.__file__)))
finders = [finder for finder in sys.meta_path if type(finder).__name__ == "_FollowedImports"]
print({name: len(calls) for finder in finders for name, calls in finder._followed_by.items()})
"""


@pytest.mark.parametrize(
    ("uses", "followed"),
    [
        ("command", {"torch": 1, "safetensors": 1}),
        ("virtual card", {"torch": 1}),
        ("command on a virtual card", {"torch": 2, "safetensors": 1}),
    ],
)
def test_the_module_and_the_users_own_run_once(uses: str, followed: dict[str, int], tmp_path: Path) -> None:
    """A command is also probed on a virtual card: the folder is on the path twice then."""
    own, folder = tmp_path / "own", tmp_path / "probe"
    own.mkdir()
    (folder / "events").mkdir(parents=True)
    (own / "sitecustomize.py").write_text(OWN)
    variables = {"PYTHONPATH": os.pathsep.join([STARTUP, STARTUP, str(own)])}
    if "command" in uses:
        variables["BATCHWRIGHT_PROBE_FOLDER"] = str(folder)
    if "virtual card" in uses:
        variables["VIRTUAL_GPU_SESSION"] = str(folder)

    ended = subprocess.run(
        [sys.executable, "-c", SHOWS], env=variables, capture_output=True, text=True, timeout=300, check=False
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["the user's own ran", "own", str(followed)]


@pytest.mark.parametrize(
    "path",
    [
        *sorted((ROOT / "tuner/batchwright/commands/injected").glob("*.py")),
        *sorted((ROOT / "tuner/batchwright/system/startup").glob("*.py")),
        ROOT / "tuner/batchwright/system/subreaper.py",
    ],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_injected_code_is_of_python_3_9(path: Path) -> None:
    """The interpreter of a command may be that old."""
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
