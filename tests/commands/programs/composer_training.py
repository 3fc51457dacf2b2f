"""A user's program with Composer's Trainer, which divides a batch into micro-batches of the size that it is given."""

from __future__ import annotations

import argparse
from typing import Any

import torch

# torchvision, which Composer imports, finds its operators only beside a torch with CUDA.
for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from composer import Trainer  # noqa: E402 - after that
from composer.models import ComposerModel  # noqa: E402
from small_network import Network, Samples  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


class Model(ComposerModel):  # type: ignore[misc] # not typed where it is not installed
    """The model and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Logits."""
        logits: Tensor = self.network(batch[0])
        return logits

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean of a micro-batch."""
        return torch.nn.functional.cross_entropy(outputs, batch[1])


def main() -> None:
    """Train for one epoch; `--microbatch auto` leaves the size to Composer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--microbatch", required=True)
    options = parser.parse_args()
    model = Model()
    loader: DataLoader[Any] = DataLoader(Samples(), batch_size=options.batch_size, drop_last=True)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.AdamW(model.parameters()),
        max_duration="1ep",
        device="cpu",
        device_train_microbatch_size=options.microbatch if options.microbatch == "auto" else int(options.microbatch),
        progress_bar=False,
    )
    trainer.fit()


if __name__ == "__main__":
    main()
