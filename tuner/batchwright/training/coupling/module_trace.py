"""Search for the module that makes a sample depend on the others: its output changes for the same input.

Every module is compared by itself. In the runs of the batch's two parts, the output of a module that got the full
batch's input is replaced by the full batch's output. So a culprit neither hides another nor affects later modules.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.hardware.failures import is_of_device
from batchwright.training.coupling.comparison import REFUSALS, Runner
from batchwright.training.coupling.error_scale import Run
from batchwright.training.micro_batches.nested_batches import tensors_of


@dataclass
class ModuleTrace:
    """Result of the search."""

    modules: dict[str, float] = field(default_factory=dict)
    """Largest relative error of the output for the same input, by path, in the order of execution."""
    whole: Run | None = None
    """Loss terms of the whole batch."""
    split: Run | None = None
    """Loss terms of the parts, with every module's output as in the full batch; None if a part was refused."""
    refused_by: str | None = None
    """Path of the innermost module that raised an error for a part."""


@dataclass
class _Call:
    """Inputs and outputs of one call of a module, as copies on the CPU."""

    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


class _Hooks:
    """Forward hooks on every module, which record the whole batch and then compare the parts with the record."""

    def __init__(self, found: ModuleTrace, names: dict[nn.Module, str], rounding: float) -> None:
        self._found = found
        self._rounding = rounding
        self._names = names
        self._calls: dict[str, list[_Call]] = defaultdict(list)
        self._part: int | None = None
        self._counts: dict[str, int] = defaultdict(int)
        self.stack: list[tuple[str, _Call | None]] = []
        """Modules that are running, outermost first, with the whole batch's call if its input was the same."""

    def start(self, part: int) -> None:
        """Begin the first part (0) or the second (1)."""
        self._part = part
        self._counts.clear()
        self.stack.clear()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the input before the module may overwrite it."""
        name, inputs = self._names[module], list(tensors_of((args, kwargs)))
        if self._part is None:
            self.stack.append((name, _Call([_copy(tensor) for tensor in inputs])))
            return
        calls, index = self._calls[name], self._counts[name]
        self._counts[name] += 1
        call = calls[index] if index < len(calls) else None
        self.stack.append((name, call if call is not None and self._inputs_match(inputs, call.inputs) else None))

    def after(self, _module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        """Record the output, or compare it and replace it by the whole batch's."""
        name, call = self.stack.pop()
        outputs = list(tensors_of(output))
        if call is None:
            return
        if self._part is None:
            call.outputs = [_copy(tensor) for tensor in outputs]
            self._calls[name].append(call)
            return
        error = max(
            (self._compare_and_replace(*pair) for pair in zip(outputs, call.outputs, strict=False)), default=0.0
        )
        if error > self._rounding:
            self._found.modules[name] = max(error, self._found.modules.get(name, 0.0))

    def _inputs_match(self, inputs: list[Tensor], reference: list[Tensor]) -> bool:
        pairs = zip(inputs, reference, strict=False)
        return len(inputs) == len(reference) and all(
            rows is not None and _error(tensor, rows) <= self._rounding
            for tensor, rows in ((tensor, self._rows(tensor, whole)) for tensor, whole in pairs)
        )

    def _compare_and_replace(self, output: Tensor, whole: Tensor) -> float:
        """The error of an output, which is then replaced. A statistic over the batch has no samples and is ignored."""
        rows = self._rows(output, whole)
        if rows is None or rows.shape == whole.shape:
            return 0.0
        error = _error(output, rows)
        with suppress(RuntimeError), torch.no_grad():  # an expanded tensor cannot be written to
            output.copy_(rows)
        return error

    def _rows(self, tensor: Tensor, whole: Tensor) -> Tensor | None:
        """The rows of ``whole`` for this part: the head or tail along the one dimension that is shorter."""
        if tensor.dim() != whole.dim():
            return None
        shorter = [axis for axis in range(whole.dim()) if tensor.shape[axis] != whole.shape[axis]]
        if not shorter:
            return whole
        axis = shorter[0]
        length, full = tensor.shape[axis], whole.shape[axis]
        if len(shorter) > 1 or length > full:
            return None
        return whole.narrow(axis, full - length if self._part else 0, length)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _error(tensor: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the largest value. Equal infinities (a mask) have no difference."""
    if not reference.numel():
        return 0.0
    here = tensor.detach().to("cpu", torch.float64)
    there = reference.to(torch.float64)
    difference = torch.where(here == there, 0.0, (here - there).abs()).max()
    scale = torch.where(there.isfinite(), there, 0.0).abs().max()
    return float(difference / scale) if scale else float(difference > 0)


@contextmanager
def _hooked(runner: Runner, found: ModuleTrace) -> Iterator[_Hooks]:
    names = {module: name for name, module in runner.model.named_modules()}
    hooks = _Hooks(found, names, runner.limits.rounding)
    handles = []
    for module in names:
        handles.append(module.register_forward_pre_hook(hooks.before, with_kwargs=True))
        handles.append(module.register_forward_hook(hooks.after))
    try:
        yield hooks
    finally:
        for handle in handles:
            handle.remove()


def trace(runner: Runner, sizes: list[int], reset_modules: frozenset[str] = frozenset()) -> ModuleTrace:
    """Run the whole batch and its two parts of these sizes, forward only, and compare the outputs of every module.

    The state of the modules ``reset_modules`` is the same for both parts.
    """
    found = ModuleTrace()
    with _hooked(runner, found) as hooks:
        found.whole = Run(runner.losses(runner.whole, seed=0), {}, {})
        try:
            found.split = Run(
                runner.losses(sizes, seed=0, on_part_start=hooks.start, reset_modules=reset_modules), {}, {}
            )
        except REFUSALS as error:
            if is_of_device(error):
                raise
            found.refused_by = hooks.stack[-1][0] if hooks.stack else None
    return found
