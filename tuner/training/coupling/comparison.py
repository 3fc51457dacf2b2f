"""Runs of a model over a batch and its parts that can be compared, and that leave the model as it was.

A run is a forward and a backward pass over each part, its loss terms divided by their weight over all parts, as an
accumulated update does it: without reduced precision, under a given seed, from the same state.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from tuner.torch_internals import Dropout
from tuner.training.coupling.error_scale import Noise, Run, Term, noise_of
from tuner.training.coupling.forward_state import ModelState
from tuner.training.coupling.precision import LIMITS, Precision
from tuner.training.coupling.random_draws import MatchedDraws
from tuner.training.coupling.rounded_weights import ROUNDED_RUNS, mantissa_bits, rounded_weights
from tuner.training.micro_batches.loss_window import check_pairs
from tuner.training.micro_batches.rng_state import RandomState
from tuner.training.micro_batches.splitting import sample_count, sliced, to_device
from tuner.workloads.base import Batch, LossTerms, Workload

_RANDOM_WORDS = ("drop", "jitter")
"""Parts of the names of probabilities: ``attention_dropout``, ``layerdrop``, ``drop_prob``, ``jitter_noise``."""
_STEP = 0.2
"""Step of the update before the comparison, as a share of a parameter's root mean square: far enough that state which
follows the weights lags behind them. Measured on layers of eight with spectral norm, whose power iterations had
converged: the gradient's error is then 0.2 to 1.3 %; with half the step 0.09 to 0.2 %."""
_SMALLEST_WEIGHT = 0.02
"""Root mean square that a smaller parameter is taken to have, so that one that starts at zero moves."""

# --- leaving no trace ------------------------------------------------------------------------------------------------


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Restore every random number generator at the end of a block."""
    state = RandomState.now(device)
    try:
        yield
    finally:
        state.restore(device)


def seed_generators(seed: int, device: torch.device, *, torchs: int | None = None) -> None:
    """Seed the generators that ``own_randomness`` keeps, and no other device's; torch's with ``torchs``, if given."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - user code may use the old interface
    torchs = seed if torchs is None else torchs
    torch.default_generator.manual_seed(torchs)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(torchs)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore gradients, modes and the state that forward passes move at the end of a block."""
    state = ModelState(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        state.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout to zero: probabilities of dropout modules, and floats that are named for one.

    Some transformers models read the probability from their config in the forward pass.
    """
    holders = {id(holder): holder for module in model.modules() for holder in (module, getattr(module, "config", None))}
    fields = [
        (vars(holder), name, value)
        for holder in holders.values()
        if hasattr(holder, "__dict__")
        for name, value in vars(holder).items()
        if isinstance(value, float) and _is_probability(holder, name)
    ]
    for attributes, name, _ in fields:
        attributes[name] = 0.0
    try:
        yield
    finally:
        for attributes, name, value in fields:
            attributes[name] = value


