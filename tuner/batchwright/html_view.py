"""Views of documents as HTML, for notebooks: a heading with the answer, and a table of named facts. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from enum import Enum
from html import escape
from typing import Any

from batchwright.units import format_bytes

_LONGEST_ROWS = 50
"""Rows of a table that are shown; a plan may list thousands of micro-batches."""
_CELL = "text-align:left;vertical-align:top;padding:.1em .8em .1em 0"
_NAME = f"{_CELL};font-weight:bold;white-space:nowrap"


def html_view(heading: str, facts: Mapping[str, object]) -> str:
    """Return a document as HTML. Texts are escaped; facts that are empty are left out.

    Args:
        heading: the answer, in a sentence or less.
        facts: a text, a number (of bytes or seconds by the end of its name), a mapping or document, which is folded, or
            a sequence of mappings or documents, which becomes a table.
    """
    rows = "".join(
        f'<tr><th style="{_NAME}">{escape(_words(name))}</th><td style="{_CELL}">{_value(name, value)}</td></tr>'
        for name, value in facts.items()
        if not _is_empty(value)
    )
    return f"<div><b>{escape(heading)}</b><table>{rows}</table></div>"


def _is_empty(value: object) -> bool:
    return value is None or value in ("", (), [], {})


def _words(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def _value(name: str, value: object) -> str:
    value = _plain(value)
    match value:
        case Mapping():
            return f"<details><summary>{len(value)} fields</summary>{html_view('', value)}</details>"
        case list() | tuple() if any(isinstance(_plain(row), Mapping) for row in value):
            return _table([_plain(row) for row in value])
        case _:
            return _text(name, value)


def _text(name: str, value: object) -> str:
    """A value in a line, or in its own lines where it has several."""
    text = str(value)
    match value:
        case list() | tuple():
            text = ", ".join(str(_plain(each)) for each in value[:_LONGEST_ROWS])
            text += ", ..." if len(value) > _LONGEST_ROWS else ""
        case bool() | None:
            text = {True: "yes", False: "no", None: ""}[value]
        case int() | float() if name.endswith("_bytes"):
            text = format_bytes(value)
        case float():
            text = f"{value:,.4g}" + (" s" if name.endswith("seconds") else "")
        case int():
            text = f"{value:,}"
    return f'<pre style="margin:0">{escape(text)}</pre>' if "\n" in text else escape(text)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with the columns in which any row has a value other than a document or a list of them."""
    used = dict.fromkeys(name for row in rows for name, value in row.items() if not _is_empty(value))
    names = [name for name in used if not any(_is_nested(row.get(name)) for row in rows)]
    head = "".join(f'<th style="{_CELL}">{escape(_words(name))}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{_text(name, _plain(row.get(name)))}</td>' for name in names) + "</tr>"
        for row in rows[:_LONGEST_ROWS]
    )
    more = f"<tr><td>and {len(rows) - _LONGEST_ROWS:,} more</td></tr>" if len(rows) > _LONGEST_ROWS else ""
    return f"<table><tr>{head}</tr>{body}{more}</table>"


def _is_nested(value: object) -> bool:
    value = _plain(value)
    rows = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(_plain(row), Mapping) for row in rows)


def _plain(value: object) -> Any:  # noqa: ANN401 - any value of a document
    """A document or a dataclass as a mapping, an enumeration as its value, a time as its text."""
    match value:
        case Enum():
            return value.value
        case datetime():
            return f"{value:%Y-%m-%d %H:%M:%S}"
        case _ if hasattr(value, "model_fields_set"):
            return dict(value)  # type: ignore[call-overload] # a pydantic model
        case _ if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
    return value
