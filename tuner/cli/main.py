"""Commands and their arguments. Each parses, calls one function, prints, and picks an exit code."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console

from service.cli.admin import keys, prune
from service.cli.serve import serve, work
from tuner.cli import options
from tuner.cli.arguments import (
    check_file,
    check_folder,
    estimate_request,
    naming_options,
    training_request,
    tuning_request,
)
from tuner.cli.display import balanced_in_words, progress_console, recommendation_panel, uniform_in_words
from tuner.cli.errors import ExitCode, as_json, exit_code
from tuner.cli.exporting import export, formats
from tuner.errors import BatchwrightError, TrainingError
from tuner.hardware.gpu_table import GPUS
from tuner.planning.accumulation import balanced_plan, uniform_plan
from tuner.schemas.base import load_document
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import TrainingRequest, TuningRequest
from tuner.schemas.training import RunOutcome, TrainingResult
from tuner.schemas.workload import load_spec
from tuner.system.files import write_atomically
from tuner.units import format_bytes

_HELP = """Find the largest micro-batch that really fits, and the gradient accumulation that gives exactly the effective
batch you asked for.

Exit codes: 0 done; 2 wrong input (spec, numbers, files, settings, a limit above the device's memory); 3 no micro-batch
fits; 4 the tuning or the estimate failed (the workload's own error, a hang); 5 no such device; 6 the training failed;
130 interrupted; 1 a fault of Batchwright.
"""

_EXTRAS = {
    "pynvml": "torch",
    "torch": "torch",
    "fastapi": "service",
    "uvicorn": "service",
    "sqlalchemy": "service",
    "prometheus_client": "service",
    "pydantic_settings": "service",
    "psycopg": "postgres",
}
"""Which extra brings a package that a command may miss."""

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
app.add_typer(keys, name="keys")


def _print_version(asked: bool) -> None:  # noqa: FBT001 - the value of an option
    if asked:
        sys.stdout.write(f"batchwright {metadata.version('batchwright')}\n")
        raise typer.Exit


@app.callback(help=_HELP)
def _batchwright(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # its callback has answered


def _print_answer(document: BaseModel, *, as_document: bool, text: object) -> None:
    """The answer on standard output, for a script or for a person."""
    if as_document:
        sys.stdout.write(document.model_dump_json(indent=2) + "\n")
    else:
        Console(highlight=False, markup=False).print(text)


@app.command()
def tune(  # noqa: PLR0913 - a command's options are its arguments
    spec: options.SpecFile,
    effective_batch_size: options.EffectiveBatchSize,
    *,
    objective: options.Objective = "largest",
    world_size: options.WorldSize = None,
    device: options.Device = None,
    memory_limit: options.MemoryLimit = None,
    memory_margin: options.MemoryMargin = 0.03,
    granularity: options.Granularity = 1,
    max_micro_batch_size: options.MaxMicroBatchSize = None,
    uniform: options.Uniform = False,
    what_if: options.WhatIf = False,
    probe_timeout: options.ProbeTimeout = 300.0,
    allow_batch_coupling: options.AllowBatchCoupling = False,
    earlier: options.Earlier = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the answer to this file.")] = None,
    json: options.Json = False,
) -> None:
    """Probe the largest micro-batch that fits by running real updates, and plan the effective batch around it.

    Example: batchwright tune spec.yaml --effective-batch-size 512 --memory-limit 24GiB -o recommendation.json
    """
    if output is not None:
        check_file(output)
    request = tuning_request(
        spec=spec,
        effective_batch_size=effective_batch_size,
        objective=objective,
        world_size=world_size,
        device=device,
        memory_limit_bytes=memory_limit,
        memory_margin=memory_margin,
        granularity=granularity,
        max_micro_batch_size=max_micro_batch_size,
        uniform=uniform,
        what_if=what_if,
        probe_timeout_seconds=probe_timeout,
        allow_batch_coupling=allow_batch_coupling,
    )
    known = load_document(Recommendation, earlier, "earlier recommendation") if earlier is not None else None
    with naming_options(memory_limit_bytes=memory_limit):
        found = _tune(request, known)
    _print_answer(found, as_document=json, text=recommendation_panel(found))
    if output is not None:
        _write(output, found)
    raise typer.Exit(ExitCode.OK if found.feasible else ExitCode.INFEASIBLE)


def _write(path: Path, found: Recommendation) -> None:
    """Write the answer, which was printed already: standard output has no further document for an error.

    Raises:
        typer.Exit: when it cannot be written.
    """
    try:
        write_atomically(path, found.model_dump_json(indent=2))
    except OSError as error:
        _print_error(f"--output: {path} cannot be written: {error.strerror or error}; the answer is on standard output")
        raise typer.Exit(ExitCode.WRONG_INPUT) from None


def _tune(request: TuningRequest, earlier: Recommendation | None = None) -> Recommendation:
    from tuner.cli.running import interrupt_on_sigterm  # noqa: PLC0415 - `plan` and `--help` need no NVML
    from tuner.cli.running import tune as run_tuning  # noqa: PLC0415 - likewise

    interrupt_on_sigterm()
    return run_tuning(request, progress_console(), earlier)


@app.command()
def estimate(  # noqa: PLR0913 - a command's options are its arguments
    spec: options.SpecFile,
    *,
    gpu: options.Gpus = None,
    all_gpus: options.AllGpus = False,
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Judge this size; the largest that fits is told in any case.")
    ] = None,
    effective_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per optimizer update over all ranks: also plan it.")
    ] = None,
    world_size: options.WorldSize = None,
    memory_margin: options.MemoryMargin = 0.03,
    allocator: options.Allocator = "default",
    timeout: options.EstimateTimeout = 120.0,
    json: options.Json = False,
) -> None:
    """Estimate what a workload takes on GPUs that need not be here: what fits, how sure that is, and the plan.

    An estimate is no proof: `tune` measures. Exit code 3 when it fits on none of the GPUs.

    Example: batchwright estimate spec.yaml --gpu H100-80GB --gpu A10G --effective-batch-size 512
    """
    from tuner.cli.estimating import estimate as run_estimate  # noqa: PLC0415 - see _tune
    from tuner.cli.estimating import fits_nowhere, in_words  # noqa: PLC0415 - likewise
    from tuner.cli.running import interrupt_on_sigterm  # noqa: PLC0415 - likewise

    interrupt_on_sigterm()

    request = estimate_request(
        spec=spec,
        world_size=world_size,
        gpus=gpu or (),
        all_gpus=all_gpus,
        micro_batch_size=micro_batch_size,
        effective_batch_size=effective_batch_size,
        memory_margin=memory_margin,
        allocator=allocator,
        timeout_seconds=timeout,
    )
    found = run_estimate(request, progress_console())
    _print_answer(found, as_document=json, text=in_words(found, request))
    raise typer.Exit(ExitCode.INFEASIBLE if fits_nowhere(found, request) else ExitCode.OK)


@app.command()
def gpus(*, json: options.Json = False) -> None:
    """List the GPUs that `estimate` knows, with the memory torch finds on them."""
    from tuner.cli.estimate_display import gpu_table  # noqa: PLC0415 - see _tune

    if json:
        sys.stdout.writelines(gpu.model_dump_json() + "\n" for gpu in GPUS)
    else:
        Console(highlight=False, markup=False).print(gpu_table(GPUS))


@app.command()
def plan(
    effective_batch_size: options.EffectiveBatchSize,
    max_micro_batch_size: Annotated[int, typer.Option(min=1, help="The largest micro-batch that fits.")],
    *,
    world_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    uniform: Annotated[bool, typer.Option("--uniform", help="Repeat one micro-batch size.")] = False,
    json: options.Json = False,
) -> None:
    """Plan an effective batch around a micro-batch size you know, without a device.

    Example: batchwright plan --effective-batch-size 100 --max-micro-batch-size 37
    """
    if uniform:
        repeated = uniform_plan(effective_batch_size, world_size, max_micro_batch_size)
        _print_answer(repeated, as_document=json, text=uniform_in_words(repeated))
    else:
        balanced = balanced_plan(effective_batch_size, world_size, max_micro_batch_size)
        _print_answer(balanced, as_document=json, text=balanced_in_words(balanced))


@app.command()
def train(  # noqa: PLR0913 - a command's options are its arguments
    spec: options.SpecFile,
    recommendation: Annotated[Path, typer.Option(help="The answer of `tune`, as JSON.")],
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
    """Train with a recommendation's plan; goes on from the newest checkpoint in the output folder, if there is one.

    Example: batchwright train spec.yaml --recommendation recommendation.json --updates 1000 --output-dir runs/first
    """
    from tuner.cli.running import check_run, for_spec  # noqa: PLC0415 - see _tune

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
    _train(tuned, request, output_dir, as_document=json)


def _train(found: Recommendation, request: TrainingRequest, directory: Path, *, as_document: bool) -> None:
    from tuner.cli.running import interrupt_on_sigterm  # noqa: PLC0415 - see _tune
    from tuner.cli.running import train as run_training  # noqa: PLC0415 - see _tune

    interrupt_on_sigterm()
    if not found.feasible:
        raise TrainingError(f"nothing to train: {found.infeasible_reason}")
    result = run_training(found, request, directory, progress_console())
    _print_answer(result, as_document=as_document, text=_result_in_words(result, directory))
    if result.outcome is RunOutcome.FAILED:
        raise typer.Exit(ExitCode.TRAINING_FAILED)
    if result.outcome is RunOutcome.STOPPED:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _result_in_words(result: TrainingResult, directory: Path) -> str:
    resumed = f", resumed from update {result.resumed_from}" if result.resumed_from else ""
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    notes = "".join(f"\nNote: {note}" for note in result.notes)
    trace = f"\n{result.traceback}" if result.traceback else ""
    return f"{result.outcome.value}: {result.message}{resumed}{loss}. Files in {directory}.{notes}{trace}"


@app.command()
def run(  # noqa: PLR0913 - a command's options are its arguments
    spec: options.SpecFile,
    effective_batch_size: options.EffectiveBatchSize,
    *,
    objective: options.Objective = "largest",
    world_size: options.WorldSize = None,
    device: options.Device = None,
    memory_limit: options.MemoryLimit = None,
    memory_margin: options.MemoryMargin = 0.03,
    granularity: options.Granularity = 1,
    max_micro_batch_size: options.MaxMicroBatchSize = None,
    probe_timeout: options.ProbeTimeout = 300.0,
    updates: options.Updates = 100,
    checkpoint_every: options.CheckpointEvery = 50,
    seed: options.Seed = 0,
    nproc_per_node: options.Processes = None,
    workers: options.Workers = 0,
    allow_batch_coupling: options.AllowBatchCoupling = False,
    tensorboard: options.TensorBoard = False,
    output_dir: options.OutputDirectory = Path("runs/run"),
    json: options.Json = False,
) -> None:
    """Tune, then train with what was found.

    Example: batchwright run spec.yaml --effective-batch-size 512 --updates 1000
    """
    from tuner.cli.running import check_run  # noqa: PLC0415 - see _tune

    check_folder(output_dir, "--output-dir")
    training = training_request(
        updates=updates,
        checkpoint_every=checkpoint_every,
        seed=seed,
        processes_per_node=nproc_per_node,
        workers=workers,
        allow_batch_coupling=allow_batch_coupling,
        tensorboard=tensorboard,
    )
    request = tuning_request(
        spec=spec,
        effective_batch_size=effective_batch_size,
        objective=objective,
        world_size=world_size,
        device=device,
        memory_limit_bytes=memory_limit,
        memory_margin=memory_margin,
        granularity=granularity,
        max_micro_batch_size=max_micro_batch_size,
        probe_timeout_seconds=probe_timeout,
        allow_batch_coupling=allow_batch_coupling,
    )
    check_run(request, training, request.device)
    with naming_options(memory_limit_bytes=memory_limit):
        found = _tune(request)
    progress_console().print(recommendation_panel(found))
    if not found.feasible:
        if json:
            sys.stdout.write(found.model_dump_json(indent=2) + "\n")
        raise typer.Exit(ExitCode.INFEASIBLE)
    _train(found, training, output_dir, as_document=json)


@app.command()
def devices(*, json: options.Json = False) -> None:
    """List the devices of this host."""
    from tuner.hardware.inventory import devices as find_devices  # noqa: PLC0415 - see _tune

    for found in find_devices():
        used = "" if found.used_bytes is None else f", {format_bytes(found.used_bytes)} in use"
        text = f"{found.id}: {found.name}, {format_bytes(found.total_bytes)}{used}"
        sys.stdout.write((found.model_dump_json() if json else text) + "\n")


app.command()(export)
app.command()(formats)
app.command()(serve)
app.command()(work)
app.command()(prune)


def main() -> None:
    """Run the command line; every error of ours ends in a message and a documented exit code."""
    wants_json = "--json" in sys.argv
    try:
        app(standalone_mode=True)
    except BatchwrightError as error:
        if wants_json:
            sys.stdout.write(as_json(error) + "\n")
        else:
            _print_error("\n".join([str(error), *getattr(error, "__notes__", [])]))
        sys.exit(exit_code(error))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        sys.stderr.write(f"error: this command needs `{error.name}`: pip install 'batchwright[{extra}]'\n")
        sys.exit(ExitCode.WRONG_INPUT)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(ExitCode.INTERRUPTED)


def _print_error(text: str) -> None:
    from rich.markup import escape  # noqa: PLC0415 - only on the way out

    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error[/]: {escape(text)}")
