"""Results of a batch and of its parts, and their difference relative to the scale of the summed terms.

A sum may cancel: a gradient that is zero in exact arithmetic consists of rounding errors otherwise. A difference is
therefore compared with the parts' own sizes, the largest gradient, and the change made by rounded weights, never with
the result alone.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from batchwright.training.coupling.precision import ROUNDING_SAFETY, Limits


@dataclass(frozen=True)
class Term:
    """A loss term of one batch."""

    total: float
    weight: float
    samples: int


_NOTHING = Term(0.0, 0.0, 0)


@dataclass(frozen=True)
class Run:
    """Result of a batch, or of all its parts."""

    parts: list[dict[str, Term]]
    gradients: dict[str, Tensor]
    """Gradients by parameter, on the CPU."""
    sizes: dict[str, float]
    """Sum of the largest values of the parts' gradients, by parameter: the sum of the gradients may cancel."""

    def part_terms(self, name: str) -> list[Term]:
        """The term of this name in each part."""
        return [part.get(name, _NOTHING) for part in self.parts]

    def terms(self) -> dict[str, Term]:
        """Each term, summed over the parts."""
        names = {name: None for part in self.parts for name in part}
        return {name: _added([part[name] for part in self.parts if name in part]) for name in names}

    def means(self) -> dict[str, float]:
        """Mean of each term, whose sum is the loss."""
        return {name: term.total / term.weight if term.weight else 0.0 for name, term in self.terms().items()}

    def mean_scales(self) -> dict[str, float]:
        """Means of the parts' absolute values, because their sum may cancel."""
        return {
            name: sum(abs(part_term.total) for part_term in self.part_terms(name)) / abs(term.weight)
            if term.weight
            else 0.0
            for name, term in self.terms().items()
        }

    def not_finite(self) -> str | None:
        """Message that names a value that is not finite; None if all are finite."""
        for name, mean in self.means().items():
            if not math.isfinite(mean):
                return f"loss term `{name}` is {mean}"
        for name, size in self.sizes.items():
            if not math.isfinite(size):
                return f"the gradient of `{name}` is not finite"
        return None


def _added(terms: list[Term]) -> Term:
    return Term(
        sum(term.total for term in terms), sum(term.weight for term in terms), sum(term.samples for term in terms)
    )


def relative(delta: float, scale: float) -> float:
    """``|delta| / |scale|``; zero for no difference, infinite for a difference on a scale of zero."""
    if delta == 0:
        return 0.0
    return abs(delta) / abs(scale) if scale else math.inf


# --- comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """Differences caused by rounding every weight to fp32: smaller ones carry no information."""

    gradients: dict[str, float]
    """Largest change of the gradient, by parameter."""
    means: dict[str, float]
    """Largest change of the mean, by loss term."""


NO_NOISE = Noise({}, {})
"""Noise of zero, before it was measured."""


def noise_of(whole: Run, rounded: list[Run]) -> Noise:
    """The largest change of ``whole`` in runs with rounded weights, times a safety factor."""
    gradients, means = differences(whole, whole), dict.fromkeys(whole.means(), 0.0)
    for run in rounded:
        gradients = {name: max(gradients[name], error) for name, error in differences(whole, run).items()}
        means = {name: max(means[name], abs(mean - run.means().get(name, 0.0))) for name, mean in whole.means().items()}
    return Noise(
        {name: ROUNDING_SAFETY * error for name, error in gradients.items()},
        {name: ROUNDING_SAFETY * error for name, error in means.items()},
    )


def loss_error(whole: Run, split: Run, limits: Limits, noise: Noise = NO_NOISE) -> float:
    """Largest relative error over the terms' means, on the scale of the summands."""
    reference, other = whole.means(), split.means()
    sizes, parts = whole.mean_scales(), split.mean_scales()
    floor = limits.negligible * max(sizes.values(), default=0.0)
    return max(
        (
            relative(
                _excess(other.get(name, 0.0) - reference.get(name, 0.0), noise.means.get(name, 0.0)),
                max(sizes.get(name, 0.0), parts.get(name, 0.0), floor),
            )
            for name in {**reference, **other}
        ),
        default=0.0,
    )


def largest(tensor: Tensor) -> float:
    """The largest absolute value; zero of no elements."""
    return float(torch.linalg.vector_norm(tensor, math.inf)) if tensor.numel() else 0.0


def differences(whole: Run, split: Run) -> dict[str, float]:
    """Largest difference of each parameter's gradient."""
    zero = torch.zeros(())
    return {
        name: largest(split.gradients.get(name, zero) - whole.gradients.get(name, zero))
        for name, gradient in {**whole.gradients, **split.gradients}.items()
        if gradient.numel()
    }


def gradient_errors(whole: Run, split: Run, limits: Limits, noise: Noise = NO_NOISE) -> dict[str, float]:
    """Relative error of each parameter's gradient, on the scale of the summands."""
    floor = limits.negligible * max(whole.sizes.values(), default=0.0)
    return {
        name: relative(
            _excess(difference, noise.gradients.get(name, 0.0)),
            max(whole.sizes.get(name, 0.0), split.sizes.get(name, 0.0), floor),
        )
        for name, difference in differences(whole, split).items()
    }


def term_errors(whole: Run, split: Run, limits: Limits, noise: Noise = NO_NOISE) -> dict[str, float]:
    """Relative error per term between the sum of the parts and the whole, in sums and weights.

    A term that is equal for every part, with equal weights (a penalty on the parameters), need not add up.
    """
    largest = max(whole.mean_scales().values(), default=0.0)
    reference, added = whole.terms(), split.terms()
    errors = {}
    for name in {**reference, **added}:
        term = reference.get(name, _NOTHING)
        part_terms = split.part_terms(name)
        is_repeated = all(
            part.weight == term.weight and relative(part.total - term.total, term.total) <= limits.rounding
            for part in part_terms
        )
        if not is_repeated:
            size = max(abs(term.total), sum(abs(part_term.total) for part_term in part_terms))
            size = max(size, limits.negligible * largest * abs(term.weight))
            delta = added.get(name, _NOTHING).total - term.total
            sum_error = relative(_excess(delta, noise.means.get(name, 0.0) * abs(term.weight)), size)
            weight_error = relative(added.get(name, _NOTHING).weight - term.weight, term.weight)
            errors[name] = max(sum_error, weight_error)
    return errors


def _excess(difference: float, noise: float) -> float:
    """Part of a difference that rounding does not explain; NaN stays NaN."""
    return max(abs(difference) - noise, 0.0) if noise else abs(difference)
