"""``batchwright verify``: run a training command with the plan of a recommendation, and compare what it does."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from batchwright.cli import options, trailing_command as trailing
from batchwright.cli.arguments import check_file, wrong_argument
from batchwright.cli.errors import ExitCode
from batchwright.cli.output import print_result, write_output
from batchwright.schemas.base import load_document, parse_document
from batchwright.schemas.command import CommandModel
from batchwright.schemas.plans import Plan
from batchwright.schemas.recommendation import Recommendation, Verification


@options.with_groups
def verify(  # noqa: PLR0913 - a command's options are its arguments
    context: typer.Context,
    recommendation: Annotated[Path, typer.Argument(metavar="REC", help="The recommendation of `tune`, as JSON.")],
    *,
    format_: Annotated[
        str | None,
        typer.Option("--format", "-f", metavar="NAME", help="Verify the plan of this export, as you train with it."),
    ] = None,
    command: trailing.CommandOptions,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the recommendation with `verified` to this file, also over itself."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Run a training command for a few updates with the plan of a recommendation: whether it fits and follows the plan.

    The command has the figures of the plan in its text, or placeholders for them.

    Example: batchwright verify recommendation.json -- torchrun train.py --batch-size 25 --accumulate 4
    """
    from batchwright.commands.verification import verify as verify_command  # noqa: PLC0415 - see commands.tune

    if output is not None:
        check_file(output)
    found = load_document(Recommendation, recommendation, "recommendation")
    if not trailing.trailing_command(context):
        raise wrong_argument("COMMAND", "is required: the command that trains, after `--`", "")
    fields = trailing.command_model(context, None, command)
    made = verify_command(
        found,
        _plan(found, format_),
        parse_document(CommandModel, fields, "command"),
        created_at=datetime.now(UTC),
        format_=format_,
    )
    print_result(made, as_document=json, text=describe_verification(made))
    if output is not None:
        write_output(output, found.model_copy(update={"verified": made}), as_document=json)
    raise typer.Exit(ExitCode.OK if made.verdict == "as-planned" else ExitCode.TUNING_FAILED)


def _plan(found: Recommendation, format_: str | None) -> Plan:
    from batchwright.exports.base import ExportOptions  # noqa: PLC0415 - see commands.tune
    from batchwright.exports.registry import plan_of_target  # noqa: PLC0415 - as above

    if format_ is not None:  # an export that changes the effective batch was allowed when it was made
        return plan_of_target(found, format_, ExportOptions(allow_inexact=True))
    if found.plan is None:
        raise wrong_argument("REC", f"has no plan: {found.infeasible_reason}", found.id)
    return found.plan


_VERDICTS = {
    "as-planned": "fits, and trains as planned",
    "not-as-planned": "does not train as planned",
    "does-not-fit": "does not fit",
    "not-known": "could not be verified",
}


def describe_verification(made: Verification) -> str:
    """Describe a verification in a few lines, with the command's own output where it failed."""
    lines = [f"The command {_VERDICTS[made.verdict]}: {made.statement}"]
    if made.samples_per_second is not None:
        lines.append(f"{made.samples_per_second:,.1f} samples per second, including data loading")
    if made.probe.files is not None:
        lines.append(f"Files outside of the probe's folder: {made.probe.files.in_words}")
    return "\n".join([*lines, *([made.probe.traceback] if made.probe.traceback else [])])
