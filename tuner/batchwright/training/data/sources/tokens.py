"""Tokenizers, and the collation of ragged token samples."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from batchwright.schemas.dataset.data_spec import OF_THE_MODEL
from batchwright.training.data.base import data_problem, import_optional
from batchwright.training.data.files import DataFolders
from batchwright.training.data.foreign import ForeignFailure, foreign_errors, try_in_child
from batchwright.workloads.base import IGNORED_LABEL
from batchwright.workloads.causal.rope_scaling import longest_uncoupled

_BYTE_VALUES = 256
_SPACE = ord(" ")
_PADDING_TOKENS = ("[PAD]", "<pad>", "<|pad|>")
_MASK_TOKENS = ("[MASK]", "<mask>", "<|mask|>")
"""Common names of these tokens: a `tokenizer.json` does not state the purpose of a token."""
_FIELD = "data.tokenizer"
_OPENING_SECONDS = 60.0
"""Time limit of opening a tokenizer: the largest ones take about a second."""
_FILLS = {"labels": IGNORED_LABEL, "attention_mask": 0, "position_ids": 0, "token_type_ids": 0}
"""Padding of what is no token. A position 0 begins a document, so that nothing attends to padding."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of a text."""

    ids: list[int]
    """Token ids, with the tokens that the tokenizer adds."""
    added: list[int]
    """1 where the tokenizer added a token, 0 where the text is."""
    types: list[int]
    """The type of each token: 1 for the second text of a pair, as the tokenizer's template has it."""


class Located(NamedTuple):
    """The tokens of a text, and where they are in it."""

    ids: list[int]
    """Token ids, without added tokens."""
    spans: list[tuple[int, int]]
    """First character and end of each token in the text."""
    special: list[bool]
    """True for a special token, which the text holds by its name."""


class ByteTokenizer:
    """Token ids 0 to 255 are the UTF-8 bytes of the text, of at most ``longest``. There is no padding or mask token."""

    vocabulary_size = _BYTE_VALUES
    padding_id: int | None = None
    mask_id: int | None = None

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def encode(self, text: str, pair: str | None = None) -> Encoded:
        """Return the first bytes. There is nothing to part a pair."""
        ids = list((text + (pair or "")).encode(errors="replace")[: self._longest])
        return Encoded(ids, [0] * len(ids), [0] * len(ids))

    def encode_words(self, words: list[str]) -> tuple[list[int], list[int | None]]:
        """Return the first bytes, with a space between two words, which is of none."""
        found: list[tuple[int, int | None]] = []
        for number, word in enumerate(words):
            found += [(_SPACE, None)] if found else []
            found += [(byte, number) for byte in word.encode(errors="replace")]
        kept = found[: self._longest]
        return [byte for byte, _ in kept], [number for _, number in kept]

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Return the first bytes of each text."""
        return [self.encode(text).ids for text in texts]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Return all bytes of each text."""
        return [list(text.encode(errors="replace")) for text in texts]

    def locate(self, texts: list[str]) -> list[Located]:
        """Return all bytes of each text, with the characters that they are of. None is special."""
        found = []
        for text in texts:
            encoded = [(place, byte) for place, letter in enumerate(text) for byte in letter.encode(errors="replace")]
            spans = [(place, place + 1) for place, _ in encoded]
            found.append(Located([byte for _, byte in encoded], spans, [False] * len(encoded)))
        return found


