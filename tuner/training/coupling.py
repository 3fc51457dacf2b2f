"""Finds losses that couple the samples of a batch, which no accumulation can make exact.

Accumulated gradients are the full batch's only when its loss is a sum over its samples. BatchNorm, in-batch negatives
and load-balancing terms of a mixture of experts are not. The check is a measurement: loss and gradient of a batch at
once against those of its two parts, in fp32 and with randomness silenced. What differs is then traced to a module (its
output changes though its input does not) or to a loss term.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tuner.errors import WorkloadError
from tuner.memory.failures import FailureKind, classify_exception
from tuner.specs import PythonModel, WorkloadSpec
from tuner.training.coupling_runs import (
    LARGEST_ERROR,
    ROUNDING,
    Run,
    Runner,
    Term,
    gradient_errors,
    in_eval_mode,
    loss_error,
    own_randomness,
    plain_arithmetic,
    relative,
    restored,
    seed_generators,
    term_errors,
    without_dropout,
)
from tuner.training.coupling_trace import Trace, trace
from tuner.workloads.base import Batch, Workload
from tuner.workloads.build import build_model, build_workload

__all__ = ["LARGEST_ERROR", "CouplingReport", "Culprit", "check_coupling", "check_spec_coupling"]

_FEWEST_SAMPLES = 2


@dataclass(frozen=True)
class Culprit:
    """What makes a batch and its parts differ."""

    kind: Literal["module", "term", "gradient"]
    """A module of the model, a loss term, or, when losses agree, the parameter whose gradient differs most."""
    name: str
    """Path of the module (empty for the model itself), name of the term, or path of the parameter."""
    type_name: str | None
    """Class of the module."""
    error: float | None
    """Relative error it shows by itself; infinite where a part was refused, none where only its type was looked at."""
    remedy: str
    """What to do."""


@dataclass(frozen=True)
class CouplingReport:
    """A batch at once against its two parts."""

    loss_error: float
    """Largest relative error over the loss terms' sums and weights; not a number where nothing could be compared."""
    gradient_error: float
    """Largest relative error over the parameters, each on its own scale (see ``check_coupling``)."""
    culprits: tuple[Culprit, ...]
    """What is at fault, in the order of execution."""
    train_mode: bool
    """Whether the model was compared as it trains, but for dropout; in eval mode otherwise."""
    samples: int
    """Samples of the batch that was compared."""
    problem: str | None = None
    """Why the two could not be compared, where they could not."""

    @property
    def coupled(self) -> bool:
        """Whether accumulation would not give the full batch's gradient, or nothing can be said about it."""
        within = self.loss_error <= LARGEST_ERROR and self.gradient_error <= LARGEST_ERROR
        return not within or bool(self.culprits) or self.problem is not None

    @property
    def message(self) -> str:
        """One paragraph: the figures, what is at fault, and what to do."""
        return " ".join([self._verdict(), *_described(self.culprits), *self._conditions()])

    def _verdict(self) -> str:
        if self.problem is not None:
            return f"A batch of {self.samples} could not be compared with its parts: {self.problem}."
        figures = (
            f"A batch of {self.samples} and its two parts differ by {self.loss_error:.1e} in the loss and "
            f"{self.gradient_error:.1e} in the gradient (relative; the limit is {LARGEST_ERROR:.0e})"
        )
        if not self.coupled:
            return f"{figures}: the loss is a sum over the samples."
        if max(self.loss_error, self.gradient_error) <= LARGEST_ERROR:
            return f"{figures}; accumulation would still not give the full batch's gradient in every update."
        return f"{figures}: samples are coupled, and accumulation would not give the full batch's gradient."

    def _conditions(self) -> list[str]:
        if self.train_mode:
            return []
        return ["Compared in eval mode, where BatchNorm couples nothing: the model's randomness could not be silenced."]


def _described(culprits: tuple[Culprit, ...]) -> list[str]:
    """A sentence for each kind of culprit: the first by name, those that are like it by number."""
    groups: dict[tuple[str, str | None, str], list[Culprit]] = {}
    for culprit in culprits:
        groups.setdefault((culprit.kind, culprit.type_name, culprit.remedy), []).append(culprit)
    return [_sentence(group) for group in groups.values()]


def _sentence(group: list[Culprit]) -> str:
    first, more = group[0], len(group) - 1
    what = {"module": "module", "term": "loss term", "gradient": "the gradient of"}[first.kind]
    name = f"`{first.name}`" if first.name else "(the model's own forward)"
    notes = [] if first.type_name is None else [first.type_name]
    notes += [f"{first.error:.1e}"] if first.error is not None and math.isfinite(first.error) else []
    figures = f" ({', '.join(notes)})" if notes else ""
    return f"At fault: {what} {name}{figures}{f' and {more} more like it' if more else ''}: {first.remedy}."


# --- remedies --------------------------------------------------------------------------------------------------------

