"""Hugging Face Transformers: ``TrainingArguments``."""

from __future__ import annotations

from tuner.exports.base import Order, Target, Written
from tuner.exports.text import json_file


def _write(order: Order) -> Written:
    figures = order.figures
    arguments = {
        "per_device_train_batch_size": figures.micro_batch_size,
        "gradient_accumulation_steps": figures.gradient_accumulation_steps,
    }
    return Written((json_file("training_arguments.json", arguments),))


def _arguments(order: Order) -> tuple[str, ...]:
    figures = order.figures
    return (
        f"--per_device_train_batch_size={figures.micro_batch_size}",
        f"--gradient_accumulation_steps={figures.gradient_accumulation_steps}",
    )


TARGET = Target(
    name="hugging-face",
    title="Hugging Face TrainingArguments",
    kind="framework",
    versions=("5",),
    repeats_one_size=True,
    write=_write,
    arguments=_arguments,
    checked="loaded by transformers",
)
