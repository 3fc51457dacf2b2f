"""Keep a process: end every process of its tree with it. Needs only the standard library, and takes Python 3.9.

A subreaper is the process above a kept one. It adopts the orphans of the tree (`PR_SET_CHILD_SUBREAPER`), so that a
daemon or a grandchild in a session of its own is found as well. It ends the tree when the kept process ends, when the
supervisor asks for that, and when the supervisor or the process that forked it has ended.

The supervisor has the other end of its ``Channel``. The kept process sends `started` with its id, and `error` if it
could not become what it should. The subreaper sends `ended` with the exit code, and then ends. Any message of the
supervisor is a request to end the tree; one with `stacks` has the process dump its stacks first.

Fork servers call ``keep`` in a process that they have forked. As a program (`python -I subreaper.py FOLDER`, with the
channel as standard input) this module keeps the command of `launch.json`.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import warnings
from array import array
from contextlib import suppress
from pathlib import Path

TYPE_CHECKING = False  # that of `typing`, whose import would take a third of the start of this program
if TYPE_CHECKING:
    from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_ADDR_NO_RANDOMIZE = 0x0040000  # <linux/personality.h>
SERVER_VARIABLE = "BATCHWRIGHT_FORK_SERVER"
_REQUESTS_TO_END = (signal.SIGTERM, signal.SIGINT)
"""Signals that a subreaper ignores: the supervisor decides when the process ends."""
_KEPT_OUTPUT_BYTES = 256 * 1024
_POLL_SECONDS = 0.005
_DUMP_SECONDS = 0.3
"""Time for a hanging process to dump its stacks before it is killed."""
_ENDING_SECONDS = 30.0
"""A process that SIGKILL has not ended by then waits in the kernel for a device, and cannot be ended."""


class Channel:
    """One end of a pair of sockets, for JSON messages that arrive whole or not at all. Threads may share ``send``.

    Args:
        end: a `SOCK_SEQPACKET` socket of a pair, which the channel owns.
        longest_bytes: length of the longest message to receive.
    """

    def __init__(self, end: socket.socket, longest_bytes: int = 65536) -> None:
        self._end = end
        self._longest_bytes = longest_bytes

    @classmethod
    def pair(cls, longest_bytes: int = 65536) -> tuple[Channel, socket.socket]:
        """Create a channel, and the socket of its other end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours, longest_bytes), theirs

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._end.fileno()

    def send(self, descriptor: int | None = None, **message: object) -> bool:
        """Send a message, and perhaps a descriptor of this process. Never waits.

        Returns:
            False when the other end is closed, or its buffer is full.
        """
        passed = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
        try:
            self._end.sendmsg([json.dumps(message).encode()], passed, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def request(self, **message: object) -> Channel:
        """Send a message with one end of a new channel, and return the other. It is closed if nobody receives it."""
        ours, theirs = Channel.pair()
        with theirs:
            self.send(theirs.fileno(), **message)
        return ours

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message, with a descriptor that came with it as `descriptor`; None if none comes in time.

        Args:
            seconds: time to wait; None for no limit.

        Raises:
            EOFError: when the other end is closed.
        """
        # `select.select` takes no descriptor above 1023, and a service with many connections has such ones.
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(None if seconds is None else seconds * 1000):
            return None
        try:
            data, passed, _, _ = self._end.recvmsg(self._longest_bytes, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError
        message: dict[str, Any] = json.loads(data)
        return {**message, "descriptor": array("i", passed[0][2])[0]} if passed else message

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._end.close()


def main(folder: Path) -> None:
    """Keep the command of a folder to its end."""
    launch = json.loads((folder / "launch.json").read_text())
    channel = Channel(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    for number in _REQUESTS_TO_END:
        signal.signal(number, signal.SIG_DFL)
    log, given = launch.get("log"), launch.get("server_descriptor")
    keep(channel, folder, _open_log(log) if log else None, given)
    try:
        if launch["fixes_addresses"]:
            # Refused by some containers, where probes repeat less well.
            ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)
        os.chdir(launch["working_directory"])
        environment = launch["environment"]
        if given is not None:
            # Children inherit the variable. By the process id none of them takes itself for the fork server.
            os.set_inheritable(given, True)
            environment[SERVER_VARIABLE] = f"{os.getpid()}:{given}"
        os.execvpe(launch["argv"][0], launch["argv"], environment)  # noqa: S606 - a command, no shell
    except OSError as error:
        channel.send(error=f"{error.strerror}: {error.filename or launch['argv'][0]}")
    finally:
        os._exit(127)


def _open_log(path: str) -> int:
    """Open the log of a job, as soon as no earlier subreaper keeps a job with this log.

    If that one's supervisor was killed, its tree may take a moment to end. This process keeps the lock to its end.
    """
    with suppress(OSError):  # a file system without locks
        fcntl.flock(os.open(path, os.O_RDONLY | os.O_CREAT, 0o666), fcntl.LOCK_EX)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def fork() -> int:
    """Fork this process as ``os.fork`` does, without the warning of Python 3.12 of native threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends in any way.

    Args:
        parent: the id of the parent process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A parent that ended before the call sends no signal any more.
    if os.getppid() != parent:
        os._exit(1)


def keep(channel: Channel, folder: Path, output: int | None = None, given: int | None = None) -> None:
    """Fork a process below this one, which becomes its subreaper and ends here. Return only in the new process.

    The new process leads a session, has no input, and dies with its subreaper.

    Args:
        channel: to the supervisor. A new process that executes no program has to close it.
        folder: gets the last output of the tree as `output.txt`, and is removed if the supervisor has ended.
        output: a descriptor that gets all output instead.
        given: a descriptor that only the new process needs.
    """
    forker, own = os.getppid(), os.getpid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _REQUESTS_TO_END}
    reader, writer = os.pipe()
    kept = fork()
    if kept == 0:
        os.setsid()
        die_with_parent(own)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(writer if output is None else output, 1)
        os.dup2(1, 2)
        for descriptor in (nothing, reader, writer):
            os.close(descriptor)
        channel.send(started=os.getpid(), subreaper=own)
        return
    try:
        # The end of a pipe or a socket is seen only once no process holds the other side, and this one was forked with
        # both.
        os.close(writer)
        if given is not None:
            os.close(given)
        text = bytearray()
        status = _attend(channel, forker, kept, reader, text)
        _end_tree()
        while _read(reader, text):
            continue
        while channel.receive(0.0) is not None:
            continue
        if output is None:
            (folder / "output.txt").write_bytes(text)
        channel.send(ended=status)
    except EOFError:  # the supervisor has ended, and removes nothing
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:  # noqa: BLE001 - no error may lead back into what the new process runs
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _attend(channel: Channel, forker: int, kept: int, reader: int, text: bytearray) -> int | None:
    """Read the output until the kept process has ended, and return its exit code; None if its tree is to be ended."""
    os.set_blocking(reader, False)
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    poll.register(reader, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(_POLL_SECONDS * 1000)]
        if reader in ready and not _read(reader, text):
            poll.unregister(reader)  # every process of the tree has closed its output
        if channel.fileno() in ready:
            with suppress(EOFError):
                if (channel.receive() or {}).get("stacks"):
                    os.kill(kept, signal.SIGUSR1)  # not reaped yet, so the id is its own
                    time.sleep(_DUMP_SECONDS)
            return None
        if kept in (ended := reap()):
            return ended[kept]
        if os.getppid() != forker:
            return None


def _read(reader: int, text: bytearray) -> bool:
    """Read a block of output, of which the end is kept. Return false if there is none."""
    try:
        block = os.read(reader, 65536)
    except BlockingIOError:
        return False
    text += block
    del text[:-_KEPT_OUTPUT_BYTES]
    return bool(block)


def reap() -> dict[int, int]:
    """Wait for children that have ended: their exit codes, negative for signals."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def has_children() -> bool:
    """Return whether this process has a child that was not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _end_tree() -> None:
    """Kill every descendant until none is left.

    Orphans become children of this process. So it has no descendant once it has no child, and need not read `/proc`.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    reap()
    while has_children() and time.monotonic() < deadline:
        for process in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        reap()


def descendants(root: int) -> list[int]:
    """The processes below ``root`` that have not ended."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb", buffering=0) as stream:
                    state, parent = stream.read().rpartition(b")")[2].split(None, 2)[:2]
            except OSError:  # it has ended
                continue
            if state != b"Z" or int(parent) == root:
                parents[int(entry)] = int(parent)
    found, level = [], [root]
    while level:
        level = [process for process, parent in parents.items() if parent in level]
        found += level
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
