"""What is trained beside a frozen base, and its files as ``peft`` writes them for ``PeftModel.from_pretrained``."""

import hashlib
import re
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

    ``build`` makes the model without the adapter, on the ``meta`` device. ``base`` is a folder or a name on the hub.
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


_OF_THE_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save)\.")
"""Names of tensors that peft adds to a model."""


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model without its frozen parameters: what is trained, and the buffers."""
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of the model below the adapter, by the names that it has without the adapter."""
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor  # before peft wrapped the module
        for name, tensor in model.state_dict().items()
        if not _OF_THE_ADAPTER.search(name)
    }


def base_digest(model: nn.Module) -> str:
    """SHA-256 over the names, types and values of the frozen parameters, in hexadecimal."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
            flat = parameter.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
