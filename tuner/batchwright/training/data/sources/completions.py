"""Rows with completions to learn: prompts with completions, and conversations with answers of the assistant."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from textwrap import shorten
from typing import Any, TypeAlias, TypeVar

from batchwright.schemas.dataset.data_spec import RecordsData
from batchwright.training.data.base import data_problem
from batchwright.training.data.files import DataFolders
from batchwright.training.data.foreign import ForeignFailure, lists_in_child
from batchwright.training.data.sources.chat_template import (
    Chat,
    ChatTemplate,
    Span,
    common_start,
    messages_of,
    open_chat_template,
    tools_of,
)
from batchwright.training.data.sources.rows import (
    Rows,
    TextRows,
    holds_lists,
    read_rows,
    rows_with_all,
)
from batchwright.training.data.sources.tokens import Located, TextTokenizer, TokenSequences, open_tokenizer

_ROWS_AT_A_TIME = 1000
_SECONDS, _SECONDS_OF_ROW = 60.0, 10.0
"""Time limits of encoding so many rows, and one of them: a thousand usual conversations take less than a second."""
_LONGEST_ROW = 200
"""Characters of a row in a message."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Learned:
    """The tokens of a row, and which of them are learned."""

    ids: list[int]
    """Token ids."""
    is_learned: list[bool]
    """True for a token of the loss."""

    def cut(self, length: int) -> Learned:
        """Return the first ``length`` tokens."""
        return Learned(self.ids[:length], self.is_learned[:length])

    @property
    def teaches(self) -> bool:
        """True if a token is learned that others come before."""
        return any(self.is_learned[1:])

    @property
    def complemented(self) -> list[int]:
        """The token ids, those that are not learned as their bitwise complements."""
        return [number if learned else ~number for number, learned in zip(self.ids, self.is_learned, strict=True)]


CompletionEncoder: TypeAlias = Callable[[Mapping[str, Sequence[Any]]], list[Learned]]
"""Finds the tokens of rows, a list of values for each field. A ValueError says that a row is no conversation."""


@dataclass(frozen=True)
class PromptedTexts:
    """Encodes prompts with completions. A completion begins where the tokens with it differ from the prompt's alone."""

    tokenizer: TextTokenizer
    """A tokenizer that does not cut."""
    fields: tuple[str, str]
    """Fields of the prompt and of the completion."""

    def __call__(self, rows: Mapping[str, Sequence[str]]) -> list[Learned]:
        """Encode rows."""
        prompts, completions = (rows[name] for name in self.fields)
        alone = self.tokenizer.encode_documents(list(prompts))
        whole = self.tokenizer.encode_documents([a + b for a, b in zip(prompts, completions, strict=True)])
        return [_learned_from(common_start(*texts), texts[1]) for texts in zip(alone, whole, strict=True)]


def _learned_from(begin: int, ids: list[int]) -> Learned:
    return Learned(ids, [place >= begin for place in range(len(ids))])


@dataclass(frozen=True)
class Conversations:
    """Encodes conversations: the answers of the assistant are learned, each with the special token behind it."""

    tokenizer: TextTokenizer
    """A tokenizer that does not cut."""
    template: ChatTemplate
    """Makes texts of conversations."""
    fields: tuple[str, ...]
    """Fields with messages, which follow each other; answers of the last field are learned."""
    tools: str | None = None
    """Field with the tools of a row."""

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> list[Learned]:
        """Encode rows."""
        chats = []
        for row in (dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)):
            parts = [messages_of(row[name]) for name in self.fields]
            chat = Chat(list(chain.from_iterable(parts)), None if self.tools is None else tools_of(row[self.tools]))
            chats.append(self.template.render_with_answers(chat, sum(map(len, parts[:-1]))))
        located = self.tokenizer.locate([text for text, _ in chats])
        return [self._learned(*chat, tokens) for chat, tokens in zip(chats, located, strict=True)]

    def _learned(self, text: str, spans: list[Span], tokens: Located) -> Learned:
        """The tokens with a character of a span, and a special one behind a span, with at most space in between.

        A span that ends with a special token has its end.
        """
        begins, ends = map(list, zip(*tokens.spans, strict=True)) if tokens.spans else ([], [])
        flags = [False] * len(begins)
        for first, last in spans:
            some = range(bisect_right(ends, first), bisect_left(begins, last))
            flags[some.start : some.stop] = [True] * len(some)
            if self.template.marks_answers or not some or tokens.special[some[-1]]:
                continue
            words = (place for place in range(some.stop, len(begins)) if text[begins[place] : ends[place]].strip())
            behind = next(words, None)
            if behind is not None and tokens.special[behind]:
                flags[behind] = True
        return Learned(tokens.ids, flags)


