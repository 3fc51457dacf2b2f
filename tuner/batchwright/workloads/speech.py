"""Speech with transformers: texts written by a decoder from audio, and CTC over the frames of raw audio.

Audio reaches a model as its waveform (raw audio) or as the frames of a spectrogram (features).
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.workloads.base import LossTerms, random_tokens
from batchwright.workloads.config_fields import TransformersConfig

Inputs: TypeAlias = "Callable[[int], dict[str, Tensor]]"
"""Function from a number of samples to a model's keyword arguments."""

_WHISPER_STRIDE = 2
"""Frames per position of Whisper's encoder: the stride of its second convolution."""
_RAW_SEQ2SEQ = ("moonshine", "speecht5")
_RAW_CTC = (
    "data2vec-audio",
    "hubert",
    "sew",
    "sew-d",
    "unispeech",
    "unispeech-sat",
    "wav2vec2",
    "wav2vec2-conformer",
    "wavlm",
)
"""Types of models that take raw audio, of those that transformers 5.23 has for each task."""
_FEWEST_ENTRIES = 3
"""Fewest entries of a vocabulary of CTC: the blank, and two labels that may follow each other."""


def speech_seq2seq_inputs(config: TransformersConfig, batch: BatchSpec) -> Inputs:
    """Return the maker of audio with the tokens that the decoder reads.

    Raises:
        SpecError: when the type of the model is not supported, or the length of the audio is missing or not possible.
    """
    audio = _audio_of_seq2seq(config, batch)
    length = batch.sequence_length or 0

    def make(size: int) -> dict[str, Tensor]:
        return {**audio(size), "decoder_input_ids": random_tokens(size, length, config.vocab_size)}

    return make


def _audio_of_seq2seq(config: TransformersConfig, batch: BatchSpec) -> Inputs:
    if config.model_type == "whisper":
        frames = _fixed_frames(config, batch)
        return lambda size: {"input_features": torch.randn(size, config.num_mel_bins, frames)}
    if config.model_type == "speech_to_text":
        length, width = _audio_length(batch), config.input_feat_per_channel * config.input_channels
        return lambda size: {
            "input_features": torch.randn(size, length, width),
            "attention_mask": _mask(size, length, min(length - 1, 2**config.num_conv_layers)),
        }
    if config.model_type in _RAW_SEQ2SEQ:
        length = _audio_length(batch)
        return lambda size: {"input_values": torch.randn(size, length)}
    raise _unsupported(config, "speech-seq2seq", ("whisper", "speech_to_text", *_RAW_SEQ2SEQ))


def _fixed_frames(config: TransformersConfig, batch: BatchSpec) -> int:
    """Return the only number of frames that Whisper takes: shorter audio is padded with silence."""
    frames = int(config.max_source_positions) * _WHISPER_STRIDE
    if batch.audio_length not in {None, frames}:
        message = f"must be {frames} frames for this config (twice its max_source_positions), or absent"
        raise SpecError([FieldProblem("batch.audio_length", message, str(batch.audio_length))])
    return frames


class CtcWorkload:
    """Connectionist temporal classification of raw audio: labels without times, such as characters.

    The loss is that of transformers: `ctc_loss_reduction: mean` divides the loss of a sample by its labels, `sum` does
    not; either way an update has the mean over its samples.

    Args:
        build: makes the model.
        config: the model's configuration.
        batch: the worst case: values of the waveform, and labels.

    Raises:
        SpecError: when the type of the model is not supported, or the audio has fewer frames than labels.
    """

    def __init__(self, build: Callable[[], nn.Module], config: TransformersConfig, batch: BatchSpec) -> None:
        if config.model_type not in _RAW_CTC:
            raise _unsupported(config, "ctc", _RAW_CTC)
        if config.vocab_size < _FEWEST_ENTRIES:
            message = f"must be at least {_FEWEST_ENTRIES} for ctc: the blank and two labels"
            raise SpecError([FieldProblem("model.config.vocab_size", message, str(config.vocab_size))])
        self.build_model = build
        self.config = config
        self._audio_length = _audio_length(batch)
        self._labels = batch.sequence_length or 0
        self._stride = int(torch.tensor(config.conv_stride).prod())
        self._is_masked = getattr(config, "feat_extract_norm", "layer") == "layer"
        _require_frames(config, self._audio_length, self._labels)

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Random audio of full length, but for one frame of padding where the model takes a mask, and labels."""
        batch = {"input_values": torch.randn(size, self._audio_length)}
        if self._is_masked:
            batch["attention_mask"] = _mask(size, self._audio_length, self._stride)
        choices = self.config.vocab_size - 1
        steps = torch.randint(1, choices, (size, self._labels))
        labels: Tensor = steps.cumsum(1) % choices  # none equals its neighbour, which would need a frame more
        return {**batch, "labels": labels.add(labels >= self.config.pad_token_id)}  # the blank is no label

    def loss_terms(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LossTerms:
        """One term, ``ctc``."""
        loss, samples = model(**batch).loss, len(batch["input_values"])
        return {"ctc": (loss * samples if self.config.ctc_loss_reduction == "mean" else loss, samples)}

    def loss_weights(self, batch: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Number of samples."""
        return {"ctc": float(len(batch["input_values"]))}


def _require_frames(config: TransformersConfig, audio_length: int, labels: int) -> None:
    frames = audio_length
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        frames = (frames - kernel) // stride + 1
    needed = labels + 1  # one frame may be padding
    if getattr(config, "apply_spec_augment", True) and config.mask_time_prob > 0:
        needed = max(needed, config.mask_time_length + 1)
    if frames < needed:
        message = (
            f"gives {max(frames, 0)} frames, and {needed} are needed: one for each of the {labels} labels "
            "(batch.sequence_length) and one more, and more than `mask_time_length`"
        )
        raise SpecError([FieldProblem("batch.audio_length", message, str(audio_length))])


def _audio_length(batch: BatchSpec) -> int:
    if batch.audio_length is None:
        message = (
            "is required: the number of values of the longest waveform for a model of raw audio, otherwise of "
            "its feature frames"
        )
        raise SpecError([FieldProblem("batch.audio_length", message)])
    return batch.audio_length


def _mask(size: int, length: int, padding: int) -> Tensor:
    """Return a mask of ones, but for some padding of the first sample: a mask without a zero may be dropped."""
    mask = torch.ones(size, length, dtype=torch.int64)
    mask[0, length - padding :] = 0
    return mask


def _unsupported(config: TransformersConfig, task: str, supported: tuple[str, ...]) -> SpecError:
    message = f"{task} trains {', '.join(supported)}: for {config.model_type} write a `python` workload"
    return SpecError([FieldProblem("model.task", message, task)])
