"""Shared parts of the programs: a network whose samples take 12 MiB of activations each, and data made on the spot."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

POSITIONS, WIDTH, CLASSES = 4096, 32, 10
SAMPLES = 4096
"""In the data: above the effective batch of any test, several times over."""


class Network(nn.Module):
    """A stack of linear layers over every position, and a classifier of their mean."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``(n, CLASSES)`` of ``(n, POSITIONS, WIDTH)``."""
        for layer in self.layers:
            inputs = layer(inputs)
        logits: Tensor = self.head(inputs.mean(1))
        return logits


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random features with random labels, drawn when they are read."""

    def __init__(self, count: int = SAMPLES) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if number >= self._count:
            raise IndexError(number)
        return torch.randn(POSITIONS, WIDTH), torch.tensor(number % CLASSES)
