"""Cheap check, for a user's own training loop, that a loss is a sum over its samples, with its weight.

The loss of the first micro-batch is compared with that of its two parts. This takes the forward passes of two
micro-batches, once, and no backward pass. If a forward pass changes state of the model, a few more passes compare the
loss from the old state and from the new one. Gradients are not changed; random numbers, buffers and attributes of
modules are restored.
Probes and the trainer run a thorough check (``batchwright.training.coupling.check``), which compares gradients too.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.overrides import TorchFunctionMode

from batchwright.device_traits import traits_of
from batchwright.errors import WorkloadError
from batchwright.training.coupling.comparison import without_dropout
from batchwright.training.coupling.precision import ROUNDED_RUNS, ROUNDING_SAFETY, mantissa_bits, rounded_weights
from batchwright.training.coupling.random_draws import MatchedDraws, UnmatchedDrawError
from batchwright.training.coupling.report import BATCH_NORM_REMEDY, class_name, is_batch_norm
from batchwright.training.micro_batches.forward_state import ModelState
from batchwright.training.micro_batches.loss_window import named_terms
from batchwright.training.micro_batches.nested_batches import copied, to_device
from batchwright.training.micro_batches.rng_state import RandomState
from batchwright.training.micro_batches.splitting import MicroBatch, unknown_micro_batch
from batchwright.workloads.base import Batch

_CPU_TOLERANCE = 1e-3
"""Relative, for a CPU that computes in fp32: a hundred times the rounding of a sum over samples in other groups."""
_GPU_TOLERANCE = 1e-2
"""Relative, on other devices, which choose kernels of other precision by size (TF32)."""
_NARROW_TOLERANCE = 0.05
"""Relative, if an operation is computed in less than fp32. A mean returned as a sum is off by at least a third."""
_RANDOM_TOLERANCE = 0.1
"""Relative, if a loss draws random numbers."""
_TF32_BITS = 10
"""Binary digits of TF32."""
_UPDATED_BITS = 3
"""Binary digits of weights, of which the last two are flipped in place of an update: a change by 12 to 38 %. State that
follows the weights, such as the power iterations of a spectral norm that have converged, lags behind only then. On
layers of 6 to 512, the loss of a second pass changes by 4e-5 or more; with another digit kept, by 3e-6 or more."""
_FEW_ELEMENTS = 2**24
"""Frozen parameters of so many elements are copied, as forward passes may change them (a teacher, a codebook)."""
_DETERMINISM_TOLERANCE = 1e-5
"""Relative: largest difference between two runs of a loss without random numbers."""
_RUNS_WITH_DRAWS = 8
"""Runs of a loss that draws random numbers: two samples have only two permutations."""
_BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training"),
}
"""Functions that normalise over the samples, with the names of their arguments."""
_SINGLE_VALUE = "Expected more than 1 value per channel when training"
"""In the error of torch's batch norm, also of a scripted one."""
_SHOWN_LENGTH = 200
_OVERRIDE_HINT = "Pass checks_coupling=False to train nevertheless."

Terms: TypeAlias = dict[str, tuple[float, float]]
"""Sum and weight of each term, by name."""
Means: TypeAlias = dict[str, float]
"""Mean of each term, or a change of the mean, by name."""
LossOf: TypeAlias = Callable[[nn.Module, Batch], Any]


@dataclass(frozen=True)
class Finding:
    """A fault of a loss."""

    message: str
    always: bool
    """True if the update of a single micro-batch is wrong too."""


