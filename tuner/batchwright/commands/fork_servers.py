"""Fork the processes of a command from ones that have executed the imports of their programs. No torch.

The command itself has a server, and so have the ranks that a launcher starts (``launched_ranks``). All servers, and
all that they fork, are below subreapers.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from batchwright.commands.injected import standing_in, subreaper
from batchwright.commands.launched_ranks import RANKS_VARIABLE, expected_rank, may_listen, refused_rank
from batchwright.commands.launching import ENDING_SECONDS, FreshCommand, Launch
from batchwright.system.temporary_folders import TemporaryFolder

_HELLO_SECONDS = 30.0
"""A process of the command that Python reaches reports at its start; one that does not by then is none."""
_FIXED_VARIABLES = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTORCH_", "TORCH", "CUDA_"),
    *("HF_", "TRANSFORMERS_", "ARROW_"),
)
"""Beginnings of the names of variables that interpreters and libraries read once, at their start."""

_NO_SERVER = "no-server"
"""Name of a socket where nothing listens: a rank that trains then leaves how it was started."""


class NotForkedError(Exception):
    """The fork server could not start the command: it is to be started anew."""


class ForkServer:
    """The fork server of a command: one process of it that has executed the imports with which its program begins.

    ``start`` or the first ``fork`` starts the server, and beside it that of the ranks which a launcher is expected to
    start. Where a rank that has trained was refused by that, the next probe has a server of ranks that began as this
    one did.

    Args:
        program: the file of the command's program.

    Attributes:
        program: that file.
        folder: holds the folders of the probes, which the server's subreaper removes too where this process dies.
        is_closed: true once the server has been ended.
    """

    def __init__(self, program: str) -> None:
        self._temporary = TemporaryFolder()
        self.folder = self._temporary.path
        self.program = program
        self.is_closed = False
        self._server: FreshCommand | None = None
        self._socket: socket.socket | None = None
        self._ranks: RankServer | None = None
        self._learns_rank = True
        """True until a server of ranks was started for one that an earlier server refused."""
        self._launch: Launch = {}
        self._arguments: int | None = None
        self._has_forked = False
        self._started_at = 0.0

    def fork(self, launch: Launch, folder: Path) -> ForkedCommand:
        """Have the server fork a process for the command, as soon as its imports are done.

        Raises:
            NotForkedError: when the server has ended, or the launch differs from that of an earlier fork in more than
                the program's arguments and environment.
            OSError: when the server cannot be started.
        """
        if self.is_closed:
            raise NotForkedError("the fork server is closed")
        if self._socket is not None and not self._is_alike(launch):
            if self._has_forked:
                raise NotForkedError("other words than the program's arguments differ")
            self._end()
        if self._socket is None:
            self.start(launch)
        self._has_forked = True
        address = self.folder / _NO_SERVER if self._ranks is None else self._ranks.await_address()
        environment = {**launch["environment"], RANKS_VARIABLE: str(address)}
        (folder / standing_in.REQUESTS).mkdir()
        (folder / "launch.json").write_text(json.dumps({**launch, "environment": environment}))
        return ForkedCommand(self, folder)

    def start(self, launch: Launch) -> None:
        """Start the server, for a command that begins as this one.

        Raises:
            OSError: when it cannot be started.
        """
        own = self.folder / "server"
        (own / "tmp").mkdir(parents=True, exist_ok=True)
        kept = {name: text for name, text in launch["environment"].items() if name != "BATCHWRIGHT_PROBE_FOLDER"}
        self._launch = launch
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._started_at = time.monotonic()
        rank = expected_rank(launch, self.program)
        with other:
            own_launch = {**launch, "environment": {**kept, "TMPDIR": str(own / "tmp")}}
            serves = subreaper.PROGRAM if rank is None else subreaper.LAUNCHER
            self._server = FreshCommand(own_launch, self.folder, other.fileno(), serves)
        self._start_ranks(rank)

    def _start_ranks(self, rank: Launch | None) -> None:
        """Start a server of ranks in place of an earlier one. Its imports run beside those of the command's server."""
        if rank is None:
            return
        if self._ranks is not None:
            self._ranks.close()
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=self.folder))
        self._ranks = RankServer(rank, folder) if may_listen(folder) else None

    def roots(self) -> list[int]:
        """Return the process below which the ranks of the current probe are, if there are any."""
        pid = None if self._ranks is None else self._ranks.pid
        return [] if pid is None else [pid]

    def finish_probe(self) -> None:
        """Wait until no rank of a probe is left whose other processes have ended."""
        if self._ranks is not None:
            self._ranks.finish_probe()

    def remember(self, folder: Path, trained: Collection[int]) -> None:
        """Start the server of a rank that has trained in an ended probe, and had to be started anew.

        Args:
            folder: the folder of the probe.
            trained: its processes that have trained.
        """
        if self._learns_rank and (rank := refused_rank(folder, trained, self._launch)) is not None:
            self._learns_rank = False
            self._start_ranks(rank)

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
            case "problem":
                raise NotForkedError(message["problem"])
            case "forked":
                return int(message["pid"])
        return None

    def close(self) -> None:
        """End the server and all that it has forked, and remove the folder. Idempotent."""
        self.is_closed = True
        self._end()
        self._temporary.remove()

    def _end(self) -> None:
        """End the server, the server of ranks and all that they have forked. Idempotent."""
        self._arguments = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if self._server is not None:
            self._server.end()
            self._server = None


