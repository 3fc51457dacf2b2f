"""Write a trained adapter as ``peft`` does, for ``PeftModel.from_pretrained`` to load."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from batchwright.schemas.model.adapter import LoraAdapter
from batchwright.schemas.workload import TransformersTask
from batchwright.workloads.adapters.lora import lora_config

_PREFIX = "base_model.model."
"""What peft's own model puts before the names of the parameters."""


def save_adapter(  # noqa: PLR0913, PLR0917 - what the two files are made of
    build: Callable[[], nn.Module],
    adapter: LoraAdapter,
    task: TransformersTask,
    weights: dict[str, Tensor],
    base: str,
    revision: str | None,
    folder: Path,
) -> None:
    """Write `adapter_config.json`, `adapter_model.safetensors` and a model card into ``folder``.

    Args:
        build: builds the model without the adapter; it is called without memory for tensors (on the ``meta`` device).
        adapter: the adapter of the spec.
        task: the task of the model.
        weights: what was trained, by name, on the CPU.
        base: the folder of the base model, or its name on the hub, which the config names.
        revision: its commit on the hub.
        folder: an existing folder.
    """
    from peft import PeftModel  # noqa: PLC0415 - takes seconds to import

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transposed matrices (GPT-2), and of transformers' deprecated names
        model = build()
        config = lora_config(adapter, task, model)
        config.base_model_name_or_path, config.revision = base, revision
        wrapped = PeftModel(model, config)
    state = {f"{_PREFIX}{name}": tensor for name, tensor in weights.items()}
    wrapped.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
