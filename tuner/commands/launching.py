"""Start a command below its subreaper, in a fresh process or by the fork server of the command. No torch."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tuner.commands.injected import subreaper

Launch = dict[str, Any]
"""The command that a subreaper starts: `argv`, `working_directory`, `environment`, `fixes_addresses`."""

_ENDING_SECONDS = 60.0
"""Longer than a subreaper takes to kill what can be killed."""
_HELLO_SECONDS = 30.0
"""A process of the command that Python reaches reports at its start; one that does not by then is none."""
_FIXED_VARIABLES = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTORCH_", "TORCH", "CUDA_"),
    *("HF_", "TRANSFORMERS_", "ARROW_"),
)
"""Beginnings of the names of variables that interpreters and libraries read once, at their start."""
_ISOLATING_OPTIONS = frozenset("EIS")
"""Options of Python that leave out what the command injects."""
_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_LONGEST_FIRST_LINE = 512


class NotForkedError(Exception):
    """The fork server could not start the command: it is to be started anew."""


class KeptCommand(Protocol):
    """A command below its subreaper."""

    @property
    def pid(self) -> int | None:
        """The process of the subreaper; none before it was forked."""

    @property
    def is_forked(self) -> bool:
        """True if the fork server started the command."""

    def wait(self, seconds: float) -> bool:
        """Wait until the subreaper has ended, and return whether it has."""

    def end(self) -> None:
        """Have the subreaper end the tree, and wait for that. Idempotent."""


class Launcher(Protocol):
    """Starts a command."""

    def __call__(self, launch: Launch, folder: Path) -> KeptCommand:
        """Start the command of a folder, in which its launch is written."""


class FreshCommand:
    """A command in a process of its own, below a subreaper that is a child of this process.

    Args:
        launch: what the subreaper starts.
        folder: the folder in which that is written, and where the subreaper leaves how the command ended.
        descriptor: a socket that the command inherits, to be its own fork server.
    """

    is_forked = False

    def __init__(self, launch: Launch, folder: Path, descriptor: int | None = None) -> None:
        if descriptor is not None:
            launch = {**launch, "server_descriptor": descriptor}
        (folder / "launch.json").write_text(json.dumps(launch))
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and a module of this package
            [sys.executable, "-I", str(Path(subreaper.__file__)), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=() if descriptor is None else (descriptor,),
        )

    @property
    def pid(self) -> int:
        """The process of the subreaper."""
        return self._process.pid

    def wait(self, seconds: float) -> bool:
        """Wait until the subreaper has ended, and return whether it has."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def end(self) -> None:
        """Have the subreaper end the tree, and wait for that. Idempotent."""
        control = self._process.stdin
        if control is None or control.closed:
            return
        with suppress(OSError):
            os.write(control.fileno(), b"e")
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        control.close()


