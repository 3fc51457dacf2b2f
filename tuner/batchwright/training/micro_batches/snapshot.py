"""Snapshot of the state other than gradients that a forward pass changes, to undo a failed micro-batch."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from batchwright.errors import WorkloadError
from batchwright.torch_internals import foreach_copy_, own_buffers, version_of
from batchwright.training.micro_batches.forward_state import ModelState
from batchwright.training.micro_batches.nested_batches import named_tensors
from batchwright.training.micro_batches.rng_state import RandomReader
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.workloads.base import Batch

_NO_VERSION = -1
"""Version of an inference tensor, which has no version counter and cannot be written to in training."""


class BatchVersions:
    """Number of writes to each tensor of some micro-batches, by autograd's version counters."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._micro_batches = micro_batches
        self._versions = [_versions(micro_batch.batch) for micro_batch in micro_batches]

    def require_unchanged(self) -> None:
        """Check that no tensor has been written to since construction.

        Raises:
            WorkloadError: naming the first tensor that was written to.
        """
        for number, (micro_batch, before) in enumerate(zip(self._micro_batches, self._versions, strict=True), start=1):
            if _versions(micro_batch.batch) != before:
                pairs = zip(named_tensors(micro_batch.batch), before, strict=False)
                written = (name for (name, tensor), version in pairs if _version(tensor) != version)
                of_many = f" of micro-batch {number} of {len(self._versions)}" if len(self._versions) > 1 else ""
                raise WorkloadError(
                    f"the loss writes to `{next(written, 'batch')}`{of_many}, so a window that ran out of memory "
                    "cannot be run again: make the loss write to a copy"
                )


def _versions(batch: Batch) -> list[int]:
    if type(batch) is dict:  # most batches: skip the names, which take longer than the versions
        values = batch.values()
        if all(isinstance(value, Tensor) for value in values):
            return [_version(value) for value in values]
    return [_version(tensor) for _, tensor in named_tensors(batch)]


def _version(tensor: Tensor) -> int:
    return _NO_VERSION if tensor.is_inference() else version_of(tensor)


class Snapshot:
    """The random generators, the model's buffers (running statistics) and other state at the last ``capture``.

    Other state is what forward passes change in attributes of modules (lists, queues, tensors that are no buffers,
    counters, generators) and in parameters (a teacher's moving averages). Before the first pass all attributes are
    captured. From then on only modules with state that the first pass has changed are, which are none for most models.
    State outside of the model, such as a queue that the loss keeps for itself, is not captured. Buffers are copied into
    memory that is allocated once, at construction.
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
        self._model = model
        self._changing: frozenset[str] | None = None
        """Paths of the modules whose attributes or parameters a pass changes; None before the first pass."""
        self._changing_parameters: frozenset[str] = frozenset()
        self._state: ModelState | None = None
        """The attributes and parameters at the last ``capture``, if there are any to capture."""
        self._before_pass: ModelState | None = None
        """All attributes before a pass whose changes are to be found."""

    @property
    def has_changing_state(self) -> bool:
        """True once a pass has changed state other than buffers, which is copied from then on."""
        return bool(self._changing)

    def _current_buffers(self) -> list[Tensor | None]:
        return [holder.get(name) for holder, name in self._slots]

    def capture(self) -> None:
        """Copy the current state."""
        self._random = self._reader.capture()
        if self._changing is None:
            self._state = self._before_pass = ModelState(self._model, buffers=False)
        else:
            changing, parameters = self._changing, self._changing_parameters
            self._state = ModelState(self._model, parameters, modules=changing, buffers=False) if changing else None
        if not self._slots:
            return
        self._buffers = self._current_buffers()
        buffers = [buffer.detach() for buffer in self._buffers if buffer is not None]
        kinds = [(buffer.shape, buffer.dtype) for buffer in buffers]
        if kinds != [(copy.shape, copy.dtype) for copy in self._copies]:
            self._copies = [buffer.clone() for buffer in buffers]
        elif buffers:
            foreach_copy_(self._copies, buffers)

    def learn(self) -> None:
        """Find the state that a pass has changed, after the first pass that has ended, and the first after a failure.

        Warns of state that no earlier pass had changed, and that a failed pass may have left changed.
        """
        if self._before_pass is None:
            return
        parameters = self._before_pass.written_parameters()
        changed, self._before_pass = self._before_pass.changed(parameters), None
        late = [path for path in changed if self._changing is not None and path not in self._changing]
        if late:
            names = ", ".join(
                f"`{name}` of `{path or type(self._model).__name__}`" for path in late for name in changed[path]
            )
            warnings.warn(
                f"the forward pass changes {names}, which it did not in the first micro-batch: this state was not "
                "restored when memory ran out, so the update is wrong if the loss depends on it",
                stacklevel=2,
            )
        self._changing = (self._changing or frozenset()) | changed.keys()
        self._changing_parameters |= parameters

    def roll_back(self) -> None:
        """Restore all of the captured state after a pass has failed.

        Raises:
            WorkloadError: when the very first pass has failed after it changed a parameter.
        """
        if self._before_pass is not None and (lost := self._before_pass.changed_parameters()):
            raise WorkloadError(
                f"the forward pass changes the parameter `{min(lost)}`, and the first micro-batch ran out of memory "
                "after that: begin with a smaller micro-batch"
            )
        if self._state is not None:
            self._state.restore()
        # The next pass is watched too: the failed one may have ended before it reached state that passes change.
        self._before_pass = ModelState(self._model, buffers=False)
        self.restore()

    def restore(self) -> None:
        """Restore the captured random generators and buffers."""
        self._random.restore(self._device)
        copies = iter(self._copies)
        with torch.no_grad():
            for (holder, name), buffer in zip(self._slots, self._buffers, strict=True):
                if buffer is not None:
                    buffer.copy_(next(copies))
                holder[name] = buffer
