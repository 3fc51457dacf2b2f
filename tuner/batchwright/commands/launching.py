"""Start a command below its subreaper, in a process of its own. No torch."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from batchwright.system import subreaper
from batchwright.system.kept_process import KeptProcess
from batchwright.system.subreaper import Channel

Launch = dict[str, Any]
"""The command that a subreaper starts: `argv`, `working_directory`, `environment`, `fixes_addresses`, a job's `log`."""
Launcher = Callable[[Launch, Path], KeptProcess]
"""Starts the command of a folder, in which it writes the launch."""
_ISOLATING_OPTIONS = frozenset("EIS")
"""Options of Python that leave out what the command injects."""
_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_LONGEST_FIRST_LINE = 512


class FreshCommand(KeptProcess):
    """A command in a process of its own, below a subreaper that is a child of this process.

    Args:
        launch: what the subreaper starts.
        folder: the folder in which that is written, and where the subreaper leaves the last output.
        descriptor: a socket that the command inherits, to be its own fork server (``injected.command_server``).
    """

    def __init__(self, launch: Launch, folder: Path, descriptor: int | None = None) -> None:
        if descriptor is not None:
            launch = {**launch, "server_descriptor": descriptor}
        (folder / "launch.json").write_text(json.dumps(launch))
        ours, theirs = Channel.pair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and a module of this distribution
                [sys.executable, "-I", subreaper.__file__, str(folder)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=() if descriptor is None else (descriptor,),
            )
        super().__init__(ours, self._process.kill)

    @override
    def end(self, *, dumps_stacks: bool = False) -> None:
        """Have the subreaper end the tree, and wait for both. Idempotent."""
        super().end(dumps_stacks=dumps_stacks)
        self._process.wait()


def may_serve(program: str, argv: Sequence[str]) -> bool:
    """Return whether a command starts Python that takes the injected code, and so may be its own fork server.

    Args:
        program: the file of its program.
        argv: its words.
    """
    if (script := _interpreter_of_script(Path(program))) is not None:
        return Path(script[0]).name.startswith("python") and not _is_isolated(script[1:])
    is_binary = _first_line(Path(program)).startswith(b"\x7fELF") and Path(program).name.startswith("python")
    return is_binary and not _is_isolated(argv[1:])


def _interpreter_of_script(program: Path) -> list[str] | None:
    """The words after `#!` of a script, without `env`; none for other files."""
    line = _first_line(program)
    words = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
    return words[Path(words[0]).name == "env" :] or None if words else None


def _first_line(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.readline(_LONGEST_FIRST_LINE)
    except OSError:
        return b""


def _is_isolated(words: Sequence[str]) -> bool:
    """Return whether the options before the program isolate Python, or there is no program in a file or module."""
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-") or word.startswith("-m"):
            return False
        if word == "-" or word.startswith("-c"):
            return True
        if word in _OPTIONS_WITH_VALUE:
            next(remaining, None)
        elif not word.startswith(("--", "-W", "-X")) and _ISOLATING_OPTIONS & set(word):
            return True
    return False
