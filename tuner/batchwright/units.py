"""Byte sizes such as ``1.50 GiB``, durations such as ``90m``, and numbers of things in words."""

import math
import re
from typing import Self

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE | re.ASCII)

LONGEST_SIZE = 40
"""Characters of a size; longer texts are refused unread."""
NOT_A_SIZE = "is not a size: write for example 8GiB, 800MiB, 800MB or a number of bytes"
"""Message about a text that is no size, which follows the text or the name of its field."""


def format_bytes(number: float) -> str:
    """Format ``1610612736`` as ``1.50 GiB``, and numbers above the range of floats as ``inf TiB``."""
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    power = 0
    while abs(number) >= _STEP and power < len(_UNITS) - 1:
        number /= _STEP
        power += 1
    return f"{number:.0f} B" if power == 0 else f"{number:.2f} {_UNITS[power]}"


def format_use(used_bytes: float, limit_bytes: float | None) -> str:
    """Format a use of memory as ``310.00 MiB of 400.00 MiB``, without a limit if there is none."""
    return format_bytes(used_bytes) + ("" if limit_bytes is None else f" of {format_bytes(limit_bytes)}")


class TypedSize(int):
    """A number of bytes with its original text, which messages repeat."""

    text: str

    def __new__(cls, number: int, text: str) -> Self:
        """Build ``number`` bytes with the original ``text``."""
        size = super().__new__(cls, number)
        size.text = text
        return size

    def __repr__(self) -> str:
        """The original text."""
        return self.text


def parse_bytes(text: str) -> int:
    """Parse ``1.5GiB``, ``800MB`` or ``1000000``: units with an ``i`` are binary, others decimal.

    Raises:
        ValueError: when the text is not a size.
    """
    found = _SIZE.fullmatch(text.strip()) if len(text) <= LONGEST_SIZE else None
    if found is None:
        shown = text if len(text) <= LONGEST_SIZE else text[:LONGEST_SIZE] + "..."
        raise ValueError(f"{shown!r} {NOT_A_SIZE}")
    unit = (found[2] or "").lower()
    return int(float(found[1]) * (_BINARY.get(unit) or _DECIMAL[unit]))


_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", re.IGNORECASE | re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_LONGEST_DURATION = 3650 * 86_400.0


def parse_duration(text: str) -> float:
    """Parse ``90s``, ``10m``, ``1.5h``, ``30d`` or ``2w`` as seconds.

    Raises:
        ValueError: when the text is not a duration of at most ten years.
    """
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2].lower()] if found else math.inf
    if seconds > _LONGEST_DURATION:
        shown = text if len(text) <= LONGEST_SIZE else text[:LONGEST_SIZE] + "..."
        raise ValueError(f"{shown!r} is not a duration of at most ten years, such as 30d, 12h, 90m or 45s")
    return seconds


def format_share(share: float, decimals: int = 0) -> str:
    """Format ``0.95`` as ``95 %``."""
    return f"{100 * share:.{decimals}f} %"


def format_duration(seconds: float) -> str:
    """Format ``11400`` as ``3 h 10 min``: in at most two units."""
    left = round(seconds)
    parts = []
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        parts.append((left // unit, name))
        left %= unit
    first = next((place for place, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number:,} {name}" for number, name in parts[first : first + 2] if number) or "0 s"


def counted(number: int, noun: str) -> str:
    """Write a number of things, with the plural of the noun by an `s`: ``1 probe``, ``2,000 probes``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
