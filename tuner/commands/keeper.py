"""Start a command, and end every process of its tree. A program of its own that needs only the standard library.

The keeper adopts the orphans of the tree (`PR_SET_CHILD_SUBREAPER`), so that a daemon or a grandchild in a session of
its own is found as well. It ends the tree when the command ends, when its standard input is closed, which the end of
the supervisor does too, and kills what does not end. The last output of the command is kept, not all of it.

Started as `python -I keeper.py FOLDER` with a file `launch.json` in the folder; it leaves `exit.json` and `output.txt`,
or removes the folder where the supervisor has died.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_ADDR_NO_RANDOMIZE = 0x0040000  # <linux/personality.h>
_KEPT_OUTPUT_BYTES = 256 * 1024
_POLL_SECONDS = 0.02
_ENDING_SECONDS = 30.0
"""A process that SIGKILL has not ended by then waits in the kernel for a device, and cannot be ended."""


def main(folder: Path) -> None:
    """Run the command of a folder to its end."""
    supervisor = os.getppid()
    launch = json.loads((folder / "launch.json").read_text())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader, writer = os.pipe()
    log = launch.get("log")  # of a job, which keeps all of its output
    started = _start(launch, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) if log else writer, libc)
    os.close(writer)
    status, output = None, bytearray()
    if isinstance(started, int):
        (folder / "pid").write_text(str(started))
        status = _attend(started, reader, output)
        _end_tree()
        _drain(reader, output)
    (folder / "output.txt").write_bytes(bytes(output))
    ended = {"status": status} if isinstance(started, int) else {"error": started}
    partial = folder / "exit.json.partial"
    partial.write_text(json.dumps(ended))
    partial.replace(folder / "exit.json")
    if os.getppid() != supervisor:  # it was killed, and removes nothing
        shutil.rmtree(folder, ignore_errors=True)


def _start(launch: dict, output: int, libc: ctypes.CDLL) -> int | str:  # type: ignore[type-arg]
    """Start the command in a session of its own. Return its process id, or why it could not be started."""
    refusal, told = os.pipe()  # closed by a successful exec, as all descriptors that Python opens
    child = os.fork()
    if child:
        os.close(told)
        with os.fdopen(refusal, "rb") as stream:
            message = stream.read().decode(errors="replace")
        if message:
            os.waitpid(child, 0)
        return message or child
    try:
        os.setsid()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if launch["fixes_addresses"]:
            libc.personality(_ADDR_NO_RANDOMIZE)  # refused by some containers, where probes repeat less well
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(launch["working_directory"])
        os.execvpe(launch["argv"][0], launch["argv"], launch["environment"])  # noqa: S606 - a command, no shell
    except OSError as error:
        os.write(told, f"{error.strerror}: {error.filename or launch['argv'][0]}".encode())
    finally:
        os._exit(127)


def _attend(command: int, reader: int, output: bytearray) -> int | None:
    """Read the output until the command has ended, and return its exit code; None when it is to be ended."""
    os.set_blocking(reader, False)
    sources = [sys.stdin.fileno(), reader]
    while True:
        ready, _, _ = select.select(sources, [], [], _POLL_SECONDS)
        if reader in ready and not _read(reader, output):
            sources.remove(reader)  # every process of the tree has closed its output
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 64):
            return None
        found = _reap()
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


def _reap() -> dict[int, int]:
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
        _reap()
    _reap()


def descendants(root: int) -> list[int]:
    """The processes below ``root`` that have not ended."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z" or int(parent) == root:
                parents[int(entry.name)] = int(parent)
    found, level = [], [root]
    while level:
        level = [process for process, parent in parents.items() if parent in level]
        found += level
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
