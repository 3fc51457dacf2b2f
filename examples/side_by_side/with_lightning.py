"""Lightning: `Tuner.scale_batch_size` with bisection, and a Trainer with `accumulate_grad_batches`."""

from math import ceil

from common_task import EFFECTIVE_BATCH_SIZE, build_model, limit_memory, loader, loss
from lightning import LightningModule, Trainer
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader

OPTIONS = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}


class Module(LightningModule):
    """The model, its loss, its optimizer and its samples, with the attribute that the tuner sets."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.model = build_model()

    def training_step(self, batch: Tensor, _number: int) -> Tensor:
        """Compute the mean loss of a micro-batch."""
        loss_sum, tokens = loss(self.model, batch)
        return loss_sum / tokens

    def configure_optimizers(self) -> AdamW:
        """Build the optimizer."""
        return AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Load micro-batches of the present size."""
        return loader(self.batch_size)


def main() -> None:
    """Find, plan, train over all samples once."""
    trainer = Trainer(**OPTIONS)
    limit_memory()
    module = Module()
    largest = Tuner(trainer).scale_batch_size(module, mode="binsearch", margin=0.0)
    steps = ceil(EFFECTIVE_BATCH_SIZE / module.batch_size)
    module.batch_size = round(EFFECTIVE_BATCH_SIZE / steps)  # the nearest that equal micro-batches give in so few steps
    print("largest:", largest, "plan:", [module.batch_size] * steps)
    Trainer(**OPTIONS, accumulate_grad_batches=steps).fit(module)


if __name__ == "__main__":
    main()
