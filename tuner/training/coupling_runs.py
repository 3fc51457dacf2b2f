"""Runs of a model over a batch and its parts that can be compared, and that leave the model as it was.

A run is a forward and a backward pass over each part, its loss terms divided by their weight over all parts, as an
accumulated update does it: in full fp32, under a given seed, from the same buffers.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tuner.training.micro_batches import sample_count, sliced, to_device
from tuner.training.randomness import RandomState
from tuner.training.window import check_pairs
from tuner.workloads.base import Batch, LossTerms, Workload

LARGEST_ERROR = 1e-4
"""Largest relative difference of loss or gradient that passes as rounding.

Measured in fp32 with torch 2.13 on the CPU: a LayerNorm model 5e-8 (loss) and 9e-8 (gradient); BatchNorm 1 % and
51 %; in-batch negatives 70 % and 67 %.
"""
ROUNDING = LARGEST_ERROR / 10
"""Below it, two runs under different seeds are the same run, and a module's two outputs are the same output."""
NEGLIGIBLE = 1e-3
"""Share of the largest tensor (or loss term) below which a tensor is compared on that scale and not on its own.

The gradient of a key's bias, or of a bias before a norm, is zero but for rounding.
"""
_RANDOM_WORDS = ("drop", "jitter")
"""In the names of probabilities: ``attention_dropout``, ``layerdrop``, ``drop_prob``, ``jitter_noise``."""

# --- leaving no trace ------------------------------------------------------------------------------------------------


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Every random number generator as it was."""
    state = RandomState.now(device)
    try:
        yield
    finally:
        state.restore(device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that ``own_randomness`` keeps, and no other device's."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - user code may use the old interface
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Full fp32: no TF32, no autocast; gradients on."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    cudnn = torch.backends.cudnn
    try:
        with (
            cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=cudnn.deterministic, allow_tf32=False),
            torch.autocast(device.type, enabled=False),
            torch.enable_grad(),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


class Buffers:
    """A model's buffers (running statistics) as they were, objects and contents."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module._buffers, [(name, buffer, _copied(buffer)) for name, buffer in module._buffers.items()])  # noqa: SLF001 - a buffer may be replaced by assignment
            for module in model.modules()
        ]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for buffers, kept in self._kept:
                buffers.clear()
                for name, buffer, content in kept:
                    buffers[name] = buffer if buffer is None or content is None else buffer.copy_(content)


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


