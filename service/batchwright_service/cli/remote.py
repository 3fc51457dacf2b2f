"""What the commands share that call a service over HTTP, with the SDK.

The API's errors become one line with an exit code, or one JSON document.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import RenderableType
from rich.table import Column, Table

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
Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Maximum number of rows, newest first.")]
Search = Annotated[str | None, typer.Option("--search", "-q", metavar="WORDS", help="Only what has these words.")]
Project = Annotated[str | None, typer.Option("--project", metavar="NAME", help="Only work of this project.")]
LabelFilter = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Only work with this label. May be repeated.")
]
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
RowT = TypeVar("RowT")


@contextmanager
def calling(url: str | None) -> Iterator[Client]:
    """Yield a client of the service.

    Raises:
        CommandError: when the service refuses a call, or cannot be reached.
    """
    from batchwright.client import ApiError, Client, ClientError, ConnectionFailedError  # noqa: PLC0415 - `--help` needs no httpx
    from batchwright.client.client import DEFAULT_URL, URL_VARIABLE  # noqa: PLC0415 - as above

    try:
        with Client(url, retry_seconds=_RETRY_SECONDS) as client:
            yield client
    except ApiError as error:
        code = ExitCode.DEVICE if error.is_transient else ExitCode.WRONG_INPUT
        message = f"{' '.join(error.problem.detail.split())} ({error.code})"
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
    """Let Ctrl-C end the watching of work, and say that the work goes on."""
    try:
        yield
    except KeyboardInterrupt:
        message = f"Interrupted. {work_id} goes on: `batchwright {command} watch {work_id}`, or `cancel {work_id}`"
        raise EndedBySignalError(message, ExitCode.INTERRUPTED) from None


def first(rows: Iterable[RowT], limit: int) -> list[RowT]:
    """Return the first rows, and fetch no page beyond them."""
    return list(islice(rows, limit))


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
    """What happens in a state, for the line of progress."""
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
