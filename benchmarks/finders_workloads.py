"""The workloads of finders.py: eight architectures, small for a CPU's budget, larger for a share of a card.

Two are ``python`` targets of this module: an LSTM and an MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tuner.schemas.requests import TuningRequest
from tuner.schemas.results import DeviceInfo
from tuner.schemas.workload import parse_spec
from tuner.workloads.base import LossTerms, random_tokens, summed_cross_entropy

MIB = 1024**2
SAMPLES, IMAGES = 4096, 1024
"""The effective batch of texts and rows, and of images: well above every answer, so that it never decides. On the CPU
all of it is in memory."""
CARD_FRACTION = 0.2
"""Of a card's memory."""


class Classifier:
    """Cross-entropy over ten classes of random samples."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], vocabulary_size: int | None = None) -> None:
        self._model = model
        self._shape = shape
        self._vocabulary_size = vocabulary_size

    def build_model(self) -> nn.Module:
        """The model."""
        return self._model

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Random features, or random tokens where there is a vocabulary."""
        if self._vocabulary_size is None:
            inputs = torch.randn(size, *self._shape)
        else:
            inputs = random_tokens(size, self._shape[0], self._vocabulary_size)
        return {"inputs": inputs, "labels": torch.randint(0, 10, (size,))}

    def loss_terms(self, model: nn.Module, batch: dict[str, Tensor]) -> LossTerms:
        """One term."""
        loss = summed_cross_entropy(model(batch["inputs"]), batch["labels"])
        return {"cross_entropy": (loss, float(len(batch["labels"])))}


class LstmClassifier(nn.Module):
    """Token embeddings, a stacked LSTM, and a linear layer on its last state."""

    def __init__(self, width: int, layers: int, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``(n, 10)`` of token ids ``(n, s)``."""
        states, _ = self.lstm(self.embedding(ids))
        logits: Tensor = self.head(states[:, -1])
        return logits


def lstm(width: int, layers: int, length: int, vocabulary_size: int = 2000) -> Classifier:
    """The ``python`` target of the LSTM."""
    return Classifier(LstmClassifier(width, layers, vocabulary_size), (length,), vocabulary_size)


def mlp(width: int, layers: int, features: int, rows: int) -> Classifier:
    """The ``python`` target of the MLP: linear layers with GELU and normalisation over every row of a sample."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(layers)]
    pooled = nn.Sequential(nn.Flatten(), nn.Linear(rows * 8, 10))
    return Classifier(nn.Sequential(nn.Linear(features, width), *blocks, nn.Linear(width, 8), pooled), (rows, features))


@dataclass(frozen=True)
class Case:
    """One workload on one device under one budget."""

    name: str
    request: TuningRequest


def cases(device: DeviceInfo) -> Iterator[Case]:
    """The eight workloads for a device."""
    on_card = device.kind == "cuda"
    for name, (spec, budget) in (_card_specs() if on_card else _cpu_specs()).items():
        limit = int(CARD_FRACTION * device.total_bytes) if on_card else int(budget * MIB)
        precision = "bf16-mixed" if on_card else "fp32"
        yield Case(
            name,
            TuningRequest(
                spec=parse_spec({**spec, "precision": precision}),
                effective_batch_size=IMAGES if "image_size" in spec.get("batch", {}) else SAMPLES,
                device=device.id,
                memory_limit_bytes=limit,
                memory_margin=0.0,  # the peers know none
                allow_batch_coupling=True,  # ResNet-50 has BatchNorm, which no peer looks for
            ),
        )


def _text(task: str, length: int, **config: object) -> dict[str, Any]:
    model = {"kind": "transformers", "task": task, "config": config}
    return {"model": model, "batch": {"sequence_length": length}}


def _image(side: int, **config: object) -> dict[str, Any]:
    model = {"kind": "transformers", "task": "image-classification", "config": {"num_labels": 10, **config}}
    return {"model": model, "batch": {"image_size": side}}


def _own(name: str, **arguments: int) -> dict[str, Any]:
    return {"model": {"kind": "python", "target": f"finders_workloads:{name}", "arguments": arguments}}


def _cpu_specs() -> dict[str, tuple[dict[str, Any], float]]:
    """Narrow and shallow, with the MiB of their budgets.

    The peak of one and the same probe differs from one fork server to the next, by 1 to 3 MiB. So that there is one
    answer, a sample takes more than that, and budgets lie half-way between what two sizes take.
    """
    transformer = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
    decoder = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 1000, "n_positions": 128}
    encoder = {"num_hidden_layers": 4, "vocab_size": 1000, "max_position_embeddings": 128}
    llama = {
        "intermediate_size": 344,
        "num_hidden_layers": 4,
        "vocab_size": 1000,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    vit = {"num_hidden_layers": 8, "image_size": 32, "patch_size": 4}
    resnet = {"embedding_size": 32, "hidden_sizes": [128, 256, 512, 1024]}
    convnext = {"hidden_sizes": [24, 48, 96, 192], "depths": [2, 2, 4, 2], "patch_size": 2, "image_size": 64}
    return {
        "GPT-2": (_text("causal-lm", 64, model_type="gpt2", **decoder), 186.9),
        "BERT": (_text("masked-lm", 64, model_type="bert", **transformer, **encoder), 192.8),
        "Llama": (_text("causal-lm", 96, model_type="llama", **{**transformer, **llama}), 187.5),
        "ViT": (_image(32, model_type="vit", **transformer, **vit), 201.0),
        "ResNet-50": (_image(64, model_type="resnet", **resnet), 314.7),
        "ConvNeXt": (_image(64, model_type="convnext", **convnext), 222.7),
        "LSTM": (_own("lstm", width=256, layers=2, length=96), 223.7),
        "MLP": (_own("mlp", width=256, layers=16, features=32, rows=128), 272.6),
    }


def _card_specs() -> dict[str, tuple[dict[str, Any], float]]:
    """The published sizes; the budget is a share of the card."""
    return {
        "GPT-2": (_text("causal-lm", 512, model_type="gpt2"), 0),
        "BERT": (_text("masked-lm", 512, model_type="bert"), 0),
        "Llama": (
            _text(
                "causal-lm",
                512,
                model_type="llama",
                hidden_size=1024,
                intermediate_size=2816,
                num_hidden_layers=12,
                num_attention_heads=16,
                num_key_value_heads=4,
                max_position_embeddings=512,
            ),
            0,
        ),
        "ViT": (_image(224, model_type="vit"), 0),
        "ResNet-50": (_image(224, model_type="resnet"), 0),
        "ConvNeXt": (_image(224, model_type="convnext"), 0),
        "LSTM": (_own("lstm", width=1024, layers=4, length=512, vocabulary_size=32000), 0),
        "MLP": (_own("mlp", width=2048, layers=16, features=256, rows=256), 0),
    }
