"""A user's own loop, with its settings in a YAML file."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import yaml
from small_network import Network, Samples
from torch.utils.data import DataLoader


def main(path: Path) -> None:
    """Train for one epoch."""
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = settings["training"]["gradient_accumulation_steps"]
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), **settings["optimizer"])
    loader = DataLoader(Samples(), **settings["data"])
    for number, (inputs, labels) in enumerate(loader, 1):
        (torch.nn.functional.cross_entropy(model(inputs), labels) / steps).backward()
        if number % steps == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
