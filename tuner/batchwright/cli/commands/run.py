"""``batchwright run``: tune, then train with the recommendation."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from batchwright.cli import options
from batchwright.cli import trailing_command as trailing
from batchwright.cli.arguments import (
    baseline,
    check_folder,
    hardware_request,
    named,
    naming_options,
    training_request,
    tuning_request,
)
from batchwright.cli.commands.train import check_options_of_command, train_with
from batchwright.cli.commands.tune import tuned
from batchwright.cli.display import progress_console, recommendation_panel
from batchwright.cli.errors import ExitCode


def run(  # noqa: PLR0913 - a command's options are its arguments
    context: typer.Context,
    spec: options.OptionalSpecFile = None,
    *,
    effective_batch_size: options.EffectiveBatchSize,
    name: options.Name = None,
    project: options.Project = None,
    label: options.Labels = None,
    objective: options.Objective = "largest",
    world_size: options.WorldSize = None,
    device: options.Device = None,
    gpu: options.Gpu = None,
    min_memory: options.MinMemory = None,
    memory_limit: options.MemoryLimit = None,
    memory_margin: options.MemoryMargin = 0.03,
    granularity: options.Granularity = 1,
    max_micro_batch_size: options.MaxMicroBatchSize = None,
    baseline_plan: options.BaselinePlan = None,
    probe_timeout: options.ProbeTimeout = 300.0,
    updates: options.Updates = 100,
    checkpoint_every: options.CheckpointEvery = 50,
    seed: options.Seed = 0,
    nproc_per_node: options.Processes = None,
    workers: options.Workers = 0,
    allow_batch_coupling: options.AllowBatchCoupling = False,
    tracker: options.Trackers = None,
    noise_scale_every: options.NoiseScaleEvery = None,
    env: trailing.Variables = None,
    template: trailing.Templates = None,
    working_directory: trailing.WorkingDirectory = None,
    probe_updates: trailing.ProbeUpdates = None,
    probe_argument: trailing.ProbeArguments = None,
    samples_dimension: trailing.SamplesDimension = None,
    samples_per_unit: trailing.SamplesPerUnit = None,
    count_samples: trailing.CountSamples = True,
    loading_timeout: trailing.LoadingTimeout = None,
    uniform_only: trailing.UniformOnly = None,
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
    names = named(name, project, label)
    training = training_request(
        updates=updates,
        checkpoint_every=checkpoint_every,
        seed=seed,
        processes_per_node=nproc_per_node,
        workers=workers,
        allow_batch_coupling=allow_batch_coupling,
        trackers=tuple(tracker or ()),
        noise_scale_every=noise_scale_every,
    )
    model = trailing.command_model(
        context,
        spec,
        environment=env,
        templates=template,
        working_directory=working_directory,
        probe_updates=probe_updates,
        probe_arguments=probe_argument,
        samples_dimension=samples_dimension,
        samples_per_unit=samples_per_unit,
        count_samples=count_samples,
        loading_timeout=loading_timeout,
    )
    request = tuning_request(
        spec=spec if model is None else {"model": model},
        effective_batch_size=effective_batch_size,
        baseline=baseline(baseline_plan),
        objective=objective,
        world_size=world_size,
        device=device,
        hardware=hardware_request(gpu, min_memory),
        memory_limit_bytes=memory_limit,
        memory_margin=memory_margin,
        granularity=granularity,
        max_micro_batch_size=max_micro_batch_size,
        probe_timeout_seconds=probe_timeout,
        allow_batch_coupling=allow_batch_coupling,
        uniform_only=uniform_only,
    )
    if request.command is not None:
        check_options_of_command(context, request.command)
    else:
        with naming_options():
            check_run(request, training, device_of(request).id)
    with naming_options(memory_limit_bytes=memory_limit):
        found, code = tuned(request)
    found = found.model_copy(update=dict(names))
    progress_console().print(recommendation_panel(found))
    if code is ExitCode.OK:
        train_with(found, training, output_dir, as_document=json)
        return
    if json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    raise typer.Exit(code)
