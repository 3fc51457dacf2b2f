"""Classification of the ends of processes by exit code and the kernel's counter of OOM kills."""

import signal

import pytest

from batchwright.system.process_exit import ExitKind, classify_exit


@pytest.mark.parametrize(
    ("exit_code", "kernel_kills", "kind", "cause"),
    [
        (3, 0, ExitKind.EXITED, "exit status 3"),
        (0, 0, ExitKind.EXITED, "exit status 0"),
        (-signal.SIGSEGV, 0, ExitKind.CRASHED, "SIGSEGV"),
        (-signal.SIGABRT, 0, ExitKind.CRASHED, "SIGABRT"),
        (-signal.SIGKILL, 0, ExitKind.KILLED, "SIGKILL"),
        (-signal.SIGKILL, 1, ExitKind.KERNEL_OOM, "kernel out-of-memory kills: 1"),
        (-signal.SIGSEGV, 1, ExitKind.CRASHED, "SIGSEGV"),
        (-signal.SIGTERM, 0, ExitKind.KILLED, "SIGTERM"),
    ],
)
def test_process_ends_are_classified(exit_code: int, kernel_kills: int, kind: ExitKind, cause: str) -> None:
    """A SIGKILL is an OOM kill only if the kernel's counter rose."""
    ended = classify_exit(exit_code, kernel_kills)
    assert ended.kind is kind
    assert cause in ended.cause
