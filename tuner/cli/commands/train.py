"""``batchwright train``: train with a recommendation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.arguments import (
    check_folder,
    training_request,
)
from tuner.cli.display import progress_console
from tuner.cli.errors import ExitCode
from tuner.cli.output import print_result
from tuner.cli.sigterm import SigtermAsInterrupt
from tuner.errors import TrainingError
from tuner.schemas.base import load_document
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import TrainingRequest
from tuner.schemas.training import RunOutcome, TrainingResult
from tuner.schemas.workload import load_spec


def train(  # noqa: PLR0913 - a command's options are its arguments
    spec: options.SpecFile,
    recommendation: Annotated[Path, typer.Option(help="The recommendation of `tune`, as JSON.")],
    *,
    updates: options.Updates = 100,
    checkpoint_every: options.CheckpointEvery = 50,
    seed: options.Seed = 0,
    nproc_per_node: options.Processes = None,
    workers: options.Workers = 0,
    allow_batch_coupling: options.AllowBatchCoupling = False,
    tensorboard: options.TensorBoard = False,
    output_dir: options.OutputDirectory = Path("runs/train"),
    json: options.Json = False,
) -> None:
    """Train with the plan of a recommendation, and resume from the newest checkpoint in the output folder, if any.

    Example: batchwright train spec.yaml --recommendation recommendation.json --updates 1000 --output-dir runs/first
    """
    from tuner.cli.running import check_run, for_spec  # noqa: PLC0415 - see commands.tune

    check_folder(output_dir, "--output-dir")
    found = load_document(Recommendation, recommendation, "recommendation")
    request = training_request(
        updates=updates,
        checkpoint_every=checkpoint_every,
        seed=seed,
        processes_per_node=nproc_per_node,
        workers=workers,
        allow_batch_coupling=allow_batch_coupling,
        tensorboard=tensorboard,
    )
    tuned = for_spec(found, load_spec(spec))
    check_run(tuned.request, request, tuned.device.id)
    train_with(tuned, request, output_dir, as_document=json)


def train_with(found: Recommendation, request: TrainingRequest, directory: Path, *, as_document: bool) -> None:
    """Train in the foreground and print the result.

    Raises:
        TrainingError: when no micro-batch fits.
        typer.Exit: with the exit code of a run that failed or was stopped.
    """
    from tuner.cli.running import train as run_training  # noqa: PLC0415 - see commands.tune

    if not found.feasible:
        raise TrainingError(f"nothing to train: {found.infeasible_reason}")
    with SigtermAsInterrupt() as signals:
        result = run_training(found, request, directory, progress_console())
    print_result(result, as_document=as_document, text=_describe_result(result, directory))
    if result.outcome is RunOutcome.FAILED:
        raise typer.Exit(ExitCode.TRAINING_FAILED)
    if result.outcome is RunOutcome.STOPPED:
        raise typer.Exit(signals.exit_code)


def _describe_result(result: TrainingResult, directory: Path) -> str:
    resumed = f", resumed from update {result.resumed_from}" if result.resumed_from else ""
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    notes = "".join(f"\nNote: {note}" for note in result.notes)
    trace = f"\n{result.traceback}" if result.traceback else ""
    return f"{result.outcome.value}: {result.message}{resumed}{loss}. Files in {directory}.{notes}{trace}"
