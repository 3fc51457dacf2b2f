"""Build validated requests from the arguments of commands, before any work; a ``SpecError`` names the wrong options."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from batchwright.cli.options import NameOptions, TrainingOptions, TuningOptions
from batchwright.errors import EstimateError, FieldProblem, SpecError, StorageError
from batchwright.hardware.gpu_lookup import find_gpu
from batchwright.hardware.gpu_table import GPUS
from batchwright.schemas.base import Document, parse_document
from batchwright.schemas.command import CommandSpec, load_any_spec
from batchwright.schemas.estimates import EstimateRequest
from batchwright.schemas.field_errors import problems_in
from batchwright.schemas.requests import Named, TrainingRequest, TuningRequest
from batchwright.schemas.workload import LARGEST_WORLD_SIZE, WorkloadSpec, load_spec
from batchwright.system.files import check_writable
from batchwright.workloads.pretrained.folder_config import with_pretrained_config

RequestT = TypeVar("RequestT", bound=Document)
SpecT = TypeVar("SpecT", WorkloadSpec, CommandSpec, WorkloadSpec | CommandSpec)

_ANY_FILE = "batchwright"
"""Name of a file whose writing is tried in an output folder."""
_OPTIONS = {
    "gpus": "--gpu",
    "labels": "--label",
    "hardware": "--gpu",
    "hardware.gpu": "--gpu",
    "hardware.min_memory_bytes": "--min-memory",
    "memory_limit_bytes": "--memory-limit",
    "probe_timeout_seconds": "--probe-timeout",
    "min_memory_bytes": "--min-memory",
    "processes_per_node": "--nproc-per-node",
    "timeout_seconds": "--timeout",
    "trackers": "--tracker",
}
"""Options whose names differ from those of their fields, by field."""


def tuning_request(spec: Path | Mapping[str, object] | None, tuning: TuningOptions, **fields: object) -> TuningRequest:
    """The request of the ``tune`` and ``run`` commands, for a file or the spec of a command, with more ``fields``."""
    loaded = read_spec(spec) if isinstance(spec, Path) else parse_document(CommandSpec, dict(spec or {}), "command")
    given = {name: value for name, value in vars(tuning).items() if name in TuningRequest.model_fields}
    given |= {"spec": _with_world_size(loaded, tuning.world_size), "baseline": baseline(tuning.baseline_plan)}
    given |= {"memory_limit_bytes": tuning.memory_limit, "probe_timeout_seconds": tuning.probe_timeout}
    if tuning.gpu is not None or tuning.min_memory is not None:
        given["hardware"] = {"gpu": tuning.gpu, "min_memory_bytes": tuning.min_memory}
    return _checked(TuningRequest, given | fields)


def read_spec(path: Path) -> WorkloadSpec | CommandSpec:
    """Read the spec of a workload, with the config of its pretrained model, or of a command."""
    spec = load_any_spec(path)
    return spec if isinstance(spec, CommandSpec) else with_pretrained_config(spec)


def baseline(text: str | None) -> dict[str, object] | None:
    """The baseline of a request, from the option: a size, or ``8x16`` for 16 steps of 8; None if it is not given."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text)
    if found is None:
        message = "must be a micro-batch size, such as `8`, or a size and accumulation steps, such as `8x16`"
        raise wrong_argument("--baseline", message, text)
    return {"micro_batch_size": int(found[1]), "accumulation_steps": int(found[2]) if found[2] else None}


def named(given: NameOptions) -> Named:
    """The names of a tuning or job; each label is a text ``key=value``."""
    return _checked(Named, {"name": given.name, "project": given.project, "labels": labels_of(given.label)})


def labels_of(texts: Sequence[str] | None) -> dict[str, str]:
    """The labels of texts ``key=value``."""
    pairs = [text.partition("=") for text in texts or ()]
    if without := [key for key, sign, _ in pairs if not sign]:
        raise wrong_argument("--label", "must be a key and a value, for example `team=vision`", without[0])
    return {key: value for key, _, value in pairs}


def training_request(training: TrainingOptions) -> TrainingRequest:
    """The request of the ``train`` and ``run`` commands."""
    given = {name: value for name, value in vars(training).items() if name in TrainingRequest.model_fields}
    given |= {"processes_per_node": training.nproc_per_node, "trackers": tuple(training.tracker or ())}
    return _checked(TrainingRequest, given)