class LossCheck:
    """Comparison of the loss of a micro-batch with that of its parts."""

    def __init__(self, model: nn.Module, device: torch.device, floating: torch.dtype | None) -> None:
        self._model = model
        self._device = device
        self._floating = floating
        self._is_due = True
        self._finding: Finding | None = None
        self._failures: list[str] = []
        """The error of a part of each reading that can be computed as a whole; empty if its parts ran."""

    def require_sum(self, *, accumulates: bool) -> None:
        """Refuse a loss that ``run`` found to be wrong.

        Raises:
            WorkloadError: when the update would be wrong.
        """
        if self._finding is not None and (accumulates or self._finding.always):
            raise WorkloadError(self._finding.message)

    def run(self, window: Sequence[MicroBatch], loss: LossOf, largest: int | None) -> MicroBatch | None:
        """Check ``loss`` in the first window with samples, over at most ``largest`` of them.

        A loss that cannot be computed for a part only causes a warning, unless by a batch norm. So does one with random
        numbers that cannot be repeated for a sample, and one that differs by every reading of a batch that may be a
        list.

        Returns:
            The reading of a batch by which the loss of its parts is that of the batch, or whose parts alone run; a
            batch of unknown samples if all readings were guesses and are wrong; None if no batch has several
            readings, or none is right.
        """
        divisible = (one for one in window if one.size > 1 and not one.is_padding)
        micro_batch = next((one for one in divisible if one.readings or one.indivisible is None), None)
        self._is_due, was_due = self._is_due and not window, self._is_due
        if not was_due or micro_batch is None:
            return None
        ran: list[tuple[MicroBatch, Finding]] = []
        for reading in micro_batch.readings or (micro_batch,):
            self._failures.append("")
            checked = reading if largest is None else reading.at_most(largest)[0]
            outcome = self._outcome(checked, loss) if checked.size > 1 else False
            if outcome is None:
                return reading
            if outcome:
                ran.append((reading, outcome))
        return self._conclude(micro_batch, ran)

    def _conclude(self, micro_batch: MicroBatch, ran: list[tuple[MicroBatch, Finding]]) -> MicroBatch | None:
        """Keep the fault of the only reading that ran, or of the first if all are along dimensions of tensors."""
        if not ran and self._failures[0]:
            message = (
                "it could not be checked whether the loss is a sum over the samples, because it fails on a "
                f"part of its {micro_batch.size} samples ({self._failures[0]}). {_OVERRIDE_HINT}"
            )
            warnings.warn(message, stacklevel=2)
        if len(ran) > 1 and micro_batch.indivisible is not None:
            message = f"the loss could not be compared with that of its parts: {micro_batch.indivisible}"
            warnings.warn(message, stacklevel=2)
            return None
        layouts = [one.layout for one in micro_batch.readings if one.layout is not None]
        if layouts and not any(layout.is_conventional for layout in layouts):
            return unknown_micro_batch(micro_batch.batch)
        if not ran:
            return None
        reading, self._finding = ran[0]
        return reading if micro_batch.readings else None

    def _outcome(self, micro_batch: MicroBatch, loss: LossOf) -> Finding | Literal[False] | None:
        """The fault of ``loss``; None if there is none, False if it cannot be computed for the batch and its parts."""
        try:
            with without_dropout(self._model), torch.compiler.set_stance("force_eager"):
                # captured without dropout, as it is restored within the block
                passes = _Passes(self._model, self._device, self._floating, micro_batch, loss)
                try:
                    return self._compare(passes)
                finally:
                    passes.restore()
        except Exception:  # noqa: BLE001 - the window's own passes raise the error, if it occurs in them too
            return False

    def _compare(self, passes: _Passes) -> Finding | None:
        parts = passes.whole.divide(_unequal_sizes(passes.whole.size))
        with _Operations() as operations:
            whole, together = passes.terms(passes.whole), operations.normalised
            changed, operations.normalised = passes.changed_state(), 0
            try:
                part_terms = [passes.terms(part) for part in parts]
            except Exception as error:
                if _SINGLE_VALUE in str(error):
                    return self._batch_norm_finding()
                self._failures[-1] = f"{type(error).__name__}: {shorten(str(error), _SHOWN_LENGTH)}"
                raise
        tolerance = _GPU_TOLERANCE if traits_of(self._device.type).is_gpu else _CPU_TOLERANCE
        tolerance = _NARROW_TOLERANCE if operations.are_narrow else tolerance
        normalises = together > operations.normalised > 0
        # With a batch norm any difference counts, however small: one whose output is not used makes none in fp32.
        least = _DETERMINISM_TOLERANCE if normalises else tolerance
        finding = passes.finding(whole, part_terms, least)
        if normalises and finding is not None and not finding.always:
            return self._batch_norm_finding()
        if finding is None:
            return _state_finding(passes, changed) if changed else None
        if passes.are_deterministic(whole):
            return passes.finding(whole, part_terms, tolerance, passes.rounding(whole, operations))
        with suppress(Exception):  # a draw that no part can repeat, or an operation that the mode cannot run
            return _matched_finding(passes, tolerance, operations)
        finding = passes.finding(whole, part_terms, _RANDOM_TOLERANCE)
        if finding is not None and finding.always:
            warnings.warn(f"{finding.message} (Its random numbers leave some doubt.)", stacklevel=2)
        return None

    def _batch_norm_finding(self) -> Finding:
        """The fault of a loss whose batch norm uses the statistics of a micro-batch: the losses may agree by chance."""
        named = ((path, module) for path, module in self._model.named_modules() if is_batch_norm(module))
        path, module = next((one for one in named if one[1].training), ("", self._model))
        name = f"module `{path}` ({class_name(module)})" if path else "a batch norm"
        reason = f"couples the samples of a micro-batch by {name}, which normalises them by their own statistics"
        return Finding(f"the loss {reason}: {BATCH_NORM_REMEDY}. {_OVERRIDE_HINT}", always=False)


