"""A user's program with HF Trainer, its arguments on the command line or in a JSON file, as in the examples of HF."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

LENGTH, VOCABULARY = 256, 500


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, _number: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,))
        return {"input_ids": tokens, "labels": tokens.clone()}


def build_model() -> PreTrainedModel:
    """A small GPT-2 with random weights."""
    config = GPT2Config(n_layer=4, n_head=2, n_embd=64, n_positions=LENGTH, vocab_size=VOCABULARY)
    return GPT2LMHeadModel(config)


def main() -> None:
    """Train."""
    parser = HfArgumentParser(TrainingArguments)
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        (arguments,) = parser.parse_json_file(json_file=str(Path(sys.argv[1]).absolute()))
    else:
        (arguments,) = parser.parse_args_into_dataclasses()
    Trainer(build_model(), arguments, train_dataset=Texts()).train()


if __name__ == "__main__":
    main()
