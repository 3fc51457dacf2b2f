"""Classify handwritten digits in a loop with accelerate."""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
parser.add_argument("--epochs", type=int, default=1)
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
loader = DataLoader(TensorDataset(images, torch.tensor(labels)), options.batch_size, shuffle=True, drop_last=True)
model = nn.Sequential(
    nn.Upsample(scale_factor=4),
    nn.Conv2d(1, 64, 3, padding=1),
    nn.GELU(),
    nn.Conv2d(64, 64, 3, stride=2),
    nn.GELU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.AdamW(model.parameters())

accelerator = Accelerator(gradient_accumulation_steps=options.gradient_accumulation_steps)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(options.epochs):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.2f}")
accelerator.end_training()
