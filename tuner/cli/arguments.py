"""From a command's arguments to checked requests, before any work is done."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from tuner.catalogue import GPUS, find_gpu
from tuner.documents import Document, field_problems
from tuner.errors import EstimateError, FieldProblem, SpecError
from tuner.estimates import EstimateRequest
from tuner.requests import TrainingRequest, TuningRequest
from tuner.specs import WorkloadSpec, load_spec

RequestT = TypeVar("RequestT", bound=Document)


def tuning_request(*, spec: Path, world_size: int | None, **fields: object) -> TuningRequest:
    """The request of the ``tune`` and ``run`` commands.

    Raises:
        SpecError: naming every field at fault.
    """
    return _checked(TuningRequest, {"spec": _workload(spec, world_size), **fields})


def training_request(**fields: object) -> TrainingRequest:
    """The request of the ``train`` and ``run`` commands.

    Raises:
        SpecError: naming every field at fault.
    """
    return _checked(TrainingRequest, fields)


def estimate_request(
    *, spec: Path, world_size: int | None, gpus: Sequence[str], all_gpus: bool, **fields: object
) -> EstimateRequest:
    """The request of the ``estimate`` command.

    Raises:
        SpecError: naming every field at fault.
    """
    names = _names_of_gpus(gpus, all_gpus=all_gpus)
    return _checked(EstimateRequest, {"spec": _workload(spec, world_size), "gpus": names, **fields})


def _names_of_gpus(gpus: Sequence[str], *, all_gpus: bool) -> tuple[str, ...]:
    if all_gpus == bool(gpus):
        message = "give either --gpu, as often as you like, or --all-gpus; `batchwright gpus` lists the names"
        raise wrong_argument("--gpu", message, ", ".join(gpus))
    try:
        return tuple(gpu.name for gpu in GPUS) if all_gpus else tuple(find_gpu(name).name for name in gpus)
    except (EstimateError, ValueError) as error:  # the latter for a memory beyond all numbers
        raise wrong_argument("--gpu", str(error), "") from None


def _workload(spec: Path, world_size: int | None) -> WorkloadSpec:
    workload = load_spec(spec)
    return workload if world_size is None else workload.with_world_size(world_size)


def _checked(kind: type[RequestT], fields: dict[str, object]) -> RequestT:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise SpecError(field_problems(error, fields), "request") from None


def check_file(path: Path) -> None:
    """Before hours of work: that ``--output`` can be written.

    Raises:
        SpecError: when it is a folder, or its folder cannot be written to.
    """
    if path.is_dir():
        raise wrong_argument("--output", "is a folder: name a file in it", path)
    check_folder(path.parent, "--output")


def check_folder(directory: Path, option: str) -> None:
    """Before hours of work: that files can be made in ``directory``, which need not exist yet.

    Raises:
        SpecError: naming the option.
    """
    there = next((it for it in (directory, *directory.parents) if it.exists()), directory)
    if not there.is_dir():
        raise wrong_argument(option, "is no folder", there)
    if not os.access(there, os.W_OK | os.X_OK):
        raise wrong_argument(option, "is a folder that may not be written to", there)


def wrong_argument(option: str, message: str, value: object) -> SpecError:
    """The error of one option."""
    return SpecError([FieldProblem(option, message, str(value))], "arguments")
