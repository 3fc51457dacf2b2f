"""``batchwright tune``: find the largest micro-batch that fits, and plan the effective batch around it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from batchwright.cli import options
from batchwright.cli import trailing_command as trailing
from batchwright.cli.arguments import (
    check_file,
    named,
    naming_options,
    tuning_request,
    unwritable,
)
from batchwright.cli.display import progress_console, recommendation_panel
from batchwright.cli.errors import ExitCode
from batchwright.cli.output import print_error, print_result
from batchwright.cli.sigterm import SigtermAsInterrupt
from batchwright.schemas.base import load_document
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TuningRequest
from batchwright.system.files import write_atomically


@options.with_groups
def tune(  # noqa: PLR0913 - a command's options are its arguments
    context: typer.Context,
    spec: options.OptionalSpecFile = None,
    *,
    tuning: options.TuningOptions,
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
    with naming_options(memory_limit_bytes=tuning.memory_limit):
        found, code = tuned(request, stored)
    found = found.model_copy(update=dict(names))
    print_result(found, as_document=json, text=recommendation_panel(found, _next_steps(spec, output)))
    if output is not None:
        try:
            write_atomically(output, found.model_dump_json(indent=2))
        except OSError as error:
            print_error(f"--output: {unwritable(output, error)}; the recommendation is on standard output")
            raise typer.Exit(ExitCode.WRONG_INPUT) from None
    raise typer.Exit(code)


def _next_steps(spec: Path | None, output: Path | None) -> str:
    """Name the commands that take the recommendation; without a file, the option that writes one."""
    if output is None:
        return "keep the recommendation with `-o FILE`; `train` and `export` take it"
    file = shlex.quote(str(output))
    train = file if spec is None else f"{shlex.quote(str(spec))} --recommendation {file}"
    form = "slurm" if spec is None else "pytorch"  # a framework's would configure another program than the command
    return f"batchwright train {train}\nbatchwright export {file} --format {form} (or another: `batchwright formats`)"


def tuned(request: TuningRequest, warm_start: Recommendation | None = None) -> tuple[Recommendation, ExitCode]:
    """Tune in the foreground, with the errors of ``batchwright.cli.running.tune``.

    Returns:
        The recommendation, and the exit code: that of an interrupt where one ended the tuning with what was proven.
    """
    from batchwright.cli.running import tune as run_tuning  # noqa: PLC0415 - `plan` and `--help` need no NVML

    with SigtermAsInterrupt() as signals:
        found = run_tuning(request, progress_console(), warm_start)
    if found.evidence.proof.stopped_by == "interrupted":
        return found, signals.exit_code
    return found, ExitCode.OK if found.feasible else ExitCode.INFEASIBLE
