"""Rows of local files as the samples of a text model: one sample per row, or sequences packed with them."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchwright.schemas.dataset.batch_spec import Packing
from batchwright.schemas.dataset.data_spec import RecordsData
from batchwright.schemas.workload import Gpt, ReferenceModel, TransformersModel, WorkloadSpec
from batchwright.training.data.base import RENDERER, TrainingData, data_problem
from batchwright.training.data.files import DataFolders
from batchwright.training.data.foreign import foreign_errors
from batchwright.training.data.seeding import generator_from_key
from batchwright.training.data.source import DataSource
from batchwright.training.data.sources.completions import encoded_rows, read_completions
from batchwright.training.data.sources.labelled_texts import ClassEncoder, classification, token_classification
from batchwright.training.data.sources.packing import pack
from batchwright.training.data.sources.pair_records import pairs_data
from batchwright.training.data.sources.rows import Encoder, Prepared, Read, Rows, read_rows, rows_with_all
from batchwright.training.data.sources.tokens import (
    PaddedCollation,
    TextTokenizer,
    open_tokenizer,
    padding_id,
    rope_notes,
)
from batchwright.workloads.base import IGNORED_LABEL, Sample, Samples, Workload
from batchwright.workloads.causal.decoders import CausalWorkload
from batchwright.workloads.causal.preference_pairs import PreferenceWorkload
from batchwright.workloads.hugging_face import LabelledWorkload
from batchwright.workloads.reference import NextTokenWorkload

_MASKED_SHARE, _MASK_SHARE, _RANDOM_SHARE = 0.15, 0.8, 0.1
"""Shares of tokens: 15 % are predicted, of which 80 % are masked, 10 % random, 10 % kept (Devlin et al., 2018)."""

_TEXT = "data.text_field"


@dataclass(frozen=True)
class RecordSamples:
    """Rows, encoded as token samples on access."""

    rows: Rows
    """The rows that have text."""
    encode: Encoder
    """Encodes a row."""
    place: Callable[[int], str]
    """Names the file and the row of a sample."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        with foreign_errors(_TEXT, lambda: self.place(index)):
            return self.encode(index, self.rows[index])


class RecordsSource(DataSource[RecordsData]):
    """Rows of files."""

    may_number_classes = True

    def modules(self) -> dict[str, str]:
        """Name `datasets`, `tokenizers` but for bytes, and what renders conversations."""
        tokenizers = {} if self.data.tokenizer == "bytes" else {"tokenizers": "tokenizer"}
        renders = self.data.messages_field or self.data.chat_template
        return {"datasets": "kind", **tokenizers, **({RENDERER: "chat_template"} if renders else {})}

    def _read(self, spec: WorkloadSpec, workload: Workload) -> TrainingData:
        """Use the rows of files as samples for the spec's task.

        Raises:
            SpecError: when a file, a field, the tokenizer or the labels do not fit the model.
        """
        data, folders = self.data, self.folders
        if isinstance(workload, PreferenceWorkload):
            return pairs_data(data, spec, workload, folders)
        task = _task_of(data, spec)
        if data.text_pair_field is not None and task != "sequence-classification":
            message = f"is for sequence-classification, and this is {task}"
            raise data_problem("data.text_pair_field", message, data.text_pair_field)
        if data.has_completions:
            return _completions_data(task, data, spec, workload, folders)
        length, packing = spec.batch.sequence_length or 0, spec.batch.packing
        config = getattr(workload, "config", None)
        longest = sys.maxsize if packing == "wrapped" else length
        tokenizer = open_tokenizer(
            data.tokenizer, longest, _vocabulary_size(workload), folders, takes_pairs=data.text_pair_field is not None
        )
        padding = padding_id(tokenizer, config)
        if packing is not None:
            rows = rows_with_all(read_rows(data, folders), data, {_TEXT: data.text_field})
            documents = encoded_rows(rows, partial(_documents, tokenizer, data.text_field), _TEXT)
            return _packed(documents, packing, padding, data, spec)
        found, encode = _PREPARATIONS[task](lambda: read_rows(data, folders), data, tokenizer, config)
        samples = RecordSamples(found.rows, _pad_empty(encode, padding), found.place)
        ragged = _ragged(samples, found.lengths, padding, spec, workload)
        return replace(ragged, classes=encode.names if isinstance(encode, ClassEncoder) else ())