def estimate_request(
    *, spec: Path, world_size: int | None, gpus: Sequence[str], all_gpus: bool, **fields: object
) -> EstimateRequest:
    """The request of the ``estimate`` command."""
    if all_gpus == bool(gpus):
        message = "give either --gpu, once or several times, or --all-gpus; `batchwright gpus` lists the names"
        raise wrong_argument("--gpu", message, ", ".join(gpus))
    try:
        names = [gpu.name for gpu in GPUS] if all_gpus else [find_gpu(name).name for name in gpus]
    except (EstimateError, ValueError) as error:  # ValueError for a memory size that is not a number
        raise wrong_argument("--gpu", str(error), "") from None
    workload = _with_world_size(with_pretrained_config(load_spec(spec)), world_size)
    return _checked(EstimateRequest, {"spec": workload, "gpus": names, **fields})


def _with_world_size(spec: SpecT, world_size: int | None) -> SpecT:
    if world_size is not None and world_size > LARGEST_WORLD_SIZE:
        raise wrong_argument("--world-size", f"must be at most {LARGEST_WORLD_SIZE}", world_size)
    return spec if world_size is None else spec.with_world_size(world_size)


def _checked(kind: type[RequestT], fields: dict[str, object]) -> RequestT:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise SpecError(
            [_naming_option(problem) for problem in problems_in(error, fields, kind)], "arguments"
        ) from None


def option_of(field: str) -> str:
    """The option that sets a field of a request."""
    return _OPTIONS.get(field, "--" + field.replace("_", "-"))


def with_options(message: str) -> str:
    """Replace the fields of a request in a message, each between backticks, by their options."""
    return re.sub(r"`(\w+)`", lambda found: f"`{option_of(found[1])}`", message)


@contextmanager
def naming_options(**typed: object) -> Iterator[None]:
    """Replace fields by options, and values by the typed text, by field, in errors about a request."""
    try:
        yield
    except SpecError as error:
        if error.document != "request":
            raise
        as_typed = [
            replace(problem, value=repr(typed[problem.field])) if problem.field in typed else problem
            for problem in error.problems
        ]
        problems = [_naming_option(problem) for problem in as_typed]
        raise SpecError(problems, "arguments") from None


def _naming_option(problem: FieldProblem) -> FieldProblem:
    """Replace the field of a problem by the option."""
    if problem.field == "(document)":
        return FieldProblem("", with_options(problem.message), problem.value)
    if problem.field in _OPTIONS:
        return FieldProblem(_OPTIONS[problem.field], with_options(problem.message), problem.value)
    name, dot, rest = problem.field.partition(".")
    return problem if name == "spec" else FieldProblem(f"{option_of(name)}{dot}{rest}", problem.message, problem.value)


def check_file(path: Path) -> None:
    """Check before any work that the file of ``--output`` can be written."""
    _check(path.is_dir, "--output", path)
    if path.is_dir():
        raise wrong_argument("--output", "is a folder: name a file in it", path)
    if not path.parent.exists():
        raise wrong_argument("--output", f"the folder {path.parent} does not exist: create it first", path)
    if path.is_file() or not path.exists():  # nothing is made beside a device or a pipe
        _check(lambda: check_writable(target_of(path)), "--output", path)


def target_of(path: Path) -> Path:
    """The file of ``--output``, of a link that which it names: the link stays, such as /dev/stdout."""
    return path.resolve() if path.is_file() else path


def check_folder(directory: Path, option: str) -> None:
    """Check before any work that files can be created in ``directory``, which need not exist yet."""
    _check(lambda: check_writable(directory / _ANY_FILE), option, directory)


def _check(attempt: Callable[[], object], option: str, path: Path) -> None:
    """Run ``attempt`` and translate its errors."""
    try:
        attempt()
    except StorageError as error:
        raise wrong_argument(option, unwritable(path, error), path) from None
    except OSError as error:
        raise wrong_argument(option, f"cannot be written: {_refusal(error, path)}", path) from None


def unwritable(path: Path, error: OSError) -> str:
    """The path that cannot be written and the system's reason, which a ``StorageError`` has in its words."""
    return str(error) if isinstance(error, StorageError) else f"{path} cannot be written: {error.strerror or error}"


def _refusal(error: OSError, path: Path) -> str:
    """The system's reason, with the path inside ``path`` that caused the error."""
    failed = error.filename
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{failed} is not a folder"
    reason = (error.strerror or str(error)).lower()
    return reason if failed is None or not path.is_relative_to(str(failed)) else f"{reason}: {failed}"


def wrong_argument(option: str, message: str, value: object) -> SpecError:
    """Build the error of one option."""
    return SpecError([FieldProblem(option, message, str(value))], "arguments")
