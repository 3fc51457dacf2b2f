"""The workloads of finders.py: eight architectures, small for a CPU's budget, larger for a share of a card.

Two are ``python`` targets of this module: an LSTM and an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.workload import parse_spec
from batchwright.workloads.base import LossTerms, random_tokens, summed_cross_entropy

ROOMY_BYTES = 1024**3
"""The limit on the CPU under which peaks are measured that a budget is set by. No workload's peak comes near it."""
SAMPLES, IMAGES = 4096, 1024
"""The effective batch of texts and rows, and of images: well above every answer, so that it never decides. On the CPU
all of it is in memory."""
CARD_FRACTION = 0.2
"""Of a card's memory."""


class Classifier:
    """Cross-entropy over ten classes of random samples."""

    def __init__(
        self, build: Callable[[], nn.Module], shape: tuple[int, ...], vocabulary_size: int | None = None
    ) -> None:
        self._build = build
        self._shape = shape
        self._vocabulary_size = vocabulary_size

    def build_model(self) -> nn.Module:
        """A new model, on torch's current default device."""
        return self._build()

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
    return Classifier(lambda: LstmClassifier(width, layers, vocabulary_size), (length,), vocabulary_size)


def mlp(width: int, layers: int, features: int, rows: int) -> Classifier:
    """The ``python`` target of the MLP: linear layers with GELU and normalisation over every row of a sample."""

    def build() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(layers)]
        pooled = nn.Sequential(nn.Flatten(), nn.Linear(rows * 8, 10))
        return nn.Sequential(nn.Linear(features, width), *blocks, nn.Linear(width, 8), pooled)

    return Classifier(build, (rows, features))


@dataclass(frozen=True)
class Case:
    """One workload on one device under one budget.

    Attributes:
        name: the architecture.
        request: what the finders are asked. Its limit is the budget, once there is one.
        size: the size that the budget is set for, half-way between its peak and that of the next; none where the budget
            is set already.
    """

    name: str
    request: TuningRequest
    size: int | None = None

    def under(self, limit_bytes: int) -> Case:
        """Return the case under a budget."""
        return replace(self, request=self.request.model_copy(update={"memory_limit_bytes": limit_bytes}), size=None)


def cases(device: DeviceInfo) -> Iterator[Case]:
    """The eight workloads for a device."""
    on_card = device.kind == "cuda"
    for name, (spec, size) in (_card_specs() if on_card else _cpu_specs()).items():
        limit = int(CARD_FRACTION * device.total_bytes) if on_card else ROOMY_BYTES
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
            size,
        )


def _text(task: str, length: int, **config: object) -> dict[str, Any]:
    model = {"kind": "transformers", "task": task, "config": config}
    return {"model": model, "batch": {"sequence_length": length}}


def _image(side: int, **config: object) -> dict[str, Any]:
    model = {"kind": "transformers", "task": "image-classification", "config": {"num_labels": 10, **config}}
    return {"model": model, "batch": {"image_size": side}}


def _own(name: str, **arguments: int) -> dict[str, Any]:
    return {"model": {"kind": "python", "target": f"finders_workloads:{name}", "arguments": arguments}}


def _cpu_specs() -> dict[str, tuple[dict[str, Any], int | None]]:
    """Narrow and shallow, with the sizes that their budgets are set for.

    The peak of one and the same probe differs from one fork server to the next, by about 1 MiB. So that there is one
    answer, a sample takes 3 to 6 MiB.
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
        "GPT-2": (_text("causal-lm", 64, model_type="gpt2", **decoder), 31),
        "BERT": (_text("masked-lm", 64, model_type="bert", **transformer, **encoder), 43),
        "Llama": (_text("causal-lm", 96, model_type="llama", **{**transformer, **llama}), 33),
        "ViT": (_image(32, model_type="vit", **transformer, **vit), 37),
        "ResNet-50": (_image(64, model_type="resnet", **resnet), 34),
        "ConvNeXt": (_image(64, model_type="convnext", **convnext), 25),
        "LSTM": (_own("lstm", width=256, layers=2, length=96), 47),
        "MLP": (_own("mlp", width=256, layers=16, features=32, rows=128), 30),
    }


def _card_specs() -> dict[str, tuple[dict[str, Any], int | None]]:
    """The published sizes; the budget is a share of the card."""
    return {
        "GPT-2": (_text("causal-lm", 512, model_type="gpt2"), None),
        "BERT": (_text("masked-lm", 512, model_type="bert"), None),
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
            None,
        ),
        "ViT": (_image(224, model_type="vit"), None),
        "ResNet-50": (_image(224, model_type="resnet"), None),
        "ConvNeXt": (_image(224, model_type="convnext"), None),
        "LSTM": (_own("lstm", width=1024, layers=4, length=512, vocabulary_size=32000), None),
        "MLP": (_own("mlp", width=2048, layers=16, features=256, rows=256), None),
    }
