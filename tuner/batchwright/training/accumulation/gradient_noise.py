"""Measure how far the gradient of a part of a window differs from the window's, for the gradient noise scale.

The part is the first micro-batch that this rank has committed: at that moment the sums of the window are its gradient,
whether the sums are scratch sums or in place (``gradient_sums``). Their norm is one pass over the gradients. It writes
nothing, and allocates a number per parameter, as the norm of the whole window does; no gradient is copied. It is taken
between two micro-batches, when the activations of the first are freed and those of the second do not exist, so that
memory is as far below its peak as it is at the window's end. A plan that was proven without the measurement is
therefore proven with it. Gradients of later micro-batches would need a copy of the sums, or a pass each:
``batchwright.planning.noise_scale`` has the estimators, and what a single part costs in precision.

A rank with a single micro-batch measures all of its part of the window. In lock step (FSDP) every rank holds a shard of
the sum of all ranks' first micro-batches: the squared norms of the shards add up, and so do their weights.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from batchwright.planning.noise_scale import GradientPart
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.accumulation.gradient_sums import GradientSums, own_parts, total_norm
from batchwright.training.micro_batches.loss_window import LossWindow, MeasuredPart


class GradientNoise:
    """The norm of the first micro-batch of a window, if the window is to be measured.

    Args:
        gradients: the sums of the window.
        ranks: the ranks that share each window.
        scaler: gradient scaler, whose scale is taken out of the norm.
        lock_step: whether the sums are shards of those of all ranks (FSDP).

    Attributes:
        wanted: whether to measure the windows that begin from now on.
    """

    def __init__(self, gradients: GradientSums, ranks: Ranks, scaler: torch.amp.GradScaler, *, lock_step: bool) -> None:
        self.wanted = False
        self._gradients = gradients
        self._ranks = ranks
        self._scaler = scaler
        self._lock_step = lock_step
        self._pending = False
        self._norm: Tensor | None = None
        self._weights: dict[str, Tensor | float] = {}

    def start(self, micro_batches: int) -> None:
        """Begin a window of this many micro-batches, or begin it again after a failure.

        A window of one micro-batch has a part to compare with only if other ranks compute their gradients apart.
        """
        apart = self._ranks.size > 1 and not self._lock_step
        self._pending = self.wanted and (micro_batches > 1 or apart)
        self._norm, self._weights = None, {}

    def take(self, losses: LossWindow) -> None:
        """Take the norm of the sums, if a micro-batch has been committed for the first time in this window."""
        if not self._pending:
            return
        self._pending = False
        sums = own_parts(self._gradients.so_far())
        if sums:
            self._norm, self._weights = total_norm(sums), dict(losses.weights)

    def part(self, losses: LossWindow) -> MeasuredPart | None:
        """The measured part of this rank, after the last micro-batch; None where nothing was measured."""
        if self._norm is None:
            return None
        norm = float(self._norm) / self._scaler.get_scale() * (losses.provisional or 1.0)
        self._norm = None
        return MeasuredPart(norm**2, {name: float(weight) for name, weight in self._weights.items()})


def gradient_parts(
    measured: Sequence[MeasuredPart | None], weights: Mapping[str, float], *, known: bool, lock_step: bool
) -> tuple[GradientPart, ...]:
    """The parts of a window that the ranks have measured.

    Args:
        measured: the part of each rank, if it has one.
        weights: weight of each loss term over the window.
        known: whether ``weights`` was known beforehand, so that the gradients are those of the window's mean.
        lock_step: whether the ranks' parts are shards of one part.
    """
    parts = [part for part in measured if part is not None]
    if lock_step and parts:
        summed = {name: sum(part.weights.get(name, 0.0) for part in parts) for name in weights}
        parts = [MeasuredPart(sum(part.squared_norm for part in parts), summed)]
    divisor = 1.0 if known else next(iter(weights.values()), 1.0) ** 2
    return tuple(
        GradientPart(
            tuple(part.weights.get(name, 0.0) / total for name, total in weights.items() if total),
            part.squared_norm / divisor,
        )
        for part in parts
        if any(part.weights.values())
    )