class _Passes:
    """Forward passes over the ``whole`` micro-batch and its parts, from the same state of the model and generators."""

    def __init__(
        self, model: nn.Module, device: torch.device, floating: torch.dtype | None, whole: MicroBatch, loss: LossOf
    ) -> None:
        self.model = model
        self.whole = whole
        self._device = device
        self._floating = floating
        self._loss = loss
        self._is_mean = False
        """True if the loss returns the mean over the samples, without a weight."""
        self._random = RandomState.capture(device)
        frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        is_few = sum(each.numel() for each in frozen.values()) <= _FEW_ELEMENTS
        self._state = ModelState(model, frozenset(frozen if is_few else ()))

    def restore(self, *, generators: bool = True) -> None:
        """Restore the random numbers, and what forward passes have changed in the model."""
        self._state.restore(generators=generators)
        self._random.restore(self._device)

    def terms(self, part: MicroBatch) -> Terms:
        """The terms of a forward pass over a copy of the batch, from the same random numbers and state each time."""
        self.restore()
        return self.forward(part)

    def later_terms(self, restored: Sequence[str] = ()) -> Terms:
        """The terms of another forward pass, from the same random numbers and the state that the last one has left.

        The state of the modules ``restored`` is as before the check.
        """
        self._random.restore(self._device)
        self._state.restore_modules(restored)
        return self.forward(self.whole)

    def forward(self, part: MicroBatch) -> Terms:
        """The terms of a forward pass from the present state."""
        output = self._loss(self.model, to_device(copied(part.batch), self._device, self._floating))
        self._is_mean = isinstance(output, Tensor)
        terms = named_terms(output, part.size)
        return {name: (_number(loss_sum), _number(weight)) for name, (loss_sum, weight) in terms.items()}

    def changed_state(self) -> dict[str, tuple[str, ...]]:
        """Names of the state that a forward pass has changed, by path of the module, but for BatchNorm's statistics.

        In training no output depends on these.
        """
        modules = dict(self.model.named_modules())  # scripted ones have no `get_submodule`
        return {path: names for path, names in self._state.changed().items() if not is_batch_norm(modules[path])}

    def rounding(self, whole: Terms, operations: _Operations) -> Means:
        """Measure how far rounding may change the mean of each term: a sum that cancels is rounding alone.

        It is what rounded weights change. Values that nearly cancel within a sample, such as logarithms of equal
        probabilities, give multiples of a last digit, which such weights often leave as they are: the rounding of one
        such value is the least.
        """
        bits = min(operations.bits, _TF32_BITS) if traits_of(self._device.type).is_gpu else operations.bits
        with _SampleValues(self.whole.size) as values:
            self.terms(self.whole)
        changed = dict.fromkeys(whole, ROUNDING_SAFETY * values.magnitude * torch.finfo(torch.float32).eps)
        for run in range(ROUNDED_RUNS):
            with rounded_weights(self.model, bits, run):
                terms = self.terms(self.whole)
            for name, (total, weight) in whole.items():
                change = abs(terms[name][0] - total) / abs(weight) if weight else 0.0
                changed[name] = max(changed[name], ROUNDING_SAFETY * change)
        return changed

    def are_deterministic(self, whole: Terms) -> bool:
        """Return whether further runs, from other random numbers, give the same loss: two, or more if it draws some."""
        for run in range(_RUNS_WITH_DRAWS):
            self.restore(generators=False)
            torch.rand(3 + run, device=self._device), torch.rand(3 + run)
            _advance_generators_of_other_libraries(1 + run)
            before = RandomState.capture(self._device)
            again = self.forward(self.whole)
            pairs = ((total, again[name][0]) for name, (total, _) in whole.items())
            if not all(
                math.isclose(total, other, rel_tol=_DETERMINISM_TOLERANCE, abs_tol=1e-12) for total, other in pairs
            ):
                return False
            if run and before.equals(RandomState.capture(self._device)):
                break
        return True

    def finding(
        self, whole: Terms, parts: list[Terms], tolerance: float, rounding: Means | None = None
    ) -> Finding | None:
        """The finding of the first term whose mean differs between the whole and its parts by more than rounding."""
        for name, (total, weight) in whole.items():
            sums, weights = [part[name][0] for part in parts], [part[name][1] for part in parts]
            if not all(map(math.isfinite, (total, weight, *sums, *weights))) or not (weight and all(weights)):
                continue
            mean, parts_mean = total / weight, sum(sums) / sum(weights)
            # Relative to the largest mean of a part: the mean of the whole may cancel to nothing.
            scale = max(abs(mean), *(abs(s / w) for s, w in zip(sums, weights, strict=True)))
            if scale and abs(mean - parts_mean) - (rounding or {}).get(name, 0.0) > tolerance * scale:
                if self._is_mean:
                    means = [one / other for one, other in zip(sums, weights, strict=True)]
                    return _explain_mean(mean, means, tolerance)
                return _explain(name, whole[name], sums, weights, tolerance)
        return None


