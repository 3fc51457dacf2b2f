"""Keep a command: end every process of its tree with it. Needs only the standard library.

The subreaper of a command adopts the orphans of the tree (`PR_SET_CHILD_SUBREAPER`), so that a daemon or a grandchild
in a session of its own is found as well. It ends the tree when the command ends, and when its control pipe has a byte
or is closed, which the end of the supervisor does too. It kills what does not end. The last output of the command is
kept, not all of it.

Started as `python -I subreaper.py FOLDER`, with a file `launch.json` in the folder and the control pipe as its standard
input, or called by ``command_server`` in a process that it forked. It leaves `exit.json` and `output.txt`, or removes
the folder where the supervisor has died.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_ADDR_NO_RANDOMIZE = 0x0040000  # <linux/personality.h>
SERVER_VARIABLE = "BATCHWRIGHT_FORK_SERVER"
REQUESTS_TO_END = (signal.SIGTERM, signal.SIGINT)
"""Signals that a subreaper ignores: the supervisor decides when the command ends."""
_KEPT_OUTPUT_BYTES = 256 * 1024
_POLL_SECONDS = 0.02
_ENDING_SECONDS = 30.0
"""A process that SIGKILL has not ended by then waits in the kernel for a device, and cannot be ended."""


def main(folder: Path) -> None:
    """Run the command of a folder to its end."""
    launch = json.loads((folder / "launch.json").read_text())
    adopt_orphans()
    for number in REQUESTS_TO_END:
        signal.signal(number, signal.SIG_IGN)
    reader, writer = os.pipe()
    log = launch.get("log")  # of a job, which keeps all of its output
    started = _start(launch, _open_log(log) if log else writer)
    os.close(writer)
    if launch.get("server_descriptor") is not None:
        os.close(launch["server_descriptor"])
    keep(folder, started, reader, sys.stdin.fileno())


def _open_log(path: str) -> int:
    """Open the log of a job, as soon as no earlier subreaper keeps a job with this log.

    Where that one's supervisor was killed, its tree may take a moment to end. This process keeps the lock to its end.
    """
    with suppress(OSError):  # a file system without locks
        fcntl.flock(os.open(path, os.O_RDONLY | os.O_CREAT, 0o666), fcntl.LOCK_EX)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def redirect(output: int) -> None:
    """Read nothing from standard input, and write standard and error output to a descriptor."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)


def keep(folder: Path, started: int | str, reader: int, control: int) -> None:
    """Attend to a command until its end or a request to end it; then end its tree, and write what is known of it.

    Args:
        folder: the folder of the probe.
        started: the process of the command, or why it could not be started.
        reader: its output.
        control: has a byte when the command is to be ended, and is closed when the supervisor has died.
    """
    status, output = None, bytearray()
    if isinstance(started, int):
        (folder / "pid").write_text(str(started))
        status = _attend(started, reader, control, output)
        _end_tree()
        _drain(reader, output)
    if _is_closed(control):  # the supervisor was killed, and removes nothing
        shutil.rmtree(folder, ignore_errors=True)
        return
    (folder / "output.txt").write_bytes(bytes(output))
    ended = {"status": status} if isinstance(started, int) else {"error": started}
    partial = folder / "exit.json.partial"
    partial.write_text(json.dumps(ended))
    partial.replace(folder / "exit.json")


def _is_closed(control: int) -> bool:
    """Return whether the other end of the control pipe is closed."""
    while select.select([control], [], [], 0)[0]:
        if not os.read(control, 64):
            return True
    return False


def _start(launch: dict, output: int) -> int | str:  # type: ignore[type-arg]
    """Start the command in a session of its own. Return its process id, or why it could not be started.

    A fork server of the command gets the descriptor of its socket with its own process id, so that no other process
    takes itself for the server.
    """
    refusal, refused = os.pipe()  # closed by a successful exec, as all descriptors that Python opens
    child = os.fork()
    if child:
        os.close(refused)
        with os.fdopen(refusal, "rb") as stream:
            message = stream.read().decode(errors="replace")
        if message:
            os.waitpid(child, 0)
        return message or child
    try:
        os.setsid()
        die_with_parent()
        if launch["fixes_addresses"]:
            ctypes.CDLL(None).personality(
                _ADDR_NO_RANDOMIZE
            )  # refused by some containers, where probes repeat less well
        for number in REQUESTS_TO_END:
            signal.signal(number, signal.SIG_DFL)
        redirect(output)
        os.chdir(launch["working_directory"])
        environment, descriptor = launch["environment"], launch.get("server_descriptor")
        if descriptor is not None:
            os.set_inheritable(descriptor, True)
            environment[SERVER_VARIABLE] = f"{os.getpid()}:{descriptor}"
        os.execvpe(launch["argv"][0], launch["argv"], environment)  # noqa: S606 - a command, no shell
    except OSError as error:
        os.write(refused, f"{error.strerror}: {error.filename or launch['argv'][0]}".encode())
    finally:
        os._exit(127)


def _attend(command: int, reader: int, control: int, output: bytearray) -> int | None:
    """Read the output until the command has ended, and return its exit code; None when it is to be ended."""
    os.set_blocking(reader, False)
    sources = [control, reader]
    while True:
        ready, _, _ = select.select(sources, [], [], _POLL_SECONDS)
        if reader in ready and not _read(reader, output):
            sources.remove(reader)  # every process of the tree has closed its output
        if control in ready:
            return None
        found = reap()
        if command in found:
            return found[command]


def _read(reader: int, output: bytearray) -> bool:
    try:
        block = os.read(reader, 65536)
    except BlockingIOError:
        return True
    output += block
    if len(output) > 2 * _KEPT_OUTPUT_BYTES:
        del output[:-_KEPT_OUTPUT_BYTES]
    return bool(block)


def _drain(reader: int, output: bytearray) -> None:
    """Read what the ended processes have left in the pipe."""
    os.set_blocking(reader, False)
    while True:
        try:
            block = os.read(reader, 65536)
        except BlockingIOError:
            break
        if not block:
            break
        output += block
    del output[:-_KEPT_OUTPUT_BYTES]


def reap() -> dict[int, int]:
    """Wait for children that have ended: their exit codes, negative for signals."""
    ended: dict[int, int] = {}
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not child:
            return ended
        ended[child] = os.waitstatus_to_exitcode(status)


def _end_tree() -> None:
    """Kill every descendant until none is left. Orphans become children of this process, and are found again."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(_POLL_SECONDS / 4)
        reap()
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
