"""Tie processes to their parent, pass environment variables on, set limits, read cgroups. Linux; no torch."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn

from batchwright.system.subreaper import die_with_parent

_CGROUPS = Path("/sys/fs/cgroup")

_propagated: ContextVar[Mapping[str, str]] = ContextVar("propagated", default={})  # noqa: B039 - never changed in place


@contextmanager
def propagate_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Add variables, such as a trace context, to the environment of probes and runs started in the block."""
    token = _propagated.set(variables)
    try:
        yield
    finally:
        _propagated.reset(token)


def propagated_environment() -> dict[str, str]:
    """Return the variables that a probe or run started now gets in addition to its environment."""
    return dict(_propagated.get())


_TIED = """
import os, sys
from batchwright.system.subreaper import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return a command that runs ``command`` as a child process that dies with the thread that starts it."""
    return [sys.executable, "-P", "-c", _TIED, str(os.getpid()), *command]


def fork(body: Callable[[], None]) -> int:
    """Fork a process that runs ``body`` and ends without clean-up. It dies with this process.

    Call it only while no other thread runs: a forked process has only the thread that forked, and locks that other
    threads held stay locked.

    Returns:
        The id of the process. Its exit status is 1 if ``body`` raised; the traceback is in its error output.

    Raises:
        OSError: when the process cannot be started.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        exit_after(body)
    return pid


def exit_after(body: Callable[[], None]) -> NoReturn:
    """Run ``body`` in a forked process, and end it without clean-up, which is that of the process that forked.

    The exit status is 1 if ``body`` raised; the traceback is in the error output.
    """
    status = 1
    try:
        body()
        status = 0
    except BaseException:  # noqa: BLE001 - user code may run here, and its traceback is the evidence
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def kill_group(group: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process group; no error if the group is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def cgroup_files(unified: str, legacy: str) -> list[Path]:
    """Return the possible paths of a file of this process's memory cgroup, the nearest first.

    Args:
        unified: the file's name in cgroup v2.
        legacy: its name in cgroup v1.
    """
    paths = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths.append(_CGROUPS / path.lstrip("/") / unified)
        elif "memory" in controllers.split(","):
            paths.append(_CGROUPS / "memory" / path.lstrip("/") / legacy)
    return [*paths, _CGROUPS / unified, _CGROUPS / "memory" / legacy]


def tighten_limit(kind: int, bound: int) -> int:
    """Lower a resource limit of this process and its future children. A lower limit that is set already stays.

    Args:
        kind: ``resource.RLIMIT_...``.
        bound: the limit.

    Returns:
        The limit in effect.
    """
    current = resource.getrlimit(kind)
    effective = min(limit for limit in (bound, *current) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(kind, (effective, current[1]))
    return effective


def raise_limit(kind: int, bound: int) -> int:
    """Raise a soft resource limit to ``bound``, as far as the hard limit allows. A higher one stays.

    Args:
        kind: ``resource.RLIMIT_...``.
        bound: the limit.

    Returns:
        The soft limit in effect; ``bound`` if there is no limit.
    """
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY:
        return bound
    reachable = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
    if reachable > soft:
        resource.setrlimit(kind, (reachable, hard))
    return max(soft, reachable)


def zombies() -> set[int]:
    """Return the ids of children of this process that have ended and were not waited for."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        fields = "".join(_lines(path / "stat")).rpartition(")")[2].split()
        if fields[:2] == ["Z", str(os.getpid())]:
            found.add(int(path.name))
    return found


def reap(children: Iterable[int]) -> None:
    """Wait for children that have ended, so that the kernel removes them."""
    for child in children:
        with suppress(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def kernel_oom_kills() -> int:
    """Return the number of OOM kills of this cgroup, or of the host where the cgroup has no counter."""
    for path in (*cgroup_files("memory.events", "memory.oom_control"), Path("/proc/vmstat")):
        for line in _lines(path):
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
