"""Exact gradient accumulation, for your own training loop as well as for Batchwright's.

::

    accumulation = GradientAccumulation(model, optimizer, max_norm=1.0)
    for micro_batches in windows(loader, 4):
        accumulation.update(micro_batches, loss)

where ``loss(model, micro_batch)`` returns ``(loss_sum, weight)``: a *sum* over samples or tokens, and their number; or
the mean over the samples. The update has the gradient of the whole window's mean, for any division of samples and
tokens into micro-batches and any number of ranks. In fp32 it is within 1e-5 for up to 1,000 micro-batches
(``gradient_sums`` has the bound). A micro-batch of weight 0 adds nothing, even if its loss is not finite. A micro-batch
that does not fit is divided and run again (``recovery``). Losses and gradients are summed over micro-batches
(``gradient_sums``) and ranks (``reduction``).

The loss is a function and not the body of a ``for`` loop, whose variables would keep the tensors of a failed
micro-batch alive while its parts run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batchwright.device_traits import traits_of
from batchwright.errors import WorkloadError
from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.planning.noise_scale import measure
from batchwright.schemas.plans import Plan, UniformPlan
from batchwright.schemas.recommendation import Recommendation
from batchwright.training.accumulation.collectives import ProcessGroup, Ranks
from batchwright.training.accumulation.engine_arguments import require_arguments, require_loss, require_plain_step
from batchwright.training.accumulation.first_window import FirstWindow
from batchwright.training.accumulation.gradient_noise import GradientNoise
from batchwright.training.accumulation.gradient_sums import (
    Gathering,
    GradientSums,
    InPlaceSums,
    ScratchSums,
    total_norm,
)
from batchwright.training.accumulation.measured_weights import measured_weights
from batchwright.training.accumulation.planned_window import PlannedWindow, plan_of
from batchwright.training.accumulation.recovery import Action, Recovery, decide
from batchwright.training.accumulation.reduction import Reduction
from batchwright.training.accumulation.sample_reader import SampleReader
from batchwright.training.accumulation.trainable_parameters import TrainableParameters
from batchwright.training.coupling.loss_check import LossCheck
from batchwright.training.micro_batches.argument_checks import require_batches, require_count, wrong_argument
from batchwright.training.micro_batches.loss_window import (
    LossWindow,
    SeveralTermsError,
    Share,
    UpdateReport,
    Weigh,
    Weight,
    check_terms,
    finite_or_none,
    named_terms,
)
from batchwright.training.micro_batches.nested_batches import to_device
from batchwright.training.micro_batches.snapshot import Snapshot
from batchwright.training.micro_batches.splitting import CountSamples, MicroBatch
from batchwright.workloads import base
from batchwright.workloads.base import Batch

Loss: TypeAlias = "Callable[[nn.Module, Batch], base.Loss]"
"""Forward pass: the mean over the samples, or ``(loss_sum, weight)``, or such pairs by name."""

_CLIPPING_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""


class GradientAccumulation:
    """A model and its optimizer, moved forward one exact update at a time.

    Args:
        model: on its device. If the model is wrapped in ``DistributedDataParallel``, the module inside is called: the
            wrapper's own reduction and broadcasts would wait for ranks that have no micro-batch.
        optimizer: optimizer of the model's parameters.
        plan: a recommendation, or its plan. One batch of this rank's whole share is divided into the plan's
            micro-batches; a micro-batch above the plan's largest is divided too; and a window of more samples than the
            plan has for this rank is refused. The last window of an epoch may have fewer. With ``lock_step`` one batch
            becomes the same number of micro-batches on every rank, and windows of several micro-batches run as they
            are. None trains the given micro-batches.
        samples: returns the number of samples of a batch, and of any part of one. By default they are found: along the
            first dimension of all tensors; or as the items of lists, tuples, nested tensors, packed sequences and graph
            batches of PyTorch Geometric; or along another dimension. The plan and the batch size of a loader, which
            ``windows`` knows, say how many samples to look for. Where several readings remain, the loss of the first
            window decides.
        max_norm: largest L2 norm of the whole gradient, applied once per update; None to not clip.
        scaler: gradient scaler for fp16, unscaled and updated once per update.
        memory: the device that the model is on, which recognises an out-of-memory error; the device of the first
            parameter by default.
        ranks: the ranks that share each window. By default a single rank, or the default process group if the model is
            wrapped in ``DistributedDataParallel``.
        gathering: the way gradients are summed, see ``batchwright.training.accumulation.gradient_sums``. By default
            scratch sums on a GPU, where they take no time, and in-place sums on the CPU, where new memory for every
            micro-batch takes time.
        recovers: whether to divide a micro-batch that does not fit, or to raise its error.
        floating: type to cast floating-point inputs to, for parameters of a lower precision. Masks are cast too: count
            them with ``mask.sum(dtype=torch.float32)``. ``weigh`` gets the batch before the cast.
        lock_step: whether the model's own collectives (FSDP) are in every forward and backward pass and reduce the
            gradient. A rank cannot divide a micro-batch alone, so an out-of-memory error is raised.
        checks_coupling: whether to compare the loss of the first window with the loss of its parts, see
            ``batchwright.training.coupling.loss_check``. The loss is called three more times, twice more if forward
            passes change state of the model, and again if losses differ. The model's state is restored, but not what
            the loss changes outside of the model, such as a queue of its own. Not with ``lock_step``.

    Attributes:
        snapshot: the last captured random numbers and state of the model, overwritten by each window; None with
            ``lock_step``.

    Before each window, parameters that became trainable later, gradients that the window did not compute, and a sharded
    model that averages are refused; in the first window also a loss or a backward pass that steps or changes
    gradients.

    Raises:
        SpecError: when an argument is wrong, naming it, or the optimizer is that of another model.
        WorkloadError: when no parameter is trainable, a scaler would scale gradients narrower than fp32, the model is
            sharded without ``lock_step``, or there is no plan or one for another number of ranks.
    """

    def __init__(  # noqa: PLR0913 - each has a default that suits a user's own loop
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        plan: Plan | UniformPlan | Recommendation | None = None,
        samples: CountSamples | None = None,
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
        options = {"plan": plan, "max_norm": max_norm, "scaler": scaler, "memory": memory, "ranks": ranks}
        flags = {"recovers": recovers, "lock_step": lock_step, "checks_coupling": checks_coupling}
        require_arguments(model, optimizer, {**options, **flags, "gathering": gathering, "floating": floating})
        self.model = model
        self.optimizer = optimizer
        self.max_norm = max_norm
        self._trainable = TrainableParameters(model, optimizer, lock_step=lock_step)
        self.parameters = self._trainable.parameters
        self.memory = memory or open_device(str(self.parameters[0].device))
        self.device = self.memory.torch_device
        self.scaler = scaler or torch.amp.GradScaler(self.device.type, enabled=False)
        wrapped = isinstance(model, DistributedDataParallel)
        self.ranks = ranks or (ProcessGroup() if wrapped else Ranks())
        self._planned = None if plan is None else PlannedWindow(plan_of(plan), self.ranks, lock_step=lock_step)
        share = None if self._planned is None else sum(self._planned.sizes)
        is_checked = checks_coupling and not lock_step
        self._reader = SampleReader(samples, share, is_checked=is_checked)
        self._has_several_terms = False
        self._called = model.module if isinstance(model, DistributedDataParallel) else model
        self._floating = floating
        self._lock_step = lock_step
        self._recovers = recovers
        in_place = lock_step or (gathering or traits_of(self.device.type).gradient_gathering) == "in-place"
        self.gradients: GradientSums = (InPlaceSums if in_place else ScratchSums)(self.parameters)
        self.snapshot = snapshot = None if lock_step else Snapshot(model, self.device)
        self._prepare_scaler()
        action = decide(lock_step=lock_step, sums_in_place=in_place) if recovers else Action.RAISE
        self._recovery = Recovery(self.memory, self.gradients, snapshot, action, self.ranks.rank)
        self.largest_micro_batch = None if self._planned is None else self._planned.bound
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
        self._noise = GradientNoise(self.gradients, self.ranks, self.scaler, lock_step=lock_step)
        self._reduction = Reduction(model, self.gradients, self.ranks, lock_step=lock_step)
        self._loss_check = LossCheck(self._called, self.device, floating) if is_checked else None
        self._first_window = None if lock_step else FirstWindow(self._called, self._trainable)
        self._reduction.broadcast_start()

    def _prepare_scaler(self) -> None:
        narrow = any(parameter.dtype.itemsize < torch.float32.itemsize for parameter in self.parameters)
        if self.scaler.is_enabled() and narrow:
            raise WorkloadError("a gradient scaler needs parameters in fp32: run the model under autocast instead")
        self.scaler.scale(torch.zeros((), device=self.device))  # creates the scale, also on a rank without samples

    @property
    def largest_micro_batch(self) -> int | None:
        """Micro-batches above this size are divided before they run; lowered by every split, None without a bound."""
        return self._recovery.largest_micro_batch

    @largest_micro_batch.setter
    def largest_micro_batch(self, size: int | None) -> None:
        self._recovery.largest_micro_batch = None if size is None else require_count("largest_micro_batch", size)

    @property
    def failed_micro_batch(self) -> int | None:
        """Size of the last micro-batch that did not fit; None when all did."""
        return self._recovery.failed_micro_batch

    # --- an update ---

    def update(
        self,
        micro_batches: Iterable[Batch | MicroBatch],
        loss: Loss,
        weigh: Weigh | None = None,
        *,
        measures_noise: bool = False,
    ) -> UpdateReport:
        """Make one optimizer update over ``micro_batches``, which are this rank's part of the effective batch.

        Args:
            micro_batches: batches of any type, or ``MicroBatch`` objects with their own division. Tensors in mappings,
                lists, tuples and dataclasses are moved to the device; other objects by their own ``to``. Ranks may have
                different numbers of micro-batches, or none.
            loss: the forward pass.
            weigh: the weights of the loss without a forward pass. Without it, a loss of several terms runs forward once
                more in each micro-batch of a window, to add up their weights; with several ranks it is needed.
            measures_noise: whether to measure the gradient noise, see ``batchwright.planning.noise_scale``, by one more
                pass over the gradients, which changes nothing. All ranks must say the same.

        The optimizer's step is never retried: an error in the step is raised unchanged, and parameters may be partly
        updated. Resume from a checkpoint then.

        Raises:
            SpecError: when an argument is wrong, naming it.
            WorkloadError: when the loss breaks its contract, or gradients are disabled.
            OutOfMemoryError: when a micro-batch of one sample does not fit.
            PeerError: when another rank failed.
        """
        if not isinstance(measures_noise, bool):
            raise wrong_argument("measures_noise", "must be True or False", measures_noise)
        if self._first_window is not None:
            require_plain_step(self.optimizer)
        self._noise.wanted = measures_noise
        report = self._run_window(micro_batches, loss, weigh)
        if not report.skipped:
            report = self._step(report)
        self.gradients.clear()
        return report

    def accumulate(
        self, micro_batches: Iterable[Batch | MicroBatch], loss: Loss, weigh: Weigh | None = None
    ) -> UpdateReport:
        """Compute the window's gradient in ``.grad``, and leave clipping and the optimizer's step to the caller.

        The gradient is still multiplied by the scaler's scale. The report has no norm.
        """
        self._noise.wanted = False  # the caller's step computes the norm that a measurement needs, if any
        report = self._run_window(micro_batches, loss, weigh)
        self._reduction.apply_outstanding()
        self.gradients.install()
        return report

    def _run_window(self, micro_batches: Iterable[Batch | MicroBatch], loss: Loss, weigh: Weigh | None) -> UpdateReport:
        """Run an accumulation window on all ranks and sum its gradients."""
        require_batches(micro_batches)
        require_loss(loss, thorough=self._first_window is not None)
        if weigh is not None and not callable(weigh):
            raise wrong_argument("weigh", "must be a function of a batch that returns its weight", weigh)
        if not torch.is_grad_enabled():
            raise WorkloadError("gradients are disabled: update outside of torch.no_grad() and torch.inference_mode()")
        window = self._reader.read(micro_batches)
        if not window and self.ranks.size == 1:
            raise wrong_argument("micro_batches", "is empty: give at least one batch, or leave out the update", window)
        totals = self._reduction.total_weights(window, weigh)
        if totals is not None and not any(totals.values()):
            self.gradients.clear()
            sizes = tuple(micro_batch.size for micro_batch in window)
            return UpdateReport(dict.fromkeys(totals, 0.0), totals, None, skipped=True, micro_batch_sizes=sizes)
        losses, first = LossWindow(totals, weigh), self._first_window
        watched: AbstractContextManager[Loss] = nullcontext(loss) if first is None else first.watched(loss)
        try:
            with watched as call:
                if self._lock_step or not self._recovers:
                    # Ranks waiting in a pass cannot be notified of a failure. It ends this process, as it ends a probe.
                    shares = self.ranks.gather(self._run(window, call, losses))
                else:
                    shares = self.ranks.run_collectively(lambda: self._run(window, call, losses))
            report = self._reduction.reduce(losses, shares)
            if first is not None and any(report.weights.values()):
                first.require_gradients(self.gradients.present())
                self._first_window = None
        except BaseException:
            self.gradients.clear()  # free the gradients of the failed window
            raise
        finally:
            self.gradients.end()
            self._seeds.clear()
        return report

    # --- forward and backward passes ---

    def _run(self, window: list[MicroBatch], loss: Loss, losses: LossWindow) -> Share:
        """Run all micro-batches of this rank, and those that do not fit in smaller parts."""
        gradients, recovery = self.gradients, self._recovery
        rerun_window = gradients.in_place
        self._trainable.check_gradients(gradients.installed)
        window = self._divided(window, loss)
        gradients.start()
        queue = deque(recovery.within_bound(window))
        self._require_sum(accumulates=len(queue) > 1)
        if len(queue) > 1 or self.ranks.reduces:
            gradients.allocate_buffers()
        recovery.start(window)
        self._noise.start(len(queue))
        if self._has_several_terms and losses.totals is None:
            losses.totals = self._measured_weights(queue, loss)
        while queue:
            micro_batch = queue.popleft()
            if not rerun_window:
                recovery.protect([micro_batch])
            failure = self._attempt(micro_batch, loss, losses)
            if failure is None:
                recovery.passed()
                gradients.commit()
                self._noise.take(losses)
                continue
            if isinstance(failure, SeveralTermsError) and self.ranks.size == 1 and self.snapshot is not None:
                del failure  # as below
                recovery.roll_back()
                self._has_several_terms = True
                losses.totals = self._measured_weights([micro_batch, *queue], loss)
                queue.appendleft(micro_batch)
                continue
            recovery.divide(failure, micro_batch)
            del failure  # its traceback keeps the tensors of the failed pass alive
            # The provisional divisor stays: where sums are kept, they are already divided by it.
            if rerun_window:
                losses.reset()
            recovery.roll_back()
            self._require_sum(accumulates=True)
            queue = deque(recovery.requeued(window if rerun_window else [micro_batch, *queue]))
            if rerun_window:
                self._noise.start(len(queue))
        gradients.collect()
        return self._reduction.share(losses, recovery.splits, self._noise.part(losses))

    def _divided(self, window: list[MicroBatch], loss: Loss) -> list[MicroBatch]:
        """The window in the plan's micro-batches, as the loss of the first window shows where its samples are."""
        if self._loss_check is not None:
            window = self._reader.settle(window, self._loss_check.run(window, loss, self.largest_micro_batch))
        return window if self._planned is None else self._planned.divide(window)

    def _measured_weights(self, queue: Iterable[MicroBatch], loss: Loss) -> dict[str, float]:
        snapshot = cast("Snapshot", self.snapshot)
        return measured_weights(self._called, snapshot, queue, loss, self._moved)

    def _moved(self, batch: Batch) -> Batch:
        return to_device(batch, self.device, self._floating)

    def _require_sum(self, *, accumulates: bool) -> None:
        if self._loss_check is not None:
            self._loss_check.require_sum(accumulates=accumulates or self.ranks.size > 1)

    def _attempt(self, micro_batch: MicroBatch, loss: Loss, losses: LossWindow) -> Exception | None:
        """Run one micro-batch. Return its error, to be handled after the ``except`` block."""
        try:
            terms = self._backward(micro_batch, loss, losses)
            if not micro_batch.is_padding:
                losses.add(terms, micro_batch.size)
        except Exception as error:  # noqa: BLE001 - any error may be an out-of-memory error
            return error
        return None

    def _backward(self, micro_batch: MicroBatch, loss: Loss, losses: LossWindow) -> Mapping[str, tuple[Tensor, Weight]]:
        """Run the forward and backward pass. Return the terms without their graph.

        A term without weight adds nothing: its loss is ignored, and has no backward pass.
        """
        samples = micro_batch.size if micro_batch.is_counted else None
        terms = named_terms(loss(self._called, self._moved(micro_batch.batch)), samples)
        check_terms(terms, losses.totals)
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        found: dict[str, tuple[Tensor, Weight]] = {}
        for name, (returned, reported) in terms.items():
            loss_sum = returned.reshape(()) if returned.dim() else returned
            weight, is_zero = losses.weight(name, reported, micro_batch)
            found[name] = (torch.zeros_like(loss_sum) if is_zero else loss_sum.detach(), weight)
            if is_zero and not self._lock_step:
                continue  # the gradient of 0 / 0 would be NaN, and stay NaN times zero
            if is_zero and not loss_sum.isfinite():
                raise WorkloadError(
                    f"loss term `{name}` is {loss_sum.item():g} for a micro-batch without weight, whose backward pass "
                    "sharded ranks cannot leave out: return a finite loss, for example by `weight.clamp(min=1)`"
                )
            divisor = losses.divisor(name, 1.0 if self._lock_step else weight, loss_sum)
            if divisor:
                roots.append(loss_sum)
                share = 0.0 if is_zero or micro_batch.is_padding else 1.0
                seeds.append(self._gradient_seed(share / divisor, loss_sum))
        if roots:
            torch.autograd.backward(roots, seeds)
        return found

    def _gradient_seed(self, gradient: float, loss_sum: Tensor) -> Tensor:
        """The gradient of the window's mean by a loss sum, times the scaler's scale, created once per window.

        Passing this gradient to autograd saves each micro-batch a division of its loss sum and its backward pass.
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
        """Unscale and clip the gradient, step once, and report the norm."""
        if self.scaler.is_enabled():
            self.gradients.install()
            self.scaler.unscale_(self.optimizer)
        norm = total_norm(self.gradients.tensors()) * self._reduction.outstanding
        if self.max_norm is None:
            self._reduction.apply_outstanding()
        else:
            self._reduction.apply_outstanding(torch.clamp(self.max_norm / (norm + _CLIPPING_EPSILON), max=1.0))
        self.gradients.install()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.scaler.get_scale() < scale  # the scale falls if and only if the scaler has skipped the step
        length, parts = float(norm), report.gradient_parts
        noise = measure(parts, length**2, report.samples) if parts else None
        return replace(report, gradient_norm=finite_or_none(length), skipped=skipped, noise=noise)
