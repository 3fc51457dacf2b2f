"""Contrastive pairs of images and texts with transformers, as CLIP and SigLIP are trained."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.workloads.base import LossTerms, random_tokens
from batchwright.workloads.config_fields import TransformersConfig

_SUPPORTED = ("align", "altclip", "chinese_clip", "clip", "clipseg", "metaclip_2", "siglip")
"""Types of models whose forward pass takes pairs and returns their loss, of those in transformers 5.23."""
_MASKLESS = {"siglip"}
"""Types that are trained without a mask of the texts, all of which are padded to one length."""


class ContrastiveWorkload:
    """Pairs of an image and a text, each of which is distinguished from the other pairs of its micro-batch.

    The loss is that of transformers. It couples the samples of a micro-batch, so that an update is exact only with all
    pairs in one micro-batch.

    Args:
        build: makes the model.
        config: the model's configuration, with a ``text_config`` and a ``vision_config``.
        batch: the worst case: tokens of the longest text, and pixels of the largest image's side.

    Raises:
        SpecError: when the type of the model is not supported, or the image's size is not that of the model.
    """

    def __init__(self, build: Callable[[], nn.Module], config: TransformersConfig, batch: BatchSpec) -> None:
        if config.model_type not in _SUPPORTED:
            message = f"contrastive trains {', '.join(_SUPPORTED)}: for {config.model_type} write a `python` workload"
            raise SpecError([FieldProblem("model.task", message, "contrastive")])
        self.build_model = build
        self.config = config
        self._length = batch.sequence_length or 0
        self._side = batch.image_size or int(config.vision_config.image_size)
        self._is_masked = config.model_type not in _MASKLESS

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Random images, and texts of full length but for one padding token where the model takes a mask."""
        text = self.config.text_config
        ids = random_tokens(size, self._length, text.vocab_size)
        channels = int(self.config.vision_config.num_channels)
        batch = {"input_ids": ids, "pixel_values": torch.randn(size, channels, self._side, self._side)}
        if self._is_masked:
            mask = torch.ones_like(ids)
            mask[0, 1:][-1:] = 0  # but a text of one token is not all padding
            batch["attention_mask"] = mask
        return batch

    def loss_terms(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
        """One term, ``contrastive``: the mean over the pairs of a micro-batch, times their number."""
        pairs = len(batch["pixel_values"])
        return {"contrastive": (model(**batch, return_loss=True).loss * pairs, pairs)}

    def loss_weights(self, batch: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Number of pairs."""
        return {"contrastive": float(len(batch["pixel_values"]))}
