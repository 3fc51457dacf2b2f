"""The contract between Batchwright and a model: the ``Workload`` protocol, and the optional parts of it.

A workload of your own is any object with three methods; name its factory as a ``python`` target in the spec::

    class Workload:
        def build_model(self): return MyModel()
        def make_batch(self, size): return {"x": torch.randn(size, 512), "y": torch.randint(0, 10, (size,))}
        def loss_terms(self, model, batch):
            loss_sum = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
            return {"classification": (loss_sum, len(batch["y"]))}

Losses are *sums with their weight*, never means: only then is the gradient of an accumulated update the full batch's,
however unevenly samples or tokens fall into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

Batch: TypeAlias = Any
"""Tensors, or dicts, lists and tuples of tensors, on the CPU; moved to the device as they are."""
Sample: TypeAlias = Any
"""One item of a dataset, whatever ``collate`` takes."""
LossTerms: TypeAlias = Mapping[str, tuple[Tensor, "Tensor | float"]]
"""For each named term the summed loss (a scalar with a graph) and the weight it was summed over."""


class Workload(Protocol):
    """A model with its worst-case batch and its loss."""

    def build_model(self) -> nn.Module:
        """A new model on the CPU (or on torch's current default device), with random weights, in training mode."""

    def make_batch(self, size: int) -> Batch:
        """``size`` random samples of the worst case (longest sequence, largest image), on the CPU."""

    def loss_terms(self, model: nn.Module, batch: Batch) -> LossTerms:
        """Forward pass: for each named term ``(loss_sum, weight)``.

        ``loss_sum`` is summed, not averaged, over the samples or tokens of ``batch``; ``weight`` is how many there were
        (after a shift, without padding). Call ``model`` itself, not its attributes: it may be wrapped.
        """


@runtime_checkable
class WeighsLosses(Protocol):
    """Optional: weights without a forward pass. Needed when there is more than one loss term."""

    def loss_weights(self, batch: Batch) -> Mapping[str, float]:
        """For each term the weight that ``loss_terms`` would return for ``batch``."""


class Samples(Protocol):
    """Samples with a length and random access: a list, an array, a map-style ``torch.utils.data.Dataset``."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Sample:
        """The sample at ``index``; the same on every call."""


@runtime_checkable
class HasDataset(Protocol):
    """Optional: what a training job reads."""

    def dataset(self) -> Samples:
        """All samples of one epoch."""


@runtime_checkable
class Collates(Protocol):
    """Optional: how samples become a batch; torch's default collation otherwise."""

    def collate(self, samples: list[Sample]) -> Batch:
        """A batch of these samples, on the CPU."""


IGNORED_LABEL = -100
"""Label of a position that counts neither in the loss nor in its weight (torch's default ``ignore_index``)."""


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in fp32 (in fp64 for such logits), summed over the positions that count.

    Args:
        logits: ``(..., classes)``, any floating type.
        labels: ``(...)``, class indices; ``IGNORED_LABEL`` where a position does not count.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(
        wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def counted(labels: Tensor) -> Tensor:
    """How many positions of ``labels`` count in the loss: a scalar on their device, for which nothing has to wait."""
    return (labels != IGNORED_LABEL).sum()


def random_tokens(size: int, length: int, vocabulary_size: int) -> Tensor:
    """Random token ids, ``(size, length)``."""
    return torch.randint(0, vocabulary_size, (size, length))


def pad_tokens(samples: list[Tensor]) -> dict[str, Tensor]:
    """Token samples of shape ``(length,)`` as a batch for next-token prediction, padded on the right.

    Padding is token 0 with an ignored label. A causal model never looks to the right, so no mask is needed, and a
    batch of full-length samples is laid out exactly as the probe's.
    """
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=0)
    labels = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=IGNORED_LABEL)
    return {"input_ids": ids, "labels": labels}
