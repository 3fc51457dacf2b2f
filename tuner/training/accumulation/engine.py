"""Exact gradient accumulation, for a training loop of your own as well as for Batchwright's.

::

    accumulation = GradientAccumulation(model, optimizer, max_norm=1.0)
    for micro_batches in windows(loader, 4):
        accumulation.update(micro_batches, loss)

where ``loss(model, micro_batch)`` returns ``(loss_sum, weight)``: a *sum* over samples or tokens, and their number. The
update has the gradient of the whole window's mean, however samples and tokens fall into micro-batches, over however
many ranks. A micro-batch that does not fit is divided and run again (``recovery``). Losses and gradients are summed
over micro-batches (``gradient_sums``) and ranks (``reduction``).

The loss is a function, not the body of a ``for``: a body's variables would keep the tensors of a failed micro-batch
alive while its parts run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tuner.errors import WorkloadError
from tuner.hardware.memory_devices.base import MemoryDevice
from tuner.hardware.memory_devices.factory import open_device
from tuner.training.accumulation.collectives import ProcessGroup, Ranks
from tuner.training.accumulation.gradient_sums import (
    Gathering,
    GradientSums,
    ScratchSums,
    SumsInPlace,
    default_gathering,
    total_norm,
)
from tuner.training.accumulation.own_parameters import OwnParameters
from tuner.training.accumulation.recovery import Action, Place, Recovery, decide
from tuner.training.accumulation.reduction import ONLY_TERM, Reduction, Weigh
from tuner.training.coupling.loss_check import LossCheck
from tuner.training.micro_batches.loss_window import LossWindow, Share, UpdateReport, check_terms
from tuner.training.micro_batches.snapshot import Snapshot
from tuner.training.micro_batches.splitting import MicroBatch, split_batch, taken, to_device, windows
from tuner.workloads.base import Batch, LossTerms

__all__ = ["Gathering", "GradientAccumulation", "UpdateReport", "split_batch", "windows"]

Loss: TypeAlias = "Callable[[nn.Module, Batch], LossTerms | tuple[Tensor, Tensor | float]]"
"""Forward pass: ``(loss_sum, weight)``, or named terms of such pairs."""

_CLIPPING_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""


class GradientAccumulation:
    """A model and its optimizer, moved forward one exact update at a time.

    Args:
        model: on its device. Of a model wrapped in ``DistributedDataParallel`` the module inside is called, as its own
            reduction and broadcasts would wait for ranks that have no micro-batch.
        optimizer: over the model's parameters.
        max_norm: largest L2 norm of the whole gradient, applied once per update; None to leave the gradient.
        scaler: for fp16; unscaled and updated once per update.
        memory: the device the model is on, which recognises an out-of-memory error; found from the model when left out.
        ranks: the ranks that share each window; this process alone when left out (under
            ``DistributedDataParallel`` the ranks of the default process group).
        gathering: how gradients are summed, see ``tuner.training.accumulation.gradient_sums``; by device when
            left out: scratch sums on a card, where they cost no time, and in place on the CPU, where fresh memory for
            every micro-batch does.
        recovers: whether a micro-batch that does not fit is divided, or its error is raised.
        floating: type that floating-point inputs are cast to, where the parameters are of a lower precision.
        lock_step: the model's own collectives (FSDP) are in every forward and backward pass and reduce the gradient: a
            rank cannot divide a micro-batch alone, so an out-of-memory error is raised.
        checks_coupling: whether the loss of the first window is compared with that of its parts, see
            ``tuner.training.coupling.loss_check``: the loss is then called three times more, and again
            where the two differ. Not with ``lock_step``.

    Parameters that become trainable later, gradients from elsewhere and a sharded model that averages are refused by
    name before a window.

    Raises:
        WorkloadError: when no parameter is trainable, a scaler is to scale gradients of less than fp32, or the model is
            in shards without ``lock_step``.
    """

    def __init__(  # noqa: PLR0913 - each has a default that suits a loop of one's own
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        memory: MemoryDevice | None = None,
        ranks: Ranks | None = None,
        gathering: Gathering | None = None,
        recovers: bool = True,
        floating: torch.dtype | None = None,
        lock_step: bool = False,
        checks_coupling: bool = True,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.max_norm = max_norm
        self._own = OwnParameters(model, optimizer, lock_step=lock_step)
        self.parameters = self._own.parameters
        self.memory = memory or open_device(str(self.parameters[0].device))
        self.device = self.memory.torch_device
        self.scaler = scaler or torch.amp.GradScaler(self.device.type, enabled=False)
        wrapped = isinstance(model, DistributedDataParallel)
        self.ranks = ranks or (ProcessGroup() if wrapped else Ranks())
        self._called = model.module if isinstance(model, DistributedDataParallel) else model
        self._floating = floating
        self._lock_step = lock_step
        in_place = lock_step or (gathering or default_gathering(self.device.type)) == "in-place"
        self.gradients: GradientSums = (SumsInPlace if in_place else ScratchSums)(self.parameters)
        snapshot = None if lock_step else Snapshot(model, self.device)
        self._prepare_scaler()
        action = decide(Place.PASS, lock_step=lock_step, sums_in_place=in_place) if recovers else Action.RAISE
        self._recovery = Recovery(self.memory, self.gradients, snapshot, action, self.ranks.rank)
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
        self._reduction = Reduction(model, self.gradients, self.ranks, lock_step=lock_step)
        self._loss_check: LossCheck | None = None
        if checks_coupling and snapshot is not None:
            self._loss_check = LossCheck(self._called, snapshot, self.device, floating)
        self._reduction.broadcast_start()

    def _prepare_scaler(self) -> None:
        narrow = any(parameter.dtype.itemsize < torch.float32.itemsize for parameter in self.parameters)
        if self.scaler.is_enabled() and narrow:
            raise WorkloadError("a gradient scaler needs parameters in fp32: run the model under autocast instead")
        self.scaler.scale(torch.zeros((), device=self.device))  # makes its scale: a rank without samples never would

    @property
    def largest_micro_batch(self) -> int | None:
        """Micro-batches above this size are divided before they run; lowered by every split, None without a bound."""
        return self._recovery.largest_micro_batch

    @largest_micro_batch.setter
    def largest_micro_batch(self, size: int | None) -> None:
        self._recovery.largest_micro_batch = size

    @property
    def failed_micro_batch(self) -> int | None:
        """Size of the last micro-batch that did not fit; None when all did."""
        return self._recovery.failed_micro_batch

    # --- an update ---

    def update(
        self, micro_batches: Iterable[Batch | MicroBatch], loss: Loss, weigh: Weigh | None = None
    ) -> UpdateReport:
        """Make one optimizer update over ``micro_batches``, which are this rank's part of the effective batch.

        Args:
            micro_batches: batches of any type, or ``MicroBatch``es that know how to divide themselves. Tensors in
                mappings, lists, tuples and dataclasses are moved to the device; other objects by their own ``to``.
                Other ranks may hold other numbers of them, or none.
            loss: the forward pass.
            weigh: its weights without a forward pass; needed with several terms.

        The optimizer's step is never retried: an error in it is raised unchanged, with the step half made. Go on from a
        checkpoint then.

        Raises:
            WorkloadError: when the loss breaks its contract.
            OutOfMemoryError: when a micro-batch of one sample does not fit.
            PeerError: when another rank failed.
        """
        report = self._gather(micro_batches, loss, weigh)
        if not report.skipped:
            report = self._step(report)
        self.gradients.clear()
        return report

    def accumulate(
        self, micro_batches: Iterable[Batch | MicroBatch], loss: Loss, weigh: Weigh | None = None
    ) -> UpdateReport:
        """Make the first half of ``update``: leave the window's gradient in ``.grad`` for a step of your own.

        The gradient is still multiplied by the scaler's scale, and not clipped. The report has no norm.
        """
        report = self._gather(micro_batches, loss, weigh)
        self._reduction.settle()
        self.gradients.install()
        return report

    def _gather(self, micro_batches: Iterable[Batch | MicroBatch], loss: Loss, weigh: Weigh | None) -> UpdateReport:
        """Run an accumulation window on all ranks and sum its gradients."""
        window = [part if isinstance(part, MicroBatch) else taken(part) for part in micro_batches]
        totals = self._reduction.total_weights(window, weigh)
        if totals is not None and not any(totals.values()):
            self.gradients.clear()
            sizes = tuple(micro_batch.size for micro_batch in window)
            return UpdateReport(dict.fromkeys(totals, 0.0), totals, None, skipped=True, micro_batch_sizes=sizes)
        losses = LossWindow(totals)
        try:
            shares = self._shares(window, loss, losses)
        except BaseException:
            self.gradients.clear()  # the gradients of a failed window would take memory
            raise
        finally:
            self.gradients.end()
        return self._reduction.reduce(losses, shares)

    def _shares(self, window: list[MicroBatch], loss: Loss, losses: LossWindow) -> list[Share]:
        if self._lock_step:  # ranks that wait inside a pass would not learn of a failure: it has to end this process
            return self.ranks.gather(self._run(window, loss, losses))
        return self.ranks.run_collectively(lambda: self._run(window, loss, losses))

    # --- forward and backward passes ---

    def _run(self, window: list[MicroBatch], loss: Loss, losses: LossWindow) -> Share:
        """Run all micro-batches of this rank, those that do not fit in smaller parts."""
        gradients, recovery = self.gradients, self._recovery
        reruns_window = gradients.in_place
        self._own.require_own(gradients.installed)
        gradients.start()
        self._seeds.clear()
        queue = deque(recovery.within_bound(window))
        self._require_sum(window, loss, accumulates=len(queue) > 1)
        if len(queue) > 1 or self.ranks.reduces:
            gradients.allocate_buffers()
        recovery.start(window)
        while queue:
            micro_batch = queue.popleft()
            if not reruns_window:
                recovery.protect([micro_batch])
            failure = self._attempt(micro_batch, loss, losses)
            if failure is None:
                gradients.commit()
                continue
            recovery.divide(failure, micro_batch)
            del failure  # its traceback keeps the tensors of the failed pass alive
            if reruns_window:
                losses.forget()
            recovery.roll_back()
            self._require_sum(window, loss, accumulates=True)
            queue = deque(recovery.requeued(window if reruns_window else [micro_batch, *queue]))
        gradients.collect()
        return self._reduction.share(losses, recovery.splits)

    def _require_sum(self, window: Sequence[MicroBatch], loss: Loss, *, accumulates: bool) -> None:
        if self._loss_check is not None:
            self._loss_check.require_sum(window, loss, accumulates=accumulates or self.ranks.size > 1)

    def _attempt(self, micro_batch: MicroBatch, loss: Loss, losses: LossWindow) -> Exception | None:
        """Run one micro-batch. Return the error it ended with, to be judged after the ``except`` block."""
        try:
            terms = self._backward(micro_batch, loss, losses)
            if not micro_batch.is_padding:
                losses.add(terms, micro_batch.size)
        except Exception as error:  # noqa: BLE001 - any error may turn out to be a lack of memory
            return error
        return None

    def _backward(self, micro_batch: MicroBatch, loss: Loss, losses: LossWindow) -> LossTerms:
        """Run the forward and backward pass. Return the terms without their graph."""
        output = loss(self._called, to_device(micro_batch.batch, self.device, self._floating))
        terms = cast("LossTerms", {ONLY_TERM: output} if isinstance(output, tuple) else output)
        check_terms(terms, losses.totals)
        sums = {name: (_scalar(loss_sum), _constant(weight)) for name, (loss_sum, weight) in terms.items()}
        divisors = {
            term: losses.divisor(term, 1.0 if self._lock_step else weight) for term, (_, weight) in sums.items()
        }
        roots = {name: sums[name][0] for name, divisor in divisors.items() if divisor}
        if roots:
            share = 0.0 if micro_batch.is_padding else 1.0
            seeds = [self._seed(share / divisors[name], root) for name, root in roots.items()]
            torch.autograd.backward(list(roots.values()), seeds)
        return {name: (loss_sum.detach(), weight) for name, (loss_sum, weight) in sums.items()}

    def _seed(self, gradient: float, loss_sum: Tensor) -> Tensor:
        """The gradient of the window's mean by a loss sum, times the scaler's scale: made once for a window.

        Handing it to autograd spares every micro-batch a division of its loss sum and that division's backward pass.
        """
        key = (gradient, loss_sum.dtype, loss_sum.device)
        found = self._seeds.get(key)
        if found is None:
            wide = torch.promote_types(loss_sum.dtype, torch.float32)
            exact = torch.full((), gradient, dtype=wide, device=loss_sum.device)
            found = self._seeds[key] = self.scaler.scale(exact).to(loss_sum.dtype)
        return found

    # --- the optimizer's step ---

    def _step(self, report: UpdateReport) -> UpdateReport:
        """Unscale, measure, clip and step, once."""
        if self.scaler.is_enabled():
            self.gradients.install()
            self.scaler.unscale_(self.optimizer)
        norm = total_norm(self.gradients.tensors()) * self._reduction.outstanding
        if self.max_norm is None:
            self._reduction.settle()
        else:
            self._reduction.settle(torch.clamp(self.max_norm / (norm + _CLIPPING_EPSILON), max=1.0))
        self.gradients.install()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.scaler.get_scale() < scale  # it falls when, and only when, the scaler has left the step out
        return replace(report, gradient_norm=_finite(float(norm)), skipped=skipped)


def _scalar(loss_sum: Tensor) -> Tensor:
    return loss_sum.reshape(()) if loss_sum.dim() else loss_sum


def _constant(weight: Tensor | float) -> Tensor | float:
    return weight.detach() if isinstance(weight, Tensor) else weight


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
