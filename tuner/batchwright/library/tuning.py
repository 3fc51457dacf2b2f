"""Tune, plan and estimate from Python: each function is what the command of its name does. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, get_args

from batchwright.cli.display import ProbeBoard, progress_console
from batchwright.errors import FieldProblem, SpecError
from batchwright.estimation import client
from batchwright.library.notebook_board import NotebookBoard
from batchwright.library.recommendation import Recommendation
from batchwright.planning.accumulation import balanced_plan
from batchwright.schemas.base import parse_document
from batchwright.schemas.command import CommandSpec, load_any_spec
from batchwright.schemas.estimates import Engine, Estimate, EstimateRequest
from batchwright.schemas.plans import Plan
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.workload import WorkloadSpec
from batchwright.workloads.pretrained.folder_config import with_pretrained_config

SpecOrFile: TypeAlias = WorkloadSpec | Mapping[str, Any] | str | PathLike[str]
"""A workload, its description as data, or the path of its file."""


def tune(
    spec: SpecOrFile,
    effective_batch_size: int,
    *,
    memory_limit: int | str | None = None,
    progress: bool = True,
    **fields: Any,  # noqa: ANN401 - fields of a TuningRequest, which checks them
) -> Recommendation:
    """Find the largest micro-batch of a spec that fits by running real updates, and plan the effective batch around it.

    Args:
        spec: the workload, the path of its file, or a mapping as in such a file.
        effective_batch_size: samples of one optimizer update, over all ranks.
        memory_limit: bytes, or a size such as ``"24GiB"``; when left out, the device's memory, of the CPU's one half.
        progress: whether to show the probes as they end, on standard error.
        fields: further fields of ``TuningRequest``, such as ``device`` or ``objective``.

    Raises:
        SpecError: when an argument is wrong, naming it.
        DeviceError, PlanError: before any probe.
        StorageError: when the disk for temporary files is full.
        TuningFailedError: when a probe failed for a reason unrelated to the size, or the plan would divide a loss that
            couples samples.
    """
    request = tuning_request(_loaded(spec), effective_batch_size, memory_limit, fields)
    return run_request(request, progress=progress)


def plan(effective_batch_size: int, micro_batch_size: int, world_size: int = 1) -> Plan:
    """Plan an effective batch in micro-batches of at most ``micro_batch_size`` samples, on ``world_size`` ranks.

    Raises:
        SpecError: when an argument is no whole number, naming it.
        PlanError: when a rank would have no sample, or the plan would list too many micro-batches.
    """
    given = {
        "effective_batch_size": effective_batch_size,
        "micro_batch_size": micro_batch_size,
        "world_size": world_size,
    }
    wrong = [
        FieldProblem(name, "must be a whole number", repr(value))
        for name, value in given.items()
        if isinstance(value, bool) or not hasattr(value, "__index__")
    ]
    if wrong:
        raise SpecError(wrong, "arguments")
    return balanced_plan(index(effective_batch_size), index(world_size), index(micro_batch_size))


def estimate(
    spec: SpecOrFile,
    gpus: Sequence[str],
    *,
    engine: Engine = "trace",
    **fields: Any,  # noqa: ANN401 - fields of an EstimateRequest, which checks them
) -> Estimate:
    """Estimate the largest micro-batch on GPUs that are not at hand.

    Args:
        spec: the workload, the path of its file, or a mapping as in such a file.
        gpus: names as ``batchwright gpus`` lists them, or a memory size such as ``"48GiB"`` for another card.
        engine: ``"trace"`` follows updates without computing them; ``"virtual"`` runs them on a virtual card of each
            GPU, with torch's CUDA build and a C++ compiler, and takes ``timeout_seconds`` for each run.
        fields: further fields of ``EstimateRequest``, such as ``effective_batch_size`` or ``micro_batch_size``.

    Raises:
        SpecError, WorkloadError: when an argument is wrong, or the workload cannot be built.
        EstimateError: when the workload cannot be traced, or a GPU is unknown.
        VirtualGpuError: when the engine is `virtual`, and cannot run here or does not know a GPU.
        TuningFailedError, ProbeError: when the engine is `virtual`, and the workload or a process of it fails.
    """
    if engine not in get_args(Engine):
        raise SpecError([FieldProblem("engine", f"must be one of {', '.join(get_args(Engine))}", repr(engine))])
    names = gpus if isinstance(gpus, str) or not isinstance(gpus, Iterable) else tuple(gpus)
    parsed = parse_document(EstimateRequest, {"spec": _loaded(spec), "gpus": names, **fields}, "arguments")
    request = parsed.model_copy(update={"spec": with_pretrained_config(parsed.spec)})
    if engine == "trace":
        return client.estimate(request)
    from batchwright.driving.virtual_estimate import estimate_on_virtual_cards  # noqa: PLC0415 - a trace needs no NVML

    return estimate_on_virtual_cards(request)


def _loaded(spec: SpecOrFile) -> WorkloadSpec | CommandSpec | Mapping[str, Any]:
    return load_any_spec(Path(spec)) if isinstance(spec, str | PathLike) else spec


def run_request(request: TuningRequest, *, progress: bool, accumulates: bool = True) -> Recommendation:
    """Run a tuning in the foreground, with the arguments and errors of ``run_tuning``, and show its probes if asked."""
    from batchwright.driving.foreground import run_tuning  # noqa: PLC0415 - `plan` needs no NVML

    if not progress:
        return Recommendation.of(run_tuning(request, accumulates=accumulates))
    console = progress_console()
    with NotebookBoard() if console.is_jupyter else ProbeBoard(console) as board:
        return Recommendation.of(run_tuning(request, board, accumulates=accumulates))


def tuning_request(
    spec: WorkloadSpec | CommandSpec | Mapping[str, Any],
    effective_batch_size: int,
    memory_limit: int | str | None,
    fields: Mapping[str, Any],
) -> TuningRequest:
    """The request of a tuning.

    Raises:
        SpecError: naming every wrong argument.
    """
    if memory_limit is not None and "memory_limit_bytes" in fields:
        raise SpecError([FieldProblem("memory_limit_bytes", "is given twice: leave out memory_limit")], "arguments")
    if isinstance(effective_batch_size, bool):
        raise SpecError(
            [FieldProblem("effective_batch_size", "must be a whole number", str(effective_batch_size))], "arguments"
        )
    limit = {} if memory_limit is None else {"memory_limit_bytes": memory_limit}
    data = {**fields, **limit, "spec": spec, "effective_batch_size": effective_batch_size}
    try:
        request = parse_document(TuningRequest, data, "arguments")
    except SpecError as error:
        if not limit:
            raise
        problems = [
            replace(problem, field="memory_limit") if problem.field == "memory_limit_bytes" else problem
            for problem in error.problems
        ]
        raise SpecError(problems, "arguments") from None
    if isinstance(request.spec, CommandSpec):
        return request
    return request.model_copy(update={"spec": with_pretrained_config(request.spec)})
