"""Small models that need only torch: an MLP, a ResNet with BatchNorm, a GPT with tied embeddings."""

import itertools
from collections.abc import Callable, Mapping
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.utils.checkpoint import checkpoint

from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.schemas.workload import Gpt, Mlp, ReferenceModel, ResNet
from batchwright.workloads.base import (
    LabelScores,
    LossTerms,
    Workload,
    count_labels,
    pad_tokens,
    random_tokens,
    summed_cross_entropy,
)


def _run(block: nn.Module, inputs: Tensor, *, recompute: bool) -> Tensor:
    """Call a block, storing its activations or recomputing them in the backward pass."""
    output: Tensor = checkpoint(block, inputs, use_reentrant=False) if recompute else block(inputs)
    return output


class MlpNetwork(nn.Module):
    """Linear layers with ReLU between them: ``(batch, input_features)`` to ``(batch, classes)``."""

    def __init__(self, sizes: Mlp, *, recompute: bool) -> None:
        super().__init__()
        widths = [sizes.input_features, *[sizes.hidden_features] * sizes.hidden_layers]
        self.hidden = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], sizes.classes)
        self.recompute = recompute

    def forward(self, features: Tensor) -> Tensor:
        """Logits."""
        for layer in self.hidden:
            features = _run(layer, features, recompute=self.recompute)
        logits: Tensor = self.head(features)
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut (He et al., 2015, the basic block)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, inputs, h, w)`` to ``(batch, outputs, h / stride, w / stride)``."""
        return F.relu(self.body(images) + self.shortcut(images), inplace=True)


class ResNetNetwork(nn.Module):
    """A residual network: ``(batch, channels, size, size)`` to ``(batch, classes)``."""

    def __init__(self, sizes: ResNet, *, recompute: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(sizes.channels, sizes.width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(sizes.width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.ModuleList(self._blocks(sizes))
        self.head = nn.Linear(sizes.width * 8, sizes.classes)
        self.recompute = recompute

    @staticmethod
    def _blocks(sizes: ResNet) -> list[ResidualBlock]:
        blocks, inputs = [], sizes.width
        for stage in range(4):
            outputs = sizes.width * 2**stage
            for index in range(sizes.blocks_per_stage):
                blocks.append(ResidualBlock(inputs, outputs, stride=2 if stage and not index else 1))
                inputs = outputs
        return blocks

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        features: Tensor = self.stem(images)
        for block in self.blocks:
            features = _run(block, features, recompute=self.recompute)
        logits: Tensor = self.head(F.adaptive_avg_pool2d(features, 1).flatten(1))
        return logits


class GptBlock(nn.Module):
    """Pre-norm causal self-attention and a feed-forward layer of four times the width."""

    def __init__(self, sizes: Gpt) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, states: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same shape."""
        batch, length, width = states.shape
        parts = self.query_key_value(self.attention_norm(states)).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        output: Tensor = states + self.dropout(self.feed_forward(self.feed_forward_norm(states)))
        return output


class GptNetwork(nn.Module):
    """A decoder-only transformer: token ids ``(batch, length)`` to logits ``(batch, length, vocabulary_size)``."""

    def __init__(self, sizes: Gpt, longest: int, *, recompute: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary_size, sizes.width)
        self.positions = nn.Embedding(longest, sizes.width)
        self.blocks = nn.ModuleList(GptBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary_size, bias=False)
        self.recompute = recompute
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        states: Tensor = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            states = _run(block, states, recompute=self.recompute)
        logits: Tensor = self.head(self.norm(states))
        return logits


class ClassificationWorkload:
    """Cross-entropy of a classifier over ``{"inputs": (n, ...), "labels": (n,)}``; one unit of weight per sample."""

    def __init__(
        self, build: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, label_smoothing: float = 0.0
    ) -> None:
        self.build_model = build
        self._label_smoothing = label_smoothing
        self._shape = shape
        self._classes = classes

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Standard normal inputs and uniform labels."""
        return {"inputs": torch.randn(size, *self._shape), "labels": torch.randint(0, self._classes, (size,))}

    def loss_terms(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
        """One term, ``cross_entropy``."""
        return self.score(model, batch).terms

    def score(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LabelScores:
        """Score the classes of each sample."""
        logits, labels = model(batch["inputs"]), batch["labels"]
        loss = summed_cross_entropy(logits, labels, self._label_smoothing)
        return LabelScores({"cross_entropy": (loss, float(len(labels)))}, logits, labels)

    def loss_weights(self, batch: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Number of samples."""
        return {"cross_entropy": float(len(batch["labels"]))}


class NextTokenWorkload:
    """Next-token cross-entropy over ``{"input_ids": (n, s), "labels": (n, s)}``, weighted by target tokens."""

    def __init__(
        self, build: Callable[[], nn.Module], length: int, vocabulary_size: int, label_smoothing: float = 0.0
    ) -> None:
        self.build_model = build
        self._label_smoothing = label_smoothing
        self._length = length
        self.vocabulary_size = vocabulary_size

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Random full-length samples."""
        return self.collate(list(random_tokens(size, self._length, self.vocabulary_size)))

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Pad on the right with ignored labels."""
        return pad_tokens(samples)

    def loss_terms(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
        """One term, ``next_token``: position ``t`` predicts token ``t + 1``."""
        return self.score(model, batch).terms

    def score(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LabelScores:
        """Score the next token at every position but the last."""
        logits = self.logits(model, batch)
        return LabelScores({"next_token": self.next_token_loss(logits, batch)}, logits[:, :-1], batch["labels"][:, 1:])

    def next_token_loss(self, logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropy over the target tokens of ``(n, s, vocabulary_size)`` logits, and their number."""
        labels = batch["labels"][:, 1:]
        return summed_cross_entropy(logits[:, :-1], labels, self._label_smoothing), count_labels(labels)

    def loss_weights(self, batch: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Number of target tokens: those after the shift that are not padding."""
        return {"next_token": float(count_labels(batch["labels"][:, 1:]))}

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """``(n, s, vocabulary_size)``."""
        logits: Tensor = model(batch["input_ids"])
        return logits


def reference_workload(
    model: ReferenceModel, batch: BatchSpec, *, recompute: bool, label_smoothing: float = 0.0
) -> Workload:
    """Build the workload of a ``reference`` model. ``recompute`` turns activation checkpointing on, block by block."""
    sizes = model.architecture
    match sizes:
        case Mlp():
            return ClassificationWorkload(
                lambda: MlpNetwork(sizes, recompute=recompute),
                (sizes.input_features,),
                sizes.classes,
                label_smoothing,
            )
        case ResNet():
            side = batch.image_size or 0
            return ClassificationWorkload(
                lambda: ResNetNetwork(sizes, recompute=recompute),
                (sizes.channels, side, side),
                sizes.classes,
                label_smoothing,
            )
        case Gpt():
            length = batch.sequence_length or 0
            return NextTokenWorkload(
                lambda: GptNetwork(sizes, length, recompute=recompute), length, sizes.vocabulary_size, label_smoothing
            )
        case _:
            assert_never(sizes)
