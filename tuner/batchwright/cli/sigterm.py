"""SIGTERM from a scheduler, handled like Ctrl-C; the exit code differs."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

from batchwright.cli.errors import EndedBySignalError, ExitCode


class SigtermAsInterrupt:
    """Raise ``KeyboardInterrupt`` at the first SIGTERM within the block, and ignore further ones.

    Schedulers send several: none of the later ones may cut a checkpoint short, so they stay ignored after the block. A
    block that Ctrl-C or the signal interrupts ends in ``EndedBySignalError``.
    """

    def __init__(self) -> None:
        self._received = False

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of a command that was interrupted: 143 after SIGTERM, 130 after Ctrl-C."""
        return ExitCode.TERMINATED if self._received else ExitCode.INTERRUPTED

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if not self._received:
            signal.signal(signal.SIGTERM, self._before)
        if isinstance(error, KeyboardInterrupt):
            raise EndedBySignalError("Terminated" if self._received else "Interrupted", self.exit_code) from None

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._received = True
        raise KeyboardInterrupt
