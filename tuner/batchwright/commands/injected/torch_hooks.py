"""Hooks on torch that feed the counter: calls of models, backward passes, steps, batches of data loaders."""

from __future__ import annotations

import os
from collections import deque
from functools import wraps
from importlib import import_module
from typing import Any, Callable, Protocol

from .torch_internals import data_loader_iterator

_MOST_VALUES = 64
"""Values of a call that are searched for its batch."""


class Observer(Protocol):
    """Takes what the hooks see."""

    def called(self, samples: int | None, sequence: int | None) -> None:
        """Take an outermost call of a module, in which gradients are recorded."""

    def went_backward(self, loaded: int | None) -> None:
        """Take a backward pass that has ended."""

    def constructed(self, optimizer: Any) -> None:
        """Take an optimizer that has been constructed."""

    def discarded(self) -> None:
        """Take that an optimizer set its gradients to zero."""

    def stepped(self, optimizer: Any) -> None:
        """Take a step that has ended."""

    def failed(self, error: BaseException, where: str) -> None:
        """Take an exception that passes a hooked function."""


class TorchHooks:
    """The hooks of one process.

    Args:
        torch: the module.

    Attributes:
        observers: take what the hooks see.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.observers: list[Observer] = []
        self._is_in_call = False
        self._is_in_backward = False
        self._loaded: deque[int | None] = deque()
        """Samples of the batches of the data loader that was read last, which had no backward pass yet."""

    def install(self) -> None:
        """Install all hooks."""
        self._hook_modules()
        self._hook_backward()
        self._hook_optimizers()
        self._hook_loaders()

    def _stepped(self, optimizer: Any) -> None:
        for observer in self.observers:
            observer.stepped(optimizer)

    def _failed(self, error: BaseException, where: str) -> None:
        for observer in self.observers:
            observer.failed(error, where)

    def _hook_modules(self) -> None:
        """Look at calls of modules from outside of any other module. Nested ones take the shortest way."""
        module = self._torch.nn.Module
        call = module.__call__

        @wraps(call)
        def watched(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_in_call or self._is_in_backward:
                return call(self_, *args, **kwargs)
            self._is_in_call = True
            try:
                self._take_call(args, kwargs)
                return call(self_, *args, **kwargs)
            except BaseException as error:
                self._failed(error, "forward")
                raise
            finally:
                self._is_in_call = False

        module.__call__ = watched

    def _take_call(self, args: Any, kwargs: Any) -> None:
        if not self._torch.is_grad_enabled():
            return
        batch = self._batch_of(args, kwargs)
        if batch is not None:
            is_tokens = batch.dim() == 2 and not batch.is_floating_point()  # noqa: PLR2004 - samples and positions
            sequence = int(batch.shape[1]) if is_tokens else None
            for observer in self.observers:
                observer.called(int(batch.shape[0]), sequence)

    def _batch_of(self, args: Any, kwargs: Any) -> Any:
        """The first tensor of a call that is data and no intermediate result, `input_ids` before others."""
        named = kwargs.get("input_ids")
        values = deque([named] if named is not None else [*args, *kwargs.values()])
        for _ in range(_MOST_VALUES):
            if not values:
                return None
            value = values.popleft()
            if isinstance(value, self._torch.Tensor):
                if value.dim() and value.grad_fn is None:
                    return value
            elif isinstance(value, (list, tuple)):
                values.extend(value)
            elif hasattr(value, "values") and hasattr(value, "keys"):
                values.extend(value.values())
        return None

    def _hook_backward(self) -> None:
        """Count calls of ``torch.autograd.backward``, which ``Tensor.backward`` makes; nested ones recompute."""
        autograd = self._torch.autograd
        backward = autograd.backward

        @wraps(backward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_backward:
                return backward(*args, **kwargs)
            self._is_in_backward = True
            try:
                backward(*args, **kwargs)
            except BaseException as error:
                self._failed(error, "backward")
                raise
            finally:
                self._is_in_backward = False
            loaded = self._loaded.popleft() if self._loaded else None
            for observer in self.observers:
                observer.went_backward(loaded)
            return None

        autograd.backward = watched

    def _hook_optimizers(self) -> None:
        optimizer = self._torch.optim.Optimizer
        construct, profile, zero = optimizer.__init__, optimizer.profile_hook_step, optimizer.zero_grad

        @wraps(construct)
        def constructed(self_: Any, *args: Any, **kwargs: Any) -> None:
            construct(self_, *args, **kwargs)
            for observer in self.observers:
                observer.constructed(self_)

        def profiled(step: Callable[..., Any]) -> Any:
            inner = profile(step)

            @wraps(inner)
            def watched(*args: Any, **kwargs: Any) -> Any:
                try:
                    return inner(*args, **kwargs)
                except BaseException as error:
                    self._failed(error, "step")
                    raise

            return watched

        @wraps(zero)
        def zeroed(self_: Any, *args: Any, **kwargs: Any) -> Any:
            for observer in self.observers:
                observer.discarded()
            return zero(self_, *args, **kwargs)

        optimizer.__init__ = constructed
        optimizer.profile_hook_step = staticmethod(profiled)
        optimizer.zero_grad = zeroed
        register = import_module("torch.optim.optimizer").register_optimizer_step_post_hook
        register(lambda stepped, _args, _kwargs: self._stepped(stepped))

    def _hook_loaders(self) -> None:
        """Keep the number of indices of each batch, in the order in which a data loader gives the batches."""
        iterator = data_loader_iterator()
        next_index, next_batch = iterator._next_index, iterator.__next__  # noqa: SLF001 - see torch_internals
        current: list[Any] = [None]

        @wraps(next_index)
        def indexed(self_: Any) -> Any:
            index = next_index(self_)
            drawn = self_.__dict__.setdefault("_batchwright_drawn", deque())
            drawn.append(len(index) if isinstance(index, (list, tuple)) and index[:1] != [None] else None)
            return index

        @wraps(next_batch)
        def loaded(self_: Any) -> Any:
            try:
                batch = next_batch(self_)
            except StopIteration:
                raise
            except BaseException as error:
                self._failed(error, "data")
                raise
            if current[0] is not self_:
                current[0] = self_
                self._loaded.clear()
            drawn = self_.__dict__.get("_batchwright_drawn")
            self._loaded.append(drawn.popleft() if drawn else None)
            return batch

        iterator._next_index, iterator.__next__ = indexed, loaded  # noqa: SLF001 - see torch_internals


def rank_and_world_size(torch: Any) -> tuple[int, int]:
    """The rank of this process and the number of ranks, by the process group, else by a launcher's variables."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdigit() else 0, int(world) if world.isdigit() and int(world) else 1