@dataclass(frozen=True)
class Completions:
    """Rows with completions, and what was found about them."""

    sequences: TokenSequences
    """The rows with something to learn."""
    notes: tuple[str, ...]
    """Rows that are left out."""
    tokenizer: TextTokenizer
    """The tokenizer of the rows."""


def read_completions(data: RecordsData, length: int, vocabulary_size: int, folders: DataFolders) -> Completions:
    """Read the rows with something to learn in their first ``length`` tokens.

    Raises:
        SpecError: when a file, a field, the template or the tokenizer does not fit, or no row has anything to learn.
    """
    tokenizer = open_tokenizer(data.tokenizer, sys.maxsize, vocabulary_size, folders)
    rows, encode = _prepared(data, tokenizer, folders)
    field = "data.messages_field" if data.completion_field is None else "data.completion_field"
    encoded = encoded_rows(rows, encode, field)
    if data.train_on_prompts:
        encoded = (_learned_from(0, found.ids) for found in encoded)
    kept = (found.cut(length) for found in encoded)
    sequences = TokenSequences.of(found.complemented for found in kept if found.teaches)
    if not len(sequences):
        message = f"no row has anything to learn in its first {length} tokens (batch.sequence_length)"
        raise data_problem("data.paths", message, ", ".join(data.paths))
    reason = f"they have nothing to learn in their first {length} tokens (batch.sequence_length)"
    return Completions(sequences, left_out(len(sequences), len(rows.rows), "rows", reason), tokenizer)


def left_out(kept: int, count: int, what: str, reason: str) -> tuple[str, ...]:
    """The note on rows that are not used; none where all are."""
    return (f"{count - kept:,} of {count:,} {what} are left out: {reason}",) if kept < count else ()


def encoded_rows(rows: TextRows, encode: Callable[[Mapping[str, Sequence[Any]]], list[_T]], field: str) -> Iterator[_T]:
    """Yield each row as it is encoded, in a child process: a template or a tokenizer may crash, or never end.

    Raises:
        SpecError: about ``field``, when a row cannot be encoded.
    """
    done, produce = 0, partial(_encoded, rows.rows, encode)
    try:
        for some in lists_in_child(produce, _ROWS_AT_A_TIME, _SECONDS, _SECONDS_OF_ROW):
            yield from some
            done += len(some)
            if rows.files.reading is not None:
                rows.files.reading.count(done, len(rows.rows), "rows")
    except ForeignFailure as failure:
        row = shorten(str(rows.rows[done]), _LONGEST_ROW)
        raise data_problem(field, f"cannot be encoded: {failure}", f"{rows.place(done)}: {row}") from None


def _encoded(
    rows: Rows, encode: Callable[[Mapping[str, Sequence[Any]]], list[_T]], begin: int, count: int
) -> Iterator[list[_T]]:
    return (encode(rows[first : first + count]) for first in range(begin, len(rows), count))


def _prepared(data: RecordsData, tokenizer: TextTokenizer, folders: DataFolders) -> tuple[TextRows, CompletionEncoder]:
    """The rows that have all fields, and their encoder."""
    rows = read_rows(data, folders)
    if data.completion_field is None:
        named = {"data.messages_field": data.messages_field or ""}
    else:
        named = {"data.prompt_field": data.prompt_field, "data.completion_field": data.completion_field}
    if data.completion_field is None or holds_lists(rows.rows, data.completion_field):
        chats = rows_with_all(rows, data, named, are_lists=True, tools=data.tools_field)
        template = open_chat_template(data, folders)
        return chats, Conversations(tokenizer, template, tuple(named.values()), data.tools_field)
    return rows_with_all(rows, data, named), PromptedTexts(tokenizer, (data.prompt_field, data.completion_field))