class FileTokenizer:
    """A Hugging Face `tokenizer.json`. Its settings for padding and truncation are not used.

    Attributes:
        vocabulary_size: one more than the largest token id.
        padding_id: padding token; None without one.
        mask_id: mask token; None without one.
    """

    def __init__(self, path: Path, longest: int, folders: DataFolders, *, takes_pairs: bool = False) -> None:
        place = f"{path}, as a tokenizer.json"
        try:
            try_in_child(partial(_opened, path, folders, takes_pairs=takes_pairs), _OPENING_SECONDS)
        except ForeignFailure as failure:
            raise data_problem(_FIELD, f"cannot be read: {failure}", place) from None
        with foreign_errors(_FIELD, lambda: place):
            self._tokenizer, added_ids = _opened(path, folders, takes_pairs=takes_pairs)
            added = self._tokenizer.num_special_tokens_to_add(is_pair=takes_pairs)
        if added + takes_pairs >= longest:
            message = f"adds {added} tokens to a text, which leaves no room in batch.sequence_length {longest}"
            raise data_problem(_FIELD, message, path)
        self._longest = longest
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary_size = 1 + max([*ids, *added_ids], default=-1)
        self.padding_id = self._first_known(_PADDING_TOKENS)
        self.mask_id = self._first_known(_MASK_TOKENS)
        decoder = self._tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in decoder.items() if token.special}

    def _first_known(self, tokens: tuple[str, ...]) -> int | None:
        ids = (self._tokenizer.token_to_id(token) for token in tokens)
        return next((found for found in ids if found is not None), None)

    def encode(self, text: str, pair: str | None = None) -> Encoded:
        """Convert a text, or a pair of which the longer one is cut first, with what the tokenizer's template adds."""
        encoding = self._cutting().encode(text, pair)
        return Encoded(encoding.ids, encoding.special_tokens_mask, encoding.type_ids)

    def encode_words(self, words: list[str]) -> tuple[list[int], list[int | None]]:
        """Convert words to tokens, with the number of each one's word; None for those that the template adds."""
        encoding = self._cutting().encode(words, is_pretokenized=True)
        return encoding.ids, encoding.word_ids

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Convert each text to the ids that ``encode`` returns, several texts in parallel."""
        return [encoding.ids for encoding in self._cutting().encode_batch_fast(texts)]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Convert each text to all of its tokens, several texts in parallel."""
        return [encoding.ids for encoding in self._whole().encode_batch_fast(texts, add_special_tokens=False)]

    def locate(self, texts: list[str]) -> list[Located]:
        """Convert each text to all of its tokens, with their places, several texts in parallel."""
        return [
            Located(encoding.ids, encoding.offsets, [number in self._special for number in encoding.ids])
            for encoding in self._whole().encode_batch(texts, add_special_tokens=False)
        ]

    def _cutting(self) -> Any:  # noqa: ANN401 - of a package without types
        self._tokenizer.enable_truncation(self._longest)
        return self._tokenizer

    def _whole(self) -> Any:  # noqa: ANN401 - as above
        self._tokenizer.no_truncation()
        return self._tokenizer


TextTokenizer: TypeAlias = ByteTokenizer | FileTokenizer
"""Converts text to token ids. ``encode`` and ``encode_documents`` cut at the longest length; the others do not."""


def _opened(path: Path, folders: DataFolders, *, takes_pairs: bool) -> tuple[Any, list[int]]:
    """Open a tokenizer, and return it with the ids that it adds to a text."""
    tokenizers = import_optional("tokenizers", _FIELD, str(path))
    with folders.open(_FIELD, path) as stream:
        tokenizer = tokenizers.Tokenizer.from_buffer(stream.read())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer, tokenizer.encode("", "" if takes_pairs else None).ids


def open_tokenizer(
    name: str, longest: int, vocabulary_size: int, folders: DataFolders, *, takes_pairs: bool = False
) -> TextTokenizer:
    """Open the tokenizer that a spec names, for texts, or pairs of them, of at most ``longest`` tokens.

    Raises:
        SpecError: when the file cannot be read or lies outside the folders, or has more token ids than the model, or
            does not tell the texts of a pair apart.
    """
    tokenizer: TextTokenizer = ByteTokenizer(longest)
    if name == "bytes" and takes_pairs:
        raise data_problem(_FIELD, "puts nothing between the texts of a pair: give a `tokenizer.json`", name)
    if name != "bytes":
        path = folders.pretrained / "tokenizer.json" if name == OF_THE_MODEL and folders.pretrained else Path(name)
        tokenizer = FileTokenizer(path, longest, folders, takes_pairs=takes_pairs)
    if tokenizer.vocabulary_size > vocabulary_size:
        message = f"has {tokenizer.vocabulary_size} token ids, more than the model's {vocabulary_size}"
        raise data_problem(_FIELD, message, name)
    return tokenizer


