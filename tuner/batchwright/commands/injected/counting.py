"""Count the updates of a process: backward passes and samples between two optimizer steps. Pure.

An update ends with a step that follows a backward pass. A further optimizer that steps without another backward pass
belongs to the same update. Gradients that are discarded before a step, as a loss scaler does, belong to no update.
"""

from __future__ import annotations

from typing import Iterable


class Update:
    """One update: its backward passes, and their samples by two sources."""

    def __init__(self) -> None:
        self.backward_passes = 0
        self.forward_samples: list[int | None] = []
        """Samples of each backward pass by the first dimension of what the model was called with."""
        self.loader_samples: list[int | None] = []
        """Samples of each backward pass by the indices that the data loader drew."""
        self.ended_at = 0.0

    def totals(self) -> dict[str, object]:
        """The figures for a report; no samples where one backward pass has none."""
        return {
            "backward_passes": self.backward_passes,
            "forward_samples": _sum(self.forward_samples),
            "loader_samples": _sum(self.loader_samples),
            "ended_at": self.ended_at,
        }


def _sum(samples: list[int | None]) -> int | None:
    known = [count for count in samples if count is not None]
    return sum(known) if samples and len(known) == len(samples) else None


class UpdateCounter:
    """The updates of one process.

    Args:
        wanted: updates after which the counting is complete.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._steps: dict[int, int] = {}
        self._current = Update()
        self._called_with: int | None = None
        self.updates: list[Update] = []
        self.skipped = 0
        self.sequences: set[int] = set()

    def call(self, samples: int, sequence: int | None) -> None:
        """Record a call of the model outside of any other; the first before a backward pass counts."""
        if self._called_with is None:
            self._called_with = samples
        if sequence is not None:
            self.sequences.add(sequence)

    def backward(self, loaded: int | None) -> None:
        """Record a backward pass, and the samples of the batch that the data loader gave for it."""
        self._current.backward_passes += 1
        self._current.forward_samples.append(self._called_with)
        self._current.loader_samples.append(loaded)
        self._called_with = None

    def discard(self) -> None:
        """Record that gradients are set to zero: backward passes without a step so far led to no update."""
        if self._current.backward_passes:
            self.skipped += 1
            self._current = Update()

    def step(self, optimizer: int, at: float) -> bool:
        """Record a step of an optimizer, and return whether it ended an update."""
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if not self._current.backward_passes:
            return False
        self._current.ended_at = at
        self.updates.append(self._current)
        self._current = Update()
        return True

    @property
    def steps(self) -> int:
        """Steps of the optimizer with the most."""
        return max(self._steps.values(), default=0)

    @property
    def waiting_passes(self) -> int:
        """Backward passes since the last step."""
        return self._current.backward_passes

    @property
    def is_complete(self) -> bool:
        """True once every optimizer that stepped has made the wanted steps."""
        return min(self._steps.values(), default=0) >= self._wanted

    def is_in_last(self, optimizers: Iterable[int]) -> bool:
        """Return whether one update is left, and each of these optimizers has made the steps of all before."""
        steps = [*self._steps.values(), *(self._steps.get(optimizer, 0) for optimizer in optimizers)]
        return self._wanted > 1 and len(self.updates) == self._wanted - 1 and min(steps, default=0) >= self._wanted - 1
