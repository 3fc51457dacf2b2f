"""Models and loss terms that couple the samples of a batch, each in one way, and a few that only appear to."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from batchwright.workloads.base import LossTerms

WIDTH = 8
"""Features of a sample, in and out."""

Terms = Callable[[nn.Module, Any], LossTerms]
"""The loss of a workload."""


def squares(model: nn.Module, batch: Tensor) -> LossTerms:
    """A sum over samples: squared distances from one."""
    outputs = model(batch)
    return {"squares": ((outputs - 1).square().sum(), float(len(outputs)))}


class Case:
    """A workload of a model and its loss terms."""

    def __init__(self, model: nn.Module, terms: Terms = squares) -> None:
        self.model = model
        self.loss_terms = terms

    def build_model(self) -> nn.Module:
        """The model it was made with."""
        return self.model

    def make_batch(self, size: int) -> Tensor:
        """Random features."""
        return torch.randn(size, WIDTH)


class Centred(nn.Module):
    """Subtracts the batch's mean between two layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        states = self.first(features)
        output: Tensor = self.second(states - states.mean(0))
        return output


def centred() -> Case:
    """A target of a spec whose samples are coupled."""
    return Case(Centred())


def in_batch_negatives(model: nn.Module, batch: Tensor) -> LossTerms:
    """InfoNCE between two noisy views."""
    views = [F.normalize(model(batch + shift), dim=1) for shift in (0.0, 0.1)]
    logits = views[0] @ views[1].T / 0.1
    return {"contrastive": (F.cross_entropy(logits, torch.arange(len(batch)), reduction="sum"), float(len(batch)))}


class Switch(nn.Module):
    """Two experts, one of them for each sample, and the load-balancing loss of Fedus et al. (2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The routed output and the auxiliary loss, a scalar."""
        shares = self.router(features).softmax(1)
        chosen = shares.argmax(1)
        outputs = torch.zeros_like(features)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            outputs = outputs.index_add(0, rows, expert(features[rows]) * shares[rows, index, None])
        load = torch.stack([(chosen == index).float().mean() for index in range(2)])
        return outputs, 2 * (load * shares.mean(0)).sum()


def with_auxiliary(model: nn.Module, batch: Tensor) -> LossTerms:
    """Squared distances, and the load-balancing loss of ``Switch`` weighted by samples."""
    outputs, auxiliary = model(batch)
    size = float(len(batch))
    return {"squares": ((outputs - 1).square().sum(), size), "auxiliary": (auxiliary * size, size)}


class ScaledBackward(torch.autograd.Function):
    """The identity, whose gradient is divided by its largest value over the batch."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        """Return a copy of the values."""
        return features.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        """Normalized."""
        return gradients[0] / gradients[0].abs().max()


class Shifted(nn.Module):
    """A layer and a shift common to all classes, which a softmax does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1))

    def forward(self, features: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.layer(features) + self.shift
        return logits


class Noisy(nn.Module):
    """Noise that no attribute turns off, in training only."""

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        return features + torch.rand_like(features) if self.training else features


class Unseeded(nn.Module):
    """Noise from a generator that cannot be seeded, in training only."""

    def forward(self, features: Tensor) -> Tensor:
        """Keep the shape."""
        noise = torch.from_numpy(np.random.default_rng().random(features.shape)).to(features.dtype)
        return features + noise if self.training else features


class Overwriting(nn.Module):
    """Doubles its input in place."""

    def forward(self, features: Tensor) -> Tensor:
        """Double the tensor in place."""
        return features.mul_(2)
