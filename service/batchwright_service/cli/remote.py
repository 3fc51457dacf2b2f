"""Parts of the commands that call a service over HTTP, with the SDK: options, errors, and the verbs of work.

The API's errors become one line with an exit code, or one JSON document.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NoReturn, TypeVar

import typer
from rich.console import RenderableType
from rich.table import Column, Table

from batchwright.cli.arguments import labels_of
from batchwright.cli.display import panel_of
from batchwright.cli.errors import CommandError, EndedBySignalError, ExitCode
from batchwright.client.documents.states import State, WorkOutcome
from batchwright.client.documents.work import Event, Job, RecommendedFigures, Tuning, WorkSummary

if TYPE_CHECKING:
    from batchwright.client import Client

_RETRY_SECONDS = 5.0
"""Shorter than the SDK's: somebody waits for the answer."""

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Address of the service. Default: BATCHWRIGHT_URL, else http://127.0.0.1:8000. The API key comes "
        "from BATCHWRIGHT_API_KEY.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result, or the error, as JSON on standard output.")]
Watch = Annotated[bool, typer.Option("--watch", help="Then watch it until it ends.")]
Priority = Annotated[
    int,
    typer.Option(
        "--priority",
        min=-100,
        max=100,
        metavar="N",
        help="Work of a higher priority runs first; above 0 needs the scope `admin`.",
    ),
]
States = Annotated[
    list[State] | None,
    typer.Option("--state", metavar="STATE", help="Only work in this state, such as `FAILED`. May be repeated."),
]
WorkId = Annotated[str, typer.Argument(metavar="ID", help="Its id, as `list` shows it.")]
WorkT = TypeVar("WorkT", bound=Tuning | Job)


@contextmanager
def calling(url: str | None) -> Iterator[Client]:
    """Yield a client of the service.

    Raises:
        CommandError: when the service refuses a call, or cannot be reached.
    """
    from batchwright.client import (  # noqa: PLC0415 - `--help` needs no httpx
        ApiError,
        Client,
        ClientError,
        ConnectionFailedError,
        NotAuthenticatedError,
    )
    from batchwright.client.client import API_KEY_VARIABLE, DEFAULT_URL, URL_VARIABLE  # noqa: PLC0415 - as above

    try:
        with Client(url, retry_seconds=_RETRY_SECONDS) as client:
            yield client
    except ApiError as error:
        code = ExitCode.DEVICE if error.is_transient else ExitCode.WRONG_INPUT
        message = f"{' '.join(error.problem.detail.split())} ({error.code})"
        message += f": set {API_KEY_VARIABLE} to a valid key" if isinstance(error, NotAuthenticatedError) else ""
        raise CommandError(message, code, problem=error.problem.model_dump(mode="json", exclude_none=True)) from None
    except ConnectionFailedError as error:
        address = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        message = f"{error} (at {address}): start it, or give its address with `--url` or {URL_VARIABLE}"
        raise CommandError(message, ExitCode.DEVICE) from None
    except ClientError as error:
        code = ExitCode.DEVICE if error.is_transient else ExitCode.WRONG_INPUT
        raise CommandError(" ".join(str(error).split()), code) from None


@contextmanager
def watching(command: str, work_id: str) -> Iterator[None]:
    """Let Ctrl-C or a lost connection end the watching of work, and say that the work goes on.

    Raises:
        EndedBySignalError, CommandError: with the command that watches the work again.
    """
    from batchwright.client import ConnectionFailedError  # noqa: PLC0415 - `--help` needs no httpx

    try:
        yield
    except ConnectionFailedError:
        message = (
            f"The connection was lost. {work_id} goes on with the service: `batchwright {command} watch {work_id}`"
        )
        raise CommandError(message, ExitCode.DEVICE) from None
    except KeyboardInterrupt:
        message = f"Interrupted. {work_id} goes on: `batchwright {command} watch {work_id}`, or `cancel {work_id}`"
        raise EndedBySignalError(message, ExitCode.INTERRUPTED) from None


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """The options of all lists."""

    search: Annotated[
        str | None, typer.Option("--search", "-q", metavar="WORDS", help="Only what contains these words.")
    ] = None
    project: Annotated[str | None, typer.Option(metavar="NAME", help="Only work of this project.")] = None
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only work with this label. May be repeated.")
    ] = None
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of rows, newest first.")] = 50
    url: Url = None
    json: Json = False

    def rows(self, kind: Literal["tunings", "jobs", "recommendations"], **filters: object) -> list[Any]:
        """Fetch the newest rows, and no page beyond them."""
        labels = labels_of(self.label)
        with calling(self.url) as client:
            found = getattr(client, kind).list(search=self.search, project=self.project, labels=labels, **filters)
            return list(islice(found, self.limit))


