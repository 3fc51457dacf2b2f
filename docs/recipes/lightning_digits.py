"""Classify handwritten digits with a LightningModule."""

import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        data = TensorDataset(images, torch.tensor(labels))
        return DataLoader(data, batch_size=self.batch_size, shuffle=True, drop_last=True)


class Classifier(lightning.LightningModule):
    def __init__(self, width: int = 64, learning_rate: float = 1e-3):
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Upsample(scale_factor=4),
            nn.Conv2d(1, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, width, 3, stride=2),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        )

    def training_step(self, batch):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    LightningCLI(Classifier, Digits, trainer_defaults={"max_epochs": 1})
