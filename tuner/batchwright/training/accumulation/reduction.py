"""Reduction of a window: its losses, weights and gradients summed over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from batchwright.schemas.training import MicroBatchSplit
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.accumulation.gradient_noise import gradient_parts
from batchwright.training.accumulation.gradient_sums import GradientSums
from batchwright.training.micro_batches.loss_window import (
    LossWindow,
    MeasuredPart,
    Share,
    UpdateReport,
    Weigh,
    agreed_weights,
    named_weights,
    sum_by_name,
)
from batchwright.training.micro_batches.splitting import MicroBatch


class Reduction:
    """Sums of one window at a time over the ranks, and the factor by which they must still be multiplied.

    Args:
        model: its buffers are overwritten by those of rank 0.
        gradients: the sums of this rank's micro-batches.
        ranks: the ranks that share each window.
        lock_step: whether the model reduces its gradients in its own backward passes (FSDP).

    Attributes:
        outstanding: the factor that ``apply_outstanding`` multiplies the sums by.
    """

    def __init__(self, model: nn.Module, gradients: GradientSums, ranks: Ranks, *, lock_step: bool) -> None:
        self.outstanding = 1.0
        self._model = model
        self._gradients = gradients
        self._ranks = ranks
        self._lock_step = lock_step

    def broadcast_start(self) -> None:
        """Begin on all ranks with the parameters and buffers of rank 0."""
        if not self._ranks.reduces or self._lock_step:
            return
        parameters = (*self._model.parameters(), *self._gradients.parameters)
        unique = {id(parameter): parameter.detach() for parameter in parameters}
        with torch.no_grad():
            self._ranks.broadcast_([*unique.values(), *self._model.buffers()])

    def total_weights(self, window: Sequence[MicroBatch], weigh: Weigh | None) -> dict[str, float] | None:
        """The window's weight per term over all ranks, or None if it is only known after the forward passes.

        Raises:
            WorkloadError: when a weight is not a number.
        """
        if weigh is None:
            return None
        named = (named_weights(weigh(micro_batch.batch)) for micro_batch in window if not micro_batch.is_padding)
        return sum_by_name(self._ranks.run_collectively(lambda: sum_by_name(named)))  # which calls `weigh`

    def share(self, losses: LossWindow, splits: list[MicroBatchSplit], measured: MeasuredPart | None) -> Share:
        """This rank's part of the window, for the other ranks."""
        names = list(losses.sums)
        values = torch.stack([losses.sums[name] for name in names]).tolist() if names else []
        return Share(
            sums=dict(zip(names, values, strict=True)),
            weights={name: float(weight) for name, weight in losses.weights.items()},
            present=self._gradients.present(),
            splits=splits,
            samples=sum(losses.sizes),
            measured=measured,
        )

    def reduce(self, losses: LossWindow, shares: list[Share]) -> UpdateReport:
        """Sum the gradients of all ranks, and report the window.

        Raises:
            WorkloadError: when weights known beforehand differ from those of the forward passes.
        """
        weights = agreed_weights(losses.totals, sum_by_name(share.weights for share in shares))
        sums = sum_by_name(share.sums for share in shares)
        self.outstanding = 1.0
        if losses.totals is None and losses.provisional:
            self.outstanding = losses.provisional / next(iter(weights.values()))
        if self._ranks.reduces:
            self.apply_outstanding()  # each rank has a factor of its own
        if not self._lock_step:
            self._sum_over_ranks(shares)
        return UpdateReport(
            terms={name: total / (weights[name] or 1.0) for name, total in sums.items()},
            weights=dict(weights),
            gradient_norm=None,
            skipped=not any(self._gradients.present()) or not any(weights.values()),
            micro_batch_sizes=tuple(losses.sizes),
            splits=tuple(split for share in shares for split in share.splits),
            samples=sum(share.samples for share in shares),
            gradient_parts=gradient_parts(
                [share.measured for share in shares],
                weights,
                known=losses.totals is not None,
                lock_step=self._lock_step,
            ),
        )

    def _sum_over_ranks(self, shares: list[Share]) -> None:
        """Sum the gradients and broadcast the buffers of rank 0. A parameter that no rank used keeps no gradient."""
        if not self._ranks.reduces:
            return
        present = [any(flags) for flags in zip(*(share.present for share in shares), strict=True)]
        self._ranks.sum_(self._gradients.complete(present))
        with torch.no_grad():
            self._ranks.broadcast_(list(self._model.buffers()))

    def apply_outstanding(self, extra_factor: float | Tensor = 1.0) -> None:
        """Multiply the sums by the outstanding factor and by ``extra_factor``, in one pass."""
        factor = self.outstanding * extra_factor
        self.outstanding = 1.0
        if isinstance(factor, Tensor) or factor != 1.0:
            self._gradients.scale(factor)
