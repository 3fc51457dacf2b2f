"""Count the updates of a process: backward passes and samples between two optimizer steps. Pure.

An update ends with a step that follows a backward pass. A further optimizer that steps without another backward pass
belongs to the same update. Gradients that an optimizer sets to zero before its step, as a loss scaler does, belong to
no update of it.

What a sample is only the program knows. So everything is counted that may be one: the indices that each data loader
drew, and every dimension of the tensor that the model was called with.
"""

from __future__ import annotations

from typing import Iterable, Mapping, Sequence

_PATIENCE_UPDATES = 64
"""Updates beyond the wanted ones that an optimizer without a step is waited for, or an update with all passes: a
program may ramp its accumulation, and a generator may step after each fifth step of its critic."""


class BackwardPass:
    """A backward pass.

    Args:
        shape: the shape of what the model was called with for it; none where it reached no new call.
        drawn: the indices that each data loader drew for it, by the loader; none where that is not known.
    """

    def __init__(self, shape: Sequence[int] | None, drawn: Mapping[str, int | None]) -> None:
        self.shape = shape
        self.drawn = drawn


class Update:
    """One update, which the step of ``optimizer`` ended at a time in seconds."""

    def __init__(self, optimizer: int, passes: Sequence[BackwardPass], ended_at: float) -> None:
        self.optimizer = optimizer
        self.backward_passes = len(passes)
        self.samples = _samples(passes)
        """Samples by each source that every pass with data has: `loader 1`, `dimension 0`, `dimension 1`."""
        self.ended_at = ended_at

    def draws_less_than(self, other: "Update | None") -> bool:
        """Return whether data loaders drew less than for another update, as for the last batch of an epoch."""
        counts = {} if other is None else other.samples
        return any(
            name.startswith("loader") and self.samples.get(name, count) < count for name, count in counts.items()
        )


def _samples(passes: Sequence[BackwardPass]) -> dict[str, int]:
    loaders = sorted({name for each in passes for name in each.drawn})
    drawn = {name: [each.drawn.get(name, 0) for each in passes] for name in loaders}
    found = {name: sum(count or 0 for count in counts) for name, counts in drawn.items() if None not in counts}
    shapes = [each.shape for each in passes if each.shape is not None]
    for number in range(min(map(len, shapes), default=0)):
        found["dimension " + str(number)] = sum(shape[number] for shape in shapes)
    return found


class UpdateCounter:
    """The updates of one process.

    Args:
        wanted: updates after which the counting is complete.
        passes: backward passes that an update must have to be one of them.
    """

    def __init__(self, wanted: int, passes: int = 1) -> None:
        self._wanted = wanted
        self._least_passes = passes
        self._steps: dict[int, int] = {}
        self._whole: dict[int, int] = {}
        """Updates of each optimizer that had the least passes, and do not seem to end an epoch."""
        self._last: dict[int, Update] = {}
        """The last such update of each optimizer."""
        self._passes: list[BackwardPass] = []
        self._zeroed: dict[int, int] = {}
        """Passes that each optimizer has discarded since the last step."""
        self.updates: list[Update] = []
        self.skipped = 0
        self.epoch_ends: set[int] = set()
        """Numbers of the updates in which, or after which, a data loader began anew; the first update is 0."""

    def backward(self, shape: Sequence[int] | None, drawn: Mapping[str, int | None]) -> None:
        """Record a backward pass, as ``BackwardPass``."""
        self._passes.append(BackwardPass(shape, drawn))

    def discard(self, optimizer: int) -> None:
        """Record that an optimizer sets its gradients to zero: earlier backward passes led to no update of it."""
        if self.waiting_passes:
            self.skipped += len(self._passes) > self._zeroed.get(optimizer, 0)
            self._zeroed[optimizer] = len(self._passes)

    def iterate(self) -> None:
        """Record that the iteration of a data loader begins."""
        number = len(self.updates) if self._passes else len(self.updates) - 1
        if number >= 0:
            self.epoch_ends.add(number)

    def step(self, optimizer: int, at: float) -> bool:
        """Record a step of an optimizer, and return whether it ended an update."""
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        passes = self._passes[self._zeroed.get(optimizer, 0) :]
        if not passes:
            return False
        update = Update(optimizer, passes, at)
        self.updates.append(update)
        if len(passes) < self._least_passes:
            self._whole.setdefault(optimizer, 0)
        # The smaller last batch of an epoch is no whole update. It is forgotten too, so that a program that draws less
        # from now on is counted from its second smaller update.
        elif not update.draws_less_than(self._last.pop(optimizer, None)):
            self._whole[optimizer] = self._whole.get(optimizer, 0) + 1
            self._last[optimizer] = update
        self._passes, self._zeroed = [], {}
        return True

    @property
    def steps(self) -> int:
        """Steps of the optimizer with the most."""
        return max(self._steps.values(), default=0)

    @property
    def waiting_passes(self) -> int:
        """Backward passes since the last step that no optimizer has discarded."""
        return len(self._passes) - max(self._zeroed.values(), default=0)

    def is_complete(self, optimizers: Iterable[int] = ()) -> bool:
        """Return whether these optimizers, and all that have stepped, have made the wanted steps and whole updates."""
        awaited = {*self._steps, *optimizers}
        is_done = all(self._steps.get(optimizer, 0) >= self._wanted for optimizer in awaited)
        return is_done and all(count >= self._wanted for count in self._whole.values())

    @property
    def is_exhausted(self) -> bool:
        """True once no more updates are waited for."""
        return self.steps >= self._wanted + _PATIENCE_UPDATES

    def is_in_last(self, optimizers: Iterable[int]) -> bool:
        """Return whether one update is left, and each of these optimizers has made the steps of all before.

        Optimizers with updates of their own leave one each, of which the last may take the most memory.
        """
        steps = [*self._steps.values(), *(self._steps.get(optimizer, 0) for optimizer in optimizers)]
        before = self._wanted - 1
        return before > 0 and list(self._whole.values()) == [before] and min(steps, default=0) >= before
