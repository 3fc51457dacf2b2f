"""The updates of other frameworks' training loops, of which an estimate traces the memory."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined] # DDP takes no other annotation of its hooks
from torch.nn.parallel import DistributedDataParallel

from batchwright.errors import EstimateError
from batchwright.estimation.tracing.recorder import Recorder
from batchwright.estimation.tracing.torch_internals import VERIFY_SHAPES
from batchwright.schemas.estimates import Loop
from batchwright.schemas.workload import TransformersModel, WorkloadSpec
from batchwright.training.micro_batches.loss_window import check_pairs, named_terms
from batchwright.training.micro_batches.nested_batches import tensors_of, to_device
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.training.optimizers import build_optimizer
from batchwright.training.update_engine import autocast, loss_scaler
from batchwright.workloads.base import Batch, BuildsOptimizer, Workload


class OtherLoop:
    """Updates as the training loops of others make them, with the tensors that these keep alive.

    All sum gradients in place and allocate the optimizer's state in its first step. A model of transformers computes
    its own loss, of its logits in fp32. Written after:

    * ``hugging-face``: ``Trainer`` of transformers 5.23, which moves all micro-batches of an update to the device
      before it begins (``get_batch_samples``). In ``training_step`` the outputs are gone when the backward pass begins.
      Under autocast they are converted to fp32 (``prepare_model`` of accelerate 1.15).
    * ``lightning``: the automatic optimization of Lightning 2.6, which clears gradients after the first forward pass of
      an update, not before it. It keeps a batch until its step has ended.
    * ``plain``: the loop of tutorials. Its variable ``outputs`` keeps the logits over the backward pass and until the
      next forward pass has ended, and its batch stays until the next one is on the device.

    Over several ranks, they have torch's ``DistributedDataParallel``, whose buckets are a copy of all gradients.
    Lightning builds it on a stream of its own, whose memory the allocator keeps apart: that is not traced.

    Args:
        loop: whose loop.
        spec: precision, clipping and optimizer.
        workload: computes the loss of other models.
        model: on its device.
        device: the device of the model.
        recorder: of the trace.
        share: samples of a rank in an update; None if they are those of the micro-batches that are traced.
    """

    def __init__(  # noqa: PLR0913 - the parts of a run
        self,
        loop: Loop,
        spec: WorkloadSpec,
        workload: Workload,
        model: nn.Module,
        device: torch.device,
        *,
        recorder: Recorder,
        share: int | None,
    ) -> None:
        self.model = model
        self.averages: list[Tensor] = []
        own = workload.build_optimizer if isinstance(workload, BuildsOptimizer) else None
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(spec.optimizer, model) if own is None else own(self._trained)
        self._scaler = loss_scaler(spec, device)
        self._loop, self._spec, self._workload, self._device = loop, spec, workload, device
        self._floating = torch.bfloat16 if spec.precision == "bf16" else None
        self._recorder, self._share = recorder, share
        self._outputs: object = None
        self._batches: list[Batch] = []
        if loop == "hugging-face" and isinstance(spec.model, TransformersModel):
            model.config.use_cache = False  # type: ignore[union-attr] # a config of transformers
        self.buckets: list[Tensor] = []
        self._replica = _distributed(model, self.buckets) if spec.parallelism.world_size > 1 else model

    def update(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Make one optimizer update over ``micro_batches``."""
        gathers = self._loop == "hugging-face"
        if gathers:
            self._batches = self._gathered(micro_batches)
        for number, micro_batch in enumerate(micro_batches):
            if self._loop == "lightning":
                self._batches = []
            if not gathers:
                self._batches = [self._moved(micro_batch)]
            loss = self._loss(self._batches[number if gathers else 0], micro_batch.size)
            if self._loop == "lightning" and not number:
                self.optimizer.zero_grad()
            self._scaler.scale(loss / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
        if self._spec.gradient_clipping is not None:
            self._scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._trained, self._spec.gradient_clipping)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        if self._loop != "lightning":
            self.optimizer.zero_grad()

    def _moved(self, micro_batch: MicroBatch) -> Batch:
        return to_device(micro_batch.batch, self._device, self._floating)

    def _gathered(self, micro_batches: Sequence[MicroBatch]) -> list[Batch]:
        """Move the micro-batches that are traced, in whose place all samples of the update are recorded."""
        batches = [self._moved(micro_batch) for micro_batch in micro_batches]
        if self._share is not None:
            traced = sum(micro_batch.size for micro_batch in micro_batches)
            self._recorder.scale(tensors_of(batches), Fraction(self._share, traced))
        return batches

    def _loss(self, batch: Batch, samples: int) -> Tensor:
        with autocast(self._spec, self._device):
            if not isinstance(self._spec.model, TransformersModel) or "labels" not in batch:
                terms = named_terms(self._workload.loss_terms(self._replica, batch), samples)
                check_pairs(terms)
                return sum((total / weight for total, weight in terms.values()), torch.zeros((), device=self._device))
            outputs = self._replica(**batch)
        if self._loop == "hugging-face" and self._spec.precision.endswith("-mixed"):
            outputs.logits = outputs.logits.float()
        if self._loop == "plain":
            self._outputs = outputs
        loss: Tensor = outputs.loss
        return loss


def _distributed(model: nn.Module, buckets: list[Tensor]) -> nn.Module:
    """Wrap a model of fake tensors for the ranks of the fake process group, and collect what its buckets hold.

    DDP arranges its buckets anew after the first update, in the order in which gradients were ready. Here it keeps the
    first ones, of the same sizes together, because its C++ code would read values.

    Raises:
        EstimateError: for a model with ``SyncBatchNorm``, whose operators torch cannot run without tensors.
    """
    if synchronized := next((name for name, each in model.named_modules() if isinstance(each, nn.SyncBatchNorm)), None):
        raise EstimateError(f"the model's `{synchronized}` is a SyncBatchNorm, which cannot be traced over ranks")
    with patch(VERIFY_SHAPES):
        wrapped: Any = DistributedDataParallel(model)
    wrapped.register_comm_hook(buckets, _reduced_alone)
    wrapped.reducer = _FakeReducer(wrapped.reducer)
    replica: nn.Module = wrapped
    return replica


def _reduced_alone(buckets: list[Tensor], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return a bucket unchanged, as the sum over ranks that do not exist."""
    buckets.append(bucket.buffer())
    reduced: torch.futures.Future[Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


class _FakeReducer:
    """A reducer of DDP without what its C++ code does with values and clocks."""

    def __init__(self, reducer: Any) -> None:  # noqa: ANN401 - a class of C++
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as above
        return getattr(self._reducer, name)

    def prepare_for_forward(self) -> None:
        """Count no iteration: the first ten are timed by events of CUDA."""

    def _rebuild_buckets(self) -> bool:
        return False
