"""From a command's arguments to checked requests, before any work is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from tuner.errors import EstimateError, FieldProblem, SpecError
from tuner.hardware.gpu_lookup import find_gpu
from tuner.hardware.gpu_table import GPUS
from tuner.schemas.base import Document
from tuner.schemas.estimates import EstimateRequest
from tuner.schemas.field_errors import problems_in
from tuner.schemas.requests import TrainingRequest, TuningRequest
from tuner.schemas.workload import LARGEST_WORLD_SIZE, WorkloadSpec, load_spec
from tuner.system.files import check_writable

RequestT = TypeVar("RequestT", bound=Document)

_ANY_FILE = "batchwright"
"""Name of a file that is tried in an output folder."""
_OPTIONS = {
    "gpus": "--gpu",
    "memory_limit_bytes": "--memory-limit",
    "probe_timeout_seconds": "--probe-timeout",
    "processes_per_node": "--nproc-per-node",
    "timeout_seconds": "--timeout",
}
"""Options that are not named as their fields."""


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
    if world_size is not None and world_size > LARGEST_WORLD_SIZE:
        raise wrong_argument("--world-size", f"must be at most {LARGEST_WORLD_SIZE}", world_size)
    return workload if world_size is None else workload.with_world_size(world_size)


def _checked(kind: type[RequestT], fields: dict[str, object]) -> RequestT:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise SpecError([_of_option(it) for it in problems_in(error, fields, kind)], "arguments") from None


def option_of(field: str) -> str:
    """The option that sets a field of a request."""
    return _OPTIONS.get(field, "--" + field.replace("_", "-"))


@contextmanager
def naming_options(**typed: object) -> Iterator[None]:
    """Have errors about a request that is checked later name the options, and the values as they were typed.

    Args:
        typed: values by the names of the request's fields.
    """
    try:
        yield
    except SpecError as error:
        if error.document != "request":
            raise
        given = [replace(it, value=repr(typed[it.field])) if it.field in typed else it for it in error.problems]
        raise SpecError([_of_option(it) for it in given], "arguments") from None


def _of_option(problem: FieldProblem) -> FieldProblem:
    """A problem of a request in the words of the command: the option in place of the field."""
    if problem.field == "(document)":
        message = re.sub(r"`(\w+)`", lambda found: f"`{option_of(found[1])}`", problem.message)
        return FieldProblem("options", message, problem.value)
    name, dot, rest = problem.field.partition(".")
    return problem if name == "spec" else FieldProblem(f"{option_of(name)}{dot}{rest}", problem.message, problem.value)


def check_file(path: Path) -> None:
    """Before hours of work: that ``--output`` can be written.

    Raises:
        SpecError: when it is a folder, or no file of that name can be made.
    """
    _check(path.is_dir, "--output", path)
    if path.is_dir():
        raise wrong_argument("--output", "is a folder: name a file in it", path)
    _check(lambda: check_writable(path), "--output", path)


def check_folder(directory: Path, option: str) -> None:
    """Before hours of work: that files can be made in ``directory``, which need not exist yet.

    Raises:
        SpecError: naming the option.
    """
    _check(lambda: check_writable(directory / _ANY_FILE), option, directory)


def _check(attempt: Callable[[], object], option: str, path: Path) -> None:
    """Make an attempt at a path.

    Raises:
        SpecError: naming the option, when the system refuses.
    """
    try:
        attempt()
    except OSError as error:
        raise wrong_argument(option, f"cannot be written: {_refusal(error, path)}", path) from None


def _refusal(error: OSError, path: Path) -> str:
    """The system's reason, with the place where that is another one than the user named."""
    place = error.filename
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{place} is not a folder"
    reason = (error.strerror or str(error)).lower()
    return reason if place is None or not path.is_relative_to(str(place)) else f"{reason}: {place}"


def wrong_argument(option: str, message: str, value: object) -> SpecError:
    """The error of one option."""
    return SpecError([FieldProblem(option, message, str(value))], "arguments")
