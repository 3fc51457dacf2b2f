"""Supervise a process below its subreaper."""

import time
from collections.abc import Callable

from batchwright.system.subreaper import Channel

_ENDING_SECONDS = 60.0
"""Longer than a subreaper takes to kill what can be killed."""


class KeptProcess:
    """A process below its subreaper, as its supervisor sees it.

    Args:
        channel: to the subreaper.
        give_up: ends a subreaper that does not respond.

    Attributes:
        pid: the process, which leads a session; None before it runs.
        subreaper: the process above it; None likewise.
        status: the exit code, negative for a signal; None before the end, and if the subreaper ended the process or it
            could not be started.
        error: why it could not be started.
        was_abandoned: true if the subreaper was killed. The kernel has ended the process then, and not what it started.
    """

    def __init__(self, channel: Channel, give_up: Callable[[], object]) -> None:
        self._channel = channel
        self._give_up = give_up
        self._has_ended = self._is_over = self._is_closed = False
        self.pid: int | None = None
        self.subreaper: int | None = None
        self.status: int | None = None
        self.error: str | None = None
        self.was_abandoned = False

    def wait(self, seconds: float) -> bool:
        """Wait until the process and its tree have ended, and return whether they have."""
        deadline = time.monotonic() + seconds
        try:
            while not self._is_over:
                message = self._channel.receive(max(0.0, deadline - time.monotonic()))
                if message is None:
                    break
                self.pid, self.subreaper = message.get("started", self.pid), message.get("subreaper", self.subreaper)
                self.error = message.get("error", self.error)
                self.status = message.get("ended") if self.error is None else None
                self._has_ended = "ended" in message
        except EOFError:
            self._is_over, self.was_abandoned = True, self.pid is not None and not self._has_ended
        return self._is_over

    def end(self, *, dumps_stacks: bool = False) -> None:
        """Have the subreaper end the tree, and wait for that. Idempotent.

        Args:
            dumps_stacks: whether the process first writes the stack of each of its threads to its output.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._channel.send(stacks=dumps_stacks)
        if not KeptProcess.wait(self, _ENDING_SECONDS):
            self._give_up()
        self._channel.close()
