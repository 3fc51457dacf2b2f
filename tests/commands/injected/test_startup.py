"""The modules ``sitecustomize`` of command probes and of virtual cards, in an interpreter of its own without torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import batchwright.commands.injected.startup as of_commands
import batchwright.virtual_gpu.startup as of_virtual_cards
from tests.support.paths import ROOT

STARTUPS = {
    "command": str(Path(of_commands.__path__[0])),
    "virtual card": str(Path(of_virtual_cards.__path__[0])),
}
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
print(sum(type(finder).__name__ in {"_TorchImport", "_FollowedImports"} for finder in sys.meta_path))
"""


@pytest.mark.parametrize(
    "names", [("command",), ("virtual card",), ("command", "virtual card"), ("virtual card", "command")], ids=", ".join
)
def test_each_module_and_the_users_own_run_once(names: tuple[str, ...], tmp_path: Path) -> None:
    """A command is also probed on a virtual card: neither module hides the other or the user's."""
    own, folder = tmp_path / "own", tmp_path / "probe"
    own.mkdir()
    (folder / "events").mkdir(parents=True)
    (own / "sitecustomize.py").write_text(OWN)
    path = os.pathsep.join([*(STARTUPS[name] for name in names), str(own)])

    ended = subprocess.run(
        [sys.executable, "-c", SHOWS],
        env={"PYTHONPATH": path, "BATCHWRIGHT_PROBE_FOLDER": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["the user's own ran", "own", str(len(names))]


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "tuner/batchwright/commands/injected").rglob("*.py")),
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_injected_code_is_of_python_3_9(path: Path) -> None:
    """The interpreter of a command may be that old."""
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
