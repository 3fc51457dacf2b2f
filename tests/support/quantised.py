"""A language model whose blocks are quantised to eight bits, with trainable adapters beside them, as QLoRA has it."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.quantization_config import QuantizationMethod

from batchwright.workloads.base import random_tokens, summed_cross_entropy

VOCABULARY = 64
LENGTH = 12
RANK = 2


class Int8Linear(nn.Module):
    """A linear layer of eight-bit weights with a scale in half precision, which its kernel requires."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (inputs, outputs), dtype=torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.full((outputs,), 0.02 / 127, dtype=torch.float16))
        self.down, self.up = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor) -> Tensor:
        """``states @ weight`` plus the adapter's output."""
        weight, scale = self.get_buffer("weight"), self.get_buffer("scale")
        if scale.dtype is not torch.float16:
            raise TypeError(f"the kernel takes scales in float16, not {scale.dtype}")
        base = states @ (weight.to(states.dtype) * scale.to(states.dtype))
        adapted: Tensor = base + self.up(self.down(states))
        return adapted


class QuantisedWorkload:
    """Next-token prediction by its adapters."""

    def build_model(self) -> nn.Module:
        """GPT-2 with frozen, quantised feed-forward layers, that refuses to be cast, as transformers has it."""
        sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, **dropout))
        model.requires_grad_(False)
        for block in model.transformer.h:
            block.mlp.c_fc, block.mlp.c_proj = Int8Linear(16, 64), Int8Linear(64, 16)
        model.is_quantized = True
        model.quantization_method = QuantizationMethod.GPTQ
        return model  # type: ignore[no-any-return]

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Random tokens."""
        return {"input_ids": random_tokens(size, LENGTH, VOCABULARY)}

    def loss_terms(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, float]]:
        """One term."""
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        labels = batch["input_ids"][:, 1:]
        return {"next_token": (summed_cross_entropy(logits, labels), float(labels.numel()))}

    def dataset(self) -> list[dict[str, Tensor]]:
        """A few fixed samples."""
        generator = torch.Generator().manual_seed(0)
        return [{"input_ids": torch.randint(VOCABULARY, (LENGTH,), generator=generator)} for _ in range(24)]


def build() -> QuantisedWorkload:
    """The workload."""
    return QuantisedWorkload()