def padding_id(tokenizer: TextTokenizer, config: Any) -> int:  # noqa: ANN401 - a transformers configuration, or none
    """The padding token of samples: the token of the model's config, else the tokenizer's, else 0.

    Raises:
        SpecError: when the two differ, because some models find the end of a sample by their padding token.
    """
    stated = getattr(config, "pad_token_id", None)
    if not isinstance(stated, int) or stated < 0:
        return tokenizer.padding_id or 0
    if tokenizer.padding_id is not None and tokenizer.padding_id != stated:
        message = f"pads with token {tokenizer.padding_id}, the model with {stated}"
        remedy = f"set model.config.pad_token_id to {tokenizer.padding_id}"
        raise data_problem(_FIELD, f"{message}: {remedy}")
    return stated


@dataclass(frozen=True)
class PaddedCollation:
    """Ragged token samples as a batch, padded on the right.

    A sample is a tensor of ids ``(length,)``, or a dict of such tensors and of scalars.
    """

    padding_id: int
    """Id that token tensors are padded with; labels are padded with ``IGNORED_LABEL``, all else with 0."""
    length: int | None
    """Length that samples are padded to, so that all batches have one shape; None for the longest of the batch."""
    masked: bool
    """True if a batch has an ``attention_mask``, 1 for tokens of a sample and 0 for padding."""

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Collate samples. Samples that are plain tensors are their own labels."""
        rows = [{"input_ids": row, "labels": row} if isinstance(row, Tensor) else row for row in samples]
        if self.masked:
            rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
        return {name: self._joined(name, [row[name] for row in rows]) for name in rows[0]}

    def _joined(self, name: str, values: list[Tensor]) -> Tensor:
        if not values[0].dim():
            return torch.stack(values)
        fill = _FILLS.get(name, self.padding_id)
        joined = values[0].new_full((len(values), self.length or max(map(len, values))), fill)
        for row, value in zip(joined, values, strict=True):
            row[: len(value)] = value
        return joined


@dataclass(frozen=True)
class TokenSequences:
    """Sequences in host memory, 4 bytes a token, sliced on access.

    A sample has ``input_ids`` and ``labels``, those of tokens that are not learned ignored: int64 ``(tokens,)``.
    """

    stream: Tensor
    """Tokens of all sequences, int32 ``(tokens,)``; those that are not learned as bitwise complements (``~id``)."""
    ends: Tensor
    """0, and the end of each sequence in the stream, int64 ``(sequences + 1,)``."""

    @classmethod
    def of(cls, sequences: Iterable[list[int]]) -> TokenSequences:
        """Store sequences of token ids, given as in the stream."""
        stream, ends = array("i"), array("q", [0])
        for ids in sequences:
            stream.extend(ids)
            ends.append(len(stream))
        return cls(torch.from_numpy(np.asarray(stream)), torch.from_numpy(np.asarray(ends)))

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, int64 ``(sequences,)``."""
        return self.ends.diff()

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return with_labels(self._tokens(index).long())

    def __iter__(self) -> Iterator[list[int]]:
        """Yield each sequence as in the stream."""
        return (self._tokens(index).tolist() for index in range(len(self)))

    def _tokens(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, end = self.ends[index : index + 2].tolist()
        return self.stream[first:end]


def with_labels(tokens: Tensor) -> dict[str, Tensor]:
    """The ``input_ids`` and ``labels`` of token ids, of which those that are not learned are bitwise complements."""
    ignored = tokens < 0
    return {"input_ids": torch.where(ignored, ~tokens, tokens), "labels": tokens.masked_fill(ignored, IGNORED_LABEL)}


def rope_notes(config: Any, collation: PaddedCollation, length: int) -> tuple[str, ...]:  # noqa: ANN401 - a transformers configuration, or none
    """Say that records of a micro-batch depend on its longest one, unless all are padded to one length."""
    longest = None if config is None else longest_uncoupled(config)
    if collation.length is not None or longest is None or length <= longest:
        return ()
    message = (
        f"a record of more than {longest} tokens changes the RoPE frequencies of all records of its micro-batch, so "
        f"that the gradient depends on the micro-batch size: set batch.sequence_length to {longest} at most, or "
        "`compile: true`, which pads each record to sequence_length"
    )
    return (message,)
