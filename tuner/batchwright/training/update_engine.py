"""The updates of a workload: precision, loss terms, optimizer, clipping and averages, as its spec states.

Probes and training share this engine, so a probe measures the updates that a run makes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import own_parts
from batchwright.training.micro_batches.loss_window import UpdateReport
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.training.optimizers import build_optimizer, materialize_state
from batchwright.workloads.base import Batch, BuildsOptimizer, LossTerms, WeighsLosses, Workload

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def autocast(spec: WorkloadSpec, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: autocast for the mixed precisions."""
    dtype = _AUTOCAST.get(spec.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_scaler(spec: WorkloadSpec, device: torch.device) -> torch.amp.GradScaler:
    """Gradient scaler for fp16, whose gradients would underflow otherwise; disabled for the other precisions."""
    return torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16-mixed")


class UpdateEngine:
    """A model with its optimizer, moved forward one exact update at a time.

    The optimizer's state is allocated at construction, so that the first update takes as much memory as every other,
    and no step runs out of memory half-way. The state of a workload's own optimizer may not begin as zeros: its first
    step allocates it. Without ``recovers`` a micro-batch that does not fit raises its error, as a probe needs.
    """

    def __init__(  # noqa: PLR0913 - a run's parts
        self,
        spec: WorkloadSpec,
        workload: Workload,
        model: nn.Module,
        memory: MemoryDevice,
        *,
        ranks: Ranks | None = None,
        recovers: bool = True,
        sharded: bool = False,
    ) -> None:
        self.spec = spec
        self.model = model
        self.device = memory.torch_device
        own = workload.build_optimizer if isinstance(workload, BuildsOptimizer) else None
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(spec.optimizer, model) if own is None else own(trained)
        self.scaler = loss_scaler(spec, self.device)
        self.accumulation = GradientAccumulation(
            model,
            self.optimizer,
            max_norm=spec.gradient_clipping,
            scaler=self.scaler,
            memory=memory,
            ranks=ranks,
            gathering=None if spec.gradient_gathering == "auto" else spec.gradient_gathering,
            recovers=recovers,
            lock_step=sharded,
            checks_coupling=False,  # probes and the trainer run the thorough check
            floating=torch.bfloat16 if spec.precision == "bf16" else None,
        )
        if own is None:
            materialize_state(self.optimizer)
        averaged = () if spec.ema_decay is None else self.parameters
        self.averages = [parameter.detach().to(torch.float32, copy=True) for parameter in averaged]
        """The moving averages of the trainable parameters, in fp32; empty without ``ema_decay``."""
        self._workload = workload
        self._weigh = workload.loss_weights if isinstance(workload, WeighsLosses) else None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return self.accumulation.parameters

    def update(self, micro_batches: Sequence[MicroBatch], *, measures_noise: bool = False) -> UpdateReport:
        """Make one optimizer update over ``micro_batches``, which are this rank's part of the effective batch.

        ``measures_noise`` also measures the gradient noise, as ``GradientAccumulation.update`` does.

        Raises:
            WorkloadError: when the loss terms break their contract.
            OutOfMemoryError: when a micro-batch of one sample does not fit.
            PeerError: when another rank failed.
        """
        report = self.accumulation.update(micro_batches, self._loss, self._weigh, measures_noise=measures_noise)
        if self.averages and not report.skipped:
            rate = 1.0 - (self.spec.ema_decay or 0.0)  # average = decay * average + (1 - decay) * parameter
            for average, parameter in zip(self.averages, self.parameters, strict=True):
                average.lerp_(parameter.detach().to(torch.float32), rate)
        return report

    def averages_by_name(self, values: Sequence[Tensor] | None = None) -> dict[str, Tensor]:
        """The moving averages, or ``values`` of a checkpoint, by parameter name and in the parameters' type."""
        if not self.averages:
            return {}
        values = self.averages if values is None else values
        averages = {id(parameter): average for parameter, average in zip(self.parameters, values, strict=True)}
        named = self.model.named_parameters(remove_duplicate=False)
        return {
            name: averages[id(parameter)].to(parameter.dtype) for name, parameter in named if id(parameter) in averages
        }

    def _loss(self, model: nn.Module, batch: Batch) -> LossTerms:
        with autocast(self.spec, self.device):
            return self._workload.loss_terms(model, batch)


@contextmanager
def averages_as_weights(
    parameters: Sequence[nn.Parameter], averages: Sequence[Tensor], memory: MemoryDevice
) -> Iterator[None]:
    """Give the parameters the values of the averages during the block. Both are equal to the bit afterwards.

    Parameters in fp32 change places with their averages, which takes no memory. Others, into which an average is
    rounded, are kept in the host's memory meanwhile, outside the limit, as for a checkpoint. Both may be shards; the
    averages are in fp32.
    """
    own = (own_parts([tensor.detach() for tensor in tensors]) for tensors in (parameters, averages))
    pairs = list(zip(*own, strict=True))
    exchanged = [pair for pair in pairs if pair[0].dtype is torch.float32]
    rounded = [pair for pair in pairs if pair[0].dtype is not torch.float32]
    with memory.without_limit():
        kept = [parameter.to("cpu", copy=True) for parameter, _ in rounded]
    for pair in exchanged:
        _exchange(*pair)
    for parameter, average in rounded:
        parameter.copy_(average)
    try:
        yield
    finally:
        for pair in exchanged:
            _exchange(*pair)
        for (parameter, _), value in zip(rounded, kept, strict=True):
            parameter.copy_(value)


def _exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the values of two tensors in fp32, bit by bit, without a third one."""
    bits, others = one.view(torch.int32), other.view(torch.int32)
    bits.bitwise_xor_(others)
    others.bitwise_xor_(bits)
    bits.bitwise_xor_(others)
