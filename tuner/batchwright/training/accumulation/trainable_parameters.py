"""The parameters whose gradients a ``GradientAccumulation`` sums, and checks for gradients that it would miss."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from batchwright.errors import WorkloadError
from batchwright.torch_internals import own_parameters
from batchwright.training.fsdp import require_summed_gradients

_SHARDED_BY_WRAPPING = "FullyShardedDataParallel"
"""Class name of FSDP1. Importing the class takes longer than building most models."""


class TrainableParameters:
    """The trainable parameters of a model, then those that only its optimizer has (parameters of a loss).

    Args:
        model: on its device.
        optimizer: optimizer of the parameters.
        lock_step: whether the model reduces gradients in its own backward passes (FSDP).

    Attributes:
        parameters: the parameters that were trainable at construction.

    Raises:
        WorkloadError: when no parameter is trainable, or the model reduces its gradients itself without ``lock_step``.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, lock_step: bool) -> None:
        self._model = model
        self._optimizer = optimizer
        self._lock_step = lock_step
        candidates = (*model.parameters(), *self.of_optimizer())
        found = {id(parameter): parameter for parameter in candidates if parameter.requires_grad}
        if not found:
            raise WorkloadError(f"{type(model).__name__} has no trainable parameter")
        self.parameters: list[nn.Parameter] = list(found.values())
        self._known = set(found)
        self._kinds = [(parameter.dtype, parameter.device) for parameter in self.parameters]
        self._check_reduction()

    def of_optimizer(self) -> Iterator[nn.Parameter]:
        """The parameters that the optimizer has now."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _check_reduction(self) -> None:
        if any(type(module).__name__ == _SHARDED_BY_WRAPPING for module in self._model.modules()):
            raise WorkloadError(
                f"{_SHARDED_BY_WRAPPING} averages gradients over ranks in every backward pass: shard the model with "
                "torch.distributed.fsdp.fully_shard, which can sum them, and pass lock_step=True"
            )
        if not self._lock_step and any(isinstance(parameter, DTensor) for parameter in self.parameters):
            raise WorkloadError(
                "a sharded model reduces its gradients itself: pass lock_step=True, and make the model sum, not average"
            )

    def check_gradients(self, installed: dict[int, Tensor]) -> None:
        """Check, before a window, that the engine sums and clears every gradient.

        Args:
            installed: by index, the gradients that the last window left for the caller's own step.

        Raises:
            WorkloadError: naming the first parameter with another gradient.
        """
        if self._lock_step:
            require_summed_gradients(self._model)
        self._check_unknown_parameters()
        for index, (parameter, kind) in enumerate(zip(self.parameters, self._kinds, strict=True)):
            if (parameter.dtype, parameter.device) != kind:
                raise WorkloadError(
                    f"{self.name(parameter)} was {_kind(kind)} when its GradientAccumulation was made and is "
                    f"{_kind((parameter.dtype, parameter.device))} now: make a new one after converting a model"
                )
            gradient = parameter.grad
            if gradient is not None and gradient is not installed.get(index) and bool(gradient.any()):
                raise WorkloadError(
                    f"{self.name(parameter)} has a gradient from before the window, which would be lost: call "
                    "optimizer.zero_grad() first, or return its loss as a term of the window's"
                )

    def _check_unknown_parameters(self) -> None:
        known = self._known
        for parameter in self.of_optimizer():
            if id(parameter) not in known and (parameter.requires_grad or parameter.grad is not None):
                self._refuse(parameter)
        if self._lock_step:  # between windows a sharded module may hold FSDP's own parameters
            return
        for module in self._model.modules():
            for candidate in own_parameters(module).values():
                if candidate is not None and candidate.requires_grad and id(candidate) not in known:
                    self._refuse(candidate)

    def _refuse(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad:
            raise WorkloadError(
                f"{self.name(parameter)} is trainable, but was frozen or missing when its GradientAccumulation was "
                "made: its gradient would not be summed, clipped or cleared. Make a new GradientAccumulation after "
                "unfreezing or adding parameters"
            )
        raise WorkloadError(
            f"{self.name(parameter)} is frozen and has a gradient, which the optimizer would use in every "
            "update: set its .grad to None, or leave the parameter out of the optimizer"
        )

    def name(self, parameter: nn.Parameter) -> str:
        """A parameter in a message: its path in the model, or its place in the optimizer."""
        for name, candidate in self._model.named_parameters(remove_duplicate=False):
            if candidate is parameter:
                return f"parameter `{name}`"
        for number, group in enumerate(self._optimizer.param_groups):
            for index, candidate in enumerate(group["params"]):
                if candidate is parameter:
                    return f"parameter {index} of the optimizer's group {number}, of shape {tuple(parameter.shape)},"
        return f"a parameter of shape {tuple(parameter.shape)}"


def _kind(kind: tuple[torch.dtype, torch.device]) -> str:
    return f"{str(kind[0]).removeprefix('torch.')} on {kind[1]}"
