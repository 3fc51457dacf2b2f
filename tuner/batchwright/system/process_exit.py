"""Classify how a process ended: an exit, a crash, a kill from outside, or a kill by the kernel for memory."""

import signal
from dataclasses import dataclass
from enum import Enum


class ExitKind(Enum):
    """Ways in which a process that left no result ended."""

    KERNEL_OOM = "killed by the kernel for memory"
    KILLED = "killed from outside"
    CRASHED = "crashed"
    EXITED = "exited by itself"


@dataclass(frozen=True)
class ProcessExit:
    """The end of a process, in the terms of the operating system."""

    kind: ExitKind
    cause: str
    """``SIGSEGV``, or ``exit status 3``."""


_CRASH_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS}


def classify_exit(exit_code: int, kernel_oom_kills: int) -> ProcessExit:
    """Classify the end of a process.

    Args:
        exit_code: the exit status, or the signal as a negative number.
        kernel_oom_kills: how much the cgroup's ``oom_kill`` counter rose while the process ran. Without it a SIGKILL is
            no evidence of an OOM, because operators and schedulers send it too.
    """
    if exit_code >= 0:
        return ProcessExit(ExitKind.EXITED, f"exit status {exit_code}")
    name = _signal_name(-exit_code)
    if -exit_code == signal.SIGKILL and kernel_oom_kills > 0:
        return ProcessExit(ExitKind.KERNEL_OOM, f"{name}, kernel out-of-memory kills: {kernel_oom_kills}")
    return ProcessExit(ExitKind.CRASHED if -exit_code in _CRASH_SIGNALS else ExitKind.KILLED, name)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