@contextmanager
def restored(model: nn.Module) -> Iterator[Buffers]:
    """Buffers, gradients and modes as they were."""
    buffers = Buffers(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield buffers
    finally:
        buffers.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Every dropout at zero: probabilities of dropout modules, and whatever float is named for one.

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
        return isinstance(holder, nn.modules.dropout._DropoutNd)  # noqa: SLF001 - torch names no public base of the dropouts
    return any(word in name.lower() for word in _RANDOM_WORDS)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode; ``restored`` puts the modes back."""
    model.eval()
    yield


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """A loss term of one batch."""

    total: float
    weight: float
    samples: int


_NOTHING = Term(0.0, 0.0, 0)


@dataclass(frozen=True)
class Run:
    """What a batch, or its parts together, gave."""

    parts: list[dict[str, Term]]
    gradients: dict[str, Tensor]
    """By parameter, on the CPU."""

    def pieces(self, name: str) -> list[Term]:
        """A term in each part."""
        return [part.get(name, _NOTHING) for part in self.parts]

    def terms(self) -> dict[str, Term]:
        """Each term, its parts added up."""
        names = {name: None for part in self.parts for name in part}
        return {name: _added([part[name] for part in self.parts if name in part]) for name in names}

    def means(self) -> dict[str, float]:
        """What is descended, term by term."""
        return {name: term.total / term.weight if term.weight else 0.0 for name, term in self.terms().items()}

    def not_finite(self) -> str | None:
        """What in it is not a finite number, in words."""
        for name, mean in self.means().items():
            if not math.isfinite(mean):
                return f"loss term `{name}` is {mean}"
        for name, gradient in self.gradients.items():
            if not torch.isfinite(gradient).all():
                return f"the gradient of `{name}` is not finite"
        return None


def _added(terms: list[Term]) -> Term:
    return Term(
        sum(term.total for term in terms), sum(term.weight for term in terms), sum(term.samples for term in terms)
    )


def relative(delta: float, scale: float) -> float:
    """``|delta| / |scale|``; zero where nothing differs, infinite where a difference meets a scale of zero."""
    if delta == 0:
        return 0.0
    return abs(delta) / abs(scale) if scale else math.inf


def loss_error(whole: Run, split: Run) -> float:
    """Largest relative error over the terms' means."""
    reference, other = whole.means(), split.means()
    floor = NEGLIGIBLE * max(map(abs, reference.values()), default=0.0)
    return max(
        (
            relative(other.get(name, 0.0) - reference.get(name, 0.0), max(abs(reference.get(name, 0.0)), floor))
            for name in {**reference, **other}
        ),
        default=0.0,
    )


def gradient_errors(whole: Run, split: Run) -> dict[str, float]:
    """Relative error of each parameter's gradient."""
    reference, other = whole.gradients, split.gradients
    sizes = {name: float(gradient.abs().max()) for name, gradient in reference.items() if gradient.numel()}
    floor = NEGLIGIBLE * max(sizes.values(), default=0.0)
    zero = torch.zeros(())
    return {
        name: relative(
            float((other.get(name, zero) - reference.get(name, zero)).abs().max()), max(sizes.get(name, 0.0), floor)
        )
        for name, gradient in {**reference, **other}.items()
        if gradient.numel()
    }


def term_errors(whole: Run, split: Run) -> dict[str, float]:
    """Per term, how far the parts' sums and weights are from adding up to the whole's.

    A term that is the same for every part, its weight too (a penalty on the parameters), need not add up.
    """
    largest = max(map(abs, whole.means().values()), default=0.0)
    reference, added = whole.terms(), split.terms()
    errors = {}
    for name in {**reference, **added}:
        term = reference.get(name, _NOTHING)
        pieces = split.pieces(name)
        if not all(_same(piece, term) for piece in pieces):
            size = max(sum(abs(piece.total) for piece in pieces), largest * abs(term.weight))
            by_sum = relative(added.get(name, _NOTHING).total - term.total, max(abs(term.total), NEGLIGIBLE * size))
            by_weight = relative(added.get(name, _NOTHING).weight - term.weight, term.weight)
            errors[name] = max(by_sum, by_weight)
    return errors


def _same(one: Term, other: Term) -> bool:
    return one.weight == other.weight and relative(one.total - other.total, other.total) <= ROUNDING


class Runner:
    """Runs a model over slices of one batch.

    Args:
        model: on ``device``; its gradients are overwritten (``restored`` keeps them), its buffers put back by each run.
        workload: makes the loss terms.
        batch: on the CPU.
        device: where the model is.
        buffers: what to start each run from.
    """

    def __init__(
        self, model: nn.Module, workload: Workload, batch: Batch, device: torch.device, buffers: Buffers
    ) -> None:
        self.model = model
        self.samples = sample_count(batch)
        self._workload = workload
        self._batch = batch
        self._device = device
        self._buffers = buffers

    @property
    def whole(self) -> list[int]:
        """Samples of the one part that is the batch."""
        return [self.samples]

    @property
    def splits(self) -> list[list[int]]:
        """Samples of the two parts: halves, then a third and the rest, where that is another split.

        Halves may agree by chance: the same number of samples for each expert, say.
        """
        sizes = {(first, self.samples - first): None for first in (self.samples // 2, max(1, self.samples // 3))}
        return [list(pair) for pair in sizes]

    def run(self, sizes: list[int], seed: int) -> Run:
        """Loss terms and gradients over parts of these sizes."""
        weights = self._weights(sizes, seed) if len(sizes) > 1 else {}
        self.model.zero_grad(set_to_none=True)
        pieces = []
        for terms, samples in self._forward(sizes, seed):
            pieces.append(_measured(terms, samples))
            shares = {name: weights.get(name, float(weight)) for name, (_, weight) in terms.items()}
            scaled = [loss.sum() / shares[name] for name, (loss, _) in terms.items() if shares[name]]
            if scaled:
                torch.autograd.backward(torch.stack(scaled).sum())
            del terms, scaled
        gradients = {
            name: parameter.grad.to_dense().to("cpu", copy=True)
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        return Run(pieces, gradients)

    def losses(
        self, sizes: list[int], seed: int, starting: Callable[[int], None] = lambda _: None
    ) -> list[dict[str, Term]]:
        """Loss terms alone. ``starting`` is called with the index of each part before its forward pass."""
        return [_measured(terms, samples) for terms, samples in self._forward(sizes, seed, starting)]

    def _weights(self, sizes: list[int], seed: int) -> dict[str, float]:
        """What each term weighs over all parts: it has to be known before the first backward pass."""
        return {name: term.weight for name, term in Run(self.losses(sizes, seed), {}).terms().items()}

    def _forward(
        self, sizes: list[int], seed: int, starting: Callable[[int], None] = lambda _: None
    ) -> Iterator[tuple[LossTerms, int]]:
        """The terms of each part with its number of samples, from the same buffers and seed at the first."""
        self._buffers.restore()
        seed_generators(seed, self._device)
        for index, part in enumerate(sliced(self._batch, self.samples).divide(sizes)):
            starting(index)
            batch = to_device(copy.deepcopy(part.batch), self._device)  # a model may overwrite its input
            terms = self._workload.loss_terms(self.model, batch)
            check_pairs(terms)
            yield terms, part.size


def _measured(terms: LossTerms, samples: int) -> dict[str, Term]:
    return {name: Term(float(loss.detach()), float(weight), samples) for name, (loss, weight) in terms.items()}
