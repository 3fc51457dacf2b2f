"""A watch over the first window of a loop, for what spoils sums of gradients without an error.

The loss and the backward passes must neither step the optimizer, nor move the parameters, nor touch gradients, which
are those of the window so far; and gradients must reach the optimizer's parameters. Later windows are not watched: they
run the same functions, and the watch takes time for each parameter.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from batchwright.errors import WorkloadError
from batchwright.torch_internals import gradient_hooks, version_of
from batchwright.training.accumulation.trainable_parameters import TrainableParameters
from batchwright.workloads.base import Batch

LossOf = Callable[[nn.Module, Batch], Any]
"""A loss that may return anything."""
Hook = Callable[[Tensor], object]
"""A hook on a gradient, called with it or, once it was accumulated, with its parameter."""


class FirstWindow:
    """The watch over one window.

    Args:
        model: the model that the loss is called with.
        trainable: the parameters that the engine trains.
    """

    def __init__(self, model: nn.Module, trainable: TrainableParameters) -> None:
        self._model = model
        self._trainable = trainable
        self._parameters = trainable.parameters
        self._hooked: set[int] = set()
        """Identities of the parameters with a hook of the user's on their gradient."""
        self._changing: dict[int, nn.Parameter] = {}
        """Those of them whose hook has changed a gradient, by identity."""
        self._runs = "the loss"
        """Code that runs now, for a message."""
        self._before: list[tuple[int, float]] = []
        """Marks of the parameters before a backward pass; empty before the first one."""

    @contextmanager
    def watched(self, loss: LossOf) -> Iterator[LossOf]:
        """Watch the passes of a block.

        Yields:
            The loss to call in place of ``loss``.

        Raises:
            WorkloadError: when the loss or a backward pass changes what it must not, before the optimizer's step.
        """
        self._before, self._changing = [], {}
        # The engine's own hooks and a trace's may change a gradient.
        users = [
            (each, hooks, key, hook)
            for each in self._parameters
            for hooks in gradient_hooks(each)
            for key, hook in hooks.items()
            if not str(getattr(hook, "__module__", "")).startswith("batchwright.")
        ]
        self._hooked = {id(parameter) for parameter, *_ in users}

        def call(model: nn.Module, batch: Batch) -> Any:  # noqa: ANN401 - what a loss returns, right or wrong
            self._require_unmoved()
            self._runs = "the loss"
            kept = [parameter.grad for parameter in self._parameters]
            versions = self._gradient_versions()
            output = loss(model, batch)
            if self._gradient_versions() != versions:
                raise WorkloadError(
                    "the loss changes gradients, which are the sums of the window so far: call neither zero_grad() nor "
                    "backward() in it. `update` does both"
                )
            del kept  # so that no other gradient took the place of one
            self._runs, self._before = "the backward pass", self._marks()
            return output

        handle = register_optimizer_step_pre_hook(self._refuse_step)
        for parameter, hooks, key, hook in users:
            hooks[key] = self._observed(hook, parameter)
        try:
            yield call
            self._require_unmoved()
        finally:
            handle.remove()
            for _, hooks, key, hook in users:
                hooks[key] = hook
        for parameter in self._changing.values():
            warnings.warn(
                f"{self._trainable.name(parameter)} has a hook that changes the gradient of each micro-batch, "
                "not that of the window: a mask or a factor stays exact, clipping or a sign does not. Clip "
                "with `max_norm`, or between `accumulate` and a step of your own",
                stacklevel=5,
            )
            return

    def _observed(self, hook: Hook, parameter: nn.Parameter) -> Hook:
        """The hook, with a note of whether it changes the gradient."""

        def call(tensor: Tensor) -> object:
            gradient = parameter.grad if tensor is parameter else tensor  # after it was accumulated, or before
            version = None if gradient is None else version_of(gradient)
            result = hook(tensor)
            after = parameter.grad if tensor is parameter else tensor if result is None else result
            if after is not gradient or (gradient is not None and version_of(gradient) != version):
                self._changing[id(parameter)] = parameter
            return result

        return call

    def require_gradients(self, present: Sequence[bool]) -> None:
        """Check that the window's gradients reach the optimizer.

        Args:
            present: flags for the parameters, True where a parameter has a gradient.

        Raises:
            WorkloadError: when no parameter of the optimizer has one, or the optimizer has parameters of other layers.
        """
        held = {id(parameter) for parameter in self._trainable.of_optimizer()}
        reached = {id(each): each for each, flag in zip(self._parameters, present, strict=True) if flag}
        if not held & reached.keys():
            raise WorkloadError(
                "no gradient of the loss reaches a parameter of the optimizer, so nothing would be trained: "
                f"compute the loss with the {type(self._model).__name__} that is passed to it, and do not "
                "detach it"
            )
        idle = held - reached.keys() - set(map(id, self._model.parameters()))
        unmoved = [parameter for key, parameter in reached.items() if key not in held]
        if idle and unmoved:
            raise WorkloadError(
                f"{self._trainable.name(unmoved[0])} has a gradient and is not in the optimizer, which has {len(idle)} "
                "parameters of other layers instead: make the optimizer after the model has all of its layers"
            )

    def _refuse_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Stop a step of any optimizer before it moves a parameter that the engine trains."""
        own = set(map(id, self._parameters))
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise WorkloadError(
                f"{type(optimizer).__name__}.step() is called in {self._runs} of a micro-batch, before the window's "
                "gradient is complete: remove the call, or the hook that makes it. `update` steps once per window"
            )

    def _gradient_versions(self) -> list[tuple[int, int]]:
        gradients = (parameter.grad for parameter in self._parameters)
        return [(id(gradient), -1 if gradient is None else version_of(gradient)) for gradient in gradients]

    def _marks(self) -> list[tuple[int, float]]:
        """Each parameter's version, and its norm where a hook might write to ``.data``, which counts no version.

        Fake tensors of a trace have no values.
        """
        hooked = (id(each) in self._hooked and type(each.data) is Tensor for each in self._parameters)
        return [
            (version_of(each), float(torch.linalg.vector_norm(each.detach())) if has_hook else 0.0)
            for each, has_hook in zip(self._parameters, hooked, strict=True)
        ]

    def _require_unmoved(self) -> None:
        if not self._before:
            return
        for parameter, before, now in zip(self._parameters, self._before, self._marks(), strict=True):
            if before != now:
                raise WorkloadError(
                    f"{self._trainable.name(parameter)} was moved by the backward pass of a micro-batch: remove the "
                    "hook that updates it. `update` steps the optimizer once per window"
                )
