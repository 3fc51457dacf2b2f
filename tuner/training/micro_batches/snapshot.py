"""Snapshot of what a forward pass changes besides gradients, so that a failed micro-batch leaves no trace."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tuner.training.micro_batches.rng_state import RandomReader


class Snapshot:
    """The random generators and the model's buffers (running statistics) at the last ``capture``.

    Args:
        model: its buffers are copied into memory that is allocated once, here.
        device: where the model is.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._places = [(module, name) for module in model.modules() for name in module._buffers]  # noqa: SLF001 - a buffer that a forward pass replaces must be restored by name
        self._buffers = self._now()
        self._copies = [buffer.detach().clone() for buffer in self._buffers if buffer is not None]
        self._reader = RandomReader(device)
        self._random = self._reader.now()

    def _now(self) -> list[Tensor | None]:
        return [module._buffers.get(name) for module, name in self._places]  # noqa: SLF001 - see above

    def capture(self) -> None:
        """Copy the state as it is now."""
        self._random = self._reader.now()
        if not self._places:
            return
        self._buffers = self._now()
        buffers = [buffer.detach() for buffer in self._buffers if buffer is not None]
        kinds = [(buffer.shape, buffer.dtype) for buffer in buffers]
        if kinds == [(copy.shape, copy.dtype) for copy in self._copies]:
            _copy(self._copies, buffers)
        else:
            self._copies = [buffer.clone() for buffer in buffers]

    def restore(self) -> None:
        """Restore the captured state."""
        self._random.restore(self._device)
        copies = iter(self._copies)
        with torch.no_grad():
            for (module, name), buffer in zip(self._places, self._buffers, strict=True):
                if buffer is not None:
                    buffer.copy_(next(copies))
                module._buffers[name] = buffer  # noqa: SLF001 - see above


def _copy(into: list[Tensor], tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(into, tensors)
