"""Be the fork server of a command: import what its program begins with, then fork a process for each probe.

A forked process returns from ``CommandServer.serve``, and Python goes on to run the program in it exactly as it would
have in a fresh one: with the arguments, the environment, the working directory and the output of its probe, in a
session of its own. Between it and the server is a ``subreaper``, as above a fresh process.

The server sends over its channel the number of the program's arguments, then the statements that it has executed, or
`problem` if it cannot be forked after them. For each probe it receives the folder, with the channel of its subreaper.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, Callable

from ...system import subreaper
from .leading_imports import LeadingImports, construct_optimizer, without_full_collections

_LONGEST_MESSAGE = 8192
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "socket:", "anon_inode:")
"""Descriptors that processes cannot share: those of cards, and connections."""
_THREADS_THAT_FORK = ("jemalloc_bg_thd",)
"""Names of native threads whose library restarts them in a forked process (jemalloc, as Arrow has it)."""


class CommandServer:
    """The fork server in this process, the first of the command.

    Args:
        descriptor: the socket to the supervisor.
    """

    def __init__(self, descriptor: int) -> None:
        end = socket.socket(fileno=descriptor)
        end.set_inheritable(False)
        self._channel = subreaper.Channel(end, _LONGEST_MESSAGE)
        self._environment = dict(os.environ)
        self._descriptors = set(_descriptors())
        self._channel.send(arguments=len(sys.argv) - 1)

    def serve(self, before_fork: Callable[[], None]) -> str:
        """Serve until the supervisor closes the connection. Return only in a forked process: the folder of its probe.

        Args:
            before_fork: called after the imports, when nothing has been forked yet.
        """
        self._import()
        before_fork()
        if (problem := self._problem()) is not None:
            self._give_up(problem)
        while (folder := self._fork_for_probe()) is None:
            continue
        return folder

    def _import(self) -> None:
        """Execute what the program begins with."""
        program = self._program()
        if program is None:
            self._give_up("the command has no file or module of Python")
            return
        imports = LeadingImports(program or None)
        with without_full_collections():
            imports.execute()
            construct_optimizer()
        has_torch = "torch" in sys.modules
        place, reason = imports.place, imports.reason
        self._channel.send(statements=imports.executed, torch=has_torch, place=place, reason=reason)

    def _fork_for_probe(self) -> str | None:
        """Wait for a probe, and fork a process for it. Return its folder in that process, and None in the server."""
        try:
            message = self._channel.receive() or {}
        except EOFError:
            os._exit(0)
        subreaper.reap()
        channel = subreaper.Channel(socket.socket(fileno=message["descriptor"]))
        if subreaper.fork() == 0:
            self._become_command(message["folder"], channel)
            return str(message["folder"])
        channel.close()
        return None

    def _give_up(self, problem: str) -> None:
        self._channel.send(problem=problem)
        os._exit(1)

    @staticmethod
    def _program() -> str | None:
        """The module that runs, an empty text for a file, none for another kind of program."""
        if sys.argv[0] == "-m":
            with open("/proc/self/cmdline", "rb") as stream:
                words = stream.read().decode(errors="surrogateescape").split("\0")[:-1]
            word = words[-len(sys.argv)]
            return word.partition("m")[2] if word.startswith("-") else word
        return "" if os.path.isfile(sys.argv[0]) else None

    def _problem(self) -> str | None:
        """The reason why a fork of this process would not be as a fresh one."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return "CUDA was initialised by an import"
        opened = {number: name for number, name in _descriptors().items() if number not in self._descriptors}
        for name in opened.values():
            if name.startswith(_DEVICE_FILES):
                return f"an import opened {name}"
        if len(sys._current_frames()) > 1:  # noqa: SLF001 - threading does not know of all
            return "an import started a thread"
        if subreaper.has_children():
            return "an import started a process"
        # A fork has no thread but the one that forked. Pools that prepare for forks end their threads before one. Any
        # thread that is still there after it would be missing in every probe.
        if subreaper.fork() == 0:
            os._exit(0)
        os.wait()
        left = [name for name in _native_threads() if name not in _THREADS_THAT_FORK]
        return f"an import started the native thread {left[0]}" if left else None

    def _become_command(self, folder: str, channel: subreaper.Channel) -> None:
        """Keep the command of a probe in this process, which ends here. Return only in the command's own process.

        That process takes what a fresh one has from its subreaper.
        """
        self._channel.close()
        try:
            subreaper.keep(channel, Path(folder))
            channel.close()
            launch = json.loads((Path(folder) / "launch.json").read_text())
            os.chdir(launch["working_directory"])
            arguments = launch["argv"][len(launch["argv"]) - len(sys.argv) + 1 :]
            original = getattr(sys, "orig_argv", [])
            original[len(original) - len(arguments) :] = arguments
            sys.argv[1:] = arguments
            self._take_environment(launch["environment"])
        except BaseException:  # noqa: BLE001 - no error may lead back into the program
            traceback.print_exc()
            os._exit(127)

    def _take_environment(self, environment: dict[str, str]) -> None:
        """Take the environment of the probe, and keep what the imports have set or removed."""
        removed = [name for name in self._environment if name not in os.environ]
        changed = {name: value for name, value in os.environ.items() if self._environment.get(name) != value}
        os.environ.clear()
        os.environ.update({**environment, **changed})
        for name in removed:
            os.environ.pop(name, None)
        tempfile: Any = sys.modules.get("tempfile")
        if tempfile is not None and tempfile.tempdir == self._environment.get("TMPDIR"):
            tempfile.tempdir = None


def _descriptors() -> dict[int, str]:
    """The open descriptors of this process, and what they lead to."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink("/proc/self/fd/" + entry)
        except OSError:  # that of the listing
            continue
    return found


def _native_threads() -> list[str]:
    """The names of the threads of this process but the first."""
    names = []
    for entry in os.listdir("/proc/self/task"):
        if int(entry) != os.getpid():
            with open(f"/proc/self/task/{entry}/comm", encoding="utf-8", errors="replace") as stream:
                names.append(stream.read().strip())
    return names
