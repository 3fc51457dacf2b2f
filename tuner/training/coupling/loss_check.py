"""A cheap check, for a training loop of one's own, that a loss is a sum over its samples, with its weight.

The loss of the first micro-batch is compared with that of its two parts: the forward passes of two micro-batches, once,
and no backward pass.
Gradients are not touched, and random numbers and buffers are as before. Probes and the trainer have a thorough check of
their own (``tuner.training.coupling.check``), which compares gradients too.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tuner.errors import WorkloadError
from tuner.training.coupling.comparison import without_dropout
from tuner.training.coupling.rounded_weights import ROUNDED_RUNS, ROUNDING_SAFETY, mantissa_bits, rounded_weights
from tuner.training.micro_batches.nested_batches import to_device
from tuner.training.micro_batches.snapshot import Snapshot
from tuner.training.micro_batches.splitting import MicroBatch
from tuner.workloads.base import Batch

_HOST_TOLERANCE = 1e-3
"""Relative, where a CPU computes in fp32: a hundred times the rounding of a sum over samples in other groups."""
_CARD_TOLERANCE = 1e-2
"""Relative, on other devices, which choose kernels of other precision by size (TF32)."""
_NARROW_TOLERANCE = 0.05
"""Relative, where something is computed in less than fp32. A mean returned as a sum is off by a third at least."""
_RANDOM_TOLERANCE = 0.1
"""Relative, where random numbers are in a loss."""
_CARD_BITS = 10
"""Binary digits of TF32."""
_STEADY = 1e-5
"""Relative: how far two runs of a loss without random numbers may be apart."""
_NEVER = "Pass checks_coupling=False to go on all the same."

Terms: TypeAlias = dict[str, tuple[float, float]]
"""Sum and weight of each term, by name."""
Means: TypeAlias = dict[str, float]
"""Mean of each term, or a change of the mean, by name."""
LossOf: TypeAlias = Callable[[nn.Module, Batch], Any]


@dataclass(frozen=True)
class Finding:
    """A fault of a loss."""

    message: str
    always: bool
    """True if the update of a single micro-batch is wrong too."""


class LossCheck:
    """Comparison of the loss of a micro-batch with that of its parts.

    Args:
        model: as the loss is called with it.
        snapshot: restores what a forward pass changes.
        device: where batches go.
        floating: what floating-point inputs are cast to.
    """

    def __init__(
        self, model: nn.Module, snapshot: Snapshot, device: torch.device, floating: torch.dtype | None
    ) -> None:
        self._model = model
        self._snapshot = snapshot
        self._device = device
        self._floating = floating
        self._is_due = True
        self._finding: Finding | None = None

    def require_sum(self, window: Sequence[MicroBatch], loss: LossOf, *, accumulates: bool) -> None:
        """Check ``loss`` in the first window with samples, and refuse what is wrong in this window or a later one.

        Raises:
            WorkloadError: when the update would be wrong.
        """
        if self._is_due and window:
            self._finding = self.finding(window, loss)
            self._is_due = False
        if self._finding is not None and (accumulates or self._finding.always):
            raise WorkloadError(self._finding.message)

    def finding(self, window: Sequence[MicroBatch], loss: LossOf) -> Finding | None:
        """Find a fault of ``loss``; None where there is none, or the loss cannot be judged.

        Nothing is reported about losses that cannot be computed of a part. Only a warning is given where random numbers
        that cannot be silenced are in a loss.
        """
        micro_batch = next(filter(_is_comparable, window), None)
        if micro_batch is None:
            return None
        self._snapshot.capture()
        try:
            with without_dropout(self._model), torch.compiler.set_stance("force_eager"):
                return self._compared(micro_batch, loss)
        except Exception:  # noqa: BLE001 - the window's own passes tell what is wrong, where they meet it too
            return None
        finally:
            self._snapshot.restore()

    def _compared(self, micro_batch: MicroBatch, loss: LossOf) -> Finding | None:
        first = micro_batch.size - max(
            1, micro_batch.size // 3
        )  # unequal parts, as a mean of equal ones is the whole's
        parts = micro_batch.divide((first, micro_batch.size - first))
        with _NarrowResults() as precision:
            whole = self._terms(micro_batch, loss)
            pieces = [self._terms(part, loss) for part in parts]
        tolerance = _HOST_TOLERANCE if self._device.type == "cpu" else _CARD_TOLERANCE
        tolerance = _NARROW_TOLERANCE if precision.found else tolerance
        finding = _judged(whole, pieces, tolerance, {})
        if finding is None:
            return None
        if self._is_steady(whole, micro_batch, loss):
            return _judged(whole, pieces, tolerance, self._rounding(whole, micro_batch, loss, precision))
        finding = _judged(whole, pieces, _RANDOM_TOLERANCE, {})
        if finding is not None and finding.always:
            warnings.warn(f"{finding.message} (Its random numbers leave some doubt.)", stacklevel=2)
        return None

    def _terms(self, micro_batch: MicroBatch, loss: LossOf) -> Terms:
        """The terms of a forward pass over a copy, from the same random numbers and buffers each time."""
        self._snapshot.restore()
        return self._forward(micro_batch, loss)

    def _forward(self, micro_batch: MicroBatch, loss: LossOf) -> Terms:
        output = loss(self._model, to_device(copy.deepcopy(micro_batch.batch), self._device, self._floating))
        terms: Mapping[str, Any] = {"loss": output} if isinstance(output, tuple) else output
        return {name: (_number(loss_sum), _number(weight)) for name, (loss_sum, weight) in terms.items()}

    def _rounding(self, whole: Terms, micro_batch: MicroBatch, loss: LossOf, precision: _NarrowResults) -> Means:
        """Measure how far rounded weights move the mean of each term: a sum that cancels is rounding alone."""
        bits = precision.bits if self._device.type == "cpu" else min(precision.bits, _CARD_BITS)
        moved = dict.fromkeys(whole, 0.0)
        for run in range(ROUNDED_RUNS):
            with rounded_weights(self._model, bits, run):
                terms = self._terms(micro_batch, loss)
            for name, (total, weight) in whole.items():
                change = abs(terms[name][0] - total) / abs(weight) if weight else 0.0
                moved[name] = max(moved[name], ROUNDING_SAFETY * change)
        return moved

    def _is_steady(self, whole: Terms, micro_batch: MicroBatch, loss: LossOf) -> bool:
        """Return whether two further runs, from other random numbers, give the same loss."""
        for _ in range(2):
            self._snapshot.restore()
            torch.rand(3, device=self._device), torch.rand(3), random.random(), np.random.random()  # noqa: NPY002 - moves each generator on
            again = self._forward(micro_batch, loss)
            pairs = ((total, again[name][0]) for name, (total, _) in whole.items())
            if not all(math.isclose(total, other, rel_tol=_STEADY, abs_tol=1e-12) for total, other in pairs):
                return False
        return True


def _is_comparable(micro_batch: MicroBatch) -> bool:
    return micro_batch.size > 1 and not micro_batch.is_padding and micro_batch.indivisible is None


class _NarrowResults(TorchFunctionMode):
    """Record of the least precision of any result, in binary digits: less than fp32 under autocast."""

    bits = mantissa_bits(torch.float32)

    @property
    def found(self) -> bool:
        """Return whether an operation of lower precision ran."""
        return self.bits < mantissa_bits(torch.float32)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's own signature
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.dtype.itemsize < torch.float32.itemsize:
            self.bits = min(self.bits, mantissa_bits(result.dtype))
        return result


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _judged(whole: Terms, pieces: list[Terms], tolerance: float, rounding: Means) -> Finding | None:
    """The finding of the first term whose mean differs between the whole and its parts by more than ``rounding``."""
    for name, (total, weight) in whole.items():
        sums, weights = [piece[name][0] for piece in pieces], [piece[name][1] for piece in pieces]
        if not all(map(math.isfinite, (total, weight, *sums, *weights))) or not (weight and all(weights)):
            continue
        mean, parts_mean = total / weight, sum(sums) / sum(weights)
        scale = max(abs(mean), *(abs(s / w) for s, w in zip(sums, weights, strict=True)))
        if scale and abs(mean - parts_mean) - rounding.get(name, 0.0) > tolerance * scale:
            return _explained(name, whole[name], sums, weights, tolerance)
    return None


def _explained(
    name: str, whole: tuple[float, float], sums: list[float], weights: list[float], tolerance: float
) -> Finding:
    total, weight = whole
    slack = tolerance * max(abs(total), *map(abs, sums))
    whole_words, part_words = f"{total:.6g} over a weight of {weight:g}", f"{sum(sums):.6g} over {sum(weights):g}"
    figures = f"{whole_words} for a micro-batch, {part_words} for its parts"
    if min(sums) - slack <= total <= max(sums) + slack:
        grows = math.isclose(weight, sum(weights), rel_tol=tolerance)
        reason = "is a mean, returned as a sum: return the sum over samples or tokens, and their number as the weight"
        return Finding(f"loss term `{name}` {reason} ({figures}). {_NEVER}", always=grows)
    if abs(sum(sums) - total) <= slack:
        reason = "has weights that do not add up: return as weight the number of samples or tokens it is summed over"
        return Finding(f"loss term `{name}` {reason} ({figures}). {_NEVER}", always=False)
    reason = (
        "couples the samples of a micro-batch (BatchNorm, in-batch negatives, load balancing), so that accumulation "
        "does not give the full batch's gradient"
    )
    return Finding(f"loss term `{name}` {reason} ({figures}). {_NEVER}", always=False)
