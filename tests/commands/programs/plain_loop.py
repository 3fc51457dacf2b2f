"""A user's own loop, with argparse."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from small_network import Network, Samples
from torch.utils.data import DataLoader


def main() -> None:
    """Train for one epoch, and save the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=Path())
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Samples(), batch_size=options.batch_size, shuffle=True, drop_last=True)
    for number, (inputs, labels) in enumerate(loader, 1):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        (loss / options.accumulate).backward()
        if number % options.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"update {number // options.accumulate}: loss {loss.item():.4f}")
    torch.save(model.state_dict(), options.output_dir / "model.pt")


if __name__ == "__main__":
    main()
