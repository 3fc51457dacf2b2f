"""A user's program with Composer's Trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import yaml

# torchvision, which Composer imports, finds its operators only beside a torch with CUDA.
for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from composer import Trainer  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: E402 - after that
from composer.models import ComposerModel  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: E402
from composer.utils import dist  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: E402
from counting import Counting, samples  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


class Model(ComposerModel):  # type: ignore[misc] # not typed where it is not installed
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Counting()

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Logits."""
        logits: Tensor = self.network(batch[0])
        return logits

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean of a micro-batch."""
        return torch.nn.functional.cross_entropy(outputs, batch[1])


def main() -> None:
    """Train over all samples once."""
    settings: dict[str, Any] = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(model.network.updated)
    data = samples()
    sampler = dist.get_sampler(data, shuffle=False)
    loader: DataLoader[Any] = DataLoader(data, sampler=sampler, **settings["train_dataloader"])  # type: ignore[arg-type] # a list will do
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=optimizer,
        max_duration="1ep",
        progress_bar=False,
        **settings["trainer"],
    )
    trainer.fit()
    model.network.write()


main()
