"""Fork the processes of a command from one that has executed the imports of its program. No torch.

The server and all that it forks are below subreapers.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from batchwright.commands.launching import ENDING_SECONDS, FreshCommand, Launch
from batchwright.schemas.results import SharedImports
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


class ForkServer:
    """The fork server of a command: one process of it that has executed the imports with which its program begins.

    The first ``fork`` starts the server.

    Attributes:
        folder: holds the folders of the probes, which the server's subreaper removes too where this process dies.
        is_closed: true once the server has been ended.
        imports: the imports that it has executed; none before it has reported them.
    """

    def __init__(self) -> None:
        self._temporary = TemporaryFolder()
        self.folder = self._temporary.path
        self.is_closed = False
        self.imports: SharedImports | None = None
        self._server: FreshCommand | None = None
        self._socket: socket.socket | None = None
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
        if self._socket is None:
            self._start(launch)
        elif not self._is_alike(launch):
            raise NotForkedError(
                "a placeholder stands before the program's own arguments, or in a variable that is read at an import"
            )
        (folder / "launch.json").write_text(json.dumps(launch))
        return ForkedCommand(self, folder)

    def _start(self, launch: Launch) -> None:
        own = self.folder / "server"
        (own / "tmp").mkdir(parents=True)
        kept = {name: text for name, text in launch["environment"].items() if name != "BATCHWRIGHT_PROBE_FOLDER"}
        self._launch = launch
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._started_at = time.monotonic()
        with other:
            own_launch = {**launch, "environment": {**kept, "TMPDIR": str(own / "tmp")}}
            self._server = FreshCommand(own_launch, self.folder, other.fileno())

    def _is_alike(self, launch: Launch) -> bool:
        """Return whether the server, which was started, can fork the process of a launch.

        Raises:
            NotForkedError: when it has ended, or never reports.
        """
        while self._arguments is None:
            self.receive(_HELLO_SECONDS)
        own, count = self._launch, self._arguments
        if len(launch["argv"]) != len(own["argv"]):
            return False
        words = len(own["argv"]) - count
        places = ("working_directory", "fixes_addresses")
        return (
            launch["argv"][:words] == own["argv"][:words]
            and all(launch[name] == own[name] for name in places)
            and _fixed(launch["environment"]) == _fixed(own["environment"])
        )

    def send(self, folder: Path, descriptors: list[int]) -> None:
        """Send the folder of a probe, with the descriptors of its subreaper.

        Raises:
            NotForkedError: when the server has ended.
        """
        try:
            if self._socket is None:
                raise NotForkedError("the fork server is closed")
            socket.send_fds(self._socket, [os.fsencode(folder)], descriptors)
        except OSError as error:
            raise NotForkedError("the fork server has ended") from error

    def receive(self, seconds: float) -> int | None:
        """Wait for messages of the server. Return the subreaper that it has forked; None if it has not yet.

        Raises:
            NotForkedError: when the server has ended, gives up, or never reports.
        """
        if self._socket is None:
            raise NotForkedError("the fork server is closed")
        if not select.select([self._socket], [], [], seconds)[0]:
            if self._arguments is None and time.monotonic() - self._started_at > _HELLO_SECONDS:
                raise NotForkedError("the command is no Python that can be reached")
            return None
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            raise NotForkedError("the fork server has ended")
        message = json.loads(data)
        match message["event"]:
            case "hello":
                self._arguments = message["arguments"]
            case "imported":
                del message["event"]
                self.imports = SharedImports.model_validate(message)
            case "problem":
                raise NotForkedError(message["problem"])
            case "forked":
                return int(message["pid"])
        return None

    def close(self) -> None:
        """End the server and all that it has forked, and remove the folder. Idempotent."""
        self.is_closed = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._server is not None:
            self._server.end()
            self._server = None
        self._temporary.remove()


class ForkedCommand:
    """A command in a process that its fork server has forked, or will fork after its imports.

    Args:
        server: the server.
        folder: the folder of the probe.
    """

    is_forked = True

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server = server
        self._pid: int | None = None
        control, self._control = os.pipe()
        self._life, life = os.pipe()
        self._is_over = False
        try:
            server.send(folder, [control, life])
        except NotForkedError:
            self._close()
            raise
        finally:
            os.close(control)
            os.close(life)

    @property
    def pid(self) -> int | None:
        """The process of the subreaper; none before it was forked."""
        return self._pid

    def wait(self, seconds: float) -> bool:
        """Wait until the subreaper has ended, and return whether it has.

        Raises:
            NotForkedError: when the server ends before the fork.
        """
        if self._pid is None:
            self._pid = self._server.receive(seconds)
            return False
        return self._has_ended(seconds)

    def _has_ended(self, seconds: float) -> bool:
        """Wait for the end of the pipe that the subreaper holds."""
        return bool(select.select([self._life], [], [], seconds)[0])

    def end(self) -> None:
        """Have the subreaper end the tree, and wait for that; end the server where that fails. Idempotent."""
        if self._is_over:
            return
        with suppress(OSError):
            os.write(self._control, b"e")
        if self._pid is None or not self._has_ended(ENDING_SECONDS):
            self._server.close()
        self._close()

    def _close(self) -> None:
        self._is_over = True
        os.close(self._control)
        os.close(self._life)


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process reads once."""
    return {name: text for name, text in environment.items() if name.startswith(_FIXED_VARIABLES)}
