"""Be the fork server of a command: import what its program begins with, then fork a process for each probe.

A forked process returns from ``ForkServer.serve``, and Python goes on to run the program in it exactly as it would have
in a fresh one: with the arguments, the environment, the working directory and the output of its probe, in a session of
its own. Between it and the server is a ``subreaper``, as above a fresh process.

The messages are JSON over a socket of packets. The server sends `hello` with the number of the program's arguments,
`ready` after the imports, or `problem`; then `forked` for each folder of a probe that it receives with two descriptors:
the control pipe of the subreaper, and a pipe whose other end shows the subreaper's end.

The server of the ranks that a launcher starts listens at an address too, where the processes of ``standing_in`` ask for
forks. There the subreaper is called the keeper of its rank. The supervisor sends a message without descriptors at the
end of each probe, and gets `over` as soon as no rank of it is left.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, Callable

from . import standing_in, subreaper
from .environment_reads import EnvironmentReads
from .leading_imports import construct_optimizer, execute_leading_imports, without_full_collections

_LONGEST_MESSAGE = 8192
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "socket:", "anon_inode:")
"""Descriptors that processes cannot share: those of cards, and connections."""
_THREADS_THAT_FORK = ("jemalloc_bg_thd",)
"""Names of native threads whose library restarts them in a forked process (jemalloc, as Arrow has it)."""
_MOST_WAITING = 128
"""Ranks that may ask at once."""


class CommandServer:
    """The fork server in this process, the first of the command.

    Args:
        descriptor: the socket to the supervisor.
        serves: the address where the ranks of a launcher ask for forks; for the server of the command itself
            ``subreaper.LAUNCHER`` where it starts others that train, and ``subreaper.PROGRAM`` otherwise.
    """

    def __init__(self, descriptor: int, serves: str) -> None:
        address = None if serves in {subreaper.PROGRAM, subreaper.LAUNCHER} else serves
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._address = address
        self._listener = None if address is None else _listening(address)
        self._trains = serves != subreaper.LAUNCHER  # which constructs no optimizer
        self._environment = dict(os.environ)
        self._reads = EnvironmentReads()
        words, count = standing_in.command_line()
        self._ignored = set(standing_in.ignored_signals())
        self._state = standing_in.state_of_process(words[1 : len(words) - count])
        self._descriptors = set(_descriptors())
        self._reads.install()
        self._send("hello", arguments=len(sys.argv) - 1, pid=os.getpid())

    def serve(self, before_fork: Callable[[], None]) -> str:
        """Serve until the supervisor closes the connection. Return only in a forked process: the folder of its probe.

        Args:
            before_fork: called after the imports, when nothing has been forked yet.
        """
        self._import()
        before_fork()
        if (problem := self._problem()) is not None:
            self._give_up(problem)
        self._send("ready")
        sources = [source for source in (self._socket, self._listener) if source is not None]
        while True:
            ready, _, _ = select.select(sources, [], [])
            _reap()
            folder = self._serve_supervisor() if self._socket in ready else self._serve_rank()
            if folder is not None:
                return folder

    def _import(self) -> None:
        """Execute what the program begins with."""
        program = self._program()
        if program is None:
            self._give_up("the command has no file or module of Python")
            return
        with without_full_collections():
            execute_leading_imports(program or None)
            if self._trains:
                construct_optimizer()
        self._reads.remove()

    def _serve_supervisor(self) -> str | None:
        """Fork a process for a probe, or wait until no rank of a probe is left. Return its folder in the process."""
        message, descriptors, _, _ = socket.recv_fds(self._socket, _LONGEST_MESSAGE, 2)
        if not message:
            os._exit(0)
        if not descriptors:
            self._end_ranks()
            self._send("over")
            return None
        folder = message.decode()
        process = _fork()
        if process == 0:
            self._keep(Path(folder), *descriptors)
            return folder
        for descriptor in descriptors:
            os.close(descriptor)
        self._send("forked", pid=process)
        return None

    def _serve_rank(self) -> str | None:
        """Fork the keeper of a rank, which forks the rank. Return the folder of its probe in the rank."""
        if self._listener is None:
            return None
        connection, _ = self._listener.accept()
        with connection:
            path, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_MESSAGE, 3)
            if path and _fork() == 0:
                return self._keep_rank(path.decode(), connection, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        return None

    def _end_ranks(self) -> None:
        """Wait until all keepers have ended. The processes that stood in have, and so none of them asks any more."""
        while self._listener is not None and select.select([self._listener], [], [], 0)[0]:
            self._listener.accept()[0].close()
        while _has_children(os.wait):
            continue

    def _send(self, event: str, **fields: object) -> None:
        self._socket.send(json.dumps({"event": event, **fields}).encode())

    def _give_up(self, problem: str) -> None:
        if self._address is not None:
            Path(self._address + standing_in.PROBLEM).write_text(problem, encoding="utf-8")
        self._send("problem", problem=problem)
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
        if _has_children(_poll):
            return "an import started a process"
        if _fork() == 0:
            os._exit(0)
        os.wait()  # thread pools that know of forks have ended their threads for it
        left = [name for name in _native_threads() if name not in _THREADS_THAT_FORK]
        return f"an import started the native thread {left[0]}" if left else None

    def _keep(self, folder: Path, control: int, life: int) -> None:
        """Keep the command of a probe in this process, which ends here. Return only in the command's own process."""
        command = -1
        try:
            self._close()
            launch = json.loads((folder / "launch.json").read_text())
            subreaper.adopt_orphans()
            handlers = {number: signal.signal(number, signal.SIG_IGN) for number in subreaper.REQUESTS_TO_END}
            reader, writer = os.pipe()
            command = _fork()
            if command == 0:
                for descriptor in (reader, control, life):
                    os.close(descriptor)
                self._become_command(launch, writer, handlers)
                return
            os.close(writer)
            subreaper.keep(folder, command, reader, control)
        except BaseException:  # noqa: BLE001 - no error may lead back into the program
            traceback.print_exc()
            os._exit(127)
        finally:
            if command != 0:
                os._exit(0)

    def _keep_rank(self, path: str, connection: socket.socket, descriptors: list[int]) -> str:
        """Keep a rank in this process, which ends here. Return only in the rank: the folder of its probe."""
        rank = -1
        try:
            self._close()
            wanted = json.loads(Path(path).read_text(encoding="utf-8"))
            if (reason := self._refusal(wanted)) is not None:
                connection.send(json.dumps({"refused": reason}).encode())
                return ""
            subreaper.adopt_orphans()
            handlers = {number: signal.signal(number, signal.SIG_IGN) for number in subreaper.REQUESTS_TO_END}
            rank = _fork()
            if rank == 0:
                connection.close()
                self._become_rank(wanted, descriptors, handlers)
                return str(wanted["environment"]["BATCHWRIGHT_PROBE_FOLDER"])
            for descriptor in descriptors:
                os.close(descriptor)
            subreaper.redirect_nowhere()
            connection.send(json.dumps({"forked": rank}).encode())
            subreaper.keep_rank(rank, connection)
        except BaseException:  # noqa: BLE001 - as in `_keep`
            traceback.print_exc()
            os._exit(127)
        finally:
            if rank != 0:
                os._exit(0)
        return ""

    def _refusal(self, wanted: dict[str, Any]) -> str | None:
        """The reason why a rank would not be as a fresh one."""
        for name, state in self._state.items():
            if wanted["alike"].get(name) != state:
                return "another " + name
        variable = self._reads.difference(self._environment, wanted["environment"])
        return None if variable is None else "another value of " + variable

    def _close(self) -> None:
        """Close the sockets of the server in a process that it has forked."""
        self._socket.close()
        if self._listener is not None:
            self._listener.close()

    def _become_command(self, launch: dict[str, Any], output: int, handlers: dict[signal.Signals, Any]) -> None:
        """Take what a fresh process of the command would have from its subreaper."""
        _begin(handlers)
        subreaper.redirect(output)
        os.close(output)
        os.chdir(launch["working_directory"])
        count = len(sys.argv) - 1
        self._take_arguments(launch["argv"][len(launch["argv"]) - count :])
        self._take_environment(launch["environment"])

    def _become_rank(self, wanted: dict[str, Any], descriptors: list[int], handlers: dict[signal.Signals, Any]) -> None:
        """Take what a fresh process would have from its launcher."""
        _begin(handlers)
        self._take_ignored_signals(set(wanted["ignored_signals"]))
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(wanted["working_directory"])
        self._take_arguments(wanted["argv"][len(wanted["argv"]) - wanted["arguments"] :])
        self._take_environment(wanted["environment"])

    def _take_ignored_signals(self, ignored: set[int]) -> None:
        """Ignore what the launcher has the rank ignore, but for signals that the imports have handlers for."""
        for number in ignored ^ self._ignored:
            if signal.getsignal(number) is (signal.SIG_IGN if number in self._ignored else signal.SIG_DFL):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    @staticmethod
    def _take_arguments(arguments: list[str]) -> None:
        original = getattr(sys, "orig_argv", [])
        original[len(original) - len(sys.argv) + 1 :] = arguments
        sys.argv[1:] = arguments

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


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of native threads, which were looked at
        return os.fork()


def _begin(handlers: dict[signal.Signals, Any]) -> None:
    """Begin as a program that is started: in a session of its own, with the signal handlers of its Python."""
    os.setsid()
    subreaper.die_with_parent()
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(_MOST_WAITING)
    return listener


def _poll() -> tuple[int, int]:
    return os.waitpid(-1, os.WNOHANG)


def _reap() -> None:
    """Remove the subreapers that have ended."""
    while _has_children(_poll, ended=True):
        continue


def _has_children(wait: Callable[[], tuple[int, int]], *, ended: bool = False) -> bool:
    """Wait for a child, and return whether there was one; with ``ended``, whether one had ended."""
    try:
        process, _ = wait()
    except ChildProcessError:
        return False
    return bool(process) or not ended


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
