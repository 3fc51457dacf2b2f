"""Hooks on torch that feed the counter: calls of models, backward passes, steps, batches of data loaders."""

from __future__ import annotations

import os
from collections import deque
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, Callable, Iterator, Mapping
from weakref import WeakKeyDictionary, WeakSet, ref

from .own_updates import OwnUpdates
from .torch_internals import data_loader_iterator

_MOST_VALUES = 64
"""Values of a call that are searched for its batch."""
_MOST_OUTPUTS = 16
"""Tensors of a model's output that are followed to a backward pass."""
_MOST_CALLS = 1024
"""Calls of models that no backward pass has reached yet."""


class ModelCall:
    """A call of a model outside of any other, in which gradients are recorded.

    Args:
        model: the class of the model, with a number from the second model of a class on.
        shapes: the shape of each tensor that is data and no intermediate result, by its name or place; that of the
            batch first.
    """

    def __init__(self, model: str, shapes: dict[str, tuple[int, ...]]) -> None:
        self.model = model
        self.shapes = shapes
        self.is_reached = False
        """True once a backward pass has reached its output, or where it has no tensors that could show that."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the batch."""
        return next(iter(self.shapes.values()))


class Observer:
    """Takes what the hooks see. A method that a class does not have does nothing."""

    def called(self) -> None:
        """Take that a model is called outside of any other, to be trained."""

    def evaluated(self, *, in_training_mode: bool) -> None:
        """Take that a model is called outside of any other, and no gradients are recorded."""

    def went_backward(self, call: ModelCall | None, drawn: dict[str, int | None], reached: dict[str, int]) -> None:
        """Take a backward pass that has ended.

        ``call`` is the first new call with data that it reached; ``drawn`` has the indices that each data loader drew
        for it, and ``reached`` the number of new calls that it reached, by the model.
        """

    def iterated(self) -> None:
        """Take that the iteration of a data loader begins."""

    def constructed(self, optimizer: Any) -> None:
        """Take an optimizer that has been constructed."""

    def discarded(self, optimizer: Any) -> None:
        """Take that an optimizer set its gradients to zero."""

    def stepped(self, optimizer: Any) -> None:
        """Take a step that has ended."""

    def failed(self, error: BaseException, where: str) -> None:
        """Take an exception that passes a hooked function."""


