"""A user's program with `LightningCLI`: its sizes are `--data.batch_size` and `--trainer.accumulate_grad_batches`."""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from small_network import Network, Samples
from torch import Tensor
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):  # type: ignore[misc] # not typed where it is not installed
    """The model and its loss."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = Network()

    def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
        """The mean loss of a micro-batch."""
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.network(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Data(lightning.LightningDataModule):  # type: ignore[misc] # not typed where it is not installed
    """The samples."""

    def __init__(self, batch_size: int = 1) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """In micro-batches."""
        return DataLoader(Samples(), batch_size=self.batch_size, shuffle=True, drop_last=True)


if __name__ == "__main__":
    LightningCLI(Module, Data, trainer_defaults={"max_epochs": 1, "accelerator": "cpu"})
