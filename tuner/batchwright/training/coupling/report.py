"""Report of the check for coupled samples, in figures and in words: the modules at fault and the remedies."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from batchwright.torch_internals import BatchNorm
from batchwright.training.coupling.error_scale import Run, Term, relative
from batchwright.training.coupling.precision import LIMITS, Limits, Precision


@dataclass(frozen=True)
class Culprit:
    """A cause of a difference between a batch and its parts."""

    kind: Literal["module", "state", "term", "gradient"]
    """A module of the model, a module whose state every forward pass changes, a loss term, or, when losses agree, the
    parameter whose gradient differs most."""
    name: str
    """Path of the module (empty for the model itself), name of the term, or path of the parameter."""
    type_name: str | None
    """Class of the module."""
    error: float | None
    """Relative error of the cause alone; infinite if a part was refused, None if the cause was found by its type."""
    remedy: str
    """Advice to the user."""


Verdict = Literal["separate", "coupled", "not-compared"]
"""Result of the check: a sum over samples, coupled samples, or a loss that could not be compared with its parts."""


@dataclass(frozen=True)
class CouplingReport:
    """Comparison of a batch with its two parts."""

    loss_error: float
    """Largest relative error over the loss terms' sums and weights; NaN if nothing could be compared."""
    gradient_error: float
    """Largest relative error over the parameters, each on its own scale (see ``check_coupling``)."""
    culprits: tuple[Culprit, ...]
    """Causes, in the order of execution."""
    train_mode: bool
    """True if the model was compared in its own modes, but for dropout; false if in eval mode to that end."""
    samples: int
    """Samples of the batch that was compared."""
    problem: str | None = None
    """Reason why the two could not be compared; None if they were."""
    precision: Precision = "fp64"
    """Arithmetic of the comparison."""
    updates: int = 0
    """Updates before the comparison: some differences appear only after an update."""

    def with_guess(self, guess: str) -> CouplingReport:
        """The report where the division into parts was a guess: then only a batch norm in training proves anything."""
        is_proven = any(one.kind == "module" and "batchnorm" in (one.type_name or "").lower() for one in self.culprits)
        if self.verdict != "coupled" or is_proven:
            return self
        problem = f"its loss differs from that of its parts, and its division was guessed ({guess}): {_GUESS_REMEDY}"
        return replace(self, loss_error=math.nan, gradient_error=math.nan, culprits=(), problem=problem)

    @property
    def limits(self) -> Limits:
        """Largest errors that pass as rounding."""
        return LIMITS[self.precision]

    @property
    def verdict(self) -> Verdict:
        """Meaning of the errors. NaN without a problem counts as coupled."""
        errors = (self.loss_error, self.gradient_error)
        if self.culprits or any(error > self.limits.largest_error for error in errors):
            return "coupled"
        if self.problem is not None:
            return "not-compared"
        return "coupled" if any(map(math.isnan, errors)) else "separate"

    @property
    def coupled(self) -> bool:
        """Return whether accumulation would not give the full batch's gradient."""
        return self.verdict == "coupled"

    @property
    def message(self) -> str:
        """One paragraph with the errors, their causes and the remedies."""
        groups: dict[tuple[str, str | None, str], list[Culprit]] = {}
        for culprit in self.culprits:
            groups.setdefault((culprit.kind, culprit.type_name, culprit.remedy), []).append(culprit)
        sentences = [self._verdict(), *map(_sentence, groups.values())]
        if not self.train_mode and self.problem is None:
            sentences.append(
                "Compared in eval mode, where BatchNorm couples nothing: the model's randomness could not be disabled."
            )
        return " ".join(sentences)

    def _verdict(self) -> str:
        if self.problem is not None:
            return f"A batch of {self.samples} could not be compared with its parts: {self.problem}."
        limit = self.limits.largest_error
        after = " after an update" if self.updates else ""
        figures = (
            f"A batch of {self.samples} and its two parts differ{after} by {self.loss_error:.1e} in the loss and "
            f"{self.gradient_error:.1e} in the gradient (relative, in {self.precision}; the limit is {limit:.0e})"
        )
        if not self.coupled:
            return f"{figures}: the loss is a sum over the samples."
        if max(self.loss_error, self.gradient_error) <= limit:
            return f"{figures}; accumulation would still not give the full batch's gradient in every update."
        if all(culprit.kind == "state" for culprit in self.culprits):
            return f"{figures}: the model keeps state, and accumulation would not give the full batch's gradient."
        return f"{figures}: samples are coupled, and accumulation would not give the full batch's gradient."


_GUESS_REMEDY = "pass `samples=`, or return a `batchwright.MicroBatch` from make_batch"
_KINDS = {
    "module": "module",
    "state": "the state of module",
    "term": "loss term",
    "gradient": "the gradient of",
}


def _sentence(group: list[Culprit]) -> str:
    """Describe culprits of one kind: the name of the first and the number of the others."""
    example, more = group[0], len(group) - 1
    name = f"`{example.name}`" if example.name else "(the model's own forward)"
    notes = [] if example.type_name is None else [example.type_name]
    notes += [f"{example.error:.1e}"] if example.error is not None and math.isfinite(example.error) else []
    figures = f" ({', '.join(notes)})" if notes else ""
    others = f" and {more} more like it" if more else ""
    return f"At fault: {_KINDS[example.kind]} {name}{figures}{others}: {example.remedy}."


# --- remedies --------------------------------------------------------------------------------------------------------

