"""The commands ``batchwright recommendations``: the results of a service's tunings, over HTTP."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from batchwright.cli import options
from batchwright.cli.arguments import check_file
from batchwright.cli.commands.export import FormatOptions, print_export
from batchwright.cli.display import recommendation_panel
from batchwright.cli.help import GroupHelp
from batchwright.cli.output import print_result, print_rows, write_output
from batchwright_service.cli.remote import (
    Json,
    ListOptions,
    Url,
    calling,
    plan_of,
    work_panel,
)

recommendations = typer.Typer(
    cls=GroupHelp, help="List, show, export and confirm the recommendations of a service.", no_args_is_help=True
)
_Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the recommendation, as `list` shows it.")]


@recommendations.command("list")
@options.with_groups
def list_recommendations(
    *,
    given: ListOptions,
    stale: Annotated[
        bool | None,
        typer.Option(
            "--stale/--current", help="Only recommendations that an upgrade made stale, or only those that still hold."
        ),
    ] = None,
) -> None:
    """List recommendations, the newest first.

    Example: batchwright recommendations list --search llama
    """
    found = given.rows("recommendations", stale=stale)
    table = Table(Column("id", no_wrap=True), "name", "plan", "device", box=None, pad_edge=False)
    for row in found:
        table.add_row(row.id, row.name or row.model, plan_of(row), row.device_name)
    print_rows(found, table, json=given.json)


@recommendations.command()
def show(
    recommendation_id: _Id,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write it to this file, for `train` and `export`.")
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Show a recommendation: the plan, its proof and its evidence."""
    if output is not None:
        check_file(output)
    with calling(url) as client:
        found = client.recommendations.get(recommendation_id)
    print_result(found, as_document=json, text=recommendation_panel(found))
    if output is not None:
        write_output(output, found, as_document=json)


@recommendations.command()
@options.with_groups
def export(recommendation_id: _Id, *, given: FormatOptions, url: Url = None, json: Json = False) -> None:
    """Have the service export a recommendation to files of a framework or launcher.

    Example: batchwright recommendations export rec_0192f3a1b2c3700089abcdef01234567 --format slurm > job.sbatch
    """
    with calling(url) as client:
        print_export(
            given,
            lambda of: client.recommendations.export(
                recommendation_id, given.format_, target_version=given.target_version, options=of
            ),
            as_document=json,
        )


@recommendations.command()
def confirm(recommendation_id: _Id, *, url: Url = None, json: Json = False) -> None:
    """Submit the tuning that confirms a stale recommendation, by one probe where that is enough."""
    with calling(url) as client:
        found = client.recommendations.confirm(recommendation_id)
    print_result(found, as_document=json, text=work_panel(found, "tunings"))
