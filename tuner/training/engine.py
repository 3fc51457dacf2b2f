"""One optimizer update over a window of micro-batches, with the gradient of the full batch.

Probes and training share it: what a probe measures is what a run does.

Each loss term's sum is divided by the term's weight over the *whole window*, known before the first backward pass where
the workload can weigh its losses without a forward pass. Where it cannot, and has a single term, gradients are gathered
divided by the first micro-batch's weight (any constant would do; this one keeps fp16 in range) and rescaled at the end.
Unscaling, clipping and stepping happen once per update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tuner.errors import WorkloadError
from tuner.specs import WorkloadSpec
from tuner.training.optimizers import build_optimizer
from tuner.training.precision import autocast, loss_scaler
from tuner.workloads.base import Batch, LossTerms, WeighsLosses, Workload


@dataclass(frozen=True)
class UpdateReport:
    """What one update did. Losses are means over the window's weight."""

    terms: dict[str, float]
    gradient_norm: float | None
    """L2 norm of the whole gradient before clipping; none when it was not finite."""
    skipped: bool
    """Whether no step was made: the scaler saw a gradient that is not finite, or the window weighed nothing."""

    @property
    def loss(self) -> float:
        """The sum of the terms' means: what the update descended."""
        return sum(self.terms.values())


@dataclass
class _Window:
    """What a window has gathered so far: per term the summed loss (kept on the device) and its weight."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    provisional: float = 0.0
    """The divisor in use while the true one is not known: the first weight seen that is not zero."""

    def add(self, name: str, loss_sum: Tensor, weight: float) -> None:
        detached = loss_sum.detach()
        self.sums[name] = self.sums[name] + detached if name in self.sums else detached
        self.weights[name] += weight


def to_device(batch: Batch, device: torch.device, floating: torch.dtype | None = None) -> Batch:
    """``batch`` with every tensor on ``device``; dicts, lists and tuples are walked, other values kept.

    Floating-point tensors take the type ``floating``, where one is given.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, floating if batch.is_floating_point() else None, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device, floating) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device, floating) for value in batch)
    return batch


class UpdateEngine:
    """A model with its optimizer, moved forward one exact update at a time.

    Args:
        spec: precision, clipping, optimizer.
        workload: makes the loss terms.
        model: already on ``device``; wrapped in ``DistributedDataParallel`` or compiled, if it is to be.
        device: where the model is.
    """

    def __init__(self, spec: WorkloadSpec, workload: Workload, model: nn.Module, device: torch.device) -> None:
        self.spec = spec
        self.workload = workload
        self.model = model
        self.device = device
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(spec.optimizer, self.parameters)
        self.scaler = loss_scaler(spec, device)
        self._floating = torch.bfloat16 if spec.precision == "bf16" else None
        """What inputs are cast to, where the parameters themselves are of a lower precision."""

    def update(self, micro_batches: Sequence[Batch]) -> UpdateReport:
        """One optimizer update over ``micro_batches`` (on the CPU), which together are the effective batch.

        Raises:
            WorkloadError: when the loss terms break their contract.
        """
        totals = self._totals(micro_batches)
        if totals is not None and not any(totals.values()):
            return UpdateReport(dict.fromkeys(totals, 0.0), 0.0, skipped=True)
        window = _Window()
        for index, batch in enumerate(micro_batches):
            with self._synchronization(last=index == len(micro_batches) - 1):
                self._backward(to_device(batch, self.device, self._floating), totals, window)
        if totals is None:
            self._rescale(window)
        return self._step(window)

    def _totals(self, micro_batches: Sequence[Batch]) -> dict[str, float] | None:
        """The window's weight per term, or none when only a forward pass can tell."""
        if not isinstance(self.workload, WeighsLosses):
            return None
        totals: dict[str, float] = defaultdict(float)
        for batch in micro_batches:
            for name, weight in self.workload.loss_weights(batch).items():
                totals[name] += float(weight)
        return dict(totals)

    def _synchronization(self, *, last: bool) -> AbstractContextManager[object]:
        """Under DDP gradients are reduced in the last backward pass only; forward and backward share the context."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    def _backward(self, batch: Batch, totals: Mapping[str, float] | None, window: _Window) -> None:
        with autocast(self.spec, self.device):
            terms = self.workload.loss_terms(self.model, batch)
        self._check(terms, totals)
        scaled = []
        for name, (loss_sum, weight) in terms.items():
            window.add(name, loss_sum, float(weight))
            window.provisional = window.provisional or float(weight)
            divisor = window.provisional if totals is None else totals[name]
            if divisor:
                scaled.append(loss_sum / divisor)
        if scaled:
            torch.autograd.backward(self.scaler.scale(torch.stack(scaled).sum()))

    def _check(self, terms: LossTerms, totals: Mapping[str, float] | None) -> None:
        if not terms:
            raise WorkloadError("loss_terms() returned no term")
        for name, pair in terms.items():
            if not isinstance(pair, tuple) or len(pair) != 2:  # noqa: PLR2004 - (loss_sum, weight)
                raise WorkloadError(f"loss term `{name}` must be (loss_sum, weight), got {type(pair).__name__}")
            if not isinstance(pair[0], Tensor) or pair[0].numel() != 1 or not pair[0].requires_grad:
                raise WorkloadError(f"the loss sum of `{name}` must be a scalar tensor with a gradient")
        if totals is None and len(terms) > 1:
            raise WorkloadError(
                f"a workload with several loss terms ({', '.join(terms)}) must define loss_weights(batch): each term "
                "is divided by its own weight over the whole window, known before the first backward pass"
            )
        if totals is not None and set(terms) - set(totals):
            raise WorkloadError(f"loss_weights() names {sorted(totals)}, but loss_terms() returned {sorted(terms)}")

    def _rescale(self, window: _Window) -> None:
        """Divide the gathered gradients by the weight that only the forward passes could tell."""
        (weight,) = window.weights.values()
        gradients = self._gradients()
        if weight and gradients:
            torch._foreach_mul_(gradients, window.provisional / weight)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _step(self, window: _Window) -> UpdateReport:
        """Unscale, measure, clip and step, once."""
        gradients = self._gradients()
        if not gradients:
            return UpdateReport(dict.fromkeys(window.sums, 0.0), 0.0, skipped=True)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.get_total_norm(gradients)
        if self.spec.gradient_clipping is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.spec.gradient_clipping, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        terms = {name: float(total) / (window.weights[name] or 1.0) for name, total in window.sums.items()}
        finite = bool(torch.isfinite(norm))
        skipped = self.scaler.is_enabled() and not finite
        return UpdateReport(terms, float(norm) if finite else None, skipped=skipped)
