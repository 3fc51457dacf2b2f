"""Tests of ``batchwright.commands.injected.oom_watch`` in every interpreter of this host that a command may have."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from shutil import which

import pytest

from tests.support.paths import ROOT

VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
PROGRAM = """
import json, sys, threading, types
package = types.ModuleType("injected")
package.__path__ = [sys.argv[1]]
sys.modules["injected"] = package
from injected.oom_watch import OomWatch
sys.path.insert(0, sys.argv[2])
import library

seen = []
ooms = OomWatch(["can't allocate memory"], lambda kind, message, where: seen.append([kind, message]))
ooms.watch_own_code()

def caught(function, *arguments):
    try:
        function(*arguments)
    except Exception:
        pass

def fails():
    raise RuntimeError(library.MESSAGE)

def fails_in_a_thread():
    thread = threading.Thread(target=caught, args=(fails,))
    thread.start()
    thread.join()

ways = {
    "raised": lambda: caught(fails),
    "raised by C": lambda: caught(bytearray, 2**62),
    "raised in a thread": fails_in_a_thread,
    "passed": lambda: caught(library.fails),
    "caught in a library": library.catches,
    "another error": lambda: caught(int, "x"),
}
ways[sys.argv[3]]()
print(json.dumps(seen))
"""
LIBRARY = """
MESSAGE = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"
def fails():
    raise RuntimeError(MESSAGE)

def catches():
    try:
        fails()
    except RuntimeError:
        pass
"""


@cache
def interpreter(version: str) -> str | None:
    """An interpreter of a version, if this host has one that starts."""
    installed = (str(path) for path in Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    names = [sys.executable, *filter(None, [which(f"python{version}")]), *installed]
    shows = "import sys; print('%d.%d' % sys.version_info[:2])"
    for name in names:
        ended = subprocess.run([name, "-c", shows], capture_output=True, text=True, check=False)
        if ended.stdout.strip() == version:
            return name
    return None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("way", "reported"),
    [
        ("raised", ["builtins.RuntimeError"]),
        ("raised by C", ["builtins.MemoryError"]),
        ("raised in a thread", ["builtins.RuntimeError"]),
        ("passed", ["builtins.RuntimeError"]),
        ("caught in a library", []),
        ("another error", []),
    ],
)
def test_an_oom_of_own_code_is_seen_once(version: str, way: str, reported: list[str], tmp_path: Path) -> None:
    """A trace function sees it up to Python 3.11, and `sys.monitoring` after that, which sees libraries too."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    folder, program = tmp_path / "site-packages", tmp_path / "program.py"
    folder.mkdir()
    (folder / "library.py").write_text(LIBRARY)
    program.write_text(PROGRAM)
    injected = ROOT / "tuner" / "batchwright" / "commands" / "injected"

    ended = subprocess.run(
        [python, "-I", str(program), str(injected), str(folder), way], capture_output=True, text=True, check=False
    )

    assert ended.stderr == ""
    assert [kind for kind, _ in json.loads(ended.stdout)] == reported
