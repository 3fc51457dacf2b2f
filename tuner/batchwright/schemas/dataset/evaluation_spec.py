"""Evaluations of a run on held-out samples."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from batchwright.schemas.base import Document, NonNegativeInt, PositiveInt
from batchwright.schemas.dataset.data_spec import HeldOutData

MetricName = Literal["accuracy", "perplexity", "f1", "precision", "recall", "reward_accuracy", "reward_margin"]
"""Figures of an evaluation beside its loss: see ``EvaluationSpec.metrics``."""
REWARD_METRICS = frozenset({"reward_accuracy", "reward_margin"})
"""Metrics of preference pairs, which have no others."""
Monitored = Literal["loss", "accuracy", "perplexity", "f1", "precision", "recall", "reward_accuracy", "reward_margin"]
"""Figures that choose the best weights."""
EvaluatedWeights = Literal["trained", "average", "both"]
"""The weights that an evaluation uses where moving averages are kept."""
_MOST_METRICS = 16


class EarlyStopping(Document):
    """The end of a run that no longer improves on held-out samples."""

    patience: PositiveInt
    """Evaluations in a row without an improvement, after which the run ends."""
    min_delta: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """The change of the monitored figure above which it counts as improved."""


class EvaluationSpec(Document):
    """Evaluation of a run on held-out samples: a split of its data, or data of its own.

    The weights before the first update are evaluated, and those of the end; in between every `every` updates. Held-out
    samples never train.
    """

    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the samples of `data` to hold out. Give this, `count` or `data`."""
    count: PositiveInt | None = None
    """Number of the samples of `data` to hold out."""
    data: HeldOutData | None = None
    """Data of its own, in files that `data` does not read. The kind `workload` is the workload's
    `evaluation_dataset()`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the choice of samples that `fraction` or `count` holds out."""
    every: PositiveInt | None = None
    """Updates between two evaluations. Default: evaluate at the start and the end only."""
    micro_batch_size: PositiveInt | None = None
    """Samples per forward pass. Default: the plan's largest micro-batch. Halved if they do not fit."""
    metrics: Annotated[tuple[MetricName, ...], Field(max_length=_MOST_METRICS)] = ()
    """`accuracy`: share of the labels that have the highest logit. `perplexity`: the exponential of the mean of the
    first loss term, for a cross-entropy. `f1`, `precision` and `recall` are means over the classes of a classifier, by
    the package `torchmetrics`. Of preference pairs: `reward_accuracy`, the share with a larger reward of the chosen
    completion, and `reward_margin`, the mean difference of the two rewards."""
    monitor: Monitored = "loss"
    """The figure that chooses the best weights and ends a run early: `loss`, or one of `metrics`."""
    weights: EvaluatedWeights = "trained"
    """The weights that are evaluated, choose the best ones and end a run early: those that train (`trained`), or their
    moving averages of `ema_decay` (`average`). `both`: as `average`, and the trained ones are evaluated beside."""
    early_stopping: EarlyStopping | None = None
    """When to end the run before its last update. Default: never."""

    @model_validator(mode="after")
    def _holds_out_one_way(self) -> Self:
        if sum(given is not None for given in (self.fraction, self.count, self.data)) != 1:
            raise ValueError("give exactly one of `fraction`, `count` and `data`: the samples to evaluate on")
        if self.early_stopping is not None and self.every is None:
            raise ValueError("`early_stopping` needs `every`: the updates between two evaluations")
        if self.monitor != "loss" and self.monitor not in self.metrics:
            raise ValueError(f"`monitor` is `{self.monitor}`, which must also be one of `metrics`")
        return self

    @property
    def uses_averages(self) -> bool:
        """True if the moving averages are evaluated, and choose the best weights."""
        return self.weights != "trained"

    def require_use(self, *, unlabelled: str, has_vocabulary: bool, has_averages: bool, has_pairs: bool) -> None:
        """Check that the metrics are of use for a model, and that the weights to evaluate are kept.

        Args:
            unlabelled: the task, if its loss is no cross-entropy over labels; empty otherwise.
            has_vocabulary: whether the classes of the labels are the tokens of a vocabulary.
            has_averages: whether moving averages of the weights are kept.
            has_pairs: whether the samples are preference pairs.

        Raises:
            ValueError: naming the first metric that is not of use, or the weights that are not kept.
        """
        if self.uses_averages and not has_averages:
            raise ValueError(
                f"`evaluation.weights` is `{self.weights}`, but no moving averages are kept: also set `ema_decay`"
            )
        for name in self.metrics:
            if has_pairs != (name in REWARD_METRICS):
                known = " and ".join(f"`{metric}`" for metric in sorted(REWARD_METRICS))
                raise ValueError(
                    f"`{name}` is not available here: {known} are the only metrics of `preference`, and only of it"
                )
            if unlabelled:
                raise ValueError(f"`{name}` is for a cross-entropy over labels, which {unlabelled} does not have")
            if has_vocabulary and name not in {"accuracy", "perplexity", *REWARD_METRICS}:
                raise ValueError(
                    f"`{name}` is an average over the classes of a classifier, and this model has a vocabulary"
                )

    @property
    def is_split(self) -> bool:
        """True if the held-out samples are some of the training data."""
        return self.data is None

    def held_out_of(self, samples: int) -> NonNegativeInt:
        """Number of samples of a split to hold out, of the data's ``samples``; at least one."""
        return self.count if self.count is not None else max(1, round((self.fraction or 0.0) * samples))
