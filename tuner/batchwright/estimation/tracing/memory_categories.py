"""Categories of the blocks in a trace: parameters, gradients, optimizer state, activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from batchwright.estimation.trace import Category
from batchwright.estimation.tracing.dispatch_mode import Tracer
from batchwright.training.micro_batches.nested_batches import tensors_of
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.training.update_engine import OtherLoop, UpdateEngine


def label_accumulated_gradients(model: nn.Module, tracer: Tracer) -> None:
    """Label every gradient that a backward pass accumulates, as soon as it has."""

    def label(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracer.recorder.label([parameter.grad], Category.GRADIENTS)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(label)  # type: ignore[no-untyped-call]


@contextmanager
def optimizer_gradients_labelled(tracer: Tracer) -> Iterator[None]:
    """Label the gradients that an optimizer receives during the block."""

    def label(optimizer: Optimizer, *_: object) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tracer.recorder.label(
            [parameter.grad for parameter in parameters if parameter.grad is not None], Category.GRADIENTS
        )

    hook = register_optimizer_step_pre_hook(label)
    try:
        yield
    finally:
        hook.remove()


def record_batches(micro_batches: list[MicroBatch], tracer: Tracer) -> None:
    """Record the batches, which on the CPU are in the memory of the device."""
    for micro_batch in micro_batches:
        recorded: set[int] = set()
        for tensor in tensors_of(micro_batch.batch):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in recorded:
                recorded.add(storage.data_ptr())
                tracer.recorder.allocate(storage.nbytes(), Category.ACTIVATIONS)


def label_live_blocks(tracer: Tracer, engine: UpdateEngine | OtherLoop) -> None:
    """Set the categories of the blocks that are live at the end."""
    recorder = tracer.recorder
    persistent = [
        (Category.PARAMETERS, [*engine.model.parameters(), *engine.model.buffers()]),
        (Category.OPTIMIZER_STATE, [value for state in engine.optimizer.state.values() for value in state.values()]),
        (Category.OPTIMIZER_STATE, engine.averages),
        (Category.GRADIENTS, engine.accumulation.gradients.buffers if isinstance(engine, UpdateEngine) else []),
    ]
    for category, tensors in persistent:
        for tensor in tensors:
            block = recorder.block_of(tensor) if isinstance(tensor, Tensor) else None
            if block is not None:
                recorder.categories[block] = category