class ForkServer:
    """The fork server of a command: one process of it that has executed the imports with which its program begins.

    ``fork`` starts the server with the figures of the first probe. The server and all that it forks are below a
    subreaper.

    Attributes:
        folder: holds the folders of the probes, which the server's subreaper removes too where this process dies.
        is_closed: true once the server has been ended.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="batchwright-"))
        self.is_closed = False
        self._server: FreshCommand | None = None
        self._socket: socket.socket | None = None
        self._launch: Launch = {}
        self._arguments: int | None = None
        self._started_at = 0.0

    def fork(self, launch: Launch, folder: Path) -> ForkedCommand:
        """Have the server fork a process for the command, as soon as its imports are done.

        Raises:
            NotForkedError: when the server has ended, or the launch differs in more than the program's arguments and
                environment.
            OSError: when the server cannot be started.
        """
        if self.is_closed:
            raise NotForkedError("the fork server is closed")
        if self._socket is None:
            self._start(launch)
        elif not self._is_alike(launch):
            raise NotForkedError("other words than the program's arguments differ")
        (folder / "launch.json").write_text(json.dumps(launch))
        return ForkedCommand(self, folder)

    def _start(self, launch: Launch) -> None:
        own = self.folder / "server"
        (own / "tmp").mkdir(parents=True)
        kept = {name: text for name, text in launch["environment"].items() if name != "BATCHWRIGHT_PROBE_FOLDER"}
        self._launch = launch
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._started_at = time.monotonic()
        with other:
            environment = {**kept, "TMPDIR": str(own / "tmp")}
            self._server = FreshCommand({**launch, "environment": environment}, self.folder, other.fileno())

    def _is_alike(self, launch: Launch) -> bool:
        own, count = self._launch, self._arguments
        if count is None or len(launch["argv"]) != len(own["argv"]):
            return False
        words = len(own["argv"]) - count
        places = ("working_directory", "fixes_addresses")
        return (
            launch["argv"][:words] == own["argv"][:words]
            and all(launch[name] == own[name] for name in places)
            and _fixed(launch["environment"]) == _fixed(own["environment"])
        )

    def send(self, folder: Path, descriptors: list[int]) -> None:
        """Send the folder of a probe, with the descriptors of its subreaper.

        Raises:
            NotForkedError: when the server has ended.
        """
        try:
            if self._socket is None:
                raise NotForkedError("the fork server is closed")
            socket.send_fds(self._socket, [os.fsencode(folder)], descriptors)
        except OSError as error:
            raise NotForkedError("the fork server has ended") from error

    def receive(self, seconds: float) -> int | None:
        """Wait for messages of the server. Return the subreaper that it has forked; None if it has not yet.

        Raises:
            NotForkedError: when the server has ended, gives up, or never reports.
        """
        if self._socket is None:
            raise NotForkedError("the fork server is closed")
        if not select.select([self._socket], [], [], seconds)[0]:
            if self._arguments is None and time.monotonic() - self._started_at > _HELLO_SECONDS:
                raise NotForkedError("the command is no Python that can be reached")
            return None
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            raise NotForkedError("the fork server has ended")
        message = json.loads(data)
        match message["event"]:
            case "hello":
                self._arguments = message["arguments"]
            case "problem":
                raise NotForkedError(message["problem"])
            case "forked":
                return int(message["pid"])
        return None

    def close(self) -> None:
        """End the server and all that it has forked, and remove the folder. Idempotent."""
        self.is_closed = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._server is not None:
            self._server.end()
        shutil.rmtree(self.folder, ignore_errors=True)


class ForkedCommand:
    """A command in a process that its fork server has forked, or will fork after its imports.

    Args:
        server: the server.
        folder: the folder of the probe.
    """

    is_forked = True

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server = server
        self._pid: int | None = None
        control, self._control = os.pipe()
        self._life, life = os.pipe()
        self._is_over = False
        try:
            server.send(folder, [control, life])
        except NotForkedError:
            self._close()
            raise
        finally:
            os.close(control)
            os.close(life)

    @property
    def pid(self) -> int | None:
        """The process of the subreaper; none before it was forked."""
        return self._pid

    def wait(self, seconds: float) -> bool:
        """Wait until the subreaper has ended, and return whether it has.

        Raises:
            NotForkedError: when the server ends before the fork.
        """
        if self._pid is None:
            self._pid = self._server.receive(seconds)
            return False
        return self._has_ended(seconds)

    def _has_ended(self, seconds: float) -> bool:
        """Wait for the end of the pipe that the subreaper holds."""
        return bool(select.select([self._life], [], [], seconds)[0])

    def end(self) -> None:
        """Have the subreaper end the tree, and wait for that; end the server where that fails. Idempotent."""
        if self._is_over:
            return
        with suppress(OSError):
            os.write(self._control, b"e")
        if self._pid is None or not self._has_ended(_ENDING_SECONDS):
            self._server.close()
        self._close()

    def _close(self) -> None:
        self._is_over = True
        os.close(self._control)
        os.close(self._life)


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process reads once."""
    return {name: text for name, text in environment.items() if name.startswith(_FIXED_VARIABLES)}


def may_serve(program: str, argv: tuple[str, ...]) -> bool:
    """Return whether a command starts Python that takes the injected code, and so may be its own fork server.

    Args:
        program: the file of its program.
        argv: its words.
    """
    line = _first_line(Path(program))
    if line.startswith(b"#!"):
        words = os.fsdecode(line[2:]).split()
        if words and Path(words[0]).name == "env":
            words = words[1:]
        return bool(words) and Path(words[0]).name.startswith("python") and not _is_isolated(words[1:])
    is_binary = line.startswith(b"\x7fELF") and Path(program).name.startswith("python")
    return is_binary and not _is_isolated(argv[1:])


def _first_line(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.readline(_LONGEST_FIRST_LINE)
    except OSError:
        return b""


def _is_isolated(words: tuple[str, ...] | list[str]) -> bool:
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
