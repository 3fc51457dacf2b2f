"""SIGTERM from a scheduler and SIGHUP from a lost terminal, handled like Ctrl-C; the exit code differs."""

import signal
from types import FrameType, TracebackType
from typing import Self

from batchwright.cli.errors import EndedBySignalError, ExitCode

_CODES = {signal.SIGTERM: ExitCode.TERMINATED, signal.SIGHUP: ExitCode.HUNG_UP}


class SignalsAsInterrupt:
    """Raise ``KeyboardInterrupt`` at the first of these signals within the block, and ignore further ones.

    Schedulers send several: none of the later ones may cut a checkpoint short, so they stay ignored after the block. A
    block that Ctrl-C or a signal interrupts ends in ``EndedBySignalError``. What ``nohup`` ignores stays ignored.
    """

    def __init__(self) -> None:
        self._received: int | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of a command that was interrupted: 130 after Ctrl-C, else 128 and the signal's number."""
        return ExitCode.INTERRUPTED if self._received is None else _CODES[signal.Signals(self._received)]

    def __enter__(self) -> Self:
        ignored = {number for number in _CODES if signal.getsignal(number) is signal.SIG_IGN}
        self._before = {number: signal.signal(number, self._receive) for number in _CODES.keys() - ignored}
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._received is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)
        if isinstance(error, KeyboardInterrupt):
            raise EndedBySignalError(
                "Interrupted" if self._received is None else "Terminated", self.exit_code
            ) from None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)
        self._received = number
        raise KeyboardInterrupt
