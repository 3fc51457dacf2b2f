"""Conversations as texts, by the Jinja template of a model, with the parts that a model learns.

transformers renders templates in a sandbox, and code beside a model is never run.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from batchwright.schemas.dataset.data_spec import OF_THE_MODEL, RecordsData
from batchwright.training.data.base import RENDERER, data_problem, import_optional
from batchwright.training.data.files import DataFolders
from batchwright.training.data.foreign import described, foreign_errors

Message: TypeAlias = Mapping[str, Any]
"""A message with a `role`, and mostly a `content`; other fields are for the template."""
Span: TypeAlias = tuple[int, int]
"""First character and end of a part of a text."""

_FIELD = "data.chat_template"
_TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_LARGEST = 2**24
"""Bytes of a file that are read: a hundred times the longest templates."""
_ASSISTANT = "assistant"
_SHAREGPT_ROLES = {"human": "user", "gpt": _ASSISTANT, "chatgpt": _ASSISTANT} | {
    role: role for role in ("system", "user", _ASSISTANT, "tool")
}
"""Roles of messages, by what ShareGPT rows call them."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKER = "\ue000"
"""A character for private use, which no answer has."""
_FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format | replace('%d', '26') | replace('%m', '07') | replace('%b', 'Jul') "
    "| replace('%B', 'July') | replace('%Y', '2024') | replace('%y', '24') }}{% endmacro %}\n"
)
"""Put before a template: the samples of a run may not depend on the day. The day is that of Llama 3's own template."""


class Chat(NamedTuple):
    """A conversation."""

    messages: list[Message]
    """Its messages."""
    tools: list[Any] | None = None
    """JSON schemas of the tools that the assistant may call."""

    def of(self, messages: list[Message]) -> Chat:
        """Return another conversation with the same tools."""
        return Chat(messages, self.tools)


class ChatTemplate:
    """A chat template. ``tokens`` are its variables, such as `bos_token`.

    Attributes:
        marks_answers: whether the template says itself what is learned (`{% generation %}`).
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._source = _FIXED_DATE + source
        self.marks_answers = _GENERATION.search(source) is not None
        self._prompts_answers = "add_generation_prompt" in source
        self._tokens = dict(tokens)
        import_optional(RENDERER, _FIELD, _TEMPLATE)

    def render(self, chat: Chat, *, awaits_answer: bool = False) -> str:
        """Make the text of a conversation; with ``awaits_answer`` up to where the assistant would begin to answer.

        Raises:
            ValueError: when the template refuses it.
        """
        return self._rendered(chat, add_generation_prompt=awaits_answer)[0]

    def render_with_answers(self, chat: Chat, first: int = 0) -> tuple[str, list[Span]]:
        """Make the text of a conversation, and find the answers of the assistant in it, but those of `weight` 0.

        A template may mark them (`{% generation %}`). In others an answer is what the assistant has to write when it is
        asked: from the end of the generation prompt to the end of the turn. Templates that have no such prompt, or that
        write earlier messages otherwise than the last, have as its ends what changes when a single character takes the
        place of the message. Answers before message number ``first`` are left out.

        Raises:
            ValueError: when the template refuses it, or its marks are not those of the messages.
        """
        answers = [place for place, message in enumerate(chat.messages) if message["role"] == _ASSISTANT]
        wanted = [place >= first and chat.messages[place].get("weight") != 0 for place in answers]
        if self.marks_answers:
            text, spans = self._rendered(chat, return_assistant_tokens_mask=True)
            if all(wanted):
                return text, spans
            if len(spans) != len(answers):
                message = f"the chat template marks {len(spans)} answers, and there are {len(answers)}"
                remedy = "remove `{% generation %}` or the weights"
                raise ValueError(f"{message}, so `weight: 0` cannot be matched to an answer; {remedy}")
            return text, list(compress(spans, wanted))
        text = self.render(chat)
        found = (self._answer(text, chat, place) for place in compress(answers, wanted))
        return text, [span for span in found if span is not None]

    def _answer(self, text: str, chat: Chat, place: int) -> Span | None:
        """The part of ``text`` that the assistant writes as a message; None if the template leaves it out."""
        messages = chat.messages
        before = self._start(text, chat.of(messages[:place]), awaits_answer=True)
        is_last = place + 1 == len(messages)
        whole = len(text) if is_last else self._start(text, chat.of(messages[: place + 1]))
        turn = None if before is None or whole is None else (before, max(before, len(text[:whole].rstrip())))
        if turn is not None and self._prompts_answers:
            return turn
        marked = [*messages[:place], {"role": _ASSISTANT, "content": _MARKER}, *messages[place + 1 :]]
        try:
            changed = _difference(text, self.render(chat.of(marked)))
        except ValueError:
            if turn is None:
                raise
            return turn
        if changed is None or before is None or not self._prompts_answers:
            return changed
        return (before, max(before, changed[1]))

    def _start(self, text: str, chat: Chat, *, awaits_answer: bool = False) -> int | None:
        """Length of the text of the first messages; None if ``text`` does not begin with it."""
        try:
            start = self.render(chat, awaits_answer=awaits_answer)
        except ValueError:
            return None
        return len(start) if text.startswith(start) else None

    def _rendered(self, chat: Chat, **options: bool) -> tuple[str, list[Span]]:
        """Render messages; where that is refused, calls of tools with a null content, which some templates ask for."""
        try:
            return self._rendered_as_they_are(chat, options)
        except ValueError:
            with_nulls = [{"content": None, **fields} if "tool_calls" in fields else fields for fields in chat.messages]
            if with_nulls == chat.messages:
                raise
            return self._rendered_as_they_are(chat.of(with_nulls), options)

    def _rendered_as_they_are(self, chat: Chat, options: Mapping[str, bool]) -> tuple[str, list[Span]]:
        try:
            texts, spans = importlib.import_module(RENDERER).render_jinja_template(
                [chat.messages], chat.tools, chat_template=self._source, **options, **self._tokens
            )
        except Exception as error:  # noqa: BLE001 - a template is a program, and raises what it likes
            raise ValueError(f"the chat template refuses it: {described(error)}") from None
        return texts[0], spans[0] if spans else []


def _difference(text: str, marked: str) -> Span | None:
    """The part of ``text`` in whose place ``marked`` has the marker; None where the template leaves it out."""
    if _MARKER not in marked:
        return None
    begin = common_start(text, marked)
    rest = common_start(text[::-1], marked[::-1])
    return (begin, max(begin, len(text) - rest))


def common_start(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of elements that two texts, or two lists, begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # halves, as comparing slices is faster than a loop over elements
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def messages_of(value: Any) -> list[Message]:  # noqa: ANN401 - of a file
    """The messages of a row, with `role` and `content`, without the fields that only messages of other rows have.

    Columns have the fields of all rows, also within the calls of tools, and null where a row has none.

    Raises:
        ValueError: when a message has no role, or one of ShareGPT that is not known.
    """
    found: list[Message] = []
    for message in value or ():
        if not isinstance(message, Mapping):
            raise ValueError(f"{message!r} is not a message, which has a `role` and a `content`")  # noqa: TRY004 - a wrong row
        fields = {name: _without_nulls(field) for name, field in message.items() if field is not None}
        if isinstance(fields.get("content"), list):
            fields["content"] = _joined(fields["content"])
        if "from" in fields and "role" not in fields:
            fields = {"role": _role_of(fields.pop("from")), "content": fields.pop("value", ""), **fields}
        if "role" not in fields:
            raise ValueError(f"a message has no `role`; it has {', '.join(fields) or 'no field'}")
        found.append(fields)
    return found


def _joined(parts: list[Any]) -> str:
    """The text of a content that is given in parts, as OpenAI's interface takes it."""
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise ValueError(f"message content part {part!r} is not supported: only text parts are")  # noqa: TRY004 - a wrong row
    return "".join(part["text"] for part in parts)