@dataclass(frozen=True)
class WorkCommands(Generic[WorkT]):
    """The commands that tunings and jobs share.

    Attributes:
        kind: name of the group, and of the SDK's resource.
        follow: shows the events of work until its end, and returns it.
        report: prints work, as text or as JSON (``as_document``).
        code: the exit code of work that has ended.
    """

    kind: Literal["tunings", "jobs"]
    follow: Callable[[Client, str], WorkT]
    report: Callable[..., None]
    code: Callable[[WorkT], ExitCode]

    def end(self, call: Callable[[Client], WorkT], url: str | None, *, watch: bool = False, json: bool) -> NoReturn:
        """Make a call, follow the work if asked, print it, and exit: by its end, if it has ended."""
        with calling(url) as client:
            found = call(client)
            if watch and not found.state.terminal:
                found = self.follow(client, found.id)
        self.report(found, as_document=json)
        raise typer.Exit(self.code(found) if found.state.terminal else ExitCode.OK)

    def add_to(self, app: typer.Typer, *, codes: str) -> None:
        """Add `show`, `watch` and `cancel`. ``codes`` are the exit codes of `watch`, for its help."""
        noun = self.kind.removesuffix("s")

        @app.command(help=f"Show a {noun}: its result, its problem, or its place in the queue.")
        def show(work_id: WorkId, *, url: Url = None, json: Json = False) -> None:
            with calling(url) as client:
                found = getattr(client, self.kind).get(work_id)
            self.report(found, as_document=json)

        @app.command(
            help=f"Show the progress of a {noun}, and then its result. Ctrl-C leaves the {noun} running.\n\n{codes}"
        )
        def watch(work_id: WorkId, *, url: Url = None, json: Json = False) -> None:
            self.end(lambda client: self.follow(client, work_id), url, json=json)

        @app.command(help=f"Cancel a {noun}. A running job writes a checkpoint first. Nothing happens if it has ended.")
        def cancel(work_id: WorkId, *, url: Url = None, json: Json = False) -> None:
            with calling(url) as client:
                found = getattr(client, self.kind).cancel(work_id)
            self.report(found, as_document=json)


def work_table(last: str) -> Table:
    """Build the columns of a table of work, at most 80 characters wide: id, state, name, and the ``last`` one."""
    return Table(Column("id", no_wrap=True), Column("state", no_wrap=True), "name", last, box=None, pad_edge=False)


def state_of(work: WorkSummary) -> str:
    """The state in a word: how the work ended, if it has."""
    return "nothing fits" if work.outcome is WorkOutcome.INFEASIBLE else work.state.lower()


def plan_of(figures: RecommendedFigures) -> str:
    """The plan as steps and size: ``2 x 300``, or ``3 x at most 34``, where some micro-batches are smaller."""
    plan = figures.plan
    if plan is not None:
        steps, size = plan.gradient_accumulation_steps, plan.micro_batch_size
        most = "" if steps * size * plan.world_size == plan.effective_batch_size else "\u2264"
        return f"{steps} x {most}{size}"
    return "-" if figures.feasible is None else "nothing fits"


def state_in_words(event: Event) -> str:
    """Describe a state, for the line of progress; an empty text for one that ends the work."""
    return {State.QUEUED: "waiting in the queue", State.RUNNING: "running", State.CANCELLING: "being cancelled"}.get(
        event.state or State.RUNNING, ""
    )


def work_panel(work: Tuning | Job, command: str) -> RenderableType:
    """Describe work that has no result to show: its state, its place in the queue, its problem, and what to do next."""
    facts: list[tuple[str, RenderableType]] = [("id", work.id), ("model", work.model), ("state", state_of(work))]
    facts += [("name", work.name)] if work.name else []
    if work.queue is not None:
        wait = work.queue.expected_wait_seconds
        expected = "" if wait is None else f", about {wait:,.0f} s"
        facts.append(("queue", work.queue.unserved or f"position {work.queue.position}{expected}"))
    facts += [("on", work.slot)] if work.slot else []
    if work.problem is not None:
        facts.append(("problem", f"{work.problem.detail} ({work.problem.code})"))
    if not work.state.terminal:
        facts.append(("next", f"batchwright {command} watch {work.id}"))
    return panel_of(facts, command.removesuffix("s"), "red" if work.problem is not None else "yellow")
