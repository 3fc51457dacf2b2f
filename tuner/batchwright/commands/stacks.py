"""Take the stacks of the processes of a command that hangs: by py-spy where it is installed, else by faulthandler.

py-spy reads a process from outside, also one that has not imported torch yet or that the injection did not reach. Some
containers do not permit that. The handler that ``injected.arming`` registers with faulthandler is C code and does not
take the GIL, so that a collective that holds the GIL is shown as well.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

STACKS_SIGNAL = int(signal.SIGRTMIN) + 11
"""A signal that neither Python, torch nor schedulers use."""
_WRITING_SECONDS = 1.0
"""Time that faulthandler has to write the stacks of all processes."""
_PY_SPY_SECONDS = 10.0
"""A process that waits in the kernel for a device cannot be attached to."""
_READERS = 4
_COMMAND_LENGTH = 200


def stacks_of(processes: Mapping[int, str], events: Path) -> str:
    """Return the stacks of the threads of each process that can be read.

    ``processes`` has command lines by process id. Armed processes have a file for their stacks in ``events``.
    """
    py_spy = find_py_spy()
    found: dict[int, str] = {}
    if py_spy is not None:
        with ThreadPoolExecutor(_READERS) as readers:
            stacks = readers.map(partial(_dump, py_spy), processes)
            found = {process: text for process, text in zip(processes, stacks, strict=True) if text}
    found.update(_write_from_inside([process for process in processes if process not in found], events))
    return "\n\n".join(
        f"Process {process} ({command[:_COMMAND_LENGTH]}):\n{found[process]}"
        for process, command in processes.items()
        if process in found
    )


def find_py_spy() -> str | None:
    """Return the program py-spy of the search path, or of the environment of this interpreter; None without one."""
    return shutil.which("py-spy") or shutil.which(str(Path(sys.executable).with_name("py-spy")))


def _dump(py_spy: str, process: int) -> str:
    """The stacks of one process by py-spy; empty where it cannot read them."""
    try:
        ended = subprocess.run(  # noqa: S603 - a program that the user installed, and a number
            [py_spy, "dump", "--pid", str(process)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PY_SPY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if ended.returncode:
        return ""
    text = ended.stdout.decode(errors="replace").strip()
    return text.partition("\n")[2] if text.startswith("Process ") else text  # its first line names the process


def _write_from_inside(processes: list[int], events: Path) -> dict[int, str]:
    """Have every armed process write its stacks, and read them."""
    files = {process: events / f"{process}.stacks" for process in processes}
    armed = {process: path for process, path in files.items() if path.exists()}
    for process in armed:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, STACKS_SIGNAL)
    if armed:
        time.sleep(_WRITING_SECONDS)
    texts = {process: path.read_text(errors="replace").strip() for process, path in armed.items()}
    return {process: text for process, text in texts.items() if text}
