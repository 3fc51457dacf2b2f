"""A LightningModule that counts its micro-batches, its data, and a Trainer, for tests with Lightning installed."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 4096
_QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(LightningModule):  # type: ignore[misc] # a class of Lightning
    """A small network that counts the samples that go through it before each step.

    Attributes:
        schedule_updates: updates of the fit, as each learning-rate schedule was told.
    """

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, 32), norm or nn.ReLU(), nn.Linear(32, FEATURES))
        self.head = nn.Linear(FEATURES, 4)
        self.schedule_updates: list[int] = []
        self._updates: list[list[int]] = [[]]

    def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
        """The mean loss of a micro-batch."""
        inputs, labels = batch
        self._updates[-1].append(len(labels))
        loss = nn.functional.cross_entropy(self.head(self.network(inputs)), labels)
        self.log("loss", loss)
        return loss

    def _updated(self, *_: object) -> None:
        self._updates.append([])

    def configure_optimizers(self) -> dict[str, Any]:
        """An optimizer with a schedule over the updates of the whole fit."""
        self.schedule_updates.append(int(self.trainer.estimated_stepping_batches))
        optimizer = torch.optim.AdamW(self.parameters())
        optimizer.register_step_post_hook(self._updated)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=self.schedule_updates[-1])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def updates(self) -> list[list[int]]:
        """The sizes of the micro-batches of each update."""
        return [update for update in self._updates if update]


class Broken(Module):
    """A module whose training step raises."""

    def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
        """Raise."""
        raise ZeroDivisionError(f"of {len(batch)}")


class Data(LightningDataModule):  # type: ignore[misc] # a class of Lightning
    """Random samples, in micro-batches of the attribute `batch_size`."""

    def __init__(self, batch_size: int = 2, samples: int = 512, *, drop_last: bool = True) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._samples = samples
        self._drop_last = drop_last

    def train_dataloader(self) -> DataLoader[Any]:
        """All samples."""
        data = TensorDataset(torch.randn(self._samples, FEATURES), torch.arange(self._samples) % 4)
        return DataLoader(data, batch_size=self.batch_size, drop_last=self._drop_last)


class IgnoringData(Data):
    """Data in micro-batches of two, whatever the attribute is."""

    def train_dataloader(self) -> DataLoader[Any]:
        """All samples."""
        return DataLoader(super().train_dataloader().dataset, batch_size=2)


class StartingWeights(Callback):  # type: ignore[misc] # a class of Lightning
    """Keeps the weights with which training starts."""

    weights: list[Tensor]

    def on_train_start(self, _trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy them."""
        self.weights = [parameter.detach().clone() for parameter in pl_module.parameters()]


def quiet_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """A Trainer of one epoch on the CPU that writes nothing."""
    return Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "callbacks": list(callbacks), **_QUIET, **options}
    )
