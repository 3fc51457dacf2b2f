"""The options that commands share, some of them in groups."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from batchwright.schemas import estimates, requests
from batchwright.units import TypedSize, parse_bytes, parse_duration


def _size(text: str) -> TypedSize:
    try:
        return TypedSize(parse_bytes(text), text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def duration(text: str) -> float:
    """Parse the duration of an option as seconds."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="YAML or JSON file that describes the workload.")]
OptionalSpecFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[SPEC]",
        help="YAML or JSON file that describes the workload. Or give the command that trains after `--`.",
    ),
]
EffectiveBatchSize = Annotated[
    int, typer.Option(min=1, help="Samples per optimizer update over all ranks. The plan gives exactly this many.")
]
WorldSize = Annotated[
    int | None, typer.Option(min=1, help="Data-parallel ranks. Overrides `parallelism.world_size` of the spec.")
]
MemoryMargin = Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of the limit that probes must leave free.")]
Uniform = Annotated[bool, typer.Option("--uniform", help="Also plan with one micro-batch size repeated.")]
WhatIf = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Also estimate, without probes, what would fit with a mixed precision, activation checkpointing or an "
        "optimizer without temporaries.",
    ),
]
WarmStartFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A recommendation of `tune` for the same request (JSON), made with other versions or another limit. "
        "One probe confirms it if possible; otherwise its measurements warm-start the search.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result, or the error, as JSON on standard output.")]
AllowBatchCoupling = Annotated[
    bool,
    typer.Option(
        "--allow-batch-coupling",
        help="Plan and train several micro-batches although the loss couples the samples of a batch (BatchNorm, "
        "in-batch negatives): accumulated updates then differ from full-batch ones.",
    ),
]
OutputDirectory = Annotated[
    Path, typer.Option("--output-dir", help="Folder of the run: recommendation, progress, checkpoints, weights.")
]
Gpus = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="A GPU by name, as `batchwright gpus` lists them, or a memory size such as `48GiB`. May be repeated.",
    ),
]
AllGpus = Annotated[bool, typer.Option("--all-gpus", help="Every GPU of the catalogue.")]
Allocator = Annotated[
    Literal["default", "expandable-segments"],
    typer.Option(
        help="Setting of torch's allocator: `expandable-segments` is `PYTORCH_ALLOC_CONF=expandable_segments:True`."
    ),
]
Loop = Annotated[
    estimates.Loop,
    typer.Option(help="Training loop that will run the plan. Its memory is estimated."),
]
Engine = Annotated[
    estimates.Engine,
    typer.Option(
        help="What makes the estimate: `trace` follows updates without tensors; `virtual` runs them with torch's CUDA "
        "build, which it needs, on a virtual card of each GPU."
    ),
]
EstimateTimeout = Annotated[
    float,
    typer.Option(min=1.0, max=600.0, help="Time limit of tracing, or of each run on a virtual card, in seconds."),
]


@dataclass(frozen=True, kw_only=True)
class NameOptions:
    """The names of a tuning or job."""

    name: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Name of the tuning or job, kept with its result and shown in lists."),
    ] = None
    project: Annotated[str | None, typer.Option(metavar="TEXT", help="Project that it belongs to.")] = None
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="KEY=VALUE",
            help="Label, with the bounds of Kubernetes labels. May be repeated.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """The options of a tuning that this process runs: when it stops, and from where it goes on."""

    time_limit: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="TIME",
            help="Time limit of the whole tuning, such as `45s`, `90m` or `12h`. It then ends with the plan "
            "proven so far, if any, as after Ctrl-C.",
        ),
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Resume a stopped tuning of the same request from the file that it left.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TuningOptions(NameOptions):
    """The options of what is tuned, of ``tune``, ``run`` and ``tunings submit``."""

    effective_batch_size: EffectiveBatchSize
    objective: Annotated[
        requests.Objective,
        typer.Option(
            help="Objective: the largest micro-batch that fits; the fewest accumulation steps, in fewer probes; or the "
            "plan with the most samples per second, measured.",
        ),
    ] = "largest"
    world_size: WorldSize = None
    device: Annotated[
        str | None, typer.Option(help="`cuda:0` or `cpu`. Default: the first GPU, or the CPU if there is none.")
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead of `--device`: the first GPU of this host with this name, as `batchwright gpus` lists them.",
        ),
    ] = None
    min_memory: Annotated[
        int | None,
        typer.Option(
            parser=_size,
            metavar="SIZE",
            help="Instead of `--device`: the first GPU of this host with at least this much memory, for example "
            "`40GiB`.",
        ),
    ] = None
    memory_limit: Annotated[
        int | None,
        typer.Option(
            parser=_size,
            metavar="SIZE",
            help="Memory the run may take, for example `24GiB`, also to simulate a smaller card. Default: the "
            "whole card; on the CPU, half of the host's memory.",
        ),
    ] = None
    memory_margin: MemoryMargin = 0.03
    granularity: Annotated[int, typer.Option(min=1, help="Try only multiples of this size, for example 8.")] = 1
    max_micro_batch_size: Annotated[int | None, typer.Option(min=1, help="Upper bound of the micro-batch size.")] = None
    baseline_plan: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="SIZE[xSTEPS]",
            help="The micro-batch size you train with today, with its accumulation steps if known, for example `8` or "
            "`8x16`: one more probe measures it, and the result says what you gain.",
        ),
    ] = None
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Run one plan that fits even at the upper end of its estimate, and recommend it. Larger sizes "
            "are not tried. `tune --warm-start-from` completes it later.",
        ),
    ] = False
    probe_timeout: Annotated[float, typer.Option(min=1.0, help="Time limit of one probe, in seconds.")] = 300.0
    allow_batch_coupling: AllowBatchCoupling = False
    uniform_only: Annotated[
        bool | None,
        typer.Option(
            "--uniform-only/--no-uniform-only",
            help="For a command: search only sizes that divide a rank's samples, because its plan repeats one "
            "size (the default), or any size.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of a training run, of ``train``, ``run`` and ``jobs submit``."""

    updates: Annotated[int, typer.Option(min=1, help="Optimizer updates to make.")] = 100
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Updates between checkpoints.")] = 50
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of samples.")] = 0
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            "--nproc-per-node",
            min=1,
            metavar="N",
            help="Processes of the run on this host, one per device; default: the plan's ranks. They share the "
            "effective batch.",
        ),
    ] = None
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            metavar="N",
            help="Processes per rank that prefetch data; with 0, data is loaded between updates.",
        ),
    ] = 0
    allow_batch_coupling: AllowBatchCoupling = False
    tracker: Annotated[
        list[str] | None,
        typer.Option(
            "--tracker",
            metavar="NAME",
            help="Also write the figures of each update for `tensorboard`, `mlflow` or `wandb`: into the run's folder, "
            "or to the server that the library's own variables name. May be repeated.",
        ),
    ] = None
    noise_scale_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Measure the gradient noise scale, which suggests an effective batch, once every so many "
            "updates; 0: never. Default: every update of a short run, every tenth of a long one.",
        ),
    ] = None


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see each field of a command's parameters that are dataclasses as an option."""
    signature = inspect.signature(command, eval_str=True)
    kinds: dict[str, type[Any]] = {name: each.annotation for name, each in signature.parameters.items()}
    groups = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        shown = inspect.signature(groups[name], eval_str=True).parameters if name in groups else {name: parameter}
        parameters.update(shown)

    @wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401 - values of options
        made = {name: kind(**{each.name: given[each.name] for each in fields(kind)}) for name, kind in groups.items()}
        command(**{name: made[name] if name in made else given[name] for name in signature.parameters})

    run.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return run
