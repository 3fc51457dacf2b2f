"""A user's own loop, with its sizes in environment variables, as a container has them."""

from __future__ import annotations

import os

import torch
from small_network import Network, Samples
from torch.utils.data import DataLoader

BATCH_SIZE = int(os.environ["BATCH_SIZE"])
ACCUMULATION = int(os.environ.get("GRAD_ACCUM", "1"))

model = Network()
optimizer = torch.optim.AdamW(model.parameters())
for number, (inputs, labels) in enumerate(DataLoader(Samples(), batch_size=BATCH_SIZE, drop_last=True), 1):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels) / ACCUMULATION
    loss.backward()
    if number % ACCUMULATION == 0:
        optimizer.step()
        optimizer.zero_grad()
print("done")
