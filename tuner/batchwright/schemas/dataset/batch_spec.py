"""The worst case of a sample, and the packing of records into samples."""

from collections.abc import Mapping
from typing import Literal

from batchwright.schemas.base import Document, PositiveInt
from batchwright.schemas.dataset.data_spec import DataSpec, SyntheticData
from batchwright.schemas.dataset.evaluation_spec import EvaluationSpec

Packing = Literal["bfd", "wrapped"]
"""How records fill a sequence: see ``BatchSpec.packing``."""
_SHORTEST_PACKED = 4
"""Two documents with a next token to predict in each."""
_PACKED_DATA = {"records", "synthetic"}


class BatchSpec(Document):
    """The worst case of one sample. The required fields depend on the model."""

    sequence_length: PositiveInt | None = None
    """Tokens of the longest sample, after tokenisation. Needed by models with texts, also as the labels of speech."""
    packing: Packing | None = None
    """Pack `records` into sequences of `sequence_length` tokens, for causal language models of transformers: a sample
    is such a sequence, and without packing a record. Attention, positions and labels are those of each record alone.
    `bfd` (best-fit decreasing): whole records, each into the fullest sequence that has room. `wrapped`: all records one
    after the other, cut where a sequence is full."""
    image_size: PositiveInt | None = None
    """Height and width of the largest image, in pixels. Needed by image models."""
    audio_length: PositiveInt | None = None
    """Length of the longest recording: values of the waveform for models of raw audio (16,000 per second at 16 kHz),
    frames for models of spectrograms (100 per second where they are 10 ms apart). Whisper's follows from its config."""

    def require_packing(self, model: str, data: Mapping[str, DataSpec], evaluation: EvaluationSpec | None) -> None:
        """Check that the records of a workload can be packed, if they are to be.

        ``model`` is the task of a transformers model, or the kind of another one; ``data`` is by field.

        Raises:
            ValueError: when the model is no causal language model of transformers, a sequence has no room for two
                documents, data has no records, or a split would divide records.
        """
        if self.packing is None:
            return
        if model != "causal-lm":
            raise ValueError(f"`batch.packing` is for `causal-lm` models of transformers, and this is {model}")
        if self.sequence_length is not None and self.sequence_length < _SHORTEST_PACKED:
            raise ValueError(
                f"`batch.sequence_length` is {self.sequence_length}, and `batch.packing` needs at least "
                f"{_SHORTEST_PACKED}: two documents with a next token in each"
            )
        for field, used in data.items():
            if used.kind not in _PACKED_DATA:
                raise ValueError(
                    f"`batch.packing` needs `records`, whose rows are the documents, and `{field}` is of the kind "
                    f"`{used.kind}`: leave packing out, or read the files as records"
                )
        is_split = evaluation is not None and evaluation.is_split and not isinstance(data.get("data"), SyntheticData)
        if self.packing == "wrapped" and is_split:
            raise ValueError(
                "`evaluation` cannot hold out sequences with `batch.packing: wrapped`: a record continues in "
                "other sequences, which would be trained on. Give `evaluation.data`, or pack with `bfd`"
            )
