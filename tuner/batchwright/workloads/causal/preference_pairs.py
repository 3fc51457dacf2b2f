"""Direct preference optimization (DPO) of a causal language model on pairs of a chosen and a rejected completion.

Sources: Rafailov et al. 2023 (the loss `sigmoid`), Mitchell 2023 (label smoothing), Azar et al. 2023 (`ipo`).
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from batchwright.schemas.dataset.preference_spec import PreferenceSpec
from batchwright.workloads.base import IGNORED_LABEL, LossTerms, RewardScores, cross_entropies, random_tokens
from batchwright.workloads.causal.decoders import vocabulary_size_of
from batchwright.workloads.causal.reference_policy import as_reference
from batchwright.workloads.config_fields import TransformersConfig

_SIDES = 2
"""The chosen completion, then the rejected one."""


class PreferenceWorkload:
    """Pairs of sequences, the chosen one first, with one unit of weight per pair.

    A batch has ``input_ids`` and ``labels`` of shape ``(pairs, 2, s)``, padded on the right. Labels are ignored but for
    the tokens of the completions. A sample is a pair, so that a pair is never divided.

    Args:
        build: makes the model, with its reference policy.
        length: tokens of the longest sequence.
        config: the model's configuration.
        preference: the loss.
    """

    def __init__(
        self, build: Callable[[], nn.Module], length: int, config: TransformersConfig, preference: PreferenceSpec
    ) -> None:
        self.build_model = build
        self.config = config
        self.vocabulary_size = vocabulary_size_of(config)
        self._length = length
        self._preference = preference

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Random full-length pairs of a prompt of half the length with two completions."""
        ids = random_tokens(size * _SIDES, self._length, self.vocabulary_size).view(size, _SIDES, self._length)
        half = self._length // 2
        ids[:, 1, :half] = ids[:, 0, :half]
        labels = ids.clone()
        labels[..., :half] = IGNORED_LABEL
        return {"input_ids": ids, "labels": labels}

    def loss_terms(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
        """One term, ``preference``."""
        return self.score_rewards(model, batch).terms

    def loss_weights(self, batch: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Number of pairs."""
        return {"preference": float(len(batch["input_ids"]))}

    def score_rewards(self, model: nn.Module, batch: Mapping[str, Tensor]) -> RewardScores:
        """Run the reference, whose logits are freed before the activations of the model are kept, and the model."""
        with as_reference(model):
            reference = self._log_probabilities(model, batch)
        ratios = self._log_probabilities(model, batch) - reference
        losses = self._losses(ratios, batch["labels"])
        terms = {"preference": (losses.sum(), float(len(losses)))}
        return RewardScores(terms, self._preference.beta * ratios.detach())

    def _log_probabilities(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Logarithms of the probabilities of the completions, in fp32 or fp64: ``(pairs, 2)``."""
        ids, labels = batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1)[:, 1:]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return -cross_entropies(logits, labels).sum(1).view(-1, _SIDES)

    def _losses(self, ratios: Tensor, labels: Tensor) -> Tensor:
        """The loss of each pair by the log-ratios to the reference, ``(pairs, 2)``: ``(pairs,)``."""
        beta, smoothing = self._preference.beta, self._preference.label_smoothing
        if self._preference.loss == "ipo":  # of means per token, as its authors use it and TRL does
            tokens = (labels[..., 1:] != IGNORED_LABEL).sum(-1).clamp(min=1)
            means = ratios / tokens
            return (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square()
        margins = beta * (ratios[:, 0] - ratios[:, 1])
        likelihoods = F.logsigmoid(margins)
        if not smoothing:
            return -likelihoods
        return -(1 - smoothing) * likelihoods - smoothing * F.logsigmoid(-margins)
