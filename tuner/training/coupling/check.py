"""Detection of losses that couple the samples of a batch, which no accumulation can make exact.

Accumulated gradients are the full batch's only when its loss is a sum over its samples. BatchNorm, in-batch negatives
and load-balancing terms of a mixture of experts are not; nor is a model whose forward pass moves state that its loss
depends on. The check is a measurement: loss and gradient of a batch at once against those of its two parts, in fp64,
each sample with the same random numbers, after an update of the new model. What differs is then traced to a
module (its output changes though its input does not, or its state moves) or to a loss term.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from tuner.errors import WorkloadError
from tuner.hardware.failures import FailureKind, classify_exception
from tuner.schemas.workload import PythonModel, WorkloadSpec
from tuner.training.coupling.comparison import (
    Runner,
    in_eval_mode,
    own_randomness,
    restored,
    seed_generators,
    without_dropout,
)
from tuner.training.coupling.error_scale import SILENCE, Noise, Run, gradient_errors, loss_error, term_errors
from tuner.training.coupling.forward_state import ModelState
from tuner.training.coupling.module_trace import Trace, trace
from tuner.training.coupling.precision import LIMITS, Precision, arithmetic, kernels_for, working_copy
from tuner.training.coupling.random_draws import MatchedDraws, UnmatchedDrawError
from tuner.training.coupling.report import (
    CouplingReport,
    Culprit,
    gradient_culprit,
    is_batch_norm,
    module_culprit,
    state_culprit,
    term_culprit,
)
from tuner.workloads.base import Batch, Workload
from tuner.workloads.build import build_model, build_workload
from tuner.workloads.casting import cast_floating

__all__ = ["LARGEST_ERROR", "CouplingReport", "Culprit", "check_coupling", "check_spec_coupling"]

LARGEST_ERROR = LIMITS["fp64"].largest_error
"""Largest relative difference of loss or gradient that passes as rounding."""
_FEWEST_SAMPLES = 2
_SLOW_SECONDS = 2.0
"""A card on which one run in fp64 takes longer than this has few units for it: fp32 is 32 to 64 times as fast there."""


def check_coupling(
    model: nn.Module, workload: Workload, batch: Batch, device: torch.device, precision: Precision = "fp64"
) -> CouplingReport:
    """Compare the loss and the gradient of ``batch`` at once with those of its two parts.

    The parts are a third and the rest (halves may agree by chance), or halves where one of those is refused. They are
    compared after an update on the batch: a new model hides what is behind weights of zero, and state that forward
    passes move then lags behind the weights.

    The model is compared in the modes it is in. Where its loss draws random numbers, every dropout is set to zero;
    where that is not enough, each sample gets the same numbers in the batch and in its parts; where two runs of the
    batch differ even so, the model is put into eval mode. A gradient's error is ``max|difference|``, less
    what rounding can have made, over the largest of ``max|reference|``, the parts' own ``max|.|`` added up, and a share
    of the largest gradient of all parameters (``LIMITS``).

    Takes the memory of the batch's forward and backward pass on ``device``, and of a copy of the model there.
    Copies of the gradients, and of the activations where a culprit is searched, are on the CPU. The model, its state,
    gradients and modes, and every random number generator are as before when it returns or raises.

    Args:
        model: on ``device``, in fp32, neither wrapped nor compiled.
        workload: makes the loss terms.
        batch: at least two samples, on the CPU, that ``tuner.training.micro_batches.splitting.sliced`` can divide.
        device: where the model is.
        precision: fp32 is taken instead of fp64 where the workload cannot run in it, or a card is slow at it.

    Raises:
        WorkloadError: when the batch cannot be halved or the loss terms break their contract.
    """
    return _checked(_Subject(model, workload, batch, device, disposable=False), precision)


def check_spec_coupling(
    spec: WorkloadSpec, workload: Workload, device: torch.device, samples: int = 4, precision: Precision = "fp64"
) -> CouplingReport:
    """``check_coupling`` of a new model in fp32, not compiled and keeping its activations, on ``samples`` samples.

    Args:
        spec: what is trained.
        workload: what ``build_workload`` made of it.
        device: where to compare.
        samples: at least two; with fewer than four, halves of one sample are refused by BatchNorm.
        precision: as of ``check_coupling``.

    Raises:
        WorkloadError: as ``check_coupling``, or when the workload builds no model that can be trained.
    """
    plain = spec.model_copy(update={"precision": "fp32", "compile": False, "activation_checkpointing": False})
    if spec.activation_checkpointing and not isinstance(spec.model, PythonModel):
        workload = build_workload(plain)
    with own_randomness(device):
        seed_generators(0, device)
        model = cast_floating(build_model(plain, workload), torch.float32).to(device)
        return _checked(_Subject(model, workload, workload.make_batch(samples), device, disposable=True), precision)


@dataclass(frozen=True)
class _Subject:
    """A model, and what is compared of it."""

    model: nn.Module
    workload: Workload
    batch: Batch
    device: torch.device
    disposable: bool
    """True if the model is thrown away afterwards."""


def _checked(subject: _Subject, precision: Precision) -> CouplingReport:
    """The report in ``precision``, in fp32 where the workload fails in fp64 and memory is not the reason."""
    with own_randomness(subject.device), restored(subject.model):
        subject.model.zero_grad(set_to_none=True)
        if precision == "fp64":
            try:
                return _compare(subject, "fp64")
            except WorkloadError:
                raise
            except Exception as error:
                if classify_exception(error) is FailureKind.OUT_OF_MEMORY:
                    raise
        return _compare(subject, "fp32")


def _compare(subject: _Subject, precision: Precision) -> CouplingReport:
    model, device = subject.model, subject.device
    copied = working_copy(model, precision, disposable=subject.disposable)
    with arithmetic(device, precision), kernels_for(model, precision), copied:
        runner = Runner(model, subject.workload, subject.batch, device, precision)
        if runner.samples < _FEWEST_SAMPLES:
            raise WorkloadError(f"the check for coupled samples needs {_FEWEST_SAMPLES} of them, got {runner.samples}")
        return replace(_Check(runner).report(), precision=precision)


class _SlowError(Exception):
    """fp64 takes this card too long."""


class _UnsteadyError(Exception):
    """Two runs of the whole batch differ, and no generator that can be seeded is the reason."""


@contextmanager
def _as_it_is(_model: nn.Module) -> Iterator[None]:
    yield


Silencing = Callable[[nn.Module], AbstractContextManager[None]]
"""Takes randomness from a model for as long as it is entered."""


class _Check:
    """One comparison."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._model = runner.model
        self._moved: dict[str, tuple[str, ...]] = {}
        """State that a forward pass of the whole batch moves, by module."""
        self._coupling_in_training = [
            (name, module)
            for name, module in self._model.named_modules()
            if is_batch_norm(module) and (module.training or getattr(module, "running_mean", self) is None)
        ]

    def report(self) -> CouplingReport:
        """Compare as soon as two runs of the whole batch agree."""
        stages: tuple[Silencing, ...] = (_as_it_is, without_dropout, self._with_equal_draws, self._drawing_in_eval_mode)
        problem = "its loss changes from run to run, in eval mode too"
        for silenced in stages:
            with silenced(self._model):
                whole = self._whole()
                wrong = whole.not_finite()
                if wrong is not None and silenced is _as_it_is:
                    return self._failed(wrong)
                if wrong is not None or (self._runner.drew and self._runner.draws is None):
                    continue
                try:
                    return self._compared(whole)
                except UnmatchedDrawError as error:
                    problem = f"its random numbers cannot be made the same for its parts ({error})"
                except _UnsteadyError as error:
                    problem = str(error)
        return self._failed(problem)

    @contextmanager
    def _with_equal_draws(self, model: nn.Module) -> Iterator[None]:
        with without_dropout(model), MatchedDraws() as self._runner.draws:
            yield

    @contextmanager
    def _drawing_in_eval_mode(self, model: nn.Module) -> Iterator[None]:
        with in_eval_mode(model), MatchedDraws() as self._runner.draws:
            yield

    def _whole(self) -> Run:
        """A run of the whole batch from the model's state now, of which it notes what moves."""
        runner = self._runner
        runner.state = ModelState(self._model)
        began = time.monotonic()
        whole = runner.run(runner.whole, seed=0)
        if runner.is_slow_in_fp64(time.monotonic() - began, _SLOW_SECONDS):
            raise _SlowError
        if moving := runner.state.moved_parameters():
            runner.state = ModelState(self._model, moving)
            whole = runner.run(runner.whole, seed=0)
        self._moved = runner.state.moved()
        return whole

    def _failed(self, problem: str, *culprits: Culprit, error: float = math.nan) -> CouplingReport:
        return CouplingReport(error, error, culprits, self._model.training, self._runner.samples, problem)

    def _compared(self, whole: Run) -> CouplingReport:
        """The report on the model after an update, or as it is where that leads to infinite numbers."""
        if not whole.gradients:
            return self._failed("its loss reaches no parameter")
        after = self._runner.advance(whole)
        if after is None:
            return self._on_splits(whole)
        self._moved = self._runner.state.moved()
        return replace(self._on_splits(after), updates=1)

    def _on_splits(self, whole: Run) -> CouplingReport:
        """The report on a third and the rest; on halves where a part of the first kind is refused."""
        *halves, third = self._runner.splits
        report = self._in_some_order(whole, third)
        return self._in_some_order(whole, halves[0]) if report.problem is not None and halves else report

    def _in_some_order(self, whole: Run, sizes: list[int]) -> CouplingReport:
        """The report on parts of these sizes; where draws have several rows for a sample, in either order of them."""
        report, draws = self._split(whole, sizes), self._runner.draws
        if not report.coupled or draws is None or not draws.ambiguous or draws.interleaved:
            return report
        draws.interleaved = True
        other = self._split(self._runner.run(self._runner.whole, seed=0), sizes)
        draws.interleaved = other.verdict == "separate"
        return other if draws.interleaved else report

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
            return self._failed(f"it is finite, but of its parts {problem}", error=math.inf)
        return self._judged(whole, split, sizes)

    def _judged(self, whole: Run, split: Run, sizes: list[int]) -> CouplingReport:
        limits, noise = self._runner.limits, SILENCE
        if self._largest(whole, split, noise) > limits.largest_error:
            again = self._runner.run(self._runner.whole, seed=1)
            if self._largest(whole, again, SILENCE) > limits.largest_error:
                raise _UnsteadyError("its loss changes from run to run, in eval mode too")
            noise = self._runner.noise(whole)
        culprits = () if self._model.training else self._found_by_type()
        if self._largest(whole, split, noise) > limits.largest_error:
            culprits += self._at_fault(whole, split, sizes, noise)
        gradients = gradient_errors(whole, split, limits, noise)
        by_loss, by_gradient = loss_error(whole, split, limits, noise), max(gradients.values(), default=0.0)
        return CouplingReport(by_loss, by_gradient, culprits, self._model.training, self._runner.samples)

    def _largest(self, whole: Run, split: Run, noise: Noise) -> float:
        """The largest error of all: of loss terms, their sums and weights, and gradients."""
        limits = self._runner.limits
        return max(
            loss_error(whole, split, limits, noise),
            *term_errors(whole, split, limits, noise).values(),
            *gradient_errors(whole, split, limits, noise).values(),
        )

    def _found_by_type(self) -> tuple[Culprit, ...]:
        """Modules that couple samples in training and show nothing of it in eval mode."""
        return tuple(module_culprit(name, module, None) for name, module in self._coupling_in_training)

    def _at_fault(self, whole: Run, split: Run, sizes: list[int], noise: Noise) -> tuple[Culprit, ...]:
        """Modules whose state moves, then what differs though every part starts from the same state."""
        limit = self._runner.limits.largest_error
        moving = self._moving(split, sizes, noise)
        held = frozenset(self._moved if moving else ())
        if held:
            split = self._runner.run(sizes, seed=0, held=held)
            if self._largest(whole, split, noise) <= limit:
                return moving
        gradients = gradient_errors(whole, split, self._runner.limits, noise)
        return moving + (self._traced(whole, split, sizes, held) or (gradient_culprit(gradients),))

    def _moving(self, split: Run, sizes: list[int], noise: Noise) -> tuple[Culprit, ...]:
        """Modules with state that each part moves, where that changes the loss or its gradient; judged type by type."""
        found: list[Culprit] = []
        types = {path: type(self._model.get_submodule(path)) for path in self._moved}
        for kind in dict.fromkeys(types.values()):
            paths = [path for path in self._moved if types[path] is kind]
            error = self._largest(split, self._runner.run(sizes, seed=0, held=frozenset(paths)), noise)
            if error > self._runner.limits.largest_error:
                found += [
                    state_culprit(path, self._model.get_submodule(path), self._moved[path], error) for path in paths
                ]
        return tuple(found)

    def _traced(self, whole: Run, split: Run, sizes: list[int], held: frozenset[str]) -> tuple[Culprit, ...]:
        """Modules at fault, then the loss terms that differ though every module returns the same output."""
        found, limits = trace(self._runner, sizes, held), self._runner.limits
        if found.whole is not None and found.split is not None:
            whole, split = found.whole, found.split
        errors = term_errors(whole, split, limits)
        return (
            *(self._module(name, error) for name, error in found.modules.items()),
            *(
                term_culprit(name, whole, split, error, limits)
                for name, error in errors.items()
                if error > limits.largest_error
            ),
        )

    def _module(self, name: str, error: float) -> Culprit:
        return module_culprit(name, self._model.get_submodule(name), error)

    def _refused(self, refusal: str, sizes: list[int]) -> CouplingReport:
        found: Trace = trace(self._runner, sizes)
        culprits = [] if found.refused_by is None else [self._module(found.refused_by, math.inf)]
        return self._failed(f"a part of it is refused ({refusal})", *culprits, error=math.inf)
