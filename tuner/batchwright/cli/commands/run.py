"""``batchwright run``: tune, then train with the recommendation."""

import sys
from pathlib import Path

import typer

from batchwright.cli import options, trailing_command as trailing
from batchwright.cli.arguments import (
    check_folder,
    named,
    naming_options,
    training_request,
    tuning_request,
)
from batchwright.cli.commands.train import check_options_of_command, train_with
from batchwright.cli.commands.tune import tuned
from batchwright.cli.display import progress_console, recommendation_panel
from batchwright.cli.errors import ExitCode


@options.with_groups
def run(  # noqa: PLR0913 - a command's options are its arguments
    context: typer.Context,
    spec: options.OptionalSpecFile = None,
    *,
    tuning: options.TuningOptions,
    stops: options.StopOptions,
    training: options.TrainingOptions,
    command: trailing.CommandOptions,
    output_dir: options.OutputDirectory = Path("runs/run"),
    json: options.Json = False,
) -> None:
    """Tune, then train with the recommendation.

    Example: batchwright run spec.yaml --effective-batch-size 512 --updates 1000

    Or tune the command after `--`, and run it with the figures of the plan to its own end:

    batchwright run --effective-batch-size 512 -- python train.py --batch-size {micro_batch_size} --accumulate
    {gradient_accumulation_steps}
    """
    from batchwright.cli.running import check_run  # noqa: PLC0415 - see commands.tune
    from batchwright.hardware.inventory import device_of  # noqa: PLC0415 - see commands.tune

    check_folder(output_dir, "--output-dir")
    names = named(tuning)
    asked = training_request(training)
    model = trailing.command_model(context, spec, command)
    request = tuning_request(spec if model is None else {"model": model}, tuning)
    if request.command is not None:
        check_options_of_command(context, request.command)
    else:
        with naming_options():
            check_run(request, asked, device_of(request).id)
    with naming_options(memory_limit_bytes=tuning.memory_limit):
        found, code = tuned(request, stops, output_dir / "unfinished-tuning.json")
    found = found.model_copy(update=dict(names))
    progress_console().print(recommendation_panel(found))
    if code is ExitCode.OK:
        train_with(found, asked, output_dir, as_document=json)
        return
    if json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    raise typer.Exit(code)