def _documents(tokenizer: TextTokenizer, field: str, rows: Mapping[str, Sequence[str]]) -> list[list[int]]:
    return tokenizer.encode_documents(list(rows[field]))


def _completions_data(
    task: str, data: RecordsData, spec: WorkloadSpec, workload: Workload, folders: DataFolders
) -> TrainingData:
    """Use the completions of rows, and the answers of conversations, as samples."""
    if task != "causal-lm":
        field = "completion_field" if data.completion_field is not None else "messages_field"
        raise data_problem(f"data.{field}", f"is for causal-lm, and this is {task}", getattr(data, field))
    length, packing = spec.batch.sequence_length or 0, spec.batch.packing
    longest = sys.maxsize if packing == "wrapped" else length
    found = read_completions(data, longest, _vocabulary_size(workload), folders)
    padding = padding_id(found.tokenizer, getattr(workload, "config", None))
    if packing is not None:
        made = _packed(found.sequences, packing, padding, data, spec)
    else:
        made = _ragged(found.sequences, found.sequences.lengths, padding, spec, workload)
    return replace(made, notes=(*found.notes, *made.notes))


def _packed(
    documents: Iterable[list[int]], packing: Packing, padding: int, data: RecordsData, spec: WorkloadSpec
) -> TrainingData:
    """Samples of sequences that are packed with the documents."""
    length = spec.batch.sequence_length or 0
    packed = pack(documents, length, packing)
    if not len(packed):
        raise data_problem("data.paths", "no row has a text of two tokens", ", ".join(data.paths))
    collation = PaddedCollation(padding, length if spec.compile else None, masked=False)
    note = (
        f"{packed.documents:,} records are packed into {len(packed):,} sequences of {length} tokens: "
        f"{packed.share:.1%} of the positions hold tokens, and {packed.unpacked_share:.1%} without packing"
    )
    return TrainingData(packed, collation, notes=(note,))


def _ragged(samples: Samples, lengths: Tensor, padding: int, spec: WorkloadSpec, workload: Workload) -> TrainingData:
    """Samples of different lengths, each with a row."""
    length = spec.batch.sequence_length or 0
    masked = isinstance(workload, (CausalWorkload, LabelledWorkload)) and workload.takes_mask
    collation = PaddedCollation(padding, length if spec.compile else None, masked=masked)
    return TrainingData(
        samples,
        collation,
        notes=rope_notes(getattr(workload, "config", None), collation, length),
        lengths=lengths if collation.length is None else None,  # which pads to one shape
    )


def _task_of(data: RecordsData, spec: WorkloadSpec) -> str:
    model = spec.model
    if isinstance(model, ReferenceModel) and isinstance(model.architecture, Gpt):
        return "causal-lm"
    if isinstance(model, TransformersModel) and model.task in _PREPARATIONS:
        return model.task
    described = model.task if isinstance(model, TransformersModel) else f"this {model.kind} model"
    message = (
        f"`records` trains {', '.join(_PREPARATIONS)} and the reference `gpt`, not {described}: use a `python` model "
        "with `workload` data and your own dataset() and collate()"
    )
    raise data_problem("data.kind", message, data.kind)


def _vocabulary_size(workload: Workload) -> int:
    if isinstance(workload, NextTokenWorkload):
        return workload.vocabulary_size
    return int(workload.config.vocab_size)  # type: ignore[attr-defined] # _task_of leaves only ours


