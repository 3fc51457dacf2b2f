"""Bounds on the structure of JSON bodies, checked on the bytes before they are parsed.

Parsing and validation run in the event loop, and a fault costs a hundred times the bytes that cause it: a body of
80,000 unknown keys, well below the limit of 1 MiB, blocked the loop for seconds.
"""

from __future__ import annotations

import re

from batchwright_service.errors import BodyTooLargeError, MalformedJsonError

MAX_VALUES = 10_000
"""Maximum number of members of objects and elements of arrays in one body.

Validating as many faults takes about 0.2 s. The largest bodies in use, a model's configuration with the names of a
thousand classes, have some thousands.
"""
MAX_DEPTH = 64
"""Maximum depth of nesting; the deepest document of the service has about ten levels."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
"""A string, or the rest of the body where a string does not end. The match takes linear time in any text."""
_BRACKET = re.compile(rb"[\[\]{}]")


def check_structure(body: bytes) -> None:
    """Refuse a body with too many values, or nested too deeply. The check takes some milliseconds for 1 MiB.

    Raises:
        BodyTooLargeError: names the limit.
        MalformedJsonError: when the body contains a NUL byte, as UTF-16 and UTF-32 do, where the counts would be wrong.
    """
    if b"\0" in body:
        raise MalformedJsonError("the body contains a NUL byte; send JSON as UTF-8, with control characters escaped")
    if body.count(b",") + _opened(body) <= MAX_DEPTH:
        return
    bare = _STRING.sub(b"", body)
    if bare.count(b",") + _opened(bare) > MAX_VALUES:
        raise BodyTooLargeError(f"the body has more than {MAX_VALUES} values; send fewer")
    if _depth(bare) > MAX_DEPTH:
        raise BodyTooLargeError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _opened(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _depth(bare: bytes) -> int:
    """Return the depth of nesting in JSON whose strings were removed."""
    level = deepest = 0
    for bracket in _BRACKET.findall(bare):
        level += 1 if bracket in b"[{" else -1
        deepest = max(deepest, level)
    return deepest