def tools_of(value: Any) -> list[Any] | None:  # noqa: ANN401 - of a file
    """The tools of a row: a list, or one as JSON text; None without any.

    Raises:
        ValueError: when they are neither.
    """
    tools = json.loads(value) if isinstance(value, str) and value else value
    if tools and not isinstance(tools, list):
        raise ValueError(f"tools must be a list of their schemas, not {type(tools).__name__}")
    return [_without_nulls(tool) for tool in tools] if tools else None


def _role_of(sender: object) -> str:
    """The role of a sender of ShareGPT. Templates leave messages of others out without a word."""
    role = _SHAREGPT_ROLES.get(str(sender))
    if role is None:
        known = ", ".join(_SHAREGPT_ROLES)
        raise ValueError(
            f"a message is from {sender!r}, which is not one of {known}: name its `role` instead of `from`"
        )
    return role


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - of a file
    """The value, without the null fields of its mappings."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(field) for field in value] if isinstance(value, list) else value


def open_chat_template(data: RecordsData, folders: DataFolders) -> ChatTemplate:
    """Open the chat template of a spec, or that beside its tokenizer.

    Raises:
        SpecError: when there is none, or a file cannot be read.
    """
    folder = folders.pretrained if data.tokenizer == OF_THE_MODEL else Path(data.tokenizer).parent
    beside = None if data.tokenizer == "bytes" else folder
    config = {}
    if beside is not None:
        with foreign_errors("data.tokenizer", lambda: str(beside / _CONFIG)):
            config = json.loads(_read(beside / _CONFIG, folders) or "{}")
        if not isinstance(config, dict):
            raise data_problem("data.tokenizer", "must hold a JSON object", beside / _CONFIG)
    tokens = {name: _token(value) for name, value in config.items() if name.endswith("_token")}
    if data.chat_template is not None:
        source = _read(Path(data.chat_template), folders)
        if source is None:
            raise data_problem(_FIELD, "is not a file", data.chat_template)
    else:
        source = _read(beside / _TEMPLATE, folders) if beside else None
        if not source:
            source = config.get("chat_template")
            if isinstance(source, list):  # of which one is named `default`
                named = (entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default")
                source = next(named, {}).get("template")
            source = source if isinstance(source, str) else None
    if not source:
        message = "is required for `messages_field`: the tokenizer has no chat template, so name a template file"
        raise data_problem(_FIELD, message)
    return ChatTemplate(source, {name: token for name, token in tokens.items() if token is not None})


def _read(path: Path, folders: DataFolders) -> str | None:
    """The text of a file; None if there is none."""
    with foreign_errors(_FIELD, lambda: str(path)):
        try:
            with folders.open(_FIELD, path) as stream:
                return stream.read(_LARGEST).decode()
        except FileNotFoundError:
            return None


def _token(value: Any) -> str | None:  # noqa: ANN401 - of a file
    """A token of a `tokenizer_config.json`, which has its text or a description."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None
