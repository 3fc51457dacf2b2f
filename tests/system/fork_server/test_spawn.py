"""Child processes connected by a socket pair."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from batchwright.system.fork_server.spawn import ChildProcess

START = ("tests.support.child_of_socket", ("one", "two words"), {"ASKED": "once"})


def _reported(child: ChildProcess) -> dict[str, Any]:
    return child.channel.receive() or {}


def test_a_child_process_receives_its_parameters() -> None:
    """The child has its arguments, environment and parent, has no input, and ends with its connection."""
    child = ChildProcess(*START)
    expected = {"parent": os.getpid(), "arguments": ["one", "two words"], "asked": "once", "input": ""}
    assert _reported(child) == expected
    assert child.output_tail(15) == "the last words"
    assert len(child.output_tail(4000)) == 1014
    child.channel.close()
    assert child.process.wait(120) == 0
    child.close()


def test_descendants_end_with_the_process() -> None:
    """A descendant, such as a compiler, is killed with the process."""
    parent = ChildProcess("tests.support.child_of_socket", ("has a child",), {"ASKED": ""})
    child = Path(f"/proc/{_reported(parent)['child']}")
    assert child.exists()
    parent.close()
    deadline = time.monotonic() + 120
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_cannot_be_started_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its connection nor its output."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        ChildProcess(*START)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
