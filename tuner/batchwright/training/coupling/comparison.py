"""Comparable runs of a model over a batch and its parts, each from the same state of the model.

A run is a forward and a backward pass over each part, with loss terms divided by their weight over all parts, as in an
accumulated update: in full precision, with a given seed, from the same state.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from batchwright.device_traits import traits_of
from batchwright.torch_internals import Dropout
from batchwright.training.coupling.error_scale import Noise, Run, Term, largest, noise_of
from batchwright.training.coupling.precision import LIMITS, ROUNDED_RUNS, Precision, mantissa_bits, rounded_weights
from batchwright.training.coupling.random_draws import MatchedDraws
from batchwright.training.micro_batches.forward_state import ModelState
from batchwright.training.micro_batches.loss_window import check_pairs, named_terms
from batchwright.training.micro_batches.nested_batches import copied, to_device
from batchwright.training.micro_batches.rng_state import RandomState, generator_of
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.workloads.base import LossTerms, Workload

_RANDOM_WORDS = ("drop", "jitter")
"""Parts of the names of probabilities: ``attention_dropout``, ``layerdrop``, ``drop_prob``, ``jitter_noise``."""
_STEP = 0.2
"""Step of the update before the comparison, as a share of a parameter's root mean square, large enough that state that
follows the weights lags behind them. Measured on layers of eight with spectral norm, whose power iterations had
converged: the gradient's error is then 0.2 to 1.3 %; with half the step 0.09 to 0.2 %."""
_SMALLEST_WEIGHT = 0.02
"""Lower bound on the root mean square of a parameter, so that parameters that start at zero change too."""
REFUSALS = (ValueError, RuntimeError, AssertionError, ArithmeticError, LookupError)
"""Errors by which modules and losses refuse a number of samples."""

# --- randomness -------------------------------------------------------------------------------------------------------


