"""Fork the processes of a command from one that has executed the imports of its program. No torch.

The server and all that it forks are below subreapers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from batchwright.commands.launching import FreshCommand, Launch
from batchwright.schemas.results import SharedImports
from batchwright.system.kept_process import KeptProcess
from batchwright.system.subreaper import Channel
from batchwright.system.temporary_folders import TemporaryFolder

_HELLO_SECONDS = 30.0
"""A process of the command that Python reaches reports at its start; one that does not by then is none."""
_FIXED_VARIABLES = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTORCH_", "TORCH", "CUDA_"),
    *("HF_", "TRANSFORMERS_", "ARROW_"),
)
"""Beginnings of the names of variables that interpreters and libraries read once, at their start."""


class NotForkedError(Exception):
    """The fork server could not start the command: it is to be started anew."""


class CommandForkServer:
    """The fork server of a command: one process of it that has executed the imports with which its program begins.

    The first ``fork`` starts the server.

    Attributes:
        folder: holds the folders of the probes, which the server's subreaper removes too where this process dies.
        is_closed: true once the server has been ended.
        imports: the imports that it has executed; None before it has reported them.
    """

    def __init__(self) -> None:
        self._temporary = TemporaryFolder()
        self.folder = self._temporary.path
        self.is_closed = False
        self.imports: SharedImports | None = None
        self._server: FreshCommand | None = None
        self._channel, self._other = Channel.pair()
        self._launch: Launch = {}
        self._arguments: int | None = None
        self._started_at = 0.0

    def fork(self, launch: Launch, folder: Path) -> ForkedCommand:
        """Have the server fork a process for the command, as soon as its imports are done.

        Raises:
            NotForkedError: when the server has ended, or the launch differs from that of the first fork in more than
                the program's arguments and environment.
            OSError: when the server cannot be started.
        """
        if self.is_closed:
            raise NotForkedError("the fork server is closed")
        if self._server is None:
            self._start(launch)
        elif not self._is_alike(launch):
            raise NotForkedError(
                "a placeholder stands before the program's own arguments, or in a variable that is read at an import"
            )
        (folder / "launch.json").write_text(json.dumps(launch))
        return ForkedCommand(self, self._channel.request(folder=str(folder)))

    def _start(self, launch: Launch) -> None:
        own = self.folder / "server"
        (own / "tmp").mkdir(parents=True)
        kept = {name: text for name, text in launch["environment"].items() if name != "BATCHWRIGHT_PROBE_FOLDER"}
        self._launch = launch
        self._started_at = time.monotonic()
        with self._other:
            own_launch = {**launch, "environment": {**kept, "TMPDIR": str(own / "tmp")}}
            self._server = FreshCommand(own_launch, self.folder, self._other.fileno())

    def _is_alike(self, launch: Launch) -> bool:
        """Return whether the server, which was started, can fork the process of a launch.

        Raises:
            NotForkedError: when it has ended, or never reports.
        """
        while self._arguments is None:
            self.check(_HELLO_SECONDS)
        own, words = self._launch, len(self._launch["argv"]) - self._arguments
        places = ("working_directory", "fixes_addresses")
        return (
            len(launch["argv"]) == len(own["argv"])
            and launch["argv"][:words] == own["argv"][:words]
            and all(launch[name] == own[name] for name in places)
            and _fixed(launch["environment"]) == _fixed(own["environment"])
        )

    def check(self, seconds: float = 0.0) -> None:
        """Take what the server reports.

        Args:
            seconds: time to wait for a report.

        Raises:
            NotForkedError: when the server has ended, gives up, or never reports.
        """
        try:
            while (message := self._channel.receive(seconds)) is not None:
                seconds = 0.0
                if "problem" in message:
                    raise NotForkedError(message["problem"])
                if "arguments" in message:
                    self._arguments = message["arguments"]
                else:
                    self.imports = SharedImports.model_validate(message)
        except EOFError:
            raise NotForkedError("the fork server has ended") from None
        if self._arguments is None and time.monotonic() - self._started_at > _HELLO_SECONDS:
            raise NotForkedError("the Python of the command cannot be reached")

    def close(self) -> None:
        """End the server and all that it has forked, and remove the folder. Idempotent."""
        self.is_closed = True
        self._channel.close()
        self._other.close()
        if self._server is not None:
            self._server.end()
        self._temporary.remove()


class ForkedCommand(KeptProcess):
    """A command in a process that its fork server has forked, or will fork after its imports.

    Args:
        server: the server, which is ended if the subreaper does not respond.
        channel: to the subreaper of the command.
    """

    def __init__(self, server: CommandForkServer, channel: Channel) -> None:
        super().__init__(channel, server.close)
        self._server = server

    @override
    def wait(self, seconds: float) -> bool:
        """Wait until the tree has ended, and return whether it has.

        Raises:
            NotForkedError: when the server ends before the fork.
        """
        was_started = self.pid is not None
        is_over = super().wait(seconds)
        if not was_started:
            self._server.check()
            if is_over and self.pid is None:
                raise NotForkedError("the fork server has ended")
        return is_over

    @override
    def end(self, *, dumps_stacks: bool = False) -> None:
        """End the tree as any kept process, and the server if it has not forked yet."""
        if self.pid is None:
            self._server.close()
        super().end(dumps_stacks=dumps_stacks)


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process reads once."""
    return {name: text for name, text in environment.items() if name.startswith(_FIXED_VARIABLES)}
