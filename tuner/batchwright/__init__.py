"""Find the largest micro-batch that fits, plan the effective batch around it, and accumulate exactly.

The names in `__all__` are the public interface; modules behind them may change at any release. Importing the package
imports neither torch nor the service::

    import batchwright

    recommendation = batchwright.find_batch_size(build_model, make_batch, loss, effective_batch_size=512)
    accumulation = batchwright.GradientAccumulation(model, optimizer, plan=recommendation)
    for batch in loader:  # of 512 samples, which `update` divides into the plan's micro-batches
        accumulation.update([batch], loss)

The package is the library and the command line. It works without the service, and never imports
``batchwright_service``. From top to bottom, each package imports only packages below it:

- ``client``: the SDK, and the documents that it shares with the service. ``integrations``: callbacks of the trainers of
  transformers and Lightning.
- ``library``: what ``import batchwright`` offers to a script or a notebook.
- ``cli``: the command `batchwright`. It parses arguments, calls one function, and prints the result.
- ``driving``: the loop of a tuning, from its request to its recommendation.
- ``probing``: measured trials, each in a process of its own, under a memory limit.
- ``estimation``: the memory curve of a workload without a GPU, from traces and a simulated allocator.
- ``training``: exact gradient accumulation, the training loop, checkpoints, and the processes of a run. ``exports``: a
  recommendation as configuration of a framework or a launcher. ``plots``: the plot of a tuning.
- ``hardware``: memory devices, the table of GPUs, and the classification of out-of-memory errors. ``planning``: the
  search, the plan and the recommendation, as pure functions of recorded results. ``workloads``: a spec as a model, a
  worst-case batch and named loss terms.
- ``schemas``: the pydantic documents that cross a boundary. ``system``: files, processes and host failures.
- ``errors``, ``units``, ``html_view``, ``suggestions``, ``arithmetic`` and ``yaml_loader``: the tree of errors, byte
  sizes as text, documents in a notebook, hints for misspelt names, expressions in placeholders, and YAML whose `1e-5`
  is a number.
  ``torch_internals``: the private names of torch in use, each with its reason.

A tuning goes through them in this order: a request (``schemas``) becomes a session (``planning.session``), which names
the next probe; ``driving.loop`` runs one after the other. A supervisor (``probing.supervisor``) has a probe run two
updates of the workload with the engine that trains (``training.update_engine``). The results end in a recommendation,
which ``training`` and ``exports`` take.

A new concept gets a package here only if none of these owns it. The order is a contract in `pyproject.toml`.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchwright.client import (
        ApiError as ApiError,
        AsyncClient as AsyncClient,
        Client as Client,
        ClientError as ClientError,
        ConflictError as ConflictError,
        ConnectionFailedError as ConnectionFailedError,
        InvalidRequestError as InvalidRequestError,
        NotAllowedError as NotAllowedError,
        NotAuthenticatedError as NotAuthenticatedError,
        NotFoundError as NotFoundError,
        QuotaExceededError as QuotaExceededError,
        ServiceUnavailableError as ServiceUnavailableError,
        TuningFailedError as TuningFailedError,
        UnexpectedResponseError as UnexpectedResponseError,
        WaitTimeoutError as WaitTimeoutError,
    )
    from batchwright.client.documents.exports import ExportRequest as ExportRequest
    from batchwright.exports.base import ExportOptions as ExportOptions
    from batchwright.library.find_batch_size import (
        find_batch_size as find_batch_size,
        with_batch_size as with_batch_size,
    )
    from batchwright.library.recommendation import Recommendation as Recommendation
    from batchwright.library.tuning import estimate as estimate, plan as plan, tune as tune
    from batchwright.schemas.base import load_document as load_document
    from batchwright.schemas.dataset.batch_spec import BatchSpec as BatchSpec
    from batchwright.schemas.optimizer import (
        OptimizerSpec as OptimizerSpec,
        ParameterGroup as ParameterGroup,
        ScheduleSpec as ScheduleSpec,
    )
    from batchwright.schemas.plans import Plan as Plan
    from batchwright.schemas.requests import TrainingRequest as TrainingRequest, TuningRequest as TuningRequest
    from batchwright.schemas.workload import (
        Gpt as Gpt,
        Mlp as Mlp,
        ParallelismSpec as ParallelismSpec,
        PythonModel as PythonModel,
        ReferenceModel as ReferenceModel,
        ResNet as ResNet,
        TransformersModel as TransformersModel,
        WorkloadSpec as WorkloadSpec,
        load_spec as load_spec,
        parse_spec as parse_spec,
    )
    from batchwright.training.accumulation.collectives import (
        ProcessGroup as ProcessGroup,
        join_ranks as join_ranks,
        local_rank as local_rank,
    )
    from batchwright.training.accumulation.engine import GradientAccumulation as GradientAccumulation
    from batchwright.training.batch_schedule import BatchSchedule as BatchSchedule, Position as Position
    from batchwright.training.micro_batches.splitting import MicroBatch as MicroBatch, windows as windows
    from batchwright.training.optimizers import build_optimizer as build_optimizer, build_schedule as build_schedule

_MODULES = {
    "batchwright.client": (
        "ApiError",
        "AsyncClient",
        "Client",
        "ClientError",
        "ConflictError",
        "ConnectionFailedError",
        "InvalidRequestError",
        "NotAllowedError",
        "NotAuthenticatedError",
        "NotFoundError",
        "QuotaExceededError",
        "ServiceUnavailableError",
        "TuningFailedError",
        "UnexpectedResponseError",
        "WaitTimeoutError",
    ),
    "batchwright.client.documents.exports": ("ExportRequest",),
    "batchwright.exports.base": ("ExportOptions",),
    "batchwright.library.find_batch_size": ("find_batch_size", "with_batch_size"),
    "batchwright.library.recommendation": ("Recommendation",),
    "batchwright.library.tuning": ("estimate", "plan", "tune"),
    "batchwright.schemas.base": ("load_document",),
    "batchwright.schemas.dataset.batch_spec": ("BatchSpec",),
    "batchwright.schemas.optimizer": ("OptimizerSpec", "ParameterGroup", "ScheduleSpec"),
    "batchwright.schemas.plans": ("Plan",),
    "batchwright.schemas.requests": ("TrainingRequest", "TuningRequest"),
    "batchwright.schemas.workload": (
        "Gpt",
        "Mlp",
        "ParallelismSpec",
        "PythonModel",
        "ReferenceModel",
        "ResNet",
        "TransformersModel",
        "WorkloadSpec",
        "load_spec",
        "parse_spec",
    ),
    "batchwright.training.accumulation.collectives": ("ProcessGroup", "join_ranks", "local_rank"),
    "batchwright.training.accumulation.engine": ("GradientAccumulation",),
    "batchwright.training.batch_schedule": ("BatchSchedule", "Position"),
    "batchwright.training.micro_batches.splitting": ("MicroBatch", "windows"),
    "batchwright.training.optimizers": ("build_optimizer", "build_schedule"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_MODULE_OF, "__version__", "errors", "integrations"]  # noqa: PLE0604 - names of the table


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is public
    """Import a public name at its first use."""
    if name == "__version__":
        return metadata.version("batchwright")
    if name in ("errors", "integrations"):
        return import_module(f"batchwright.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'batchwright' has no public name {name!r}; it has {', '.join(sorted(__all__))}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