class TorchHooks:
    """The hooks of one process on torch.

    Attributes:
        observers: take what the hooks see.
        data_sets: the identities of the data sets that were read.
        choose: takes the iterator of a data loader and the indices that it has drawn for a batch, and returns others.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.observers: list[Observer] = []
        self.data_sets: set[int] = set()
        self.choose: Callable[[Any, Any], Any] = lambda _iterator, index: index
        self._within: list[str] = []
        """The call of a model, the backward pass and the loading of a batch that this process is in."""
        self._models: dict[str, WeakKeyDictionary[Any, int]] = {}
        """Models that were called outside of any other, by their class."""
        self._calls: list[ModelCall] = []
        """Calls of models with data that no backward pass has taken for its own yet."""
        self._reached: dict[str, int] = {}
        """Number of calls that the current backward pass has reached first, by the model."""
        self._given: WeakKeyDictionary[Any, deque[int | None]] = WeakKeyDictionary()
        """By iterator of a data loader: samples of the batches that it has given, and no backward pass has taken."""
        self._optimizers: WeakSet[Any] = WeakSet()
        self._own_updates = OwnUpdates(torch, self._updated_itself)
        """The updates of a process as long as it has no optimizer of torch."""

    def install(self) -> None:
        """Install all hooks."""
        self._hook_modules()
        self._hook_backward()
        self._hook_optimizers()
        self._hook_loaders()

    def _stepped(self, optimizer: Any) -> None:
        self._calls.clear()
        for observer in self.observers:
            observer.stepped(optimizer)

    def _updated_itself(self, optimizer: OwnUpdates) -> None:
        for observer in self.observers:
            observer.constructed(optimizer)
        self._stepped(optimizer)

    def _failed(self, error: BaseException, where: str) -> None:
        for observer in self.observers:
            observer.failed(error, where)

    @contextmanager
    def _entered(self, where: str) -> Iterator[None]:
        """Look at an exception that passes the block, in which a call of a module is none of a model."""
        self._within.append(where)
        try:
            yield
        except StopIteration:
            raise
        except BaseException as error:
            self._failed(error, where)
            raise
        finally:
            self._within.pop()

    def _hook_modules(self) -> None:
        """Look at calls of modules from outside of any other module. Nested ones take the shortest way."""
        module = self._torch.nn.Module
        call = module.__call__
        is_compiling = getattr(getattr(self._torch, "compiler", None), "is_compiling", bool)

        @wraps(call)
        def watched(self_: Any, *args: Any, **kwargs: Any) -> Any:
            # A module without parameters, such as a loss or a metric, is no model. Inside of a model, a backward pass
            # (which recomputes) or the loading of a batch, a call belongs to that.
            if is_compiling() or self._within or next(self_.parameters(), None) is None:
                return call(self_, *args, **kwargs)
            is_trained = self._torch.is_grad_enabled()
            if is_trained and not self._optimizers:
                self._own_updates.look()
            for observer in self.observers:
                observer.called() if is_trained else observer.evaluated(in_training_mode=self_.training)
            shapes = self._shapes_of(args, kwargs) if is_trained else {}
            with self._entered("forward"):
                result = call(self_, *args, **kwargs)
            if is_trained:
                kind = type(self_).__name__
                models = self._models.setdefault(kind, WeakKeyDictionary())
                number = models.setdefault(self_, len(models) + 1)
                self._follow(ModelCall(kind if number == 1 else kind + " " + str(number), shapes), result)
            return result

        module.__call__ = watched

    def _shapes_of(self, args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of a call that are data and no intermediate results, `input_ids` before others."""
        named = {"input_ids": kwargs["input_ids"], **kwargs} if "input_ids" in kwargs else kwargs
        if named is kwargs:
            named = {**{str(number): value for number, value in enumerate(args)}, **kwargs}
        tensors = self._tensors_in(named, _MOST_VALUES)
        return {name: tuple(map(int, it.shape)) for name, it in tensors if it.dim() and it.grad_fn is None}

    def _tensors_in(self, values: Any, most: int) -> Iterator[tuple[str, Any]]:
        """Yield the tensors in a value and in its lists, tuples and mappings, with their names."""
        left: deque[tuple[str, Any]] = deque([("", values)])
        for _ in range(most):
            if not left:
                return
            name, value = left.popleft()
            if isinstance(value, self._torch.Tensor):
                yield name, value
            elif isinstance(value, (list, tuple)):
                left.extend((name + "." + str(number), each) for number, each in enumerate(value))
            elif isinstance(value, Mapping):
                left.extend((name + "." + str(key) if name else str(key), each) for key, each in value.items())

    def _follow(self, call: ModelCall, result: Any) -> None:
        """Have a backward pass that reaches the output of a call mark the call."""

        def mark(_gradient: Any) -> None:
            if not call.is_reached:
                call.is_reached = True
                self._reached[call.model] = self._reached.get(call.model, 0) + 1

        tensors = [tensor for _, tensor in self._tensors_in(result, _MOST_OUTPUTS)]
        try:
            hooked = [tensor.register_hook(mark) for tensor in tensors if tensor.grad_fn is not None]
        except RuntimeError:  # within a transform of functions
            hooked, tensors = [], []
        call.is_reached = not tensors
        if call.shapes and (hooked or not tensors):
            self._calls = [*self._calls[1 - _MOST_CALLS :], call]

    def _hook_backward(self) -> None:
        """Count calls of ``torch.autograd.backward``, which ``Tensor.backward`` makes; nested ones recompute.

        Calls of ``torch.autograd.grad`` for parameters count too, unless their gradients are differentiated again.
        """
        autograd = self._torch.autograd
        backward, grad = autograd.backward, autograd.grad

        @wraps(backward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if "backward" in self._within:
                return backward(*args, **kwargs)
            with self._backward_from(args[0] if args else kwargs["tensors"]):
                backward(*args, **kwargs)
            return None

        @wraps(grad)
        def watched_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            found = inputs if isinstance(inputs, (list, tuple)) else [inputs]
            is_of_model = any(isinstance(each, self._torch.nn.Parameter) for each in found)
            is_again = kwargs.get("create_graph") or (len(args) > 2 and args[2])  # noqa: PLR2004 - its place
            if "backward" in self._within or not is_of_model or is_again:
                return grad(outputs, inputs, *args, **kwargs)
            with self._backward_from(outputs):
                return grad(outputs, inputs, *args, **kwargs)

        autograd.backward, autograd.grad = watched, watched_grad

    @contextmanager
    def _backward_from(self, outputs: Any) -> Iterator[None]:
        """Look for an update before a backward pass, and count the pass."""
        if not self._optimizers:
            self._own_updates.look()
        with self._entered("backward"):
            yield
        if not self._optimizers:
            self._own_updates.keep(outputs)
        self._went_backward()

    def _went_backward(self) -> None:
        reached = [call for call in self._calls if call.is_reached]
        self._calls = [call for call in self._calls if not call.is_reached]
        drawn: dict[str, int | None] = {}
        for iterator, given in self._given.items():
            if given:
                drawn["loader " + str(iterator.__dict__["_batchwright_number"])] = given.popleft()
        for observer in self.observers:
            observer.went_backward(reached[0] if reached else None, drawn, self._reached)
        self._reached = {}

    def _hook_optimizers(self) -> None:
        optimizer = self._torch.optim.Optimizer
        construct, profile, zero = optimizer.__init__, optimizer.profile_hook_step, optimizer.zero_grad

        @wraps(construct)
        def constructed(self_: Any, *args: Any, **kwargs: Any) -> None:
            construct(self_, *args, **kwargs)
            self._optimizers.add(self_)
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
                observer.discarded(self_)
            return zero(self_, *args, **kwargs)

        optimizer.__init__ = constructed
        optimizer.profile_hook_step = staticmethod(profiled)
        optimizer.zero_grad = zeroed
        register = import_module("torch.optim.optimizer").register_optimizer_step_post_hook
        register(lambda stepped, _args, _kwargs: self._stepped(stepped))

    def _hook_loaders(self) -> None:
        """Keep the number of indices of each batch, in the order in which a data loader gives the batches.

        Of a data set that is iterated, without indices, they are the samples that were asked for.
        """
        iterator = data_loader_iterator()
        construct, next_index = iterator.__init__, iterator._next_index  # noqa: SLF001 - see torch_internals
        next_batch, reset = iterator.__next__, iterator._reset  # noqa: SLF001

        def begin(self_: Any, loader: Any) -> None:
            self.data_sets.add(id(loader.dataset))
            for other in [it for it in self._given if _is_succeeded(it, loader)]:
                del self._given[other]
            # A number is given again as soon as its iterator has a successor, so that `loader 1` stays the same loader
            # over all epochs.
            numbers = {it.__dict__["_batchwright_number"] for it in self._given}
            number = min(set(range(1, len(numbers) + 2)) - numbers)
            self_.__dict__.update(
                _batchwright_number=number, _batchwright_drawn=deque(), _batchwright_loader=ref(loader)
            )
            self._given[self_] = deque()
            for observer in self.observers:
                observer.iterated()

        @wraps(construct)
        def constructed(self_: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            begin(self_, loader)
            construct(self_, loader, *args, **kwargs)

        @wraps(reset)
        def was_reset(self_: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            begin(self_, loader)
            reset(self_, loader, *args, **kwargs)

        @wraps(next_index)
        def indexed(self_: Any) -> Any:
            index = self.choose(self_, next_index(self_))
            self_.__dict__["_batchwright_drawn"].append(len(index) if isinstance(index, (list, tuple)) else None)
            return index

        @wraps(next_batch)
        def loaded(self_: Any) -> Any:
            with self._entered("data"):
                try:
                    batch = next_batch(self_)
                except StopIteration:
                    self_.__dict__["_batchwright_loader"] = None
                    raise
            drawn = self_.__dict__["_batchwright_drawn"]
            if self_ in self._given:
                self._given[self_].append(drawn.popleft() if drawn else None)
            return batch

        iterator.__init__, iterator._reset = constructed, was_reset  # noqa: SLF001
        iterator._next_index, iterator.__next__ = indexed, loaded  # noqa: SLF001


def _is_succeeded(iterator: Any, loader: Any) -> bool:
    """Return whether an iterator is followed by one of a data loader: of the same one, or of another for its data."""
    own = iterator.__dict__["_batchwright_loader"]
    return iterator._dataset is loader.dataset if own is None else own() is loader  # noqa: SLF001 - see torch_internals


def rank_and_world_size(torch: Any) -> tuple[int, int]:
    """The rank of this process and the number of ranks, by the process group, else by a launcher's variables."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdigit() else 0, int(world) if world.isdigit() and int(world) else 1
