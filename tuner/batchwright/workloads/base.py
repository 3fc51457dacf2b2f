"""The contract between Batchwright and a model: the ``Workload`` protocol, and the optional parts of it.

A workload of your own is any object with three methods; name its factory as a ``python`` target in the spec::

    class Workload:
        def build_model(self): return MyModel()
        def make_batch(self, size): return {"x": torch.randn(size, 512), "y": torch.randint(0, 10, (size,))}
        def loss_terms(self, model, batch):
            loss_sum = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
            return {"classification": (loss_sum, len(batch["y"]))}

Losses are *sums with their weight*, or the mean over the samples: only then is the gradient of an accumulated update
the full batch's, for any division of samples or tokens into micro-batches.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

Batch: TypeAlias = Any
"""Tensors, or dicts, lists and tuples of tensors, on the CPU."""
Sample: TypeAlias = Any
"""One item of a dataset, of the type that ``collate`` accepts."""
LossTerms: TypeAlias = Mapping[str, tuple[Tensor, "Tensor | float"]]
"""The summed loss (a scalar with a graph) of each named term, and the weight that the loss was summed over."""
Loss: TypeAlias = Tensor | tuple[Tensor, "Tensor | float"] | LossTerms
"""A loss: its mean over the samples of a batch, or its sum and the sum's weight, or several such pairs by name."""


class Workload(Protocol):
    """A model with its worst-case batch and its loss."""

    def build_model(self) -> nn.Module:
        """Build a model on the CPU (or torch's current default device), with random weights, in training mode.

        Modules that training keeps in eval mode, such as a BatchNorm with fixed statistics, are in eval mode.
        """

    def make_batch(self, size: int) -> Batch:
        """Make ``size`` random samples of the worst case (longest sequence, largest image), on the CPU."""

    def loss_terms(self, model: nn.Module, batch: Batch) -> LossTerms:
        """Run the forward pass. Return ``(loss_sum, weight)`` for each named term, or any other ``Loss``.

        ``loss_sum`` is summed, not averaged, over the samples or tokens of ``batch``; ``weight`` is their number (after
        a shift, without padding). Call ``model`` itself, not its attributes: the model may be wrapped.
        """


@runtime_checkable
class WeighsLosses(Protocol):
    """Optional: weights without a forward pass, which several loss terms need on several ranks."""

    def loss_weights(self, batch: Batch) -> Mapping[str, float]:
        """The weight of each term that ``loss_terms`` would return for ``batch``."""


@runtime_checkable
class KeepsModes(Protocol):
    """Optional: a model that is trained in the modes in which it is built, in eval mode too."""

    keeps_modes: ClassVar[bool]


@runtime_checkable
class BuildsOptimizer(Protocol):
    """Optional: an optimizer of the workload's own, instead of the spec's."""

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer of the parameters that are trained. Its state is allocated by its first step."""


@runtime_checkable
class BuildsLRScheduler(Protocol):
    """Optional: a learning-rate schedule of the workload's own, for jobs, instead of the spec's."""

    def build_lr_scheduler(
        self, optimizer: torch.optim.Optimizer, updates: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Build the scheduler of ``optimizer`` over the ``updates`` of a job, which steps it after each update.

        Its ``state_dict`` is in checkpoints. A job that resumes builds it again, then loads that state.
        """


class LabelScores(NamedTuple):
    """A batch's loss terms, with the logits and labels that they compare."""

    terms: LossTerms
    """As ``loss_terms`` returns them."""
    logits: Tensor
    """``(..., classes)``."""
    labels: Tensor
    """``(...)``, class indices or ``IGNORED_LABEL``."""


@runtime_checkable
class ScoresLabels(Protocol):
    """Optional: the loss with its logits and labels, for the metrics of an evaluation."""

    def score(self, model: nn.Module, batch: Batch) -> LabelScores:
        """Run the forward pass of ``loss_terms``. Return its terms, logits and labels."""


class RewardScores(NamedTuple):
    """A batch's loss terms, with the rewards of its preference pairs."""

    terms: LossTerms
    """As ``loss_terms`` returns them."""
    rewards: Tensor
    """``(pairs, 2)``: the reward of the chosen completion, and of the rejected one. Without a graph."""


@runtime_checkable
class ScoresRewards(Protocol):
    """Optional: the loss with the rewards of preference pairs, for the metrics of an evaluation."""

    def score_rewards(self, model: nn.Module, batch: Batch) -> RewardScores:
        """Run the forward pass of ``loss_terms``. Return its terms and the rewards."""


class Samples(Protocol):
    """Samples with a length and random access: a list, an array, a map-style ``torch.utils.data.Dataset``."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Sample:
        """The sample at ``index``, equal on every call."""


@runtime_checkable
class HasDataset(Protocol):
    """Optional: the data set of a training job."""

    def dataset(self) -> Samples:
        """All samples of one epoch."""


@runtime_checkable
class HasEvaluationDataset(Protocol):
    """Optional: the held-out data set of a training job."""

    def evaluation_dataset(self) -> Samples:
        """All samples to evaluate on, none of which trains."""


@runtime_checkable
class Collates(Protocol):
    """Optional: the collation of samples; torch's default collation otherwise."""

    def collate(self, samples: list[Sample]) -> Batch:
        """Make a batch of these samples, on the CPU."""


IGNORED_LABEL = -100
"""Label of a position that is excluded from the loss and its weight (torch's default ``ignore_index``)."""


def summed_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy in fp32 (fp64 for fp64 logits), summed over the positions whose label is not ignored.

    Args:
        logits: ``(..., classes)``, any floating type.
        labels: ``(...)``, class indices or ``IGNORED_LABEL``.
        label_smoothing: share of each label's probability that is spread evenly over all classes, from 0 to 1.
    """
    return _cross_entropy(logits, labels, "sum", label_smoothing)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each position, ``(...)``, which ``summed_cross_entropy`` sums; 0 for ignored labels."""
    return _cross_entropy(logits, labels, "none").view_as(labels)


def _cross_entropy(logits: Tensor, labels: Tensor, reduction: str, label_smoothing: float = 0.0) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(
        wide.flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def count_labels(labels: Tensor) -> Tensor:
    """Number of ``labels`` that are not ignored, a scalar on their device, to avoid a synchronization."""
    return (labels != IGNORED_LABEL).sum()


def random_tokens(size: int, length: int, vocabulary_size: int) -> Tensor:
    """Random token ids, ``(size, length)``."""
    return torch.randint(0, vocabulary_size, (size, length))


def pad_tokens(samples: list[Tensor]) -> dict[str, Tensor]:
    """Make a batch for next-token prediction of token samples of shape ``(length,)``, padded on the right.

    Padding is token 0 with an ignored label. A causal model does not attend to later positions, so no mask is needed,
    and a batch of full-length samples has the same layout as the probe's.
    """
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=0)
    labels = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=IGNORED_LABEL)
    return {"input_ids": ids, "labels": labels}