def _matched_finding(passes: _Passes, tolerance: float, operations: _Operations) -> Finding | None:
    """Compare a loss that draws random numbers, with the same numbers for a sample in the whole and in its parts.

    Raises:
        UnmatchedDrawError: when the numbers of a sample are not known.
    """
    size, (first, last) = passes.whole.size, _unequal_sizes(passes.whole.size)
    with MatchedDraws() as draws:
        draws.start(0, size, size)
        whole = passes.terms(passes.whole)
        passes.restore(generators=False)
        _advance_generators_of_other_libraries()
        draws.start(0, size, size)
        if _largest_difference(whole, passes.forward(passes.whole)) > _DETERMINISM_TOLERANCE:
            raise UnmatchedDrawError("random numbers of another library than torch")
        parts = []
        for start, part in zip((0, first), passes.whole.divide((first, last)), strict=True):
            draws.start(start, part.size, size)
            parts.append(passes.terms(part))
        if passes.finding(whole, parts, tolerance) is None:
            return None
        if draws.ambiguous:
            raise UnmatchedDrawError("several rows for each sample, in an unknown order")
        draws.start(0, size, size)
        return passes.finding(whole, parts, tolerance, passes.rounding(whole, operations))


def _state_finding(passes: _Passes, changed: dict[str, tuple[str, ...]]) -> Finding | None:
    """Compare the loss of a micro-batch with that from the state which its own forward pass has left.

    The second micro-batch of a window begins from such a state, which is that of the first in a full batch. Both passes
    have weights changed as by an update.
    """
    with rounded_weights(passes.model, _UPDATED_BITS, 0):
        first, later = passes.terms(passes.whole), passes.later_terms()
        error = _largest_difference(first, later)
        if not error > _DETERMINISM_TOLERANCE:
            return None
        if _largest_difference(first, passes.terms(passes.whole)) > error / 10:  # random numbers of its own
            return None
        by_type: dict[type, list[str]] = {}
        for path in changed:
            by_type.setdefault(type(passes.model.get_submodule(path)), []).append(path)
        for paths in by_type.values():
            passes.terms(passes.whole)
            if _largest_difference(later, passes.later_terms(paths)) > error / 10:
                break
    path = paths[0]
    name = f"module `{path}`" if path else "the model itself"
    reason = (
        f"the loss depends on state of {name} ({type(passes.model.get_submodule(path)).__name__}: "
        f"{', '.join(changed[path])}) that every forward pass changes, so several micro-batches do not give "
        "the full batch's gradient"
    )
    remedy = "keep this state fixed, or change it once per update, outside of the forward pass"
    figures = f"{error:.1e} relative, between two passes over one micro-batch"
    return Finding(f"{reason} ({figures}): {remedy}. {_OVERRIDE_HINT}", always=False)


