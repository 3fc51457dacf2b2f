"""Processes that never outlive the one that started them. Linux; no torch."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_CGROUPS = Path("/sys/fs/cgroup")

_handed_on: ContextVar[Mapping[str, str]] = ContextVar("handed_on", default={})  # noqa: B039 - never changed in place


@contextmanager
def handing_on(variables: Mapping[str, str]) -> Iterator[None]:
    """Have probes and runs that are started in the block find these in their environment, such as their trace."""
    token = _handed_on.set(variables)
    try:
        yield
    finally:
        _handed_on.reset(token)


def handed_on() -> dict[str, str]:
    """The variables that a probe or run started here and now gets on top of its environment."""
    return dict(_handed_on.get())


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which started it, ends in whatever way."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the line above


def fork(body: Callable[[], None]) -> int:
    """Fork a process that runs ``body`` and ends without clean-up. It dies with this process.

    Call it where no other thread runs: a forked process has but the thread that forked, and locks that others held stay
    locked.

    Returns:
        The id of the process, whose exit status is 1 where ``body`` raised: the traceback is in its error output.

    Raises:
        OSError: when it cannot be started.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        body()
        status = 0
    except BaseException:  # noqa: BLE001 - user code may run here, and its traceback is the evidence
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def outlive_parent() -> None:
    """Take back ``die_with_parent``: this process learns of its parent's end by itself, and ends in its own time."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def kill_group(group: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process group; nothing happens when it is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def cgroup_files(unified: str, legacy: str) -> list[Path]:
    """Where this process's memory cgroup may keep a file, the nearest first: cgroup v2 by one name, v1 by the other."""
    paths = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths.append(_CGROUPS / path.lstrip("/") / unified)
        elif "memory" in controllers.split(","):
            paths.append(_CGROUPS / "memory" / path.lstrip("/") / legacy)
    return [*paths, _CGROUPS / unified, _CGROUPS / "memory" / legacy]


def tighten_limit(kind: int, wanted: int) -> int:
    """Bound what this process and those that it starts may take of a resource; a tighter bound that is there stays.

    Args:
        kind: ``resource.RLIMIT_...``.
        wanted: the bound.

    Returns:
        The bound that holds now.
    """
    there = resource.getrlimit(kind)
    own = min(it for it in (wanted, *there) if it != resource.RLIM_INFINITY)
    resource.setrlimit(kind, (own, there[1]))
    return own


def raise_limit(kind: int, wanted: int) -> int:
    """Raise the soft bound of a resource as far as ``wanted`` and the hard bound allow; a higher one stays.

    Args:
        kind: ``resource.RLIMIT_...``.
        wanted: the bound.

    Returns:
        The bound that holds now; ``wanted`` where there is none.
    """
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY:
        return wanted
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if reachable > soft:
        resource.setrlimit(kind, (reachable, hard))
    return max(soft, reachable)


def zombies() -> set[int]:
    """Ids of children of this process that have ended, and that nobody has waited for."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        fields = "".join(_lines(path / "stat")).rpartition(")")[2].split()
        if fields[:2] == ["Z", str(os.getpid())]:
            found.add(int(path.name))
    return found


def reap(children: Iterable[int]) -> None:
    """Wait for children that have ended, so that the kernel forgets them."""
    for child in children:
        with suppress(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for memory: of this cgroup, or of the host where that is not counted."""
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
