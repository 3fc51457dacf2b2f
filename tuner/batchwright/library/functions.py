"""Functions of one's own as a workload, in the processes of the probes."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from batchwright.errors import WorkloadError
from batchwright.training.micro_batches.splitting import sample_count, tensors_of
from batchwright.workloads.base import Batch, LossTerms

Loss: TypeAlias = Tensor | tuple[Tensor, "Tensor | float"] | LossTerms
"""A loss: its mean over the samples of a batch, or its sum and the sum's weight, or several such pairs by name."""


@dataclass(frozen=True)
class Functions:
    """The functions of a workload, as ``find_batch_size`` takes them. See there for what each returns."""

    build_model: Callable[[], nn.Module] | nn.Module
    make_batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Loss]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None


class FunctionWorkload:
    """A workload made of functions. A ``batchwright.workloads.base.Workload``."""

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
        if (shapes := _shapes(batch)) and all(not shape or shape[0] != size for shape in shapes):
            other = 1 if size > 1 else 2
            if _shapes(self._functions.make_batch(other)) == shapes:
                raise WorkloadError(
                    f"make_batch({size}) and make_batch({other}) return tensors of the same shapes "
                    f"({', '.join(map(str, shapes))}): make a batch of as many samples as the argument says"
                )
        return batch

    def loss_terms(self, model: nn.Module, batch: Batch) -> LossTerms:
        """Call the function. A single tensor is the mean over the samples, which makes their number its weight.

        Raises:
            WorkloadError: when the function returns something else, or one value for each sample.
        """
        loss = self._functions.loss(model, batch)
        match loss:
            case Tensor():
                if loss.dim():  # one value for each sample, which a batch of one sample would hide
                    raise WorkloadError(
                        f"loss(model, batch) returned a tensor of shape {tuple(loss.shape)}: return a scalar, such as "
                        "its mean over the samples, or (loss_sum, weight)"
                    )
                samples = sample_count(batch)
                return {"loss": (loss * samples, samples)}
            case Mapping():
                return loss
            case (Tensor() as loss_sum, weight):
                return {"loss": (loss_sum, weight)}
        raise WorkloadError(
            "loss(model, batch) must return the mean loss, or (loss_sum, weight), or a dict of such pairs by name, "
            f"not {type(loss).__name__}"
        )


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


class OptimizingFunctionWorkload(FunctionWorkload):
    """A workload that builds its own optimizer. A ``batchwright.workloads.base.BuildsOptimizer``."""

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Call the function.

        Raises:
            WorkloadError: when it returns no optimizer.
        """
        build = self._functions.optimizer
        optimizer = None if build is None else build(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise WorkloadError(f"optimizer(parameters) must return a torch optimizer, not {type(optimizer).__name__}")
        return optimizer


def load_functions(file: str, sha256: str) -> FunctionWorkload:
    """Load the workload that ``find_batch_size`` has pickled.

    Args:
        file: path of the file, of this user alone.
        sha256: digest of its content, which makes it part of the tuning's fingerprint.

    Raises:
        WorkloadError: when the file has another content, or its functions cannot be loaded here.
    """
    try:
        with Path(file).open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != sha256:
                raise WorkloadError(f"{file} has another content than when the tuning began")
            opened.seek(0)
            folders = pickle.load(opened)  # noqa: S301 - written by the parent process, as the digest shows
            sys.path.extend(entry for entry in folders if entry not in sys.path)
            functions = Functions(**pickle.load(opened))  # noqa: S301 - as above
    except FileNotFoundError:
        raise WorkloadError(
            "the functions of find_batch_size are there only during its tuning: train with "
            "batchwright.GradientAccumulation, or write them as a `python` target"
        ) from None
    except ImportError as error:
        raise WorkloadError(f"the functions cannot be imported in a process of their own: {error}") from error
    return FunctionWorkload(functions) if functions.optimizer is None else OptimizingFunctionWorkload(functions)