def seed_generators(seed: int, device: torch.device, *, torch_seed: int | None = None) -> None:
    """Seed the generators that ``preserved_random_state`` restores; torch's with ``torch_seed``, if given."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - user code may use the old interface
    torch_seed = seed if torch_seed is None else torch_seed
    for generator in {torch.default_generator, generator_of(device)}:
        generator.manual_seed(torch_seed)


def has_dropout(model: nn.Module) -> bool:
    """Return whether a module of the model drops activations in its current mode."""
    return any(
        isinstance(module, Dropout) and module.training and vars(module).get("p", 0.0) > 0.0
        for module in model.modules()
    )


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout to zero: probabilities of dropout modules, and floats with such a name.

    Some transformers models read the probability from their config in the forward pass.
    """
    holders = {id(holder): holder for module in model.modules() for holder in (module, getattr(module, "config", None))}
    fields = [
        (vars(holder), name, value)
        for holder in holders.values()
        if hasattr(holder, "__dict__")
        for name, value in vars(holder).items()
        if isinstance(value, float)
        and (isinstance(holder, Dropout) if name == "p" else any(word in name.lower() for word in _RANDOM_WORDS))
    ]
    for attributes, name, _ in fields:
        attributes[name] = 0.0
    try:
        yield
    finally:
        for attributes, name, value in fields:
            attributes[name] = value


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode, for good."""
    model.eval()
    yield


# --- running ---------------------------------------------------------------------------------------------------------


class Runner:
    """Runs a model over slices of one batch. The model's gradients are overwritten, and each run restores its state."""

    def __init__(
        self, model: nn.Module, workload: Workload, micro_batch: MicroBatch, device: torch.device, precision: Precision
    ) -> None:
        self.model = model
        self.samples = micro_batch.size
        self.limits = LIMITS[precision]
        self.precision: Precision = precision
        self.draws: MatchedDraws | None = None
        """Mode that gives a sample equal random numbers in each run, if the loss draws some."""
        self.state = ModelState(model)
        """State that each run starts from."""
        self.drew_random_numbers = False
        """True if the last part drew numbers from a global generator."""
        self._seeded = RandomState.capture(device)
        self._weights: dict[str, float] = {}
        """Weight of each term over the whole batch, needed before the first backward pass of a part."""
        self._continues = False
        self._workload = workload
        self._micro_batch = micro_batch
        self._device = device

    def is_slow_in_fp64(self, seconds: float, limit: float) -> bool:
        """Return whether a run in fp64 took more than ``limit`` seconds on a GPU, where fp32 is far faster."""
        return self.precision == "fp64" and traits_of(self._device.type).is_gpu and seconds > limit

    @property
    def whole(self) -> list[int]:
        """Sizes of the parts of an undivided batch: one part with all samples."""
        return [self.samples]

    @property
    def splits(self) -> list[list[int]]:
        """Sizes of the two parts: halves, and last a third and the rest, if that is another split.

        Halves may agree by chance, for example with the same number of samples for each expert.
        """
        sizes = {(first, self.samples - first): None for first in (self.samples // 2, max(1, self.samples // 3))}
        return [list(pair) for pair in sizes]

    def run(
        self, sizes: list[int], seed: int, *, reset_modules: frozenset[str] = frozenset(), continues: bool = False
    ) -> Run:
        """Loss terms and gradients over parts of these sizes, of the batch's first samples if they have fewer.

        Every part starts from the same state of the modules ``reset_modules``. If the run ``continues``, the first part
        starts from the state of the other modules that the last run has left.
        """
        self._continues = continues
        run = self._run_weighted(sizes, seed, reset_modules, self._weights)
        weights = {name: term.weight for name, term in run.terms().items()}
        if len(sizes) > 1 and weights != self._weights:
            run = self._run_weighted(sizes, seed, reset_modules, weights)
        elif len(sizes) == 1:
            self._weights = weights
        return run

    def _run_weighted(
        self, sizes: list[int], seed: int, reset_modules: frozenset[str], weights: dict[str, float]
    ) -> Run:
        """A run whose loss terms are divided by ``weights``, those over all parts. A single part has its own."""
        weights = weights if len(sizes) > 1 else {}
        gradients: dict[str, Tensor] = {}
        scales: dict[str, float] = defaultdict(float)
        pieces = []
        for terms, samples in self._forward(sizes, seed, reset_modules=reset_modules):
            self.model.zero_grad(set_to_none=True)
            pieces.append(_measure(terms, samples))
            shares = {name: weights.get(name, float(weight)) for name, (_, weight) in terms.items()}
            scaled = [loss.sum() / shares[name] for name, (loss, weight) in terms.items() if shares[name] and weight]
            if scaled:
                torch.autograd.backward(torch.stack(scaled).sum())
            del terms, scaled
            for name, parameter in self.model.named_parameters():
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to_dense().to("cpu")
                scales[name] += largest(gradient)
                gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient
            self.model.zero_grad(set_to_none=True)
        self._continues = False
        return Run(pieces, gradients, dict(scales))

    def losses(
        self,
        sizes: list[int],
        seed: int,
        on_part_start: Callable[[int], None] = lambda _: None,
        *,
        reset_modules: frozenset[str] = frozenset(),
    ) -> list[dict[str, Term]]:
        """Loss terms alone. ``on_part_start`` is called with the index of each part before its forward pass."""
        return [
            _measure(terms, samples)
            for terms, samples in self._forward(sizes, seed, on_part_start, reset_modules=reset_modules)
        ]

    def noise(self, whole: Run) -> Noise:
        """Change of a run of the whole batch when every weight is rounded to fp32."""
        rounded = []
        for index in range(ROUNDED_RUNS):
            with rounded_weights(self.model, mantissa_bits(torch.float32), index):
                rounded.append(self.run(self.whole, seed=0))
        return noise_of(whole, rounded)

    def update(self, gradients: dict[str, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
        """Step against the sign of the gradient, as Adam's first step does, independently of the loss's scale.

        Returns what was subtracted from each parameter.
        """
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
        on_part_start: Callable[[int], None] = lambda _: None,
        *,
        reset_modules: frozenset[str] = frozenset(),
    ) -> Iterator[tuple[LossTerms, int]]:
        """Yield the terms and the number of samples of each part. The first part always starts from the same state."""
        first, samples = 0, sum(sizes)
        rest = [self.samples - samples] if samples < self.samples else []
        for index, part in enumerate(self._micro_batch.divide([*sizes, *rest])[: len(sizes)]):
            if not index and not self._continues:
                self.state.restore()
            self.state.restore_modules(reset_modules)
            if self.draws is not None:
                self.draws.start(first, part.size, samples)
                seed_generators(seed, self._device, torch_seed=0)
            elif not index:
                seed_generators(seed, self._device)
            self._seeded = RandomState.capture(self._device)
            on_part_start(index)
            floating = torch.float64 if self.precision == "fp64" else None
            batch = to_device(copied(part.batch), self._device, floating)  # a model may overwrite its input
            terms = named_terms(self._workload.loss_terms(self.model, batch), part.size)
            check_pairs(terms)
            yield terms, part.size
            first += part.size
            self.drew_random_numbers = not self._seeded.equals(RandomState.capture(self._device))


def _measure(terms: LossTerms, samples: int) -> dict[str, Term]:
    return {  # as in an update, a term without weight adds nothing, even if its loss is 0 / 0
        name: Term(float(loss.detach()) if weight else 0.0, float(weight), samples)
        for name, (loss, weight) in terms.items()
    }