_ALLOW = "or set allow_batch_coupling (`--allow-batch-coupling` on the command line)"
_BATCH_NORM = (
    "use GroupNorm or LayerNorm, or freeze its statistics (keep it in eval mode); SyncBatchNorm does not help, it "
    "shares statistics between ranks and not between micro-batches"
)
_ROUTED = (
    "tokens compete for the experts' capacity over the whole micro-batch: route without dropping tokens, give each "
    f"sample its own capacity, {_ALLOW}"
)
_MODULE = f"its output for one sample depends on the others: compute it for each sample alone, {_ALLOW}"
_MEAN = (
    "it is a mean: return the sum over samples or tokens, not the mean, and their number as the weight (a penalty that "
    "has no samples: weight 1, whatever the batch)"
)
_WEIGHT = "its weights do not add up: return as weight the number of samples or tokens that the loss is summed over"
_BALANCE = (
    "a load-balancing term is a statistic of the whole batch: make it a sum over tokens of a per-token quantity with "
    f"its own weight, or accept balancing per micro-batch, as is usual, and to that end {_ALLOW.removeprefix('or ')}"
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


def _names(words: tuple[str, ...], name: str) -> bool:
    return any(word in name.lower() for word in words)


def _is_batch_norm(module: nn.Module) -> bool:
    """By class, or by the name of the class: libraries write their own."""
    name = type(module).__name__.lower()
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or ("batchnorm" in name and "frozen" not in name)  # noqa: SLF001 - torch names no public base of the BatchNorms


def _module_culprit(name: str, module: nn.Module, error: float | None) -> Culprit:
    type_name = type(module).__name__
    if _is_batch_norm(module):
        return Culprit("module", name, type_name, error, _BATCH_NORM)
    return Culprit("module", name, type_name, error, _ROUTED if _names(_ROUTING_WORDS, type_name) else _MODULE)


def _term_culprit(name: str, whole: Run, split: Run, error: float) -> Culprit:
    """The remedy follows the evidence: the name, what the parts add up to, or nothing."""
    if _names(_BALANCE_WORDS, name):
        return Culprit("term", name, None, error, _BALANCE)
    term, pieces = whole.terms().get(name), split.pieces(name)
    if term is None:
        return Culprit("term", name, None, error, _TERM)
    if _is_mean(term, pieces):
        return Culprit("term", name, None, error, _MEAN)
    sums_agree = relative(sum(piece.total for piece in pieces) - term.total, term.total) <= LARGEST_ERROR
    return Culprit("term", name, None, error, _WEIGHT if sums_agree else _TERM)


def _is_mean(whole: Term, pieces: list[Term]) -> bool:
    """Whether the whole's sum is the parts' mean, weighted by samples or by what they say they weigh."""
    means = [
        sum(piece.total * share for piece, share in zip(pieces, shares, strict=True)) / sum(shares)
        for shares in ([float(piece.samples) for piece in pieces], [piece.weight for piece in pieces])
        if sum(shares)
    ]
    return any(relative(mean - whole.total, whole.total) <= LARGEST_ERROR for mean in means)


# --- the check -------------------------------------------------------------------------------------------------------


def check_coupling(model: nn.Module, workload: Workload, batch: Batch, device: torch.device) -> CouplingReport:
    """Compare the loss and the gradient of ``batch`` at once with those of its two parts.

    The parts are halves and, where those agree, a third and the rest.

    The model is compared in the modes it is in. Where two runs of the whole batch under different seeds differ, every
    dropout is set to zero; where that is not enough, the model is put into eval mode. A gradient's error is
    ``max|difference| / max(max|reference|, 1e-3 * largest max|reference| of all parameters)``.

    Takes the memory of the batch's forward and backward pass on ``device``; copies of the gradients, and of the
    activations where a culprit is searched, are on the CPU. The model, its buffers, gradients and modes, and every
    random number generator are as before when it returns or raises.

    Args:
        model: on ``device``, in fp32, neither wrapped nor compiled.
        workload: makes the loss terms.
        batch: at least two samples, on the CPU, that ``tuner.training.micro_batches.sliced`` can divide.
        device: where the model is.

    Raises:
        WorkloadError: when the batch cannot be halved or the loss terms break their contract.
    """
    with own_randomness(device), plain_arithmetic(device), restored(model) as buffers:
        runner = Runner(model, workload, batch, device, buffers)
        if runner.samples < _FEWEST_SAMPLES:
            raise WorkloadError(f"the check for coupled samples needs {_FEWEST_SAMPLES} of them, got {runner.samples}")
        return _Check(runner).report()


def check_spec_coupling(
    spec: WorkloadSpec, workload: Workload, device: torch.device, samples: int = 4
) -> CouplingReport:
    """``check_coupling`` of a new model in fp32, not compiled and keeping its activations, on ``samples`` samples.

    Args:
        spec: what is trained.
        workload: what ``build_workload`` made of it.
        device: where to compare.
        samples: at least two; with fewer than four, halves of one sample are refused by BatchNorm.

    Raises:
        WorkloadError: as ``check_coupling``, or when the workload builds no model that can be trained.
    """
    plain = spec.model_copy(update={"precision": "fp32", "compile": False, "activation_checkpointing": False})
    if spec.activation_checkpointing and not isinstance(spec.model, PythonModel):
        workload = build_workload(plain)
    with own_randomness(device):
        seed_generators(0, device)
        model = build_model(plain, workload).float().to(device)
        return check_coupling(model, workload, workload.make_batch(samples), device)


@contextmanager
def _as_it_is(_model: nn.Module) -> Iterator[None]:
    yield


class _Check:
    """One comparison."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._model = runner.model
        self._coupling_in_training = [
            (name, module)
            for name, module in self._model.named_modules()
            if _is_batch_norm(module) and (module.training or getattr(module, "running_mean", self) is None)
        ]

    def report(self) -> CouplingReport:
        """Compare as soon as two runs of the whole batch agree."""
        for silenced in (_as_it_is, without_dropout, in_eval_mode):
            with silenced(self._model):
                whole = self._runner.run(self._runner.whole, seed=0)
                problem = whole.not_finite()
                if problem is not None and silenced is _as_it_is:
                    return self._failed(problem)
                if problem is None and self._is_steady(whole):
                    return self._compared(whole)
        return self._failed("its loss changes from run to run, in eval mode too")

    def _is_steady(self, whole: Run) -> bool:
        again = self._runner.run(self._runner.whole, seed=1)
        errors = (loss_error(whole, again), *gradient_errors(whole, again).values())
        return again.not_finite() is None and max(errors) <= ROUNDING

    def _failed(self, problem: str, *culprits: Culprit, error: float = math.nan) -> CouplingReport:
        return CouplingReport(error, error, culprits, self._model.training, self._runner.samples, problem)

    def _compared(self, whole: Run) -> CouplingReport:
        """The report on the first split that shows a difference, on the last one otherwise."""
        if not whole.gradients:
            return self._failed("its loss reaches no parameter")
        halves, *others = self._runner.splits
        report = self._split(whole, halves)
        for sizes in others:
            if report.coupled:
                break
            other = self._split(whole, sizes)
            report = report if other.problem else other  # nothing is said against parts that are halves
        return report

    def _split(self, whole: Run, sizes: list[int]) -> CouplingReport:
        split, refusal = None, ""
        try:
            split = self._runner.run(sizes, seed=0)
        except (ValueError, RuntimeError) as error:
            if classify_exception(error) is FailureKind.OUT_OF_MEMORY:
                raise
            refusal = " ".join(str(error).split())
        if split is None:
            return self._refused(refusal, sizes)
        problem = split.not_finite()
        if problem is not None:
            return self._failed(f"it is finite, but of its parts {problem}")
        return self._judged(whole, split, sizes)

    def _judged(self, whole: Run, split: Run, sizes: list[int]) -> CouplingReport:
        gradients = gradient_errors(whole, split)
        by_loss, by_gradient = loss_error(whole, split), max(gradients.values(), default=0.0)
        culprits = () if self._model.training else self._found_by_type()
        if max(by_loss, by_gradient, *term_errors(whole, split).values()) > LARGEST_ERROR:
            culprits += self._traced(whole, split, sizes) or (_worst_gradient(gradients),)
        return CouplingReport(by_loss, by_gradient, culprits, self._model.training, self._runner.samples)

    def _found_by_type(self) -> tuple[Culprit, ...]:
        """What couples samples in training and shows nothing of it in eval mode."""
        return tuple(_module_culprit(name, module, None) for name, module in self._coupling_in_training)

    def _traced(self, whole: Run, split: Run, sizes: list[int]) -> tuple[Culprit, ...]:
        """Modules at fault, then the loss terms that differ though every module gives what it gave."""
        found = trace(self._runner, sizes)
        if found.whole is not None and found.split is not None:
            whole, split = found.whole, found.split
        errors = term_errors(whole, split)
        return (
            *(self._module(name, error) for name, error in found.modules.items()),
            *(_term_culprit(name, whole, split, error) for name, error in errors.items() if error > LARGEST_ERROR),
        )

    def _module(self, name: str, error: float) -> Culprit:
        return _module_culprit(name, self._model.get_submodule(name), error)

    def _refused(self, refusal: str, sizes: list[int]) -> CouplingReport:
        found: Trace = trace(self._runner, sizes)
        culprits = [] if found.refused_by is None else [self._module(found.refused_by, math.inf)]
        return self._failed(f"a part of it is refused ({refusal})", *culprits, error=math.inf)


def _worst_gradient(errors: dict[str, float]) -> Culprit:
    name = max(errors, key=lambda name: errors[name])
    return Culprit("gradient", name, None, errors[name], _GRADIENT)
