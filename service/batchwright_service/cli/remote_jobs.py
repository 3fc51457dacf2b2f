"""The commands ``batchwright jobs``: training runs of a service, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchwright.cli import options
from batchwright.cli.arguments import named, training_request
from batchwright.cli.command_running import describe_command_progress
from batchwright.cli.display import describe_update, progress_console
from batchwright.cli.errors import ExitCode
from batchwright.cli.help import GroupedHelp, GroupHelp
from batchwright.cli.output import print_result, print_rows
from batchwright.client.documents.states import State
from batchwright.client.documents.work import JobSummary
from batchwright.schemas.base import load_document
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.training import CommandProgress, RunProgress
from batchwright_service.cli.remote import (
    Json,
    ListOptions,
    Priority,
    States,
    Url,
    Watch,
    WorkCommands,
    WorkId,
    state_in_words,
    state_of,
    watching,
    work_panel,
    work_table,
)

if TYPE_CHECKING:
    from batchwright.client import Client
    from batchwright.client.sdk_documents import Job

jobs = typer.Typer(
    cls=GroupHelp,
    help="Submit, list, show, watch, cancel and resume the training runs of a service.",
    no_args_is_help=True,
)


@jobs.command(cls=GroupedHelp)
@options.with_groups
def submit(  # noqa: PLR0913 - options of a command
    recommendation: Annotated[
        str, typer.Argument(metavar="REC", help="A recommendation: its id on the service, or a file of `tune`.")
    ],
    *,
    training: options.TrainingOptions,
    names: options.NameOptions,
    priority: Priority = 0,
    watch: Watch = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a training run that follows the plan of a recommendation.

    Example: batchwright jobs submit rec_0192f3a1b2c3700089abcdef01234567 --updates 1000 --watch
    """
    is_id = recommendation.startswith("rec_") and not Path(recommendation).exists()
    wanted = recommendation if is_id else load_document(Recommendation, Path(recommendation), "recommendation")
    request = training_request(training)
    sent = dict(named(names))
    _WORK.end(
        lambda client: client.jobs.submit(wanted, request, priority=priority, **sent), url, watch=watch, json=json
    )


@jobs.command("list")
@options.with_groups
def list_jobs(*, given: ListOptions, state: States = None) -> None:
    """List jobs, the newest first.

    Example: batchwright jobs list --state RUNNING
    """
    found: list[JobSummary] = given.rows("jobs", state=state)
    table = work_table("updates")
    for row in found:
        course = row.course
        done = "-" if course is None else f"{course.update:,}" + (f"/{course.updates:,}" if course.updates else "")
        table.add_row(row.id, state_of(row), row.name or row.model, done)
    print_rows(found, table, json=given.json)


def _followed(client: Client, job_id: str) -> Job:
    console = progress_console()
    with watching("jobs", job_id):
        for event in client.jobs.events(job_id):
            if event.state is not None and (words := state_in_words(event)):
                console.print(f"{words} ...", soft_wrap=True)
            if event.progress is not None and _is_shown(event.progress):
                console.print(_line(event.progress), soft_wrap=True, markup=False)
        return client.jobs.get(job_id)


def _is_shown(progress: RunProgress) -> bool:
    """Return whether an update has a line: each of a short run, a tenth of a long one."""
    every = max(1, (progress.updates or 0) // 10)
    return progress.update % every == 0 or progress.update in {1, progress.updates}


def _line(progress: RunProgress) -> str:
    if isinstance(progress, CommandProgress):
        return describe_command_progress(progress, None)
    return f"update {progress.update}/{progress.updates}  {describe_update(progress, norm=True)}"


def _code(found: Job) -> ExitCode:
    return ExitCode.OK if found.state is State.SUCCEEDED else ExitCode.TRAINING_FAILED


def _print(found: Job, *, as_document: bool) -> None:
    text = work_panel(found, "jobs")
    if found.result is not None and found.problem is None:
        folder = f" Files in {found.directory}." if found.directory else ""
        text = f"{found.id} {found.state.lower()}: {found.result.message}.{folder}"
    print_result(found, as_document=as_document, text=text)


_WORK = WorkCommands("jobs", _followed, _print, _code)
_WORK.add_to(jobs, codes="Exit codes: 0 trained; 6 the job failed or was cancelled.")


@jobs.command()
def resume(job_id: WorkId, *, watch: Watch = False, url: Url = None, json: Json = False) -> None:
    """Resume a failed or cancelled job from its newest checkpoint."""
    _WORK.end(lambda client: client.jobs.resume(job_id), url, watch=watch, json=json)
