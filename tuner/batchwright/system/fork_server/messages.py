"""Messages between a fork server and its client: pydantic models as JSON, one per frame of the connection."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

_Message = TypeVar("_Message")


class Message(BaseModel):
    """Base class of messages: frozen, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ImportModules(Message):
    """Import modules that later tasks need. A missing or broken module is reported when a task needs it."""

    kind: Literal["import-modules"] = "import-modules"
    modules: tuple[str, ...]
    """Their names."""


class RunTask(Message):
    """Run a task in a fork of the server."""

    kind: Literal["run-task"] = "run-task"
    task: str
    """Its name."""
    directory: Path
    """The directory of its ``TaskPaths``."""
    modules: tuple[str, ...] = ()
    """Modules that the server imports before it forks."""
    environment: dict[str, str] = {}
    """Variables on top of the server's own."""
    data_bytes: int | None = None
    """Limit of the task's private memory (``RLIMIT_DATA``)."""
    file_bytes: int | None = None
    """Limit of the size of files that the task writes (``RLIMIT_FSIZE``)."""


class KillTask(Message):
    """Kill the running task."""

    kind: Literal["kill-task"] = "kill-task"
    dumps_stacks: bool = False
    """True if the task first writes the stack of each of its threads to its output."""


class Ready(Message):
    """The server has imported its modules."""

    kind: Literal["ready"] = "ready"


class ImportFailed(Message):
    """A module of ``RunTask`` cannot be imported, so the task is not run."""

    kind: Literal["import-failed"] = "import-failed"
    error: str
    """The error's class and message."""


class Started(Message):
    """The task has started."""

    kind: Literal["started"] = "started"
    pid: int
    """The id of its process, and of its process group."""


class Ended(Message):
    """The task's process and its process group have ended."""

    kind: Literal["ended"] = "ended"
    exit_code: int
    """The exit status, or the signal as a negative number."""


Command: TypeAlias = ImportModules | RunTask | KillTask
Event: TypeAlias = Ready | ImportFailed | Started | Ended
COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def send(connection: Connection, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: when the other side has closed.
    """
    connection.send_bytes(message.model_dump_json().encode())


def receive(connection: Connection, kinds: TypeAdapter[_Message], timeout: float | None) -> _Message | None:
    """Return the next message, or None when ``timeout`` seconds pass first.

    Raises:
        EOFError: when the other side has closed.
    """
    try:
        return kinds.validate_json(connection.recv_bytes()) if connection.poll(timeout) else None
    except OSError as error:  # the process was killed, perhaps in the middle of a message
        raise EOFError(str(error)) from error
