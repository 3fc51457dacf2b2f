"""The command on stored recommendations: ``batchwright admin recommendations``, directly on the service's database.

The command line imports this module also where the service's packages are not installed, so they are imported within
the functions that use them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from batchwright.cli.help import GroupHelp
from batchwright.cli.output import print_rows
from batchwright.client.documents.staleness import Staleness
from batchwright_service.cli.admin import Json, opened
from batchwright_service.cli.serve import DatabaseUrl
from batchwright_service.domain.callers import KEYLESS

if TYPE_CHECKING:
    from batchwright.client.documents.work import RecommendationSummary
    from batchwright_service.application.tunings import TuningCases

_ROWS_AT_ONCE = 200
_Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the recommendation, as `list` shows it.")]

recommendations = typer.Typer(
    cls=GroupHelp,
    help="List the recommendations of a service with what has changed since, and confirm stale ones, directly in "
    "its database.",
    no_args_is_help=True,
)


@recommendations.command("list")
def list_recommendations(
    *,
    stale: Annotated[
        bool | None,
        typer.Option(
            "--stale/--current",
            help="Only recommendations that an upgrade or another device made stale, or only those that still "
            "hold. Those on devices without a live worker are in neither list.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of recommendations, newest first.")] = 50,
    database_url: DatabaseUrl = None,
    json: Json = False,
) -> None:
    """List recommendations, with the changes on their devices since.

    Workers report the software and the hardware of their devices; without a live worker nothing is marked.

    Example: batchwright admin recommendations list --stale
    """
    with _cases(database_url) as cases:
        found = list(itertools.islice(_rows(cases, stale), limit))
    print_rows(found, _table(found), json=json)


@recommendations.command()
def confirm(recommendation_id: _Id, *, database_url: DatabaseUrl = None, json: Json = False) -> None:
    """Queue the tuning that confirms a stale recommendation, by one probe where that is enough.

    The submission is checked with the settings of this shell, not those of the service: set the service's
    BATCHWRIGHT_PYTHON_TARGETS, BATCHWRIGHT_DATA_ROOTS, BATCHWRIGHT_COMMANDS and BATCHWRIGHT_LEASE_SECONDS here too. The
    quotas of API keys do not count.

    Example: batchwright admin recommendations confirm rec_0192f3a1b2c3700089abcdef01234567
    """
    with _cases(database_url) as cases:
        response = cases.confirm(recommendation_id, KEYLESS)
    verb = "Queued" if response.queued else "Confirmed before by"
    sys.stdout.write((response.body if json else f"{verb} {response.work_id}.") + "\n")


def _rows(cases: TuningCases, stale: bool | None) -> Iterator[RecommendationSummary]:  # noqa: FBT001 - a filter
    from batchwright_service.store.models import RecommendationFilter  # noqa: PLC0415 - see the module's docstring

    cursor = None
    while True:
        rows, cursor = cases.recommendation_rows(RecommendationFilter(), _ROWS_AT_ONCE, cursor, stale=stale)
        yield from rows
        if cursor is None:
            return


@contextmanager
def _cases(database_url: str | None) -> Iterator[TuningCases]:
    """Open the use cases of a database; raises as ``opened``."""
    from batchwright_service.bootstrap import tuning_cases  # noqa: PLC0415 - see the module's docstring

    with opened(database_url) as (store, settings), tuning_cases(settings, store) as cases:
        yield cases


def _table(found: Sequence[RecommendationSummary]) -> Table:
    id_, state = Column("id", no_wrap=True), Column("state", overflow="fold")
    table = Table(id_, "name", "model", "plan", "device", "made (UTC)", state, box=None)
    for row in found:
        plan = "nothing fits"
        if row.plan is not None:
            plan = f"{row.plan.gradient_accumulation_steps} x {row.plan.micro_batch_size}"
        made = f"{row.created_at:%Y-%m-%d %H:%M}"
        table.add_row(row.id, row.name or "-", row.model, plan, row.device_name, made, _state(row))
    return table


def _state(row: Staleness) -> str:
    if row.stale is None:
        return "unknown: no live worker has the device"
    if not row.stale:
        return "current" if row.confirmed_by is None else f"confirmed by {row.confirmed_by}"
    changes = ", ".join(f"{change.name} {change.before or '-'} to {change.now or '-'}" for change in row.changes)
    return f"stale: {changes}" + (f"; replaced by {row.replaced_by}" if row.replaced_by else "")
