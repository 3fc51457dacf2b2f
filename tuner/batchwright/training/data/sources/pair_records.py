"""Rows with a prompt and two completions as the samples of training on preference pairs (DPO)."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from batchwright.schemas.dataset.data_spec import RecordsData
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.data.base import TrainingData, data_problem
from batchwright.training.data.files import DataFolders
from batchwright.training.data.sources.chat_template import (
    Chat,
    ChatTemplate,
    common_start,
    messages_of,
    open_chat_template,
    tools_of,
)
from batchwright.training.data.sources.completions import encoded_rows, left_out
from batchwright.training.data.sources.rows import TextRows, holds_lists, read_rows, rows_with_all
from batchwright.training.data.sources.tokens import (
    PaddedCollation,
    TextTokenizer,
    TokenSequences,
    open_tokenizer,
    padding_id,
    rope_notes,
)
from batchwright.workloads.causal.preference_pairs import PreferenceWorkload

_PROMPT = RecordsData.model_fields["prompt_field"].default


class Pair(NamedTuple):
    """The tokens of both sequences of a pair, and where the completions begin."""

    chosen: list[int]
    """Token ids of the prompt and the chosen completion."""
    rejected: list[int]
    """Token ids of the prompt and the rejected completion."""
    prompt: int
    """Number of tokens of the prompt."""


PairEncoder: TypeAlias = Callable[[Mapping[str, Sequence[Any]]], list[Pair]]
"""Encodes rows, given as a list of values for each field."""


@dataclass(frozen=True)
class PairedTexts:
    """Encodes texts.

    The prompt is the common token prefix of ``prompt`` and ``prompt + completion`` (as in TRL); a token spanning both
    belongs to the completion. Without a prompt of its own it is the common prefix of both texts.
    """

    tokenizer: TextTokenizer
    """A tokenizer that does not cut."""
    prompt: str | None
    """Field of the prompt; None if the completions hold it."""
    sides: tuple[str, str]
    """Fields of the chosen and the rejected completion."""

    def __call__(self, rows: Mapping[str, Sequence[str]]) -> list[Pair]:
        """Encode rows."""
        sides = [list(rows[name]) for name in self.sides]
        if self.prompt is None:
            encoded = zip(*map(self.tokenizer.encode_documents, sides), strict=True)
            return [Pair(chosen, rejected, common_start(chosen, rejected)) for chosen, rejected in encoded]
        prompts = list(rows[self.prompt])
        whole = [[a + b for a, b in zip(prompts, side, strict=True)] for side in sides]
        return list(starmap(_pair, zip(*map(self.tokenizer.encode_documents, (prompts, *whole)), strict=True)))


@dataclass(frozen=True)
class PairedConversations:
    """Encodes conversations. Without a prompt alone it is the messages that both begin with."""

    tokenizer: TextTokenizer
    """A tokenizer that does not cut."""
    template: ChatTemplate
    """Makes texts of conversations."""
    prompt: str | None
    """Field of the prompt; None if the completions hold it."""
    sides: tuple[str, str]
    """Fields of the chosen and the rejected completion."""
    tools: str | None = None
    """Field with the tools of a row."""

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> list[Pair]:
        """Encode rows."""
        sides = [list(map(messages_of, rows[name])) for name in self.sides]
        if self.prompt is None:
            prompts = [one[: common_start(one, other)] for one, other in zip(*sides, strict=True)]
        else:
            prompts = list(map(messages_of, rows[self.prompt]))
            sides = [[[*a, *b] for a, b in zip(prompts, side, strict=True)] for side in sides]
        tools = list(map(tools_of, rows[self.tools])) if self.tools else [None] * len(prompts)
        alone = [self.template.render(Chat(*chat), awaits_answer=True) for chat in zip(prompts, tools, strict=True)]
        whole = [[self.template.render(Chat(*chat)) for chat in zip(side, tools, strict=True)] for side in sides]
        return list(starmap(_pair, zip(*map(self.tokenizer.encode_all, (alone, *whole)), strict=True)))


def _pair(prompt: list[int], chosen: list[int], rejected: list[int]) -> Pair:
    return Pair(chosen, rejected, min(common_start(prompt, chosen), common_start(prompt, rejected)))


@dataclass(frozen=True)
class PairSamples:
    """Pairs as two samples of ``input_ids`` and ``labels`` each, the chosen one first, those of prompts ignored."""

    sequences: TokenSequences
    """The sequences of all pairs, two of each."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of both sequences of each pair, int64 ``(pairs,)``."""
        return self.sequences.lengths.view(-1, 2).sum(1)

    def __len__(self) -> int:
        return len(self.sequences) // 2

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.sequences[2 * index], self.sequences[2 * index + 1]


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
    rows, encode = _prepared(data, tokenizer, folders)
    pairs = encoded_rows(rows, encode, "data.chosen_field")
    fitting = (pair for pair in pairs if pair.prompt < length)
    samples = PairSamples(TokenSequences.of(side for pair in fitting for side in _sides(pair, length, padding)))
    if not len(samples):
        message = (
            f"every prompt has batch.sequence_length {length} tokens or more, which leaves no room for a completion"
        )
        raise data_problem("data.paths", message, ", ".join(data.paths))
    reason = f"their prompts have {length} tokens (batch.sequence_length) or more"
    collation = PaddedCollation(padding, length if spec.compile else None, masked=False)
    return TrainingData(
        samples,
        PairCollation(collation),
        notes=(
            *left_out(len(samples), len(rows.rows), "pairs", reason),
            *rope_notes(workload.config, collation, length),
        ),
        lengths=samples.lengths if collation.length is None else None,  # which pads to one shape
    )


def _sides(pair: Pair, length: int, padding: int) -> Iterator[list[int]]:
    """Yield both sequences, cut, those of the prompt as their complements; padding stands for one without tokens."""
    for ids in (pair.chosen, pair.rejected):
        kept = ids[:length] or [~padding]
        yield [~number for number in kept[: pair.prompt]] + kept[pair.prompt :]


def _prepared(data: RecordsData, tokenizer: TextTokenizer, folders: DataFolders) -> tuple[TextRows, PairEncoder]:
    """The rows that have all fields, and their encoder."""
    rows = read_rows(data, folders)
    sides = {"data.chosen_field": data.chosen_field, "data.rejected_field": data.rejected_field}
    is_chat = holds_lists(rows.rows, data.chosen_field)
    is_in_sides = data.prompt_field == _PROMPT and _PROMPT not in rows.rows.column_names
    is_beside = is_chat and not holds_lists(rows.rows, data.prompt_field)  # a text that the conversations repeat
    prompt = None if is_in_sides or is_beside else data.prompt_field
    named = sides if prompt is None else {"data.prompt_field": prompt, **sides}
    fields = (prompt, (data.chosen_field, data.rejected_field))
    if is_chat:
        chats = rows_with_all(rows, data, named, are_lists=True, tools=data.tools_field)
        return chats, PairedConversations(tokenizer, open_chat_template(data, folders), *fields, data.tools_field)
    return rows_with_all(rows, data, named), PairedTexts(tokenizer, *fields)
