"""A user's loop with accelerate, started by `accelerate launch`."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from small_network import Network, Samples
from torch.utils.data import DataLoader


def main() -> None:
    """Train for one epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, required=True)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=options.gradient_accumulation_steps)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Samples(), batch_size=options.per_device_train_batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
