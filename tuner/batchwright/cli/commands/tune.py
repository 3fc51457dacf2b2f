"""``batchwright tune``: find the largest micro-batch that fits, and plan the effective batch around it."""

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from batchwright.cli import options, trailing_command as trailing
from batchwright.cli.arguments import (
    check_file,
    named,
    naming_options,
    target_of,
    tuning_request,
)
from batchwright.cli.display import plain_console, progress_console, recommendation_panel
from batchwright.cli.ending_signals import SignalsAsInterrupt
from batchwright.cli.errors import EndedBySignalError, ExitCode
from batchwright.cli.options import StopOptions
from batchwright.cli.output import print_result, write_output
from batchwright.cli.trailing_command import own_arguments
from batchwright.errors import BatchwrightError
from batchwright.schemas.base import load_document
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.unfinished import UnfinishedTuning, load_unfinished
from batchwright.system.files import write_atomically


@options.with_groups
def tune(  # noqa: PLR0913 - a command's options are its arguments
    context: typer.Context,
    spec: options.OptionalSpecFile = None,
    *,
    tuning: options.TuningOptions,
    stops: options.StopOptions,
    uniform: options.Uniform = False,
    what_if: options.WhatIf = False,
    warm_start_from: options.WarmStartFrom = None,
    command: trailing.CommandOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the recommendation to this file.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Find the largest micro-batch that fits by running real updates, and plan the effective batch around it.

    Example: batchwright tune spec.yaml --effective-batch-size 512 --memory-limit 24GiB -o recommendation.json

    The workload is described in a file, or it is the command that trains, after `--`, with placeholders for its sizes:

    batchwright tune --effective-batch-size 512 -- python train.py --batch-size {micro_batch_size} --accumulate
    {gradient_accumulation_steps}
    """
    if output is not None:
        check_file(output)
    names = named(tuning)
    model = trailing.command_model(context, spec, command)
    request = tuning_request(spec if model is None else {"model": model}, tuning, uniform=uniform, what_if=what_if)
    stored = None if warm_start_from is None else load_document(Recommendation, warm_start_from, "warm start")
    if request.command is not None and not request.command.model.takes_accumulation:
        progress_console().print(_NO_ACCUMULATION, soft_wrap=True)
    with naming_options(memory_limit_bytes=tuning.memory_limit):
        found, code = tuned(request, stops, output, stored)
    found = found.model_copy(update=dict(names))
    print_result(found, as_document=json, text=recommendation_panel(found))
    if output is not None:
        write_output(output, found, as_document=json)
    if found.feasible and not json:
        plain_console().print(_next_steps(found, spec, output), soft_wrap=True)
    raise typer.Exit(code)


_NO_ACCUMULATION = (
    "Note: the command has no placeholder `{gradient_accumulation_steps}`. Unless it accumulates by itself, an update "
    "is one micro-batch, and an effective batch that does not fit in one cannot be planned."
)


def _next_steps(found: Recommendation, spec: Path | None, output: Path | None) -> str:
    """Name the commands that take the recommendation from the file of ``output``, or from a temporary one."""
    kept = ""
    if output is None:
        try:
            output = _temporary_file("found.json")
            write_atomically(output, found.model_dump_json(indent=2))
        except OSError:
            return "Next: tune again with `-o FILE`, which `batchwright train` and `batchwright export` take"
        kept = "  # a temporary file; `-o FILE` names another"
    file = shlex.quote(str(output))
    train = file if spec is None else f"{shlex.quote(str(spec))} --recommendation {file}"
    form = "slurm" if spec is None else "pytorch"  # a framework's would configure another program than the command
    return (
        f"Next: batchwright train {train}{kept}\n"
        f"      batchwright export {file} --format {form}  # others: batchwright formats"
    )


def tuned(
    request: TuningRequest, stops: StopOptions, output: Path | None, warm_start: Recommendation | None = None
) -> tuple[Recommendation, ExitCode]:
    """Tune in the foreground, with the errors of ``batchwright.driving.foreground.run_tuning``.

    A tuning that is stopped leaves its probes in ``output``, or in a temporary file.

    Returns:
        The recommendation, and the exit code: that of an interrupt where one ended the tuning with what was proven.
    """
    from batchwright.cli import running  # noqa: PLC0415 - `plan` and `--help` need no NVML

    resumed = None if stops.resume is None else load_unfinished(stops.resume, "tuning to resume")
    stopped: list[UnfinishedTuning] = []
    try:
        with SignalsAsInterrupt() as signals:
            found = running.tune(request, warm_start, resumed, stops.time_limit, stopped.append)
    except BatchwrightError as error:
        if not stopped:
            raise
        ending = (
            EndedBySignalError(stopped[0].statement, error.code) if isinstance(error, EndedBySignalError) else error
        )
        if stopped[0].probes:
            ending.add_note(_how_to_go_on(stopped[0], output))
        raise ending from None
    if stopped:
        sys.stderr.write(f"{stopped[0].statement}.\n{_how_to_go_on(stopped[0], output)}\n")
        if stopped[0].stopped_by == "interrupted":
            return found, signals.exit_code
    return found, ExitCode.OK if found.feasible else ExitCode.INFEASIBLE


def _how_to_go_on(stopped: UnfinishedTuning, output: Path | None) -> str:
    """Keep the probes of a tuning that was stopped, and name the command that goes on from them."""
    try:
        path = output or _temporary_file("unfinished.json")
        write_atomically(target_of(path), stopped.model_dump_json(indent=2))
    except OSError as error:
        if output is None:
            return f"The probes are lost: {error}"
        return _how_to_go_on(stopped, None)
    own = [*own_arguments(sys.argv[1:])]
    command = sys.argv[1 + len(own) :]
    if "--resume" in own:
        before = own.index("--resume")
        del own[before : before + 2]
    return f"Nothing is lost. Go on with: batchwright {shlex.join([*own, '--resume', str(path), *command])}"


def _temporary_file(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix="batchwright-"), name)
