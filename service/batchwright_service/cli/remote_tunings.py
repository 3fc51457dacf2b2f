"""The commands ``batchwright tunings``: tunings of a service, over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType

from batchwright.cli import options, trailing_command as trailing
from batchwright.cli.arguments import named, tuning_request
from batchwright.cli.display import ProbeBoard, progress_console, recommendation_panel
from batchwright.cli.errors import ExitCode
from batchwright.cli.help import GroupedTakesCommand, GroupHelp
from batchwright.cli.output import print_result, print_rows
from batchwright.client.documents.work import TuningSummary
from batchwright_service.cli.remote import (
    Json,
    ListOptions,
    Priority,
    States,
    Url,
    Watch,
    WorkCommands,
    plan_of,
    state_in_words,
    state_of,
    watching,
    work_panel,
    work_table,
)

if TYPE_CHECKING:
    from batchwright.client import Client
    from batchwright.client.sdk_documents import Tuning

tunings = typer.Typer(
    cls=GroupHelp, help="Submit, list, show, watch and cancel the tunings of a service.", no_args_is_help=True
)


@tunings.command(cls=GroupedTakesCommand)
@options.with_groups
def submit(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    spec: options.OptionalSpecFile = None,
    *,
    tuning: options.TuningOptions,
    uniform: options.Uniform = False,
    what_if: options.WhatIf = False,
    command: trailing.CommandOptions,
    fresh: Annotated[bool, typer.Option("--fresh", help="Probe again, even if the result is stored.")] = False,
    priority: Priority = 0,
    watch: Watch = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a tuning to a service, which returns a stored result of the same request at once.

    Example: batchwright tunings submit spec.yaml --effective-batch-size 512 --gpu A100-80GB --watch
    """
    model = trailing.command_model(context, spec, command)
    request = tuning_request(spec if model is None else {"model": model}, tuning, uniform=uniform, what_if=what_if)
    sent = dict(named(tuning))
    _WORK.end(
        lambda client: client.tunings.submit(request, fresh=fresh, priority=priority, **sent),
        url,
        watch=watch,
        json=json,
    )


@tunings.command("list")
@options.with_groups
def list_tunings(*, given: ListOptions, state: States = None) -> None:
    """List tunings, the newest first.

    Example: batchwright tunings list --state FAILED --project vision
    """
    found: list[TuningSummary] = given.rows("tunings", state=state)
    table = work_table("plan")
    for row in found:
        table.add_row(row.id, state_of(row), row.name or row.model, plan_of(row))
    print_rows(found, table, json=given.json)


def _followed(client: Client, tuning_id: str) -> Tuning:
    with watching("tunings", tuning_id), ProbeBoard(progress_console()) as board:
        for event in client.tunings.events(tuning_id):
            if event.probe is not None:
                board.add(event.probe.result)
            if event.state is not None:
                board.set_activity(state_in_words(event))
        return client.tunings.get(tuning_id)


def _code(found: Tuning) -> ExitCode:
    if found.recommendation is None:
        return ExitCode.TUNING_FAILED
    return ExitCode.OK if found.recommendation.feasible else ExitCode.INFEASIBLE


def _print(found: Tuning, *, as_document: bool) -> None:
    made = found.recommendation
    text: RenderableType
    if made is None:
        text = work_panel(found, "tunings")
    else:
        train = f"Train:  batchwright jobs submit {made.id}"
        export = f"Export: batchwright recommendations export {made.id} --format slurm (or another)"
        text = Group(recommendation_panel(made), *([train, export] if made.feasible else []))
    print_result(found, as_document=as_document, text=text)


_WORK = WorkCommands("tunings", _followed, _print, _code)
_WORK.add_to(tunings, codes="Exit codes: 0 a plan; 3 nothing fits; 4 the tuning failed or was cancelled.")
