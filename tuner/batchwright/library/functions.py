"""Functions of one's own as a workload, in the processes of the probes."""

import hashlib
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from batchwright.errors import WorkloadError
from batchwright.library.process_state import restore_state
from batchwright.training.micro_batches.nested_batches import entries_of, item_count, tensors_of
from batchwright.training.micro_batches.splitting import CountSamples, MicroBatch, made_micro_batch
from batchwright.workloads.base import Batch, Loss


@dataclass(frozen=True)
class Functions:
    """The functions of a workload, as ``find_batch_size`` takes them. See there for what each returns."""

    build_model: Callable[[], nn.Module] | nn.Module
    make_batch: Callable[[int], Batch | MicroBatch]
    loss: Callable[[nn.Module, Batch], Loss]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    samples: CountSamples | None = None


class FunctionWorkload:
    """A workload made of functions. A ``batchwright.workloads.base.Workload``."""

    keeps_modes = True

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def build_model(self) -> nn.Module:
        """Call the function, or take the given model, of which each process has a copy of its own."""
        build = self._functions.build_model
        return build if isinstance(build, nn.Module) else build()

    def make_batch(self, size: int) -> Batch:
        """Call the function.

        Raises:
            WorkloadError: when it makes the same batch for another size, so that a probe would prove nothing.
        """
        batch = self._functions.make_batch(size)
        if isinstance(batch, MicroBatch):
            return batch.batch
        if (shapes := _shapes(batch)) and not any(size in shape for shape in shapes):
            other = 1 if size > 1 else 2
            if _shapes(self._functions.make_batch(other)) == shapes:
                raise WorkloadError(
                    f"make_batch({size}) and make_batch({other}) return tensors of the same shapes "
                    f"({', '.join(map(str, shapes))}): make a batch of as many samples as the argument says"
                )
        return batch

    def make_micro_batch(self, size: int) -> MicroBatch:
        """Call the function, and once more if the division of its batch is to be found.

        Raises:
            WorkloadError: when the batch has another number of samples.
        """
        return made_micro_batch(self._functions.make_batch, size, self._functions.samples)

    def loss_terms(self, model: nn.Module, batch: Batch) -> Loss:
        """Call the function."""
        return self._functions.loss(model, batch)


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    """The shapes of the tensors of a batch, and the numbers of items of its lists."""
    lists = [(count,) for value in (batch, *(one for _, one in entries_of(batch))) if (count := item_count(value))]
    return [*lists, *(tuple(tensor.shape) for tensor in tensors_of(batch) if not tensor.is_nested)]


class OptimizingFunctionWorkload(FunctionWorkload):
    """A workload that builds its own optimizer. A ``batchwright.workloads.base.BuildsOptimizer``."""

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Call the function.

        Raises:
            WorkloadError: when it returns no optimizer of these parameters.
        """
        build, parameters = self._functions.optimizer, list(parameters)
        optimizer = None if build is None else build(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise WorkloadError(f"optimizer(parameters) must return a torch optimizer, not {type(optimizer).__name__}")
        given = {id(parameter) for parameter in parameters}
        if not given >= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}:
            raise WorkloadError("optimizer(parameters) must return an optimizer of the parameters it is given")
        return optimizer


def load_functions(file: str, sha256: str) -> FunctionWorkload:
    """Load the workload that ``find_batch_size`` has pickled.

    Args:
        file: path of the file, of this user alone.
        sha256: digest of its content, which makes it part of the tuning's fingerprint.

    Raises:
        WorkloadError: when the file has another content, or its functions cannot be loaded here.
        SpecError: when they use a value of their program that cannot be made here, naming it.
    """
    try:
        with Path(file).open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != sha256:
                raise WorkloadError(f"{file} has changed since the tuning began")
            opened.seek(0)
            restore_state(opened)
            functions = Functions(**pickle.load(opened))  # noqa: S301 - written by the parent process, as the digest shows
    except FileNotFoundError:
        raise WorkloadError(
            "the functions of find_batch_size exist only during its tuning: train with "
            "batchwright.GradientAccumulation, or write them as a `python` target"
        ) from None
    except (ImportError, AttributeError) as error:
        raise WorkloadError(f"the functions cannot be imported in a process of their own: {error}") from error
    return FunctionWorkload(functions) if functions.optimizer is None else OptimizingFunctionWorkload(functions)
