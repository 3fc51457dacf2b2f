"""Find the largest micro-batch of functions of one's own, in a script or a notebook cell. No torch."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial, update_wrapper
from inspect import signature
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchwright.errors import FieldProblem, SpecError, TuningFailedError
from batchwright.exports.advice import OWN_OPTIMIZER
from batchwright.library.recommendation import Recommendation
from batchwright.library.tuning import run_request, tuning_request
from batchwright.planning.objectives.by_name import objective_of
from batchwright.schemas.optimizer import OptimizerSpec
from batchwright.schemas.recommendation import Advice
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.workload import Precision, WorkloadSpec
from batchwright.system.files import atomic_writer
from batchwright.system.temporary_folders import TemporaryFolder

if TYPE_CHECKING:
    import torch
    from torch import nn

    from batchwright.training.micro_batches.splitting import MicroBatch
    from batchwright.workloads.base import Batch, Loss

T = TypeVar("T")

LARGEST_UNPLANNED_SAMPLES = 65_536
"""Bound of the search for the largest batch, where no effective batch bounds it."""
_CALLS = {
    "build_model": "build_model()",
    "make_batch": "make_batch(samples)",
    "loss": "loss(model, batch)",
    "optimizer": "optimizer(parameters)",
    "samples": "samples(batch)",
    "train": "train(recommendation)",
}
"""How each function is called, for a message."""
_SHOWN_LENGTH = 80
_TARGET = "batchwright.library.functions:load_functions"


def find_batch_size(  # noqa: PLR0913 - the functions of a workload, and what the user decides
    build_model: Callable[[], nn.Module] | nn.Module,
    make_batch: Callable[[int], Batch | MicroBatch],
    loss: Callable[[nn.Module, Batch], Loss],
    *,
    effective_batch_size: int | None = None,
    device: str | None = None,
    memory_limit: int | str | None = None,
    optimizer: str | OptimizerSpec | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = "adamw",
    precision: Precision = "fp32",
    samples: Callable[[Batch], int] | None = None,
    progress: bool = True,
    **fields: Any,  # noqa: ANN401 - fields of a TuningRequest, which checks them
) -> Recommendation:
    """Find the largest micro-batch that fits by running real updates, and plan the effective batch around it.

    The functions run in processes of their own, one for each probe, so that nothing of them stays on the device. They
    are pickled by value: lambdas, closures, and classes of a script or a notebook work. Modules are imported again; on
    the CPU, the memory of these imports counts. The processes have the settings of torch, the replaced methods of torch
    and other libraries, and what the program has changed in the user's modules that the functions use.

    Args:
        build_model: builds the model, on the CPU; or a model on the CPU, of which each probe gets a copy. Modules stay
            in their modes, so that a BatchNorm in eval mode keeps its statistics.
        make_batch: makes a batch of so many samples, on the CPU, each as large as the largest of training. A batch of
            one more sample shows which dimensions and lists hold the samples; or it returns a ``MicroBatch``, which
            says how it is divided.
        loss: computes the loss of a batch: ``(loss_sum, weight)``, where ``weight`` is the number of samples or tokens
            that ``loss_sum`` was summed over; or such pairs by name; or the mean over the batch's samples.
        effective_batch_size: samples of one optimizer update. Without it the effective batch is the largest micro-batch
            that fits, of at most ``max_micro_batch_size`` samples (65,536 if left out). That batch is not divided, so
            that its loss need not be a sum over samples.
        device: ``cuda:0`` or ``cpu``; the first GPU, else the CPU, when left out.
        memory_limit: bytes, or a size such as ``"24GiB"``; when left out, the device's memory, of the CPU's one half.
        optimizer: name or ``OptimizerSpec``; or a function of the parameters, such as ``torch.optim.RMSprop``.
        precision: ``fp32``, ``bf16-mixed``, ``fp16-mixed`` or ``bf16``.
        samples: returns the number of samples of a batch, and of any part of one, if that cannot be seen.
        progress: whether to show the probes as they end, on standard error.
        fields: further fields of ``TuningRequest``, such as ``memory_margin`` or ``objective``, and of
            ``WorkloadSpec``, such as ``gradient_clipping`` or ``compile``.

    Raises:
        SpecError: when an argument is wrong, naming it, a function cannot be pickled, or a variable of a module was
            changed and cannot be copied, naming it.
        DeviceError, PlanError: before any probe.
        StorageError: when the disk for temporary files is full.
        TuningFailedError: when a function of the user raised, whose traceback is its note, or the loss couples samples.
    """
    problems = [FieldProblem(name, "is made of the functions") for name in ("model", "spec") if name in fields]
    if problems:
        raise SpecError(problems, "arguments")
    own = None if isinstance(optimizer, (str, OptimizerSpec)) else optimizer
    functions = {
        "build_model": build_model,
        "make_batch": make_batch,
        "loss": loss,
        "optimizer": own,
        "samples": samples,
    }
    _require_functions(functions)
    accumulates = effective_batch_size is not None
    bound = fields.get("max_micro_batch_size") or LARGEST_UNPLANNED_SAMPLES
    requested = bound if effective_batch_size is None else effective_batch_size
    spec_fields = {name: fields.pop(name) for name in list(fields) if name in WorkloadSpec.model_fields}
    if own is None:
        spec_fields["optimizer"] = {"name": optimizer} if isinstance(optimizer, str) else optimizer
    with _pickled(functions) as (arguments, unknown):
        model = {"kind": "python", "target": _TARGET, "arguments": arguments}
        spec = {"model": model, "precision": precision, **spec_fields}
        request = tuning_request(spec, requested, memory_limit, {"device": device, **fields})
        if not accumulates:
            _require_one_micro_batch(request)
        found = run_request(request, progress=progress, accumulates=accumulates)
    warnings = (*unknown, OWN_OPTIMIZER) if own else unknown
    return found.model_copy(update={"warnings": (*found.warnings, *warnings)}) if warnings else found


def with_batch_size(
    *functions: Any,  # noqa: ANN401 - the arguments of find_batch_size
    **options: Any,  # noqa: ANN401 - as above
) -> Callable[[Callable[..., T]], WithBatchSize[T]]:
    """Pass a training function the recommendation, found at its first call, as its first argument.

    For example::

        @with_batch_size(build_model, make_batch, loss, effective_batch_size=512)
        def train(recommendation, updates): ...

        train(updates=100)

    In a method the recommendation comes after ``self``. It is found once for each decorated function. The arguments and
    errors are those of ``find_batch_size``; where nothing fits, the function is not called.

    Raises:
        SpecError: when an argument of ``find_batch_size`` is missing, or what is decorated takes no recommendation.
        TuningFailedError: at the first call, also when no micro-batch fits.
    """
    try:
        signature(find_batch_size).bind(*functions, **options)
    except TypeError as error:
        message = f"takes the arguments of find_batch_size: {error}"
        raise SpecError([FieldProblem("with_batch_size", message)], "arguments") from None

    def decorate(train: Callable[..., T]) -> WithBatchSize[T]:
        _require_call("train", train, None)
        return WithBatchSize(train, functions, options)

    return decorate


class WithBatchSize(Generic[T]):
    """A function or method that is called with a recommendation, which its first call finds."""

    def __init__(self, train: Callable[..., T], functions: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self._train = train
        self._find = cache(partial(find_batch_size, *functions, **options))
        update_wrapper(self, train)

    def __call__(self, *args: Any, **kwargs: Any) -> T:  # noqa: ANN401 - those of the function
        """Call the function with the recommendation and the arguments."""
        return self._train(self._recommendation(), *args, **kwargs)

    def __get__(self, instance: object, _owner: type | None = None) -> Callable[..., T]:
        """As a method: the object comes before the recommendation."""
        if instance is None:
            return self
        return lambda *args, **kwargs: self._train(instance, self._recommendation(), *args, **kwargs)

    def _recommendation(self) -> Recommendation:
        found = self._find()
        if found.plan is None:
            name = getattr(self._train, "__qualname__", "the function")
            raise TuningFailedError("infeasible", f"{name} was not called: {found.infeasible_reason}")
        return found


def _require_one_micro_batch(request: TuningRequest) -> None:
    """Refuse what makes no sense without an effective batch: what is found is one micro-batch on one rank."""
    needing = {
        "objective": objective_of(request).is_of_plans,
        "what_if": request.what_if,
        "quick": request.quick,
        "baseline": request.baseline is not None,
        "uniform": request.uniform,
        "parallelism": request.spec.parallelism.world_size > 1,
    }
    named = next((name for name, needs in needing.items() if needs), None)
    if named is not None:
        raise SpecError([FieldProblem(named, "needs an effective_batch_size")], "arguments")


def _require_functions(functions: Mapping[str, object]) -> None:
    """Check the types before anything is pickled."""
    calls = {"build_model": (), "make_batch": (1,), "loss": (None, None), "optimizer": ((),), "samples": (None,)}
    for name, function in functions.items():
        is_model = name == "build_model" and hasattr(function, "named_parameters") and not isinstance(function, type)
        if not is_model and not (name in {"optimizer", "samples"} and function is None):
            _require_call(name, function, *calls[name])
    model = functions["build_model"]
    if hasattr(model, "named_parameters") and not isinstance(model, type):
        elsewhere = {str(parameter.device) for parameter in model.parameters()} - {"cpu"}  # type: ignore[attr-defined]
        if elsewhere:
            message = "is a model on a device: move it to the CPU, or give a function that builds it"
            raise SpecError([FieldProblem("build_model", message, ", ".join(sorted(elsewhere)))], "arguments")


def _require_call(name: str, function: object, *arguments: object) -> None:
    """Check that a function, an argument of the user, can be called with as many arguments."""
    if not callable(function):
        shown = shorten(f"{type(function).__name__} {function!r}", _SHOWN_LENGTH)
        raise SpecError([FieldProblem(name, "is not a function", shown)], "arguments")
    with suppress(ValueError):  # a function of C without a signature
        try:
            bind = signature(function).bind_partial if name == "train" else signature(function).bind
            bind(*arguments)
        except TypeError as error:
            message = f"is called as {_CALLS[name]}, which it does not accept: {error}"
            raise SpecError([FieldProblem(name, message)], "arguments") from None


@contextmanager
def _pickled(functions: Mapping[str, object]) -> Iterator[tuple[dict[str, str], tuple[Advice, ...]]]:
    """Write the functions to a file that only this user can read, for the time of a tuning.

    Yields the arguments of ``batchwright.library.functions.load_functions``, and warnings of what the functions use.
    """
    pickled, unknown = _pickle(functions)
    with TemporaryFolder() as folder:
        file = folder / "functions.pickle"
        with atomic_writer(file, len(pickled)) as opened:
            opened.write(pickled)
        del pickled  # may be as large as the model, and the block lasts as long as the tuning
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        yield {"file": str(file), "sha256": digest}, unknown


def _pickle(functions: Mapping[str, object]) -> tuple[bytes, tuple[Advice, ...]]:
    from batchwright.library.pickling import ModulePickler, examine  # noqa: PLC0415 - cloudpickle comes with torch
    from batchwright.library.process_state import write_state  # noqa: PLC0415 - as above

    written = io.BytesIO()
    try:
        unknown = write_state(written, *functions.values())
        ModulePickler(written).dump(dict(functions))
    except Exception:
        for name, function in functions.items():
            try:
                examine(function)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                message = f"cannot be sent to another process ({reason}): build it inside the function"
                raise SpecError([FieldProblem(name, message)], "arguments") from error
        raise
    return written.getvalue(), unknown
