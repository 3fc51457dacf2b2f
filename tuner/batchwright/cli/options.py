"""The options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from batchwright.schemas import estimates, requests
from batchwright.units import TypedSize, parse_bytes


def _size(text: str) -> TypedSize:
    try:
        return TypedSize(parse_bytes(text), text)
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
Device = Annotated[
    str | None, typer.Option(help="`cuda:0` or `cpu`. Default: the first GPU, or the CPU where there is none.")
]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Instead of `--device`: the first GPU of this host with this name, as `batchwright gpus` lists them.",
    ),
]
MinMemory = Annotated[
    int | None,
    typer.Option(
        parser=_size,
        metavar="SIZE",
        help="Instead of `--device`: the first GPU of this host with at least this much memory, for example `40GiB`.",
    ),
]
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        parser=_size,
        metavar="SIZE",
        help="Memory the run may take, for example `24GiB`, also to simulate a smaller card. Default: the whole card, "
        "or on the CPU half of the host's memory.",
    ),
]
MemoryMargin = Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of the limit that probes must leave free.")]
Objective = Annotated[
    requests.Objective,
    typer.Option(
        help="Objective: the largest micro-batch that fits; the fewest accumulation steps, in fewer probes; or the "
        "plan with the most samples per second, measured.",
    ),
]
Name = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Name of the tuning, kept in the recommendation and shown in lists.")
]
Project = Annotated[str | None, typer.Option(metavar="TEXT", help="Project that the tuning belongs to.")]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label", metavar="KEY=VALUE", help="Label of the tuning, with the bounds of Kubernetes labels. Repeatable."
    ),
]
Granularity = Annotated[int, typer.Option(min=1, help="Try only multiples of this size, for example 8.")]
MaxMicroBatchSize = Annotated[int | None, typer.Option(min=1, help="Upper bound of the micro-batch size.")]
Uniform = Annotated[bool, typer.Option("--uniform", help="Also plan with one micro-batch size repeated.")]
BaselinePlan = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="SIZE[xSTEPS]",
        help="Micro-batch size that the training uses until now, with its accumulation steps if known, for example "
        "`8` or `8x16`: one more probe measures it, and the result says what is gained.",
    ),
]
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
        help="A recommendation of `tune` for the same request, as JSON, made under other versions or another limit: "
        "one probe confirms it where possible; otherwise its measurements warm-start the search.",
    ),
]
ProbeTimeout = Annotated[float, typer.Option(min=1.0, help="Time limit of one probe, in seconds.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result, or the error, as JSON on standard output.")]
Updates = Annotated[int, typer.Option(min=1, help="Optimizer updates to make.")]
CheckpointEvery = Annotated[int, typer.Option(min=1, help="Updates between checkpoints.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights and of the order of samples.")]
Processes = Annotated[
    int | None,
    typer.Option(
        "--nproc-per-node",
        min=1,
        metavar="N",
        help="Processes of the run on this host, one per device; default: the plan's ranks. They share the "
        "effective batch.",
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        min=0,
        max=64,
        metavar="N",
        help="Processes per rank that prefetch data; with 0, data is loaded between updates.",
    ),
]
AllowBatchCoupling = Annotated[
    bool,
    typer.Option(
        "--allow-batch-coupling",
        help="Plan and train several micro-batches although the loss couples the samples of a batch (BatchNorm, "
        "in-batch negatives): accumulated updates then differ from full-batch ones.",
    ),
]
Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="NAME",
        help="Also write the figures of each update for `tensorboard`, `mlflow` or `wandb`: into the run's folder, or "
        "to the server that the library's own variables name. May be repeated.",
    ),
]
NoiseScaleEvery = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Updates between two that are measured for the gradient noise scale, which suggests an effective batch; "
        "0 for none. Default: each of a short run, every tenth of a long one.",
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
