"""Processes that never outlive the one that started them. Linux; no torch."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_KERNEL_OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which started it, ends in whatever way."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the line above


def kill_group(group: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process group; nothing happens when it is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def kernel_oom_kills() -> int:
    """How many processes of this cgroup the kernel has killed for memory; 0 where it does not count."""
    for path in _KERNEL_OOM_COUNTERS:
        try:
            fields = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
        except OSError:
            continue
        if "oom_kill" in fields:
            return int(fields["oom_kill"])
    return 0