def _pad_empty(encode: Encoder, padding: int) -> Encoder:
    """Replace a sample without tokens by one padding token with an ignored label."""

    def encoded(index: int, row: dict[str, Any]) -> Sample:
        sample = encode(index, row)
        if isinstance(sample, Tensor):
            sample = {"input_ids": sample, "labels": sample}
        return {
            name: value if value.numel() else torch.tensor([IGNORED_LABEL if name == "labels" else padding])
            for name, value in sample.items()
        }

    return encoded


# --- rows and encoders of each task ---


def _causal(read: Read, data: RecordsData, tokenizer: TextTokenizer, _config: Any) -> Prepared:  # noqa: ANN401 - a transformers configuration, or none
    rows = rows_with_all(read(), data, {_TEXT: data.text_field})
    return rows, lambda _, row: torch.tensor(tokenizer.encode(row[data.text_field]).ids, dtype=torch.int64)


def _sequence_to_sequence(read: Read, data: RecordsData, tokenizer: TextTokenizer, config: Any) -> Prepared:  # noqa: ANN401 - as above
    if data.target_field is None:
        raise data_problem("data.target_field", "is required for seq2seq-lm: the field with the text to produce")
    target = data.target_field
    start = getattr(config, "decoder_start_token_id", getattr(config, "pad_token_id", None))  # the latter as in T5
    if not isinstance(start, int):
        message = "is not stated in this config: set it to the token that a target starts with"
        raise data_problem("model.config.decoder_start_token_id", message)
    rows = rows_with_all(read(), data, {_TEXT: data.text_field, "data.target_field": target})

    def encode(_: int, row: dict[str, Any]) -> dict[str, Tensor]:
        source, wanted = (tokenizer.encode(row[name]).ids for name in (data.text_field, target))
        return {
            "input_ids": torch.tensor(source, dtype=torch.int64),
            "decoder_input_ids": torch.tensor([start, *wanted[:-1]]),
            "labels": torch.tensor(wanted, dtype=torch.int64),
        }

    return rows, encode


def _masked(read: Read, data: RecordsData, tokenizer: TextTokenizer, _config: Any) -> Prepared:  # noqa: ANN401 - as above
    mask_id = tokenizer.mask_id
    if mask_id is None:
        message = "has no mask token: masked-lm needs a tokenizer.json with a token `[MASK]` or `<mask>`"
        raise data_problem("data.tokenizer", message, data.tokenizer)
    rows = rows_with_all(read(), data, {_TEXT: data.text_field})

    def encode(index: int, row: dict[str, Any]) -> dict[str, Tensor]:
        encoded = tokenizer.encode(row[data.text_field])
        ids = torch.tensor(encoded.ids, dtype=torch.int64)
        chances = torch.rand(2, len(ids), generator=(generator := generator_from_key("mask", index)))
        chances[0, torch.tensor(encoded.added, dtype=torch.bool)] = torch.inf
        chosen = chances[0] < _MASKED_SHARE
        if not chosen.any() and len(ids):
            chosen = chances[0] == chances[0].min().clamp(max=1.0)  # at least one, if the text has a token
        others = torch.randint(tokenizer.vocabulary_size, ids.shape, generator=generator)
        shown = torch.where(chances[1] < _MASK_SHARE, mask_id, others)
        shown = torch.where(chances[1] < _MASK_SHARE + _RANDOM_SHARE, shown, ids)
        return {"input_ids": torch.where(chosen, shown, ids), "labels": torch.where(chosen, ids, IGNORED_LABEL)}

    return rows, encode


_PREPARATIONS: dict[str, Callable[[Read, RecordsData, TextTokenizer, Any], Prepared]] = {
    "causal-lm": _causal,
    "masked-lm": _masked,
    "seq2seq-lm": _sequence_to_sequence,
    "sequence-classification": classification,
    "token-classification": token_classification,
}
