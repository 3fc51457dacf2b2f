"""A user's program with `LightningCLI`: everything but model and data comes from the command line and its files."""

import lightning  # type: ignore[import-not-found,import-untyped,unused-ignore] # of the extra `bench`
import torch
from counting import Counting, samples
from lightning.pytorch.cli import LightningCLI  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):  # type: ignore[misc] # not typed where it is not installed
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Counting()

    def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
        """The mean loss of a micro-batch."""
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.network(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One that tells the model of its steps."""
        optimizer = torch.optim.AdamW(self.parameters())
        optimizer.register_step_post_hook(self.network.updated)
        return optimizer

    def on_train_end(self) -> None:
        """Leave what was counted."""
        self.network.write()


class Data(lightning.LightningDataModule):  # type: ignore[misc] # not typed where it is not installed
    """The samples."""

    def __init__(self, batch_size: int = 1) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """In micro-batches."""
        return DataLoader(samples(), batch_size=self.batch_size, drop_last=True)  # type: ignore[arg-type] # a list will do


if __name__ == "__main__":
    quiet = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    LightningCLI(Module, Data, trainer_defaults=quiet, save_config_callback=None)
