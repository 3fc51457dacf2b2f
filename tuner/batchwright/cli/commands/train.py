"""``batchwright train``: train with a recommendation."""

from pathlib import Path
from typing import Annotated

import typer

from batchwright.cli import options
from batchwright.cli.arguments import check_folder, option_of, read_spec, training_request, wrong_argument
from batchwright.cli.display import progress_console
from batchwright.cli.ending_signals import SignalsAsInterrupt
from batchwright.cli.output import print_run
from batchwright.errors import TrainingError
from batchwright.schemas.base import load_document
from batchwright.schemas.command import UPDATES, CommandSpec
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import TrainingResult

_OF_TRAINING = ("checkpoint_every", "seed", "nproc_per_node", "workers", "tracker", "noise_scale_every")
"""Options of the engine's runs, which a command has none of."""


@options.with_groups
def train(  # noqa: PLR0913 - a command's options are its arguments
    context: typer.Context,
    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC|REC", help="The spec that was tuned; or, without --recommendation, the recommendation alone."
        ),
    ],
    *,
    recommendation: Annotated[
        Path | None,
        typer.Option(
            help="The recommendation of `tune`, as JSON. SPEC may differ in fields that do not affect memory."
        ),
    ] = None,
    training: options.TrainingOptions,
    output_dir: options.OutputDirectory = Path("runs/train"),
    json: options.Json = False,
) -> None:
    """Train with the plan of a recommendation, and resume from the newest checkpoint in the output folder, if any.

    Example: batchwright train spec.yaml --recommendation recommendation.json --updates 1000 --output-dir runs/first

    The recommendation of a command runs the command with the figures of the plan, to its own end.
    """
    from batchwright.cli.running import check_run, for_spec  # noqa: PLC0415 - see commands.tune

    check_folder(output_dir, "--output-dir")
    found = load_document(Recommendation, recommendation or spec, "recommendation")
    request = training_request(training)
    tuned = found if recommendation is None else for_spec(found, read_spec(spec))
    if tuned.request.command is not None:
        check_options_of_command(context, tuned.request.command)
    else:
        check_run(tuned.request, request, tuned.device.id)
    train_with(tuned, request, output_dir, as_document=json)


def check_options_of_command(context: typer.Context, command: CommandSpec) -> None:
    """Check that no option was given that the command does not get.

    Raises:
        SpecError: naming the option.
    """
    given = [name for name in _OF_TRAINING if _is_given(context, name)]
    if given:
        message = "is for runs that Batchwright trains itself: give the program's own option in the command"
        raise wrong_argument(option_of(given[0]), message, context.params[given[0]])
    if _is_given(context, UPDATES) and UPDATES not in command.model.placeholders:
        message = "has no effect: the command has no placeholder `{updates}`, and runs to its own end"
        raise wrong_argument("--updates", message, context.params[UPDATES])


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def train_with(found: Recommendation, request: TrainingRequest, directory: Path, *, as_document: bool) -> None:
    """Train in the foreground and print the result.

    Raises:
        TrainingError: when no micro-batch fits.
        typer.Exit: with the exit code of a run that failed or was stopped.
    """
    from batchwright.cli.running import train as run_training  # noqa: PLC0415 - see commands.tune

    if not found.feasible:
        raise TrainingError(f"nothing to train: {found.infeasible_reason}")
    if found.request.command is not None:
        from batchwright.cli.command_running import train_command  # noqa: PLC0415 - as above

        train_command(found, request.updates, directory, as_document=as_document)
        return
    with SignalsAsInterrupt() as signals:
        result = run_training(found, request, directory, progress_console())
    text = _describe_result(result, directory)
    print_run(result, as_document=as_document, text=text, stopped=signals.exit_code)


def _describe_result(result: TrainingResult, directory: Path) -> str:
    resumed = f", resumed from update {result.resumed_from}" if result.resumed_from else ""
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    scale = result.noise_scale
    noise = f"\n{scale.message}." if scale is not None and scale.lower_samples is not None else ""
    evaluation = (
        "" if result.evaluation is None or not result.evaluation.evaluations else f"\n{result.evaluation.message}."
    )
    notes = "".join(f"\nNote: {note}" for note in result.notes)
    trace = f"\n{result.traceback}" if result.traceback else ""
    ending = f"{result.outcome.value}: {result.message}{resumed}{loss}. Files in {directory}."
    return f"{ending}{evaluation}{noise}{notes}{trace}"