_ALLOW = "or set allow_batch_coupling (`--allow-batch-coupling` on the command line)"
BATCH_NORM_REMEDY = (
    "use GroupNorm or LayerNorm, or freeze its statistics (keep it in eval mode); SyncBatchNorm does not help, it "
    "shares statistics between ranks and not between micro-batches"
)
_ROUTED = (
    "tokens compete for the experts' capacity over the whole micro-batch: route without dropping tokens, give each "
    f"sample its own capacity, {_ALLOW}"
)
_MODULE = f"its output for one sample depends on the others: compute it for each sample alone, {_ALLOW}"
_MEAN = (
    "it is a mean: return the sum over samples or tokens, not the mean, and their number as the weight (a "
    "penalty without samples: always weight 1)"
)
_SUM = (
    "it grows with the batch, like a sum, and is then multiplied by its weight: return the sum and the "
    "weight as they are, `(loss_sum, weight)`, or a mean where a mean is expected"
)
_WEIGHT = "its weights do not add up: return as weight the number of samples or tokens that the loss is summed over"
_BALANCE = (
    "a load-balancing term is a statistic of the whole batch: make it a sum over tokens of a per-token "
    "quantity with its own weight, or accept the usual balancing per micro-batch: "
    f"{_ALLOW.removeprefix('or ')}"
)
_TERM = (
    "if it compares samples with each other (in-batch negatives), GradCache makes it exact: all representations "
    "first, without a graph, then the gradient per micro-batch; if it is a statistic of the batch, make it a sum over "
    f"samples, {_ALLOW}"
)
_GRADIENT = (
    "the losses agree and the gradients do not: look for a custom backward pass, a detached statistic or a gradient "
    f"hook that uses the whole batch, {_ALLOW}"
)
_ROUTING_WORDS = ("moe", "router", "expert", "switch", "sparse")
_BALANCE_WORDS = ("aux", "router", "balanc", "load", "moe", "expert", "z_loss")


_STATE = (
    "every forward pass in training changes {names}, and the loss depends on it, so that an update of several "
    "micro-batches differs from one of the full batch: keep this state fixed, change it once per update outside of the "
    f"forward pass, {_ALLOW}"
)


def _contains_any(fragments: tuple[str, ...], name: str) -> bool:
    return any(word in name.lower() for word in fragments)


def class_name(module: nn.Module) -> str:
    """The name of a module's class, also of one that ``torch.jit.script`` has compiled."""
    return str(getattr(module, "original_name", type(module).__name__))


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm, by its class or, for the classes of other libraries, the class name."""
    name = class_name(module).lower()
    return isinstance(module, BatchNorm) or ("batchnorm" in name and "frozen" not in name)


def module_culprit(name: str, module: nn.Module, error: float | None) -> Culprit:
    """The culprit for a module whose output for a sample depends on the others."""
    type_name = class_name(module)
    if is_batch_norm(module):
        return Culprit("module", name, type_name, error, BATCH_NORM_REMEDY)
    return Culprit("module", name, type_name, error, _ROUTED if _contains_any(_ROUTING_WORDS, type_name) else _MODULE)


def state_culprit(name: str, module: nn.Module, state: tuple[str, ...], error: float) -> Culprit:
    """The culprit for a module whose own state, by these names, each forward pass changes."""
    return Culprit("state", name, class_name(module), error, _STATE.format(names=", ".join(state)))


def gradient_culprit(errors: dict[str, float]) -> Culprit:
    """The culprit for the parameter whose gradient differs most."""
    name = max(errors, key=lambda name: errors[name])
    return Culprit("gradient", name, None, errors[name], _GRADIENT)


def term_culprit(name: str, whole: Run, split: Run, error: float, limits: Limits) -> Culprit:
    """The culprit for a loss term, with a remedy chosen by its name or by the sum of its parts."""
    if _contains_any(_BALANCE_WORDS, name):
        return Culprit("term", name, None, error, _BALANCE)
    term, part_terms = whole.terms().get(name), split.part_terms(name)
    if term is None:
        return Culprit("term", name, None, error, _TERM)
    if _is_mean(term, part_terms, limits):
        return Culprit("term", name, None, error, _MEAN)
    sums_agree = (
        relative(sum(part_term.total for part_term in part_terms) - term.total, term.total) <= limits.largest_error
    )
    if sums_agree:
        return Culprit("term", name, None, error, _WEIGHT)
    return Culprit("term", name, None, error, _SUM if _is_weighted_sum(term, part_terms, limits) else _TERM)


def _is_mean(whole: Term, part_terms: list[Term], limits: Limits) -> bool:
    """Return whether the whole's sum is the mean of the parts, weighted by samples or by their own weights."""
    means = [
        sum(part_term.total * share for part_term, share in zip(part_terms, shares, strict=True)) / sum(shares)
        for shares in (
            [float(part_term.samples) for part_term in part_terms],
            [part_term.weight for part_term in part_terms],
        )
        if sum(shares)
    ]
    return any(relative(mean - whole.total, whole.total) <= limits.largest_error for mean in means)


def _is_weighted_sum(whole: Term, part_terms: list[Term], limits: Limits) -> bool:
    """Return whether the sums add up once they are divided by their weights."""
    if not whole.weight or not all(part_term.weight for part_term in part_terms):
        return False
    parts = sum(part_term.total / part_term.weight for part_term in part_terms)
    return relative(parts - whole.total / whole.weight, whole.total / whole.weight) <= limits.largest_error
