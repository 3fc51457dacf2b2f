"""A user's loop with Accelerate, as its guide to gradient accumulation has it."""

import os
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-not-found,import-untyped,unused-ignore] # of the extra `bench`
from counting import Counting, samples
from torch.utils.data import DataLoader


def main() -> None:
    """Train over all samples once."""
    accelerator = Accelerator()
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters())
    size = int(os.environ["BATCHWRIGHT_MICRO_BATCH_SIZE"])
    loader: DataLoader[Any] = DataLoader(samples(), batch_size=size, drop_last=True)  # type: ignore[arg-type] # a list will do
    wrapped, prepared, loader = accelerator.prepare(model, optimizer, loader)
    optimizer.register_step_post_hook(model.updated)
    for inputs, labels in loader:
        with accelerator.accumulate(wrapped):
            loss = torch.nn.functional.cross_entropy(wrapped(inputs), labels)
            accelerator.backward(loss)
            prepared.step()
            prepared.zero_grad()
    model.write()
    print(accelerator.num_processes, accelerator.mixed_precision, accelerator.gradient_accumulation_steps)
    accelerator.end_training()


main()
