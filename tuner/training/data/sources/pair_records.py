"""Rows with a prompt and two completions as the samples of training on preference pairs (DPO)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tuner.schemas.dataset import RecordsData
from tuner.schemas.workload import WorkloadSpec
from tuner.training.data.base import TrainingData, data_problem
from tuner.training.data.files import DataFolders
from tuner.training.data.sources.rows import Rows, read_rows, rows_with_text
from tuner.training.data.sources.tokens import (
    PaddedCollation,
    TextTokenizer,
    open_tokenizer,
    padding_id,
    rope_notes,
)
from tuner.workloads.base import IGNORED_LABEL
from tuner.workloads.causal.preference_pairs import PreferenceWorkload

_ROWS_AT_A_TIME = 1000


@dataclass(frozen=True)
class PairSamples:
    """Pairs, encoded on access as two samples of ``input_ids`` and ``labels``: int64 ``(tokens,)``, the chosen first.

    A sequence has the tokens of the prompt and of one completion, cut after ``length`` tokens. The completion begins
    where the tokens of the three texts (the prompt alone, and with each completion) are no longer equal, as in TRL, so
    that a token of both belongs to the completion. Labels of the prompt are ignored.
    """

    rows: Rows
    """The rows whose prompt leaves room for a completion."""
    fields: tuple[str, ...]
    """Fields of the prompt, the chosen and the rejected completion."""
    tokenizer: TextTokenizer
    """A tokenizer that does not cut."""
    length: int
    """Tokens of the longest sequence."""
    padding_id: int
    """Stands for a sequence without tokens."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        row = self.rows[index]
        prompt, chosen, rejected = (row[name] for name in self.fields)
        texts = self.tokenizer.encode_documents([prompt, prompt + chosen, prompt + rejected])
        common = min(_common(texts[0], texts[1]), _common(texts[0], texts[2]))
        return self._labelled(texts[1], common), self._labelled(texts[2], common)

    def _labelled(self, tokens: list[int], prompt: int) -> dict[str, Tensor]:
        ids = torch.tensor(tokens[: self.length] or [self.padding_id])
        labels = ids.clone()
        labels[: prompt if tokens else None] = IGNORED_LABEL
        return {"input_ids": ids, "labels": labels}


def _common(one: list[int], other: list[int]) -> int:
    """Number of tokens at the start of both."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (here, there) in pairs if here != there), min(len(one), len(other)))


@dataclass(frozen=True)
class PairCollation:
    """Pairs as a batch of tensors ``(pairs, 2, tokens)``, padded on the right."""

    padded: PaddedCollation
    """Collates sequences."""

    def __call__(self, samples: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> dict[str, Tensor]:
        """Collate samples."""
        joined = self.padded([side for pair in samples for side in pair])
        return {name: tensor.view(len(samples), 2, -1) for name, tensor in joined.items()}


def pairs_data(
    data: RecordsData, spec: WorkloadSpec, workload: PreferenceWorkload, folders: DataFolders
) -> TrainingData:
    """Use the rows of files as preference pairs.

    Raises:
        SpecError: when a file, a field or the tokenizer does not fit the model, or no prompt leaves room.
    """
    length = spec.batch.sequence_length or 0
    tokenizer = open_tokenizer(data.tokenizer, sys.maxsize, workload.vocabulary_size, folders)
    padding = padding_id(tokenizer, workload.config)
    fields = {
        "data.prompt_field": data.prompt_field,
        "data.chosen_field": data.chosen_field,
        "data.rejected_field": data.rejected_field,
    }
    found = rows_with_text(read_rows(data, folders), data, fields)
    rooms, count = _rooms(found.rows, data.prompt_field, tokenizer, length), len(found.rows)
    has_room = np.fromiter(rooms, dtype=bool, count=count)
    if not has_room.any():
        message = f"no prompt has less than batch.sequence_length {length} tokens, which leaves room for a completion"
        raise data_problem("data.paths", message, ", ".join(data.paths))
    kept = found.selected(has_room)
    left_out = count - len(kept.rows)
    note = (
        f"{left_out:,} of {count:,} pairs are left out: their prompts have {length} tokens (batch.sequence_length) "
        "or more"
    )
    collation = PaddedCollation(padding, length if spec.compile else None, masked=False)
    samples = PairSamples(kept.rows, tuple(fields.values()), tokenizer, length, padding)
    notes = (*((note,) if left_out else ()), *rope_notes(workload.config, collation, length))
    lengths = kept.lengths if collation.length is None else None  # which pads to one shape
    return TrainingData(samples, PairCollation(collation), notes=notes, lengths=lengths)


def _rooms(rows: Rows, field: str, tokenizer: TextTokenizer, length: int) -> Iterator[bool]:
    """Yield for each row whether its prompt, without the tokens that the tokenizer adds behind it, leaves room."""
    added = tokenizer.encode("a").added
    behind = next((count for count, is_added in enumerate(reversed(added)) if not is_added), 0)
    for some in rows.iter(_ROWS_AT_A_TIME):
        yield from (len(ids) - behind < length for ids in tokenizer.encode_documents(some[field]))
