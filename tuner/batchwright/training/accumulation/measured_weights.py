"""Weights of several loss terms over a window, from forward passes alone."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from batchwright.training.micro_batches.forward_state import ModelState
from batchwright.training.micro_batches.loss_window import named_terms, sum_by_name
from batchwright.training.micro_batches.nested_batches import copied
from batchwright.training.micro_batches.snapshot import Snapshot
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.workloads.base import Batch, Loss


def measured_weights(
    model: nn.Module,
    snapshot: Snapshot,
    window: Iterable[MicroBatch],
    loss: Callable[[nn.Module, Batch], Loss],
    moved: Callable[[Batch], Batch],
) -> dict[str, float]:
    """The weight of each term over ``window``, by a forward pass over each micro-batch without a graph.

    Random numbers, buffers and attributes of modules are as before when the function returns or raises.

    Args:
        model: the model that the loss is called with.
        snapshot: captures the random numbers and buffers.
        window: the micro-batches.
        loss: the forward pass.
        moved: moves a batch to the model's device.
    """
    snapshot.capture()
    state = ModelState(model)
    try:
        with torch.no_grad():
            named = [named_terms(loss(model, moved(copied(one.batch))), one.size) for one in window]
    finally:
        state.restore()
        snapshot.restore()
    return sum_by_name({name: float(weight) for name, (_, weight) in terms.items()} for terms in named)
