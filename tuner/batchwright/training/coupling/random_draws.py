"""Equal random numbers for a sample, in the whole batch and in its parts.

A loss that draws noise (diffusion, flow matching, a variational autoencoder) can be compared with its parts only if a
sample gets the same noise in both. Every random operation of torch is replaced: the draw is made for the whole batch,
and a part gets the rows of its samples. Random operations are recognised by torch's tag ``nondeterministic_seeded``.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from batchwright.torch_internals import TorchDispatchMode, schema_of, tree_map
from batchwright.training.micro_batches.rng_state import generator_of

_SEEDS = 2**62

_Operation: TypeAlias = Any
"""An overload of a torch operation, whose class is not public."""
_Value: TypeAlias = Any
"""An argument or a result of an operation."""


class UnmatchedDrawError(Exception):
    """A draw of a part that matches no draw of the whole batch; the message names the draw."""


@dataclass(frozen=True)
class _Part:
    """The samples that run through the model now."""

    first: int
    size: int
    samples: int
    """Samples of the whole batch."""


@dataclass(frozen=True)
class _Draw:
    """One draw of the whole batch: the operation and its arguments by name, with copies of tensors."""

    operation: _Operation
    arguments: dict[str, Any]


class MatchedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's types
    """Mode that makes each draw for the whole batch; ``start`` sets the part that runs.

    A draw is identified by a seed that it takes from its generator: a pass that runs again from a restored state
    (activation checkpointing) makes the same draws again.

    Attributes:
        ambiguous: whether a draw had several rows for each sample, which may be in either order.
        interleaved: whether such rows begin with the first row of all samples, not with all rows of the first sample.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's types
        self.ambiguous = False
        self.interleaved = False
        self._part = _Part(0, 1, 1)
        self._draws: dict[int, list[_Draw]] = defaultdict(list)
        self._generators: dict[torch.Generator, Tensor] = {}

    def start(self, first: int, size: int, samples: int) -> None:
        """Set the samples of the next pass, and restore the user's own generators to their first known state."""
        self._part = _Part(first, size, samples)
        if size == samples:
            self._draws.clear()
        for generator, state in self._generators.items():
            generator.set_state(state)

    def __torch_dispatch__(
        self, func: _Operation, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _Value:
        """Run a torch operation; a random operation is run for the whole batch."""
        del types
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in schema_of(func).arguments]
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs or {})
        generator = self._generator(arguments)
        seed = int(torch.randint(_SEEDS, (1,), generator=generator, device=generator.device))
        if self._part.size == self._part.samples:
            copies = {name: _copy_of(value) for name, value in arguments.items()}
            self._draws[seed].append(_Draw(func, copies))
            return _run_seeded(generator, seed, lambda: func(**arguments))
        return self._rows_of_draw(func, arguments, generator, seed)

    def _generator(self, arguments: dict[str, Any]) -> torch.Generator:
        own = next((value for value in arguments.values() if isinstance(value, torch.Generator)), None)
        if own is not None:
            self._generators.setdefault(own, own.get_state())
            return own
        tensor = next((value for value in arguments.values() if isinstance(value, Tensor)), None)
        return generator_of(torch.device(arguments.get("device") or (tensor.device if tensor is not None else "cpu")))

    def _rows_of_draw(
        self, func: _Operation, arguments: dict[str, Any], generator: torch.Generator, seed: int
    ) -> _Value:
        """The part's rows of a draw for the whole batch, whose other rows use the whole batch's arguments."""
        whole_arguments = self._whole_arguments(func, arguments, seed)
        drawn = _run_seeded(generator, seed, lambda: func(**whole_arguments))
        copies = {name: _copy_of(value) for name, value in arguments.items()}
        shaped = _run_seeded(generator, seed, lambda: func(**copies))
        written = (each.name for each in schema_of(func).arguments if each.alias_info and each.alias_info.is_write)
        for name in written:
            if isinstance(arguments.get(name), Tensor):
                arguments[name].copy_(self._rows(whole_arguments[name], arguments[name].shape))
        arguments_by_id = {
            id(whole_arguments[name]): arguments[name]
            for name in whole_arguments
            if isinstance(whole_arguments[name], Tensor)
        }
        return tree_map(
            lambda pair: pair if not isinstance(pair, _Pair) else pair.select(arguments_by_id, self._rows),
            _pair_results(drawn, shaped),
        )

    def _whole_arguments(self, func: _Operation, arguments: dict[str, Any], seed: int) -> dict[str, Any]:
        """The arguments of the whole batch's draw, with the part's rows replaced by the part's arguments.

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
            filled = reference.clone()
            index = self._index(reference.shape, value.shape, value.device)
            return value.clone() if index is None else filled.index_copy_(index[0], index[1], value)
        if not isinstance(value, (list, tuple)) and reference != value:
            raise UnmatchedDrawError(f"its `{name}` depends on the number of samples ({reference}, of a part {value})")
        return reference

    def _rows(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """The rows of ``tensor`` that are the part's, in ``shape``."""
        index = self._index(tensor.shape, shape, tensor.device)
        return tensor if index is None else tensor.index_select(*index)

    def _index(self, whole: torch.Size, part: torch.Size, device: torch.device) -> tuple[int, Tensor] | None:
        """The axis along which a part's tensor is shorter and the indices of its rows; None if the shapes are equal.

        Raises:
            UnmatchedDrawError: when no axis is shorter by the ratio of the part to the batch.
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
    """A result for the whole batch, and one with the shape of the part."""

    whole: Tensor
    part: Tensor

    def select(self, arguments_by_id: dict[int, Tensor], rows: Callable[[Tensor, torch.Size], Tensor]) -> Tensor:
        """The part's rows, or the part's argument if the operation returns an argument."""
        argument = arguments_by_id.get(id(self.whole))
        return rows(self.whole, self.part.shape).clone() if argument is None else argument


def _pair_results(drawn: _Value, shaped: _Value) -> _Value:
    if isinstance(drawn, Tensor):
        return _Pair(drawn, shaped)
    if isinstance(drawn, (list, tuple)):
        return tuple(_pair_results(*pair) for pair in zip(drawn, shaped, strict=True))
    return drawn


def _name(func: _Operation) -> str:
    return f"torch.{schema_of(func).name.removeprefix('aten::')}"


def _copy_of(value: _Value) -> _Value:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _run_seeded(generator: torch.Generator, seed: int, work: Callable[[], Any]) -> _Value:
    """Do ``work`` with the generator seeded with ``seed``, then restore the generator."""
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        return work()
    finally:
        generator.set_state(state)
