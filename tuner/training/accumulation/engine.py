"""Exact gradient accumulation, for a training loop of your own as well as for Batchwright's.

::

    accumulation = GradientAccumulation(model, optimizer, max_norm=1.0)
    for micro_batches in windows(loader, 4):
        accumulation.update(micro_batches, loss)

where ``loss(model, micro_batch)`` returns ``(loss_sum, weight)``: a *sum* over samples or tokens, and how many there
were. The update has the gradient of the whole window's mean, however samples and tokens fall into micro-batches, over
however many ranks; a micro-batch that does not fit is divided and run again.

The loss is a function, not the body of a ``for``: a body's variables would keep the tensors of a failed micro-batch
alive while it is tried again in smaller parts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tuner.errors import InvalidSizeError, OutOfMemoryError, WorkloadError
from tuner.hardware.memory_devices.base import MemoryDevice
from tuner.hardware.memory_devices.factory import open_device
from tuner.planning.accumulation import balanced_split
from tuner.schemas.training import MicroBatchSplit
from tuner.training.accumulation.collectives import ProcessGroup, Ranks
from tuner.training.accumulation.gradient_sums import GradientSums, ScratchSums, SumsInPlace, total_norm
from tuner.training.accumulation.own_parameters import OwnParameters
from tuner.training.coupling.loss_check import LossCheck
from tuner.training.micro_batches.batch_versions import BatchVersions
from tuner.training.micro_batches.loss_window import (
    Share,
    UpdateReport,
    Window,
    agreed_weights,
    check_terms,
    sum_by_name,
)
from tuner.training.micro_batches.snapshot import Undo
from tuner.training.micro_batches.splitting import MicroBatch, split_batch, taken, to_device, windows
from tuner.workloads.base import Batch, LossTerms

__all__ = ["GradientAccumulation", "UpdateReport", "split_batch", "windows"]

Loss: TypeAlias = "Callable[[nn.Module, Batch], LossTerms | tuple[Tensor, Tensor | float]]"
"""Forward pass: ``(loss_sum, weight)``, or named terms of such pairs."""
Weigh: TypeAlias = "Callable[[Batch], Mapping[str, float] | float]"
"""The weight that the loss of a micro-batch will have, told without a forward pass."""
Gathering: TypeAlias = Literal["scratch", "in-place"]
"""How gradients are summed, and so what running out of memory costs: the micro-batch, or the window."""

_ONLY_TERM = "loss"
_CLIPPING_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""


class GradientAccumulation:
    """A model and its optimizer, moved forward one exact update at a time.

    Args:
        model: on its device. Of one wrapped in ``DistributedDataParallel`` the module inside is called, as its own
            reduction and broadcasts would wait for ranks that have nothing to do.
        optimizer: over the model's parameters.
        max_norm: largest L2 norm of the whole gradient, applied once per update; none to leave it.
        scaler: for fp16; unscaled and updated once per update.
        memory: the device the model is on, which tells an out-of-memory error; found from the model when left out.
        ranks: the ranks that share each window; this process alone when left out (under
            ``DistributedDataParallel`` those of the default process group).
        gathering: how gradients are summed, see ``tuner.training.accumulation.gradient_sums``; by device when
            left out: apart on a card, where it costs no time, and in place on the CPU, where fresh memory for
            every micro-batch does.
        recovers: whether a micro-batch that does not fit is divided, or its error comes out.
        floating: what floating-point inputs are cast to, where the parameters are of a lower precision.
        lock_step: the model's own collectives (FSDP) are in every forward and backward pass and reduce the gradient: a
            rank cannot go its own way, so an out-of-memory error passes.
        checks_coupling: whether the loss of the first window is compared with that of its parts, see
            ``tuner.training.coupling.loss_check``: it is called three times more then, and again
            where the two differ. Not with ``lock_step``.

    Attributes:
        largest_micro_batch: micro-batches above this size are divided before they run; lowered by every split.
        failed_micro_batch: the size of the last one that did not fit; none when all did.

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
        self.largest_micro_batch: int | None = None
        self.failed_micro_batch: int | None = None
        self._recovers = recovers and not lock_step
        self._floating = floating
        self._lock_step = lock_step
        gathering = gathering or ("in-place" if self.device.type == "cpu" else "scratch")
        in_place = gathering == "in-place" or lock_step
        self._gradients: GradientSums = (SumsInPlace if in_place else ScratchSums)(self.parameters)
        self._undo = None if lock_step else Undo(model, self.device)
        if self.scaler.is_enabled() and any(it.dtype.itemsize < torch.float32.itemsize for it in self.parameters):
            raise WorkloadError("a gradient scaler needs parameters in fp32: run the model under autocast instead")
        self.scaler.scale(torch.zeros((), device=self.device))  # makes its scale: a rank without samples never would
        self._loss_check: LossCheck | None = None
        if checks_coupling and self._undo is not None:
            self._loss_check = LossCheck(self._called, self._undo, self.device, floating)
        self._outstanding = 1.0
        """What the sums are still to be multiplied by."""
        self._start_alike()

    def _start_alike(self) -> None:
        """All ranks begin with the parameters and buffers of rank 0."""
        if self.ranks.reduces and not self._lock_step:
            every = {id(it): it.detach() for it in (*self.model.parameters(), *self.parameters)}
            with torch.no_grad():
                self.ranks.broadcast_([*every.values(), *self.model.buffers()])

    # --- an update ---

    def update(
        self, micro_batches: Iterable[Batch | MicroBatch], loss: Loss, weigh: Weigh | None = None
    ) -> UpdateReport:
        """One optimizer update over ``micro_batches``, which together are this rank's part of the effective batch.

        Args:
            micro_batches: batches of any type, or ``MicroBatch``es that know how to divide themselves. Tensors in
                mappings, lists, tuples and dataclasses are moved to the device; other objects by their own ``to``.
                Other ranks may hold other numbers of them, or none.
            loss: the forward pass.
            weigh: its weights without a forward pass; needed with several terms.

        The optimizer's step is never retried: an error in it comes out as it is, with the step half made. Go on from a
        checkpoint then.

        Raises:
            WorkloadError: when the loss breaks its contract.
            OutOfMemoryError: when a micro-batch of one sample does not fit.
            PeerError: when another rank failed.
        """
        report = self._gather(micro_batches, loss, weigh)
        if not report.skipped:
            report = self._step(report)
        self._gradients.clear()
        return report

    def accumulate(
        self, micro_batches: Iterable[Batch | MicroBatch], loss: Loss, weigh: Weigh | None = None
    ) -> UpdateReport:
        """The first half of ``update``: leaves the window's gradient in ``.grad`` for a step of your own.

        It is still multiplied by the scaler's scale, and not clipped; the report tells no norm.
        """
        report = self._gather(micro_batches, loss, weigh)
        self._settle()
        self._gradients.install()
        return report

    def _gather(self, micro_batches: Iterable[Batch | MicroBatch], loss: Loss, weigh: Weigh | None) -> UpdateReport:
        window = [it if isinstance(it, MicroBatch) else taken(it) for it in micro_batches]
        totals = self._totals(window, weigh)
        self._outstanding = 1.0
        if totals is not None and not any(totals.values()):
            self._gradients.clear()
            sizes = tuple(it.size for it in window)
            return UpdateReport(dict.fromkeys(totals, 0.0), totals, None, skipped=True, micro_batch_sizes=sizes)
        gathered = Window(totals)
        try:
            shares = self._shares(window, loss, gathered)
        except BaseException:
            self._gradients.clear()  # what is left of a failed window is in nobody's way, and takes no memory
            raise
        finally:
            self._gradients.end()
        return self._reduce(gathered, shares)

    def _shares(self, window: list[MicroBatch], loss: Loss, gathered: Window) -> list[Share]:
        if self._lock_step:  # ranks that wait inside a pass would not hear of a failure: it has to end this process
            return self.ranks.gather(self._run(window, loss, gathered))
        return self.ranks.together(lambda: self._run(window, loss, gathered))

    # --- the window's weight ---

    def _totals(self, window: list[MicroBatch], weigh: Weigh | None) -> dict[str, float] | None:
        """The window's weight per term over all ranks, or none when only forward passes can tell."""
        if weigh is None:
            return None
        return sum_by_name(
            self.ranks.together(lambda: sum_by_name(_named(weigh(it.batch)) for it in window if not it.idle))
        )

    # --- forward and backward passes ---

    def _run(self, window: list[MicroBatch], loss: Loss, gathered: Window) -> Share:
        """All micro-batches of this rank, those that do not fit in smaller parts."""
        self._own.require_own(self._gradients.installed)
        self._gradients.start()
        restarts = self._gradients.restarts
        queue = deque(self._within_bounds(window))
        self._require_sum(window, loss, accumulates=len(queue) > 1)
        if len(queue) > 1 or self.ranks.reduces:
            self._gradients.make_room()
        if restarts:
            self._remember()
            versions = BatchVersions(window if self._recovers else [])
        while queue:
            micro_batch = queue.popleft()
            if not restarts:
                self._remember()
                versions = BatchVersions([micro_batch])
            failure = self._attempt(micro_batch, loss, gathered)
            if failure is None:
                self._gradients.commit()
                continue
            shortage = self._split_after(failure, micro_batch, gathered)
            del failure  # with its traceback go the tensors of the failed pass
            self._make_undone(gathered)
            versions.require_unchanged()
            self._require_sum(window, loss, accumulates=True)
            queue = deque(self._divided(window if restarts else [micro_batch, *queue], shortage))
        self._gradients.collect()
        return self._share(gathered)

    def _require_sum(self, window: list[MicroBatch], loss: Loss, *, accumulates: bool) -> None:
        if self._loss_check is not None:
            self._loss_check.require_sum(window, loss, accumulates=accumulates or self.ranks.size > 1)

    def _divided(self, micro_batches: list[MicroBatch], shortage: str) -> list[MicroBatch]:
        try:
            return self._within_bounds(micro_batches)
        except WorkloadError as error:
            raise OutOfMemoryError(f"{shortage}; and {error}") from None

    def _remember(self) -> None:
        if self._undo is not None:
            self._undo.remember()

    def _within_bounds(self, window: list[MicroBatch]) -> list[MicroBatch]:
        largest = self.largest_micro_batch
        return window if largest is None else [part for it in window for part in it.at_most(largest)]

    def _attempt(self, micro_batch: MicroBatch, loss: Loss, gathered: Window) -> Exception | None:
        """Run one micro-batch; returns the error it ended with, for after the ``except`` block."""
        try:
            terms = self._backward(micro_batch, loss, gathered)
            if not micro_batch.idle:
                gathered.add(terms, micro_batch.size)
        except Exception as error:  # noqa: BLE001 - any error may turn out to be a lack of memory
            return error
        return None

    def _backward(self, micro_batch: MicroBatch, loss: Loss, gathered: Window) -> LossTerms:
        """Forward and backward pass; returns the terms without their graph."""
        answer = loss(self._called, to_device(micro_batch.batch, self.device, self._floating))
        terms = cast("LossTerms", {_ONLY_TERM: answer} if isinstance(answer, tuple) else answer)
        check_terms(terms, gathered.totals)
        sums = {name: (_scalar(loss_sum), _constant(weight)) for name, (loss_sum, weight) in terms.items()}
        scaled = []
        for name, (loss_sum, weight) in sums.items():
            divisor = gathered.divisor(name, 1.0 if self._lock_step else weight)
            if divisor:
                scaled.append(loss_sum * 0.0 if micro_batch.idle else loss_sum / divisor)
        if scaled:
            whole = scaled[0] if len(scaled) == 1 else torch.stack(scaled).sum()
            torch.autograd.backward(self.scaler.scale(whole))
        return {name: (loss_sum.detach(), weight) for name, (loss_sum, weight) in sums.items()}

    # --- recovery ---

    def _split_after(self, failure: Exception, micro_batch: MicroBatch, gathered: Window) -> str:
        """Lower the bound on micro-batches after one did not fit; returns what the device said.

        Raises:
            OutOfMemoryError, InvalidSizeError: when there is no smaller micro-batch, or splitting is not allowed.
            Exception: ``failure`` itself, when it is no lack of memory.
        """
        shortage = self.memory.translate(failure)
        if not isinstance(shortage, (OutOfMemoryError, InvalidSizeError)):
            raise failure
        self.failed_micro_batch = micro_batch.size
        if not self._recovers:
            raise failure
        if micro_batch.indivisible is not None:
            raise type(shortage)(f"{shortage}; and {micro_batch.indivisible}")
        if micro_batch.size == 1:
            raise type(shortage)(f"a micro-batch of one sample does not fit: {shortage}")
        parts = balanced_split(micro_batch.size, 2)
        self.largest_micro_batch = parts[0]
        split = MicroBatchSplit(rank=self.ranks.rank, size=micro_batch.size, parts=parts, message=str(shortage))
        gathered.splits.append(split)
        return str(shortage)

    def _make_undone(self, gathered: Window) -> None:
        """After a failed pass: its gradients, random numbers and running statistics never were; its memory is free."""
        self._gradients.discard()
        if self._gradients.restarts:
            gathered.forget()
        self.memory.synchronize()
        self.memory.release()
        if self._undo is not None:
            self._undo.put_back()
        self._gradients.make_room()

    # --- the end of a window ---

    def _share(self, gathered: Window) -> Share:
        names = list(gathered.sums)
        values = torch.stack([gathered.sums[name].double() for name in names]).tolist() if names else []
        return Share(
            sums=dict(zip(names, values, strict=True)),
            weights={name: float(weight) for name, weight in gathered.weights.items()},
            present=self._gradients.present(),
            splits=gathered.splits,
        )

    def _reduce(self, gathered: Window, shares: list[Share]) -> UpdateReport:
        """Sum the ranks' gradients and install them."""
        weights = agreed_weights(gathered.totals, sum_by_name(share.weights for share in shares))
        sums = sum_by_name(share.sums for share in shares)
        if gathered.totals is None and gathered.provisional:
            self._outstanding = gathered.provisional / next(iter(weights.values()))
        if self.ranks.reduces:
            self._settle()  # each rank has a factor of its own
        if not self._lock_step:
            self._sum_over_ranks(shares)
        return UpdateReport(
            terms={name: total / (weights[name] or 1.0) for name, total in sums.items()},
            weights=dict(weights),
            gradient_norm=None,
            skipped=not any(self._gradients.present()) or not any(weights.values()),
            micro_batch_sizes=tuple(gathered.sizes),
            splits=tuple(split for share in shares for split in share.splits),
        )

    def _sum_over_ranks(self, shares: list[Share]) -> None:
        """A parameter that no rank used keeps no gradient; buffers become those of rank 0."""
        if not self.ranks.reduces:
            return
        present = [any(flags) for flags in zip(*(share.present for share in shares), strict=True)]
        self.ranks.sum_(self._gradients.complete(present))
        with torch.no_grad():
            self.ranks.broadcast_(list(self.model.buffers()))

    def _step(self, report: UpdateReport) -> UpdateReport:
        """Unscale, measure, clip and step, once."""
        if self.scaler.is_enabled():
            self._gradients.install()
            self.scaler.unscale_(self.optimizer)
        norm = total_norm(self._gradients.tensors()) * self._outstanding
        if self.max_norm is None:
            self._settle()
        else:
            self._settle(torch.clamp(self.max_norm / (norm + _CLIPPING_EPSILON), max=1.0))
        self._gradients.install()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.scaler.get_scale() < scale  # it falls when, and only when, the scaler has left the step out
        return replace(report, gradient_norm=_finite(float(norm)), skipped=skipped)

    def _settle(self, more: float | Tensor = 1.0) -> None:
        """Multiply the sums by what is outstanding, and by ``more``, in one pass."""
        factor = self._outstanding * more
        self._outstanding = 1.0
        if isinstance(factor, Tensor) or factor != 1.0:
            self._gradients.scale(factor)


def _scalar(loss_sum: Tensor) -> Tensor:
    return loss_sum.reshape(()) if loss_sum.dim() else loss_sum


def _constant(weight: Tensor | float) -> Tensor | float:
    return weight.detach() if isinstance(weight, Tensor) else weight


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _named(weights: Mapping[str, float] | float) -> Mapping[str, float]:
    return weights if isinstance(weights, Mapping) else {_ONLY_TERM: weights}
