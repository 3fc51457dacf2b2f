"""Workloads of causal language models: next-token prediction, of packed documents, with the loss of routers."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from batchwright.errors import FieldProblem, SpecError
from batchwright.workloads.base import IGNORED_LABEL, LabelScores
from batchwright.workloads.causal.routers import ROUTER_TERM, router_coefficient, router_loss
from batchwright.workloads.config_fields import TransformersConfig
from batchwright.workloads.reference import NextTokenWorkload

_FEWEST_TOKENS = 2
"""Fewest tokens of a sample with a next token to predict."""


class CausalWorkload(NextTokenWorkload):
    """Next-token prediction with a transformers decoder."""

    takes_mask = False
    """True if batches have an ``attention_mask``, which a causal model does not need for padding on the right."""

    def __init__(
        self, build: Callable[[], nn.Module], length: int, config: TransformersConfig, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(build, length, vocabulary_size_of(config), label_smoothing)
        self.config = config

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """``(n, s, vocabulary_size)``, without the key-value cache of generation."""
        logits: Tensor = model(input_ids=batch["input_ids"], use_cache=False).logits
        return logits


class PackedWorkload(CausalWorkload):
    """Next-token prediction in sequences of several documents, which neither attend to nor predict each other.

    A batch has ``position_ids`` ``(n, s)`` beside ids and labels. They restart from 0 at each document, from which
    transformers derives the mask of attention (``find_packed_sequence_indices`` in its ``masking_utils``). The first
    label of a document is ignored. A position of padding is a document of its own.
    """

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Random full-length samples of two documents each.

        Attention of ``sdpa`` has a mask of ``(n, 1, s, s)`` as soon as one sample has two documents, and none
        otherwise, which takes less memory. More documents take no more.
        """
        batch, half = super().make_batch(size), self._length // 2
        batch["labels"][:, half] = IGNORED_LABEL
        positions = torch.arange(self._length)
        positions[half:] -= half
        return {**batch, "position_ids": positions.repeat(size, 1)}

    @override
    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits


class RoutedWorkload(CausalWorkload):
    """Next-token prediction with a mixture of experts whose routers are trained to balance their load.

    The routers' loss, times its coefficient, is a separate term, weighted by the tokens without padding. With one
    micro-batch per update the loss equals the loss that transformers computes.
    """

    takes_mask = True
    """True, because the routers' loss must ignore padding."""

    def __init__(
        self, build: Callable[[], nn.Module], length: int, config: TransformersConfig, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(build, length, config, label_smoothing)
        self._coefficient = router_coefficient(config)

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Random samples of full length, but for one padding token: a mask without a zero would be dropped."""
        batch = super().make_batch(size)
        if self._length > _FEWEST_TOKENS:
            batch["attention_mask"][0, -1] = 0
            batch["labels"][0, -1] = IGNORED_LABEL
        return batch

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Pad on the right with ignored labels, and add a mask."""
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(sample) for sample in samples], batch_first=True)
        return {**super().collate(samples), "attention_mask": mask}

    def score(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LabelScores:
        """Score the next token, with two terms, ``next_token`` and ``router_aux_loss``."""
        mask = batch.get("attention_mask")
        output = model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False, output_router_logits=True)
        tokens = _tokens(batch)
        terms = {
            "next_token": self.next_token_loss(output.logits, batch),
            ROUTER_TERM: (router_loss(output).float() * self._coefficient * tokens, tokens),
        }
        return LabelScores(terms, output.logits[:, :-1], batch["labels"][:, 1:])

    def loss_weights(self, batch: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Numbers of target tokens, and of all tokens without padding."""
        return {**super().loss_weights(batch), ROUTER_TERM: float(_tokens(batch))}


def _tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Number of tokens of a batch without padding, a scalar on their device."""
    mask = batch.get("attention_mask")
    return (torch.ones_like(batch["input_ids"]) if mask is None else mask).sum()


def vocabulary_size_of(config: TransformersConfig) -> int:
    """Number of token ids of a configuration.

    Raises:
        SpecError: when it is not one of a text model.
    """
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        message = f"needs a text model, and {type(config).__name__} has no vocabulary"
        raise SpecError([FieldProblem("model.task", message)])
    return size
