"""Tell what is trained beside a frozen base from the base itself."""

from __future__ import annotations

import hashlib
import re

import torch
from torch import Tensor, nn

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
