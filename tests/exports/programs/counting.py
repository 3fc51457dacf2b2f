"""Shared parts of the user programs: a tiny model, numbered samples, and a count of those that each update took."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 8, 4


class Counting(nn.Module):
    """A classifier that takes note of which samples went through it: the first feature of each is its number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.passes: list[list[int]] = []
        self.updates: list[list[list[int]]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of ``(batch, FEATURES)``."""
        if self.training:
            self.passes.append([round(number) for number in inputs[:, 0].tolist()])
        logits: Tensor = self.layer(inputs / 100.0)
        return logits

    def updated(self, *_: object) -> None:
        """An update was made of what went through since the last."""
        self.updates.append(self.passes)
        self.passes = []

    def write(self) -> None:
        """For each update of this rank, the samples of each of its micro-batches."""
        rank = os.environ.get("RANK", "0")
        Path(f"counted-{rank}.json").write_text(json.dumps(self.updates), encoding="utf-8")


def samples() -> list[tuple[Tensor, Tensor]]:
    """As many numbered samples as the environment says."""
    generator = torch.Generator().manual_seed(0)
    count = int(os.environ["SAMPLES"])
    features = torch.randn(count, FEATURES, generator=generator)
    features[:, 0] = torch.arange(count, dtype=torch.float32)
    return [(row, (row[1:] > 0).sum() % CLASSES) for row in features]
