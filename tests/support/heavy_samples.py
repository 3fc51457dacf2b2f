"""A workload whose samples take many MiB each, so that the largest micro-batch does not depend on a page or two."""

import torch
from torch import Tensor, nn

VALUES = 2**19
"""Values of a sample, and weights of the model: 2 MiB in fp32."""
MEMORY_LIMIT = "128MiB"


class Scaled(nn.Module):
    """Each value of a sample times a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(VALUES))

    def forward(self, samples: Tensor) -> Tensor:
        """Scale ``(batch, VALUES)``."""
        return samples * self.weights


def make_batch(size: int) -> Tensor:
    """Samples ``(size, VALUES)``, each of one random value: a value for each would take longer than all else."""
    return torch.randn(size, 1).expand(size, VALUES).contiguous()


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    """The sum of squares over the samples, and their number."""
    return model(batch).square().sum() / VALUES, len(batch)


class Workload:
    """The three functions as a ``python`` target, ``tests.support.heavy_samples:Workload``."""

    def build_model(self) -> nn.Module:
        """Build the model."""
        return Scaled()

    def make_batch(self, size: int) -> Tensor:
        """Make random samples."""
        return make_batch(size)

    def loss_terms(self, model: nn.Module, batch: Tensor) -> dict[str, tuple[Tensor, int]]:
        """Compute the loss."""
        return {"loss": loss(model, batch)}
