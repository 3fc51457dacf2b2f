"""Equal random numbers for a sample, in the whole batch and in its parts.

A loss that draws noise (diffusion, flow matching, a variational autoencoder) can be compared with its parts only where
a sample meets the same noise in both. Every draw of torch is replaced: the draw is made for the whole batch, and a part
gets the rows of its samples. The operations that draw are those that torch itself tags so, whatever calls them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tuner.torch_internals import TorchDispatchMode, schema_of, tree_map

_SEEDS = 2**62

_Operation: TypeAlias = Any
"""An overload of torch's: its class is not public."""
_Value: TypeAlias = Any
"""An argument or a result of an operation."""


class UnmatchedDrawError(Exception):
    """A draw of a part that is no part of any draw of the whole batch; the message names the draw."""


@dataclass(frozen=True)
class _Part:
    """The samples that go through the model now."""

    first: int
    size: int
    samples: int
    """Samples of the whole batch."""


@dataclass(frozen=True)
class _Draw:
    """One draw of the whole batch: the operation, and its arguments by name, tensors copied."""

    operation: _Operation
    arguments: dict[str, Any]


class MatchedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's types
    """Make each draw for the whole batch, as long as the mode is entered; ``start`` names the part that runs.

    A draw is known by a seed that it takes from its generator: a pass that runs again from a restored state (activation
    checkpointing) makes the same draws again.

    Attributes:
        ambiguous: whether a draw had several rows for each sample, which may be in either order.
        interleaved: the order of such rows: all samples' first rows first, or all rows of the first sample first.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's types
        self.ambiguous = False
        self.interleaved = False
        self._part = _Part(0, 1, 1)
        self._draws: dict[int, list[_Draw]] = defaultdict(list)
        self._generators: dict[torch.Generator, Tensor] = {}

    def start(self, first: int, size: int, samples: int) -> None:
        """Take note of the samples that come next. A user's own generators go back to where they were first met."""
        self._part = _Part(first, size, samples)
        if size == samples:
            self._draws.clear()
        for generator, state in self._generators.items():
            generator.set_state(state)

    def __torch_dispatch__(
        self, func: _Operation, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _Value:
        """Run an operation of torch; an operation that draws is run for the whole batch."""
        del types
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        arguments = _by_name(func, args, kwargs or {})
        generator = self._generator(arguments)
        seed = int(torch.randint(_SEEDS, (1,), generator=generator, device=generator.device))
        if self._part.size == self._part.samples:
            kept = {name: _copied(value) for name, value in arguments.items()}
            self._draws[seed].append(_Draw(func, kept))
            return _seeded(generator, seed, lambda: func(**arguments))
        return self._rows_of_draw(func, arguments, generator, seed)

    def _generator(self, arguments: dict[str, Any]) -> torch.Generator:
        own = next((value for value in arguments.values() if isinstance(value, torch.Generator)), None)
        if own is not None:
            self._generators.setdefault(own, own.get_state())
            return own
        tensor = next((value for value in arguments.values() if isinstance(value, Tensor)), None)
        device = torch.device(arguments.get("device") or (tensor.device if tensor is not None else "cpu"))
        if device.type != "cuda":
            return torch.default_generator
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]

    def _rows_of_draw(
        self, func: _Operation, arguments: dict[str, Any], generator: torch.Generator, seed: int
    ) -> _Value:
        """The part's rows of the whole batch's draw, whose other rows have the whole batch's arguments."""
        completed = self._completed(func, arguments, seed)
        drawn = _seeded(generator, seed, lambda: func(**completed))
        own = {name: _copied(value) for name, value in arguments.items()}
        shaped = _seeded(generator, seed, lambda: func(**own))
        for name in _written(func):
            if isinstance(arguments.get(name), Tensor):
                arguments[name].copy_(self._rows(completed[name], arguments[name].shape))
        given = {id(completed[name]): arguments[name] for name in completed if isinstance(completed[name], Tensor)}
        return tree_map(
            lambda pair: pair if not isinstance(pair, _Pair) else pair.settled(given, self._rows),
            _paired(drawn, shaped),
        )

    def _completed(self, func: _Operation, arguments: dict[str, Any], seed: int) -> dict[str, Any]:
        """The arguments of the whole batch's draw, with the part's rows in their place.

        Raises:
            UnmatchedDrawError: when the whole batch made no such draw.
        """
        reason = "the whole batch makes no such draw"
        for draw in self._draws.get(seed, ()):
            if draw.operation is not func:
                continue
            try:
                return {name: self._with_rows(func, name, draw.arguments, arguments) for name in arguments}
            except UnmatchedDrawError as error:
                reason = str(error)
        raise UnmatchedDrawError(f"{_name(func)}: {reason}")

    def _with_rows(self, func: _Operation, name: str, whole: dict[str, Any], part: dict[str, Any]) -> _Value:
        reference, value = whole.get(name), part[name]
        if isinstance(value, torch.Generator) or value is None:
            return value
        if isinstance(value, Tensor) and isinstance(reference, Tensor):
            if "multinomial" in _name(func) and reference.shape[-1] != value.shape[-1]:
                raise UnmatchedDrawError("it chooses among the samples of the batch")
            completed = reference.clone()
            index = self._index(reference.shape, value.shape, value.device)
            return value.clone() if index is None else completed.index_copy_(index[0], index[1], value)
        if not isinstance(value, (list, tuple)) and reference != value:
            raise UnmatchedDrawError(f"its `{name}` depends on the number of samples ({reference}, of a part {value})")
        return reference

    def _rows(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """The rows of ``tensor`` that are the part's, in ``shape``."""
        index = self._index(tensor.shape, shape, tensor.device)
        return tensor if index is None else tensor.index_select(*index)

    def _index(self, whole: torch.Size, part: torch.Size, device: torch.device) -> tuple[int, Tensor] | None:
        """The axis along which a part's tensor is shorter, and where its rows are; none where the shapes are equal.

        Raises:
            UnmatchedDrawError: when no axis is shorter as the part is shorter than the batch.
        """
        shorter = [axis for axis, (full, own) in enumerate(zip(whole, part, strict=False)) if full != own]
        if len(whole) == len(part) and not shorter:
            return None
        samples, size = self._part.samples, self._part.size
        axis = shorter[0] if shorter else 0
        if len(whole) != len(part) or len(shorter) > 1 or whole[axis] * size != part[axis] * samples:
            raise UnmatchedDrawError(f"a shape of {tuple(part)} for {size} samples, {tuple(whole)} for {samples}")
        if whole[axis] % samples:
            raise UnmatchedDrawError(f"{whole[axis]} rows for {samples} samples")
        each = whole[axis] // samples
        self.ambiguous |= each > 1
        rows, columns = torch.arange(whole[axis], device=device), slice(self._part.first, self._part.first + size)
        if self.interleaved:
            return axis, rows.view(each, samples)[:, columns].flatten()
        return axis, rows.view(samples, each)[columns].flatten()


@dataclass(frozen=True)
class _Pair:
    """A result for the whole batch, and one that has the shape of the part's."""

    whole: Tensor
    part: Tensor

    def settled(self, given: dict[int, Tensor], rows: Callable[[Tensor, torch.Size], Tensor]) -> Tensor:
        """The part's rows, or the part's argument where the operation returns one."""
        argument = given.get(id(self.whole))
        return rows(self.whole, self.part.shape).clone() if argument is None else argument


def _paired(drawn: _Value, shaped: _Value) -> _Value:
    if isinstance(drawn, Tensor):
        return _Pair(drawn, shaped)
    if isinstance(drawn, (list, tuple)):
        return tuple(_paired(*pair) for pair in zip(drawn, shaped, strict=True))
    return drawn


def _by_name(func: _Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an operation by their names, so that they can be compared one by one."""
    names = [argument.name for argument in schema_of(func).arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _written(func: _Operation) -> Iterator[str]:
    """Names of the arguments that an operation writes to."""
    for argument in schema_of(func).arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield argument.name


def _name(func: _Operation) -> str:
    return f"torch.{schema_of(func).name.removeprefix('aten::')}"


def _copied(value: _Value) -> _Value:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _seeded(generator: torch.Generator, seed: int, work: Callable[[], Any]) -> _Value:
    """Do ``work`` with the generator at ``seed``, and leave the generator as it was."""
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        return work()
    finally:
        generator.set_state(state)
