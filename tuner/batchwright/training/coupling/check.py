"""Detection of losses that couple the samples of a batch, which no accumulation can make exact.

Accumulated gradients are the full batch's only when its loss is a sum over its samples. The losses of BatchNorm,
in-batch negatives and load-balancing terms of a mixture of experts are no such sums, nor is the loss of a model whose
forward pass changes state that the loss depends on. The check compares the loss and the gradient of a batch with those
of its two parts, in fp64, each sample with the same random numbers, after an update of the new model. A difference is
then traced to a module (its output changes for the same input, or its state changes) or to a loss term.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from batchwright.errors import WorkloadError
from batchwright.hardware.failures import is_of_device
from batchwright.schemas.workload import PythonModel, WorkloadSpec
from batchwright.training.coupling.comparison import (
    REFUSALS,
    Runner,
    has_dropout,
    in_eval_mode,
    seed_generators,
    without_dropout,
)
from batchwright.training.coupling.error_scale import NO_NOISE, Noise, Run, gradient_errors, loss_error, term_errors
from batchwright.training.coupling.module_trace import trace
from batchwright.training.coupling.precision import Precision, arithmetic, cast, kernels_for
from batchwright.training.coupling.random_draws import MatchedDraws, UnmatchedDrawError
from batchwright.training.coupling.report import (
    CouplingReport,
    Culprit,
    gradient_culprit,
    is_batch_norm,
    module_culprit,
    state_culprit,
    term_culprit,
)
from batchwright.training.micro_batches.forward_state import ModelState
from batchwright.training.micro_batches.rng_state import preserved_random_state
from batchwright.training.micro_batches.splitting import MakesMicroBatches, MicroBatch, made_micro_batch
from batchwright.workloads.base import Workload
from batchwright.workloads.build import build_model, build_workload

_FEWEST_SAMPLES = 2
_SLOW_SECONDS = 2.0
"""A GPU that takes longer for one run in fp64 has few fp64 units: its fp32 is 32 to 64 times as fast."""


def check_spec_coupling(
    spec: WorkloadSpec, workload: Workload, device: torch.device, samples: int = 4, precision: Precision = "fp64"
) -> CouplingReport:
    """Run ``check_coupling`` on a new model in fp32, without compilation and activation checkpointing.

    Random number generators are as before when the function returns or raises. The batch has at least two samples; with
    fewer than four, BatchNorm refuses halves of one sample, and coupled samples may lie in the same part.

    Raises:
        WorkloadError: as ``check_coupling``, or when the workload builds no model that can be trained.
    """
    plain = spec.model_copy(update={"precision": "fp32", "compile": False, "activation_checkpointing": False})
    if spec.activation_checkpointing and not isinstance(spec.model, PythonModel):
        workload = build_workload(plain)
    with preserved_random_state(device):
        seed_generators(0, device)
        model = build_model(plain, workload).to(device)
        if isinstance(workload, MakesMicroBatches):
            whole = workload.make_micro_batch(samples)
        else:
            whole = made_micro_batch(workload.make_batch, samples)
        return check_coupling(model, workload, whole, device, precision)


def check_coupling(
    model: nn.Module, workload: Workload, whole: MicroBatch, device: torch.device, precision: Precision = "fp64"
) -> CouplingReport:
    """Compare the loss and the gradient of a ``whole`` batch with those of its two parts.

    The parts are a third and the rest (halves may agree by chance), or halves if the model refuses one of these. They
    are compared after an update on the first part: in a new model, weights of zero hide coupled samples, and state that
    forward passes change lags behind the weights only after an update. Weights that only other samples reach are
    updated by the whole batch.

    The model is compared in its current modes. If its loss draws random numbers, every dropout is set to zero. If that
    is not enough, each sample gets the same numbers in the batch and in its parts. If two runs of the batch still
    differ, the model is set to eval mode. A gradient's error is ``max|difference|``, less the possible rounding, over
    the largest of ``max|reference|``, the sum of the parts' ``max|.|``, and a share of the largest gradient of all
    parameters (``LIMITS``).

    Takes the memory of the batch's forward and backward pass on ``device``. Copies of the gradients, and of the
    activations during the search for a culprit, are on the CPU. Changes the model and seeds the generators.

    Args:
        model: on ``device``, neither wrapped nor compiled; it is of no use afterwards.
        workload: computes the loss terms.
        whole: at least two samples, on the CPU. If their division is a guess, a difference proves nothing.
        device: the device of the model.
        precision: arithmetic to use; fp32 replaces fp64 if the workload cannot run in fp64 or the GPU is slow at it.

    Raises:
        WorkloadError: when the batch cannot be halved or the loss terms break their contract.
    """
    if precision == "fp64":
        try:
            return _compare(model, workload, whole, device, "fp64")
        except WorkloadError:
            raise
        except Exception as error:
            if is_of_device(error):
                raise
    return _compare(model, workload, whole, device, "fp32")


def _compare(
    model: nn.Module, workload: Workload, whole: MicroBatch, device: torch.device, precision: Precision
) -> CouplingReport:
    cast(model, precision)
    with arithmetic(device, precision), kernels_for(model, precision):
        runner = Runner(model, workload, whole, device, precision)
        if whole.indivisible is not None:
            raise WorkloadError(whole.indivisible)
        if runner.samples < _FEWEST_SAMPLES:
            raise WorkloadError(f"the check for coupled samples needs {_FEWEST_SAMPLES} of them, got {runner.samples}")
        report = replace(_Check(runner).report(), precision=precision)
        return report if whole.guess is None else report.with_guess(whole.guess)


class _SlowError(Exception):
    """fp64 takes too long on this GPU."""


class _NondeterministicError(Exception):
    """Two runs of the whole batch differ, for another reason than generators that can be seeded."""


_Suppressor: TypeAlias = Callable[[nn.Module], AbstractContextManager[object]]
"""Suppresses randomness in a model for a block."""


class _Check:
    """One comparison of a batch with its parts."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._model = runner.model
        self._changed: dict[str, tuple[str, ...]] = {}
        """State that a forward pass of the whole batch changes, by module."""
        self._trains = any(module.training for module in self._model.modules())
        self._forces_eval_mode = False
        """True while modules that train are in eval mode, to suppress their randomness."""
        self._coupling_in_training = [
            (name, module)
            for name, module in self._model.named_modules()
            if is_batch_norm(module) and (module.training or getattr(module, "running_mean", self) is None)
        ]

    def report(self) -> CouplingReport:
        """Suppress more and more randomness, until two runs of the whole batch agree and can be compared."""
        stages: tuple[tuple[_Suppressor, bool], ...] = (
            (nullcontext, False),
            (without_dropout, False),
            (without_dropout, True),
            (in_eval_mode, True),
        )
        if has_dropout(self._model):
            stages = stages[1:]  # a run would only show that it draws random numbers
        problem = "its loss changes from run to run, in eval mode too"
        for stage, (suppress, matches_draws) in enumerate(stages):
            with suppress(self._model), MatchedDraws() if matches_draws else nullcontext() as self._runner.draws:
                first = self._run_for_update()
                wrong = first.not_finite()
                if wrong is not None and stage == 0:
                    return self._failed_report(wrong)
                if wrong is not None or self._draws_differ:
                    continue
                self._forces_eval_mode = suppress is in_eval_mode and self._trains
                try:
                    return self._compare_after_update(first)
                except UnmatchedDrawError as error:
                    problem = f"its random numbers cannot be made the same for its parts ({error})"
                except _NondeterministicError as error:
                    problem = str(error)
        return self._failed_report(problem)

    @property
    def _draws_differ(self) -> bool:
        """True if the last run drew random numbers that another run does not draw again."""
        return self._runner.drew_random_numbers and self._runner.draws is None

    def _run_for_update(self) -> Run:
        """Run the first part, which costs less, or the whole batch if the part has no gradient to make an update by."""
        runner = self._runner
        try:
            run = self._run_new_state(runner.splits[-1][:1])
        except REFUSALS as error:  # BatchNorm may refuse one sample
            if is_of_device(error):
                raise
        else:
            if any(run.sizes.values()) and run.not_finite() is None:
                return run
        runner.state.restore()
        return self._run_new_state(runner.whole)

    def _run_new_state(self, sizes: list[int], changing: frozenset[str] = frozenset()) -> Run:
        """Run parts of these sizes from the model's current state, and record the state that changes.

        Forward passes are known to change the parameters ``changing``.
        """
        runner = self._runner
        runner.state = ModelState(self._model, changing)
        began = time.monotonic()
        run = runner.run(sizes, seed=0)
        if runner.is_slow_in_fp64(time.monotonic() - began, _SLOW_SECONDS):
            raise _SlowError
        if more := runner.state.changed_parameters() - changing:
            runner.state = ModelState(self._model, changing | more)
            run = runner.run(sizes, seed=0)
        self._changed = runner.state.changed()
        return run

    def _failed_report(self, problem: str, *culprits: Culprit, error: float = math.nan) -> CouplingReport:
        return CouplingReport(error, error, culprits, not self._forces_eval_mode, self._runner.samples, problem)

    def _compare_after_update(self, first: Run) -> CouplingReport:
        """The report on the model after an update, or without one if the update leads to infinite numbers."""
        if not first.gradients:
            return self._failed_report("its loss reaches no parameter")
        after = self._advance(first.gradients)
        if after is not None and (hidden := self._not_updated(first, after)):
            after = self._advance(hidden) or after
        whole = self._run_new_state(self._runner.whole) if after is None else after
        if wrong := whole.not_finite():
            return self._failed_report(wrong)
        if self._draws_differ:
            raise _NondeterministicError("it draws random numbers that its first part does not draw")
        return replace(self._compare_splits(whole), updates=0 if after is None else 1)

    def _advance(self, gradients: dict[str, Tensor]) -> Run | None:
        """Make an update by these gradients, after which each run starts from the new state.

        Returns:
            A run of the whole batch after the update, or None if its numbers are infinite. Then the update is undone.
        """
        runner = self._runner
        before, steps = runner.state, runner.update(gradients)
        after = self._run_new_state(runner.whole, before.changing)
        if after.not_finite() is None:
            return after
        with torch.no_grad():
            for parameter, step in steps:
                parameter.add_(step)
        runner.state = before
        before.restore()
        return None

    def _not_updated(self, first: Run, after: Run) -> dict[str, Tensor]:
        """The whole batch's gradients of parameters that the first part does not reach, if that may hide coupling.

        That may be so of parameters of zero, and of all parameters if forward passes change the model's state.
        """
        parameters = dict(self._model.named_parameters())
        return {
            name: gradient
            for name, gradient in after.gradients.items()
            if after.sizes[name] and not first.sizes.get(name) and (self._changed or not parameters[name].any())
        }

    def _compare_splits(self, whole: Run) -> CouplingReport:
        """The report on a third and the rest, or on halves if the model refuses one of these."""
        *halves, third = self._runner.splits
        report = self._compare_in_either_order(whole, third)
        return self._compare_in_either_order(whole, halves[0]) if report.problem is not None and halves else report

    def _compare_in_either_order(self, whole: Run, sizes: list[int]) -> CouplingReport:
        """The report on parts of these sizes, trying both orders of the rows if draws have several rows per sample."""
        report, draws = self._compare_split(whole, sizes), self._runner.draws
        if not report.coupled or draws is None or not draws.ambiguous or draws.interleaved:
            return report
        draws.interleaved = True
        other = self._compare_split(self._runner.run(self._runner.whole, seed=0), sizes)
        draws.interleaved = other.verdict == "separate"
        return other if draws.interleaved else report

    def _compare_split(self, whole: Run, sizes: list[int]) -> CouplingReport:
        split, refusal = None, ""
        try:
            split = self._runner.run(sizes, seed=0)
        except REFUSALS as error:
            if is_of_device(error):
                raise
            refusal = " ".join(str(error).split())
        if split is None:
            refused_by = trace(self._runner, sizes).refused_by
            culprits = [] if refused_by is None else [self._module_culprit(refused_by, math.inf)]
            return self._failed_report(f"a part of it is refused ({refusal})", *culprits, error=math.inf)
        problem = split.not_finite()
        if problem is not None:
            return self._failed_report(f"it is finite, but of its parts {problem}", error=math.inf)
        return self._evaluate(whole, split, sizes)

    def _evaluate(self, whole: Run, split: Run, sizes: list[int]) -> CouplingReport:
        limits, noise = self._runner.limits, NO_NOISE
        if self._largest_error(whole, split, noise) > limits.largest_error:
            again = self._runner.run(self._runner.whole, seed=1)
            if self._largest_error(whole, again, NO_NOISE) > limits.largest_error:
                raise _NondeterministicError("its loss changes from run to run, in eval mode too")
            noise = self._runner.noise(whole)
        culprits: tuple[Culprit, ...] = ()
        if self._forces_eval_mode:  # the modules that couple samples in training mode but not in eval mode
            culprits = tuple(module_culprit(name, module, None) for name, module in self._coupling_in_training)
        if self._largest_error(whole, split, noise) > limits.largest_error:
            culprits += self._find_culprits(whole, split, sizes, noise)
        elif state_culprits := self._lagging_state(whole):
            culprits, split = culprits + state_culprits, self._run_later()
        gradients = gradient_errors(whole, split, limits, noise)
        by_loss, by_gradient = loss_error(whole, split, limits, noise), max(gradients.values(), default=0.0)
        return CouplingReport(by_loss, by_gradient, culprits, not self._forces_eval_mode, self._runner.samples)

    def _largest_error(self, whole: Run, split: Run, noise: Noise) -> float:
        """The largest error of loss terms, their sums and weights, and gradients."""
        limits = self._runner.limits
        return max(
            loss_error(whole, split, limits, noise),
            *term_errors(whole, split, limits, noise).values(),
            *gradient_errors(whole, split, limits, noise).values(),
        )

    def _find_culprits(self, whole: Run, split: Run, sizes: list[int], noise: Noise) -> tuple[Culprit, ...]:
        """Modules whose state changes, then the differences that remain when every part starts from the same state."""
        limit = self._runner.limits.largest_error
        state_culprits = self._state_culprits(
            split, noise, lambda modules: self._runner.run(sizes, seed=0, reset_modules=modules)
        )
        reset_modules = frozenset(self._changed if state_culprits else ())
        if reset_modules:
            split = self._runner.run(sizes, seed=0, reset_modules=reset_modules)
            if self._largest_error(whole, split, noise) <= limit:
                return state_culprits
        gradients = gradient_errors(whole, split, self._runner.limits, noise)
        return state_culprits + (
            self._traced_culprits(whole, split, sizes, reset_modules) or (gradient_culprit(gradients),)
        )

    def _lagging_state(self, whole: Run) -> tuple[Culprit, ...]:
        """Modules whose state makes another pass of the whole batch differ from the first.

        Few samples may depend on parts of a state that their own pass alone changes, such as the codes of a codebook.
        """
        limit, noise = self._runner.limits.largest_error, NO_NOISE
        if all(is_batch_norm(self._model.get_submodule(path)) for path in self._changed):
            return ()  # whose statistics do not change an output in training
        later = self._run_later()
        if self._largest_error(whole, later, noise) > limit:
            noise = self._runner.noise(whole)
        is_random = self._largest_error(whole, self._runner.run(self._runner.whole, seed=0), NO_NOISE) > limit
        if is_random or self._largest_error(whole, later, noise) <= limit:
            return ()
        return self._state_culprits(later, noise, self._run_later)

    def _run_later(self, reset_modules: frozenset[str] = frozenset()) -> Run:
        """A run of the whole batch from the state that a run of it has left, but for the modules ``reset_modules``."""
        self._runner.run(self._runner.whole, seed=0)
        return self._runner.run(self._runner.whole, seed=0, reset_modules=reset_modules, continues=True)

    def _state_culprits(self, split: Run, noise: Noise, run: Callable[[frozenset[str]], Run]) -> tuple[Culprit, ...]:
        """Modules whose changing state affects the loss or its gradient; tested type by type."""
        found: list[Culprit] = []
        types = {path: type(self._model.get_submodule(path)) for path in self._changed}
        for kind in dict.fromkeys(types.values()):
            paths = [path for path in self._changed if types[path] is kind]
            error = self._largest_error(split, run(frozenset(paths)), noise)
            if error > self._runner.limits.largest_error:
                found += [
                    state_culprit(path, self._model.get_submodule(path), self._changed[path], error) for path in paths
                ]
        return tuple(found)

    def _traced_culprits(
        self, whole: Run, split: Run, sizes: list[int], reset_modules: frozenset[str]
    ) -> tuple[Culprit, ...]:
        """Modules at fault, then the loss terms that differ when every module returns the same output."""
        found, limits = trace(self._runner, sizes, reset_modules), self._runner.limits
        if found.whole is not None and found.split is not None:
            whole, split = found.whole, found.split
        errors = term_errors(whole, split, limits)
        return (
            *(self._module_culprit(name, error) for name, error in found.modules.items()),
            *(
                term_culprit(name, whole, split, error, limits)
                for name, error in errors.items()
                if error > limits.largest_error
            ),
        )

    def _module_culprit(self, name: str, error: float) -> Culprit:
        return module_culprit(name, self._model.get_submodule(name), error)