class ForkedCommand:
    """A command in a process that its fork server has forked, or will fork after its imports.

    Args:
        server: the server.
        folder: the folder of the probe.
    """

    is_forked = True

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
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

    def roots(self) -> list[int]:
        """Return the process of the subreaper, and that of the server of ranks."""
        return [] if self._pid is None else [self._pid, *self._server.roots()]

    def remember(self, trained: Collection[int]) -> None:
        """Have the server know a rank that it could have forked."""
        self._server.remember(self._folder, trained)

    def end(self) -> None:
        """Have the subreaper end the tree, and wait for that; end the server where that fails. Idempotent."""
        if self._is_over:
            return
        with suppress(OSError):
            os.write(self._control, b"e")
        if self._pid is None or not self._has_ended(ENDING_SECONDS):
            self._server.close()
        else:
            self._server.finish_probe()
        self._close()

    def _close(self) -> None:
        self._is_over = True
        os.close(self._control)
        os.close(self._life)


class RankServer:
    """The server of the ranks of one program, in a process of its own.

    Args:
        launch: a rank, as the launcher starts it.
        folder: an empty folder, for the server.

    Raises:
        OSError: when the server cannot be started.
    """

    def __init__(self, launch: Launch, folder: Path) -> None:
        (folder / "tmp").mkdir(parents=True)
        self._address = str(folder / "socket")
        self._folder = folder
        self._pid: int | None = None
        self._is_ready = False
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: text for name, text in launch["environment"].items() if not name.startswith("BATCHWRIGHT")}
        environment["TMPDIR"] = str(folder / "tmp")
        with other:
            own = {**launch, "environment": environment}
            self._server = FreshCommand(own, folder, other.fileno(), serves=self._address)

    def await_address(self) -> str:
        """Return the address of the server as soon as ranks can ask there, which takes no imports."""
        deadline = time.monotonic() + _HELLO_SECONDS
        while self._pid is None and (left := deadline - time.monotonic()) > 0.0 and self._receive(left):
            continue
        return self._address

    @property
    def pid(self) -> int | None:
        """The process of the server, below which its ranks run; none before it has started."""
        self._receive(0.0)
        return self._pid

    def finish_probe(self) -> None:
        """Wait until no rank of the probe is left, whose launcher has ended. End the server where that fails."""
        self._receive(0.0)
        if not self._is_ready:
            return  # it has forked nothing
        deadline = time.monotonic() + ENDING_SECONDS
        with suppress(OSError):
            self._socket.send(b"over")
            while (left := deadline - time.monotonic()) > 0.0:
                event = self._receive(left)
                if event == "over":
                    return
                if event == "":
                    break
        self.close()

    def _receive(self, seconds: float) -> str | None:
        """Take the next message. Return its event; empty where the server has ended, None where there is none."""
        if self._socket.fileno() < 0:
            return ""
        while select.select([self._socket], [], [], seconds)[0]:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._is_ready = False
                return ""
            message = json.loads(data)
            self._pid = message.get("pid", self._pid)
            self._is_ready = self._is_ready or message["event"] == "ready"
            if seconds:
                return str(message["event"])
        return None

    def close(self) -> None:
        """End the server and all that it has forked. Idempotent."""
        self._socket.close()
        self._server.end()
        shutil.rmtree(self._folder, ignore_errors=True)


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process reads once."""
    return {name: text for name, text in environment.items() if name.startswith(_FIXED_VARIABLES)}
