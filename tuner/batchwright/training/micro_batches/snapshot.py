"""Snapshot of the state other than gradients that a forward pass changes, to undo a failed micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from batchwright.torch_internals import foreach_copy_, own_buffers
from batchwright.training.micro_batches.rng_state import RandomReader


class Snapshot:
    """The random generators and the model's buffers (running statistics) at the last ``capture``.

    Args:
        model: its buffers are copied into memory that is allocated once, at construction.
        device: the device of the model.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        holders = map(own_buffers, model.modules())
        self._slots = [(holder, name) for holder in holders for name in holder]
        """The buffers by module and name, because a forward pass may replace a buffer by another."""
        self._buffers = self._current_buffers()
        self._copies = [buffer.detach().clone() for buffer in self._buffers if buffer is not None]
        self._reader = RandomReader(device)
        self._random = self._reader.capture()

    def _current_buffers(self) -> list[Tensor | None]:
        return [holder.get(name) for holder, name in self._slots]

    def capture(self) -> None:
        """Copy the current state."""
        self._random = self._reader.capture()
        if not self._slots:
            return
        self._buffers = self._current_buffers()
        buffers = [buffer.detach() for buffer in self._buffers if buffer is not None]
        kinds = [(buffer.shape, buffer.dtype) for buffer in buffers]
        if kinds != [(copy.shape, copy.dtype) for copy in self._copies]:
            self._copies = [buffer.clone() for buffer in buffers]
        elif buffers:
            foreach_copy_(self._copies, buffers)

    def restore(self) -> None:
        """Restore the captured state."""
        self._random.restore(self._device)
        copies = iter(self._copies)
        with torch.no_grad():
            for (holder, name), buffer in zip(self._slots, self._buffers, strict=True):
                if buffer is not None:
                    buffer.copy_(next(copies))
                holder[name] = buffer