def _is_probability(holder: object, name: str) -> bool:
    if name == "p":
        return isinstance(holder, Dropout)
    return any(word in name.lower() for word in _RANDOM_WORDS)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode; ``restored`` restores the modes."""
    model.eval()
    yield


# --- running ---------------------------------------------------------------------------------------------------------


class Runner:
    """Runs a model over slices of one batch.

    Args:
        model: on ``device``; its gradients are overwritten (``restored`` keeps them), its state restored by each run.
        workload: makes the loss terms.
        batch: on the CPU.
        device: where the model is.
        precision: of the model, and of the batch's floating-point numbers.
    """

    def __init__(
        self, model: nn.Module, workload: Workload, batch: Batch, device: torch.device, precision: Precision
    ) -> None:
        self.model = model
        self.samples = sample_count(batch)
        self.limits = LIMITS[precision]
        self.precision: Precision = precision
        self.draws: MatchedDraws | None = None
        """Gives the samples equal random numbers, where a loss draws some."""
        self.state = ModelState(model)
        """State that each run starts from."""
        self.drew = False
        """True if the last part took numbers from a generator that everyone shares."""
        self._seeded = RandomState.now(device)
        self._weights: dict[str, float] = {}
        """Weight of each term over the whole batch, which has to be known before the first backward pass of a part."""
        self._workload = workload
        self._batch = batch
        self._device = device

    def is_slow_in_fp64(self, seconds: float, most: float) -> bool:
        """Return whether a run of this many ``seconds`` should have been one in fp32, which a card makes far faster."""
        return self.precision == "fp64" and self._device.type == "cuda" and seconds > most

    @property
    def whole(self) -> list[int]:
        """Samples of the one part that is the batch."""
        return [self.samples]

    @property
    def splits(self) -> list[list[int]]:
        """Samples of the two parts: halves, and last a third and the rest, where that is another split.

        Halves may agree by chance: the same number of samples for each expert, say.
        """
        sizes = {(first, self.samples - first): None for first in (self.samples // 2, max(1, self.samples // 3))}
        return [list(pair) for pair in sizes]

    def run(self, sizes: list[int], seed: int, *, held: frozenset[str] = frozenset()) -> Run:
        """Loss terms and gradients over parts of these sizes.

        Every part starts from the same state of the modules ``held``.
        """
        run = self._weighted(sizes, seed, held, self._weights)
        weights = {name: term.weight for name, term in run.terms().items()}
        if len(sizes) > 1 and weights != self._weights:
            run = self._weighted(sizes, seed, held, weights)
        elif len(sizes) == 1:
            self._weights = weights
        return run

    def _weighted(self, sizes: list[int], seed: int, held: frozenset[str], weights: dict[str, float]) -> Run:
        """A run whose loss terms are divided by ``weights``, which they have over all parts; one part by its own."""
        weights = weights if len(sizes) > 1 else {}
        gradients: dict[str, Tensor] = {}
        extents: dict[str, float] = defaultdict(float)
        pieces = []
        for terms, samples in self._forward(sizes, seed, held=held):
            self.model.zero_grad(set_to_none=True)
            pieces.append(_measured(terms, samples))
            shares = {name: weights.get(name, float(weight)) for name, (_, weight) in terms.items()}
            scaled = [loss.sum() / shares[name] for name, (loss, _) in terms.items() if shares[name]]
            if scaled:
                torch.autograd.backward(torch.stack(scaled).sum())
            del terms, scaled
            for name, gradient in self._taken_gradients():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
                extents[name] += float(gradient.abs().max()) if gradient.numel() else 0.0
        return Run(pieces, gradients, dict(extents))

    def _taken_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients of the last backward pass, on the CPU, which the model then has no more."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad.to_dense().to("cpu", copy=True)
        self.model.zero_grad(set_to_none=True)

    def losses(
        self,
        sizes: list[int],
        seed: int,
        starting: Callable[[int], None] = lambda _: None,
        *,
        held: frozenset[str] = frozenset(),
    ) -> list[dict[str, Term]]:
        """Loss terms alone. ``starting`` is called with the index of each part before its forward pass."""
        return [_measured(terms, samples) for terms, samples in self._forward(sizes, seed, starting, held=held)]

    def noise(self, whole: Run) -> Noise:
        """Change of a run of the whole batch by rounding every weight to fp32."""
        rounded = []
        for index in range(ROUNDED_RUNS):
            with rounded_weights(self.model, mantissa_bits(torch.float32), index):
                rounded.append(self.run(self.whole, seed=0))
        return noise_of(whole, rounded)

    def advance(self, whole: Run) -> Run | None:
        """Make an update on the batch, whose result becomes the state to start from.

        Args:
            whole: a run of the whole batch, from which the update is made.

        Returns:
            A run of the whole batch after the update; None where its numbers are infinite: the update is undone then.
        """
        before, steps = self.state, self._update(whole.gradients)
        self.state = ModelState(self.model, before.moving)
        after = self.run(self.whole, seed=0)
        if after.not_finite() is None:
            return after
        with torch.no_grad():
            for parameter, step in steps:
                parameter.add_(step)
        self.state = before
        return None

    def _update(self, gradients: dict[str, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
        """Move every number against the sign of its gradient, as Adam's first step does, whatever the loss's scale."""
        steps = []
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in gradients and parameter.numel():
                    size = max(float(parameter.square().mean().sqrt()), _SMALLEST_WEIGHT)
                    step = gradients[name].sign().to(parameter.device, parameter.dtype) * (_STEP * size)
                    parameter.sub_(step)
                    steps.append((parameter, step))
        return steps

    def _forward(
        self,
        sizes: list[int],
        seed: int,
        starting: Callable[[int], None] = lambda _: None,
        *,
        held: frozenset[str] = frozenset(),
    ) -> Iterator[tuple[LossTerms, int]]:
        """The terms of each part with its number of samples, from the same state and seed at the first."""
        first = 0
        for index, part in enumerate(sliced(self._batch, self.samples).divide(sizes)):
            self._start(index, first, part.size, seed, held)
            starting(index)
            floating = torch.float64 if self.precision == "fp64" else None
            batch = to_device(copy.deepcopy(part.batch), self._device, floating)  # a model may overwrite its input
            terms = self._workload.loss_terms(self.model, batch)
            check_pairs(terms)
            yield terms, part.size
            first += part.size
            self.drew = not self._seeded.equals(RandomState.now(self._device))

    def _start(self, index: int, first: int, size: int, seed: int, held: frozenset[str]) -> None:
        """State and random numbers for a part of ``size`` samples from the one numbered ``first``."""
        if not index:
            self.state.restore()
        self.state.restore_modules(held)
        if self.draws is not None:
            self.draws.start(first, size, self.samples)
            seed_generators(seed, self._device, torchs=0)
        elif not index:
            seed_generators(seed, self._device)
        self._seeded = RandomState.now(self._device)


def _measured(terms: LossTerms, samples: int) -> dict[str, Term]:
    return {name: Term(float(loss.detach()), float(weight), samples) for name, (loss, weight) in terms.items()}
