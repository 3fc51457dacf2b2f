"""Bytes for people: ``1.50 GiB`` both ways."""

from __future__ import annotations

import math
import re
from typing import Self

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_SHOWN_LENGTH = 40
_DECIMAL = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def format_bytes(number: float) -> str:
    """``1610612736`` as ``1.50 GiB``; what no float holds as ``inf TiB``."""
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    power = 0
    while abs(number) >= _STEP and power < len(_UNITS) - 1:
        number /= _STEP
        power += 1
    return f"{number:.0f} B" if power == 0 else f"{number:.2f} {_UNITS[power]}"


class TypedSize(int):
    """A number of bytes that remembers how it was written, so that a message can repeat the text."""

    text: str

    def __new__(cls, number: int, text: str) -> Self:
        """``number`` bytes, written as ``text``."""
        made = super().__new__(cls, number)
        made.text = text
        return made

    def __repr__(self) -> str:
        """The text as it was written."""
        return self.text


def parse_bytes(text: str) -> int:
    """``1.5GiB``, ``800MB`` or ``1000000`` in bytes: binary units with an ``i``, decimal ones without.

    Raises:
        ValueError: when the text is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    unit = (found[2] if found else None) or ""
    number = float(found[1]) * (_BINARY.get(unit) or _DECIMAL[unit]) if found else math.inf
    if math.isinf(number):
        shown = text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
        raise ValueError(f"{shown!r} is no size: write for example 8GiB, 800MiB, 800MB or a number of bytes")
    return int(number)
