"""The dispatch mode of a trace: operators run on fake tensors, and what they take is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tuner.errors import EstimateError
from tuner.estimation.trace import Bound, Category
from tuner.estimation.tracing.kernel_workspaces import onednn_recurrent_workspace_bytes
from tuner.estimation.tracing.known_values import KnownValues, mapped, tensors_in
from tuner.estimation.tracing.recorder import Recorder
from tuner.estimation.tracing.shape_cache import Shapes
from tuner.estimation.tracing.torch_internals import (
    LOCAL_SCALAR_DENSE,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    backward_task,
)
from tuner.torch_internals import TorchDispatchMode

_aten = torch.ops.aten
_ONEDNN_RECURRENT = _aten.mkldnn_rnn_layer.default
_ITEM = LOCAL_SCALAR_DENSE
_DEVICE = torch.ops.prim.device.default
_LIFTED = _aten.lift_fresh.default
"""Takes in what ``torch.tensor`` has just made: memory of the trace's own, though it comes as a real tensor."""
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}


class Kernels(Protocol):
    """What a device's kernels take beside their results."""

    def lasting(self, func: OpOverload, args: Sequence[Any]) -> Sequence[tuple[str, int]]:
        """What ``func`` makes once and for all, by name, in bytes: handles' workspaces."""

    def passing(self, func: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[int | Bound]:
        """What ``func`` holds while it runs, in bytes."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own initialisation of subclasses
    """Runs operators on fake tensors and records the storages of one device. Enter it inside of ``fakes``.

    Real tensors (a batch) are taken as fakes of the CPU whose values are known.

    Args:
        fakes: the mode that makes results.
        device_type: the device whose storages are recorded.
        kernels: what its kernels take by themselves.
        shapes: what operators return.
    """

    def __init__(self, fakes: FakeTensorMode, device_type: str, kernels: Kernels, shapes: Shapes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes = fakes
        self.recorder = Recorder()
        self.values = KnownValues()
        self.device_type = device_type
        self._kernels = kernels
        self._shapes = shapes
        self.notes: set[str] = set()
        self._lasting: set[str] = set()
        self._backward = -1
        self._begun = 0
        self._sees = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; being wrapped against it would cost a tenth of the time."""
        return False

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is made in the block is not recorded, unless the recorder is shown it later."""
        self._sees = False
        try:
            yield
        finally:
            self._sees = True

    def begin(self, name: str) -> None:
        """A stretch of the trace begins."""
        self.recorder.mark(name)
        self._begun = len(self.recorder.sizes)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - an operator's results
        """Run ``func`` on fakes; record what it takes and what is known of its results."""
        if DTensor in types:
            return NotImplemented  # its own dispatch comes back with what this rank holds
        kwargs = kwargs or {}
        if func is _DEVICE:  # asked by C++ code of every other operator: most calls are these
            return args[0].device
        if func is _ITEM:
            return self.values.scalar(args[0])
        self._notice_backward()
        if func is not _LIFTED:
            args = tuple(mapped(it, self._faked) for it in args)
        kwargs = {name: mapped(it, self._faked) for name, it in kwargs.items()}
        outputs = self._run(func, args, kwargs)
        self.values.follow(func, args, kwargs, outputs)
        return outputs

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - see above
        if func in _INDEXED:
            args = (args[0], self._positions(args[1]), *args[2:])
        try:
            outputs = self._shapes.run(self.fakes, func, args, kwargs)
        except DynamicOutputShapeException:
            outputs = self._of_known_shape(func, args, kwargs)
        if func is _ONEDNN_RECURRENT:  # its fake has an empty workspace, which the backward pass keeps
            workspace = torch.empty(onednn_recurrent_workspace_bytes(args), dtype=torch.uint8)
            outputs = (*outputs[:3], self._like(workspace, outputs[0].device))
        if not self._sees:
            return outputs
        here = [it for it in tensors_in((outputs,)) if it.device.type == self.device_type]
        if here:
            self._record(func, args, here)
        return outputs

    def _record(self, func: OpOverload, args: tuple[Any, ...], here: list[Tensor]) -> None:
        for name, nbytes in self._kernels.lasting(func, args):
            if name not in self._lasting:
                self._lasting.add(name)
                self.recorder.take(nbytes, Category.WORKSPACE)
        blocks = [self.recorder.take(it, Category.WORKSPACE) for it in self._kernels.passing(func, args, here) if it]
        self.recorder.see(here)
        for block in blocks:
            self.recorder.give_back(block)

    def _faked(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self.fakes.from_tensor(tensor)
        self.recorder.adopt(fake)
        self.values.know(fake, tensor)
        return fake

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Masks as the positions that they choose, as indexing does it."""
        positions: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in {torch.bool, torch.uint8}:
                found = _aten.nonzero.default
                positions += self._of_known_shape(found, (index,), {}).unbind(1)
            else:
                positions.append(index)
        return positions

    def _of_known_shape(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - see above
        """Results whose shapes depend on values, where these are known.

        Raises:
            EstimateError: where they are not.
        """
        inputs = list(tensors_in((*args, *kwargs.values())))
        if any(self.values.value_of(it) is None for it in inputs):
            raise EstimateError(
                f"the workload makes a tensor whose shape depends on values that only a run knows ({func}): it can be "
                "measured, not estimated"
            )
        device = inputs[0].device
        return mapped(self.values.compute(func, args, kwargs), lambda it: self._like(it, device))

    def _like(self, value: Tensor, device: torch.device) -> Tensor:
        with self.fakes:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        self.values.know(fake, value)
        return fake

    def _notice_backward(self) -> None:
        """When a backward pass begins, what the forward pass has left are its activations."""
        task = backward_task()
        if task >= 0 and task != self._backward:
            self._backward = task
            for block in self.recorder.live.values():
                if block >= self._begun:
                    self.recorder.categories.setdefault(block, Category.ACTIVATIONS)