class _Operations(TorchFunctionMode):
    """Record of the lowest precision of any result, and of the values that batch norms normalise together."""

    bits = mantissa_bits(torch.float32)
    """Binary digits of the lowest precision: fewer than those of fp32 under autocast."""
    normalised = 0
    """The most values of one channel that share a mean and a variance of their own."""

    @property
    def are_narrow(self) -> bool:
        """Return whether an operation of lower precision ran."""
        return self.bits < mantissa_bits(torch.float32)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's own signature
        if function in _BATCH_NORMS:
            arguments = dict(zip(_BATCH_NORMS[function], args, strict=False)) | (kwargs or {})
            if arguments.get("training"):
                features = arguments["input"]
                self.normalised = max(self.normalised, features.numel() // max(1, features.shape[1]))
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.dtype.itemsize < torch.float32.itemsize:
            self.bits = min(self.bits, mantissa_bits(result.dtype))
        return result


class _SampleValues(TorchFunctionMode):
    """Record of the magnitude of results with one value for each of ``samples``."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples
        self.magnitude = 0.0
        """The largest of the results' medians, as a few values may be those of a mask."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's own signature
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.numel() == self._samples:
            median = float(result.detach().abs().median())
            self.magnitude = max(self.magnitude, median if math.isfinite(median) else 0.0)
        return result


def _unequal_sizes(samples: int) -> tuple[int, int]:
    """Sizes of two parts. The mean of equal parts would be the mean of the whole."""
    last = max(1, samples // 3)
    return samples - last, last


def _advance_generators_of_other_libraries(numbers: int = 1) -> None:
    for _ in range(numbers):
        random.random(), np.random.random()  # noqa: NPY002 - user code may use the old interface


def _largest_difference(one: Terms, other: Terms) -> float:
    """The largest difference of a sum or a weight, relative to the larger."""
    pairs = [pair for name, values in one.items() for pair in zip(values, other[name], strict=True)]
    return max(abs(a - b) / (max(abs(a), abs(b)) or 1.0) for a, b in pairs)


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _explain_mean(mean: float, part_means: list[float], tolerance: float) -> Finding:
    figures = f"({mean:.6g} for a micro-batch, {' and '.join(f'{one:.6g}' for one in part_means)} for its parts)"
    if abs(sum(part_means) - mean) <= tolerance * abs(mean):
        reason = "grows with the batch, like a sum: return (loss_sum, weight), or the mean over the samples"
        return Finding(f"the loss {reason} {figures}. {_OVERRIDE_HINT}", always=False)
    reason = (
        "is not the mean over the samples: a mean over tokens is returned as their sum and number, (loss_sum, tokens); "
        "a loss that couples the samples (BatchNorm, in-batch negatives, load balancing) cannot be accumulated exactly"
    )
    return Finding(f"the loss {reason} {figures}. {_OVERRIDE_HINT}", always=False)


def _explain(
    name: str, whole: tuple[float, float], sums: list[float], weights: list[float], tolerance: float
) -> Finding:
    total, weight = whole
    slack = tolerance * max(abs(total), *map(abs, sums))
    whole_figures, part_figures = f"{total:.6g} over a weight of {weight:g}", f"{sum(sums):.6g} over {sum(weights):g}"
    figures = f"{whole_figures} for a micro-batch, {part_figures} for its parts"
    if min(sums) - slack <= total <= max(sums) + slack:
        grows = math.isclose(weight, sum(weights), rel_tol=tolerance)
        reason = "is a mean, returned as a sum: return the sum over samples or tokens, and their number as the weight"
        return Finding(f"loss term `{name}` {reason} ({figures}). {_OVERRIDE_HINT}", always=grows)
    if abs(sum(sums) - total) <= slack:
        reason = "has weights that do not add up: return as weight the number of samples or tokens it is summed over"
        return Finding(f"loss term `{name}` {reason} ({figures}). {_OVERRIDE_HINT}", always=False)
    reason = (
        "couples the samples of a micro-batch (BatchNorm, in-batch negatives, load balancing), so "
        "accumulation does not give the full batch's gradient"
    )
    return Finding(f"loss term `{name}` {reason} ({figures}). {_OVERRIDE_HINT}", always=False)
