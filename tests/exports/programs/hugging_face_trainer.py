"""A user's program for HF Trainer: its arguments come from a JSON file, or from the command line."""

import sys
from typing import Any

import torch
from counting import Counting, samples
from torch import Tensor, nn
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments


class Classifier(nn.Module):
    """The model as the Trainer wants it: it computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Counting()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits."""
        logits = self.network(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Noting(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Callback that counts updates."""

    def __init__(self, model: Classifier) -> None:
        self._model = model

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """After each."""
        self._model.network.updated()


def main() -> None:
    """Train over all samples once."""
    parser = HfArgumentParser([TrainingArguments])
    own = {"output_dir": "out", "num_train_epochs": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    if sys.argv[1].endswith(".json"):
        (arguments,) = parser.parse_json_file(sys.argv[1])
    else:
        (arguments,) = parser.parse_args_into_dataclasses()
    for name, value in own.items():
        setattr(arguments, name, value)
    model = Classifier()
    data = [{"inputs": inputs, "labels": label} for inputs, label in samples()]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Noting(model)])
    trainer.train()
    optimizer = trainer.optimizer
    print(type(getattr(optimizer, "optimizer", optimizer)).__name__, torch.get_num_threads())
    model.network.write()


main()
