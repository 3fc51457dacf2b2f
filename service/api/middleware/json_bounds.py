"""Bounds on the structure of JSON bodies, checked on the bytes before anything is parsed.

Parsing and validation run in the event loop, and a fault costs a hundred times the bytes that cause it: a body of
80,000 unknown keys, well below a cap of 1 MiB, kept the loop for seconds.
"""

from __future__ import annotations

import re

from service.errors import BodyTooLargeError, MalformedJsonError

MOST_VALUES = 10_000
"""Members of objects and elements of arrays in one body. Validating as many faults takes about 0.2 s; the largest
bodies in use, a model's configuration with the names of a thousand classes, have some thousands."""
DEEPEST = 64
"""Levels of nesting; the deepest document of the service has about ten."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
"""A string, or the rest of the body where one does not end: the search is linear in any text."""
_BRACKET = re.compile(rb"[\[\]{}]")


def check_structure(body: bytes) -> None:
    """Refuse a body with too many values, or nested too deep. Takes some milliseconds for 1 MiB.

    Raises:
        BodyTooLargeError: naming the bound.
        MalformedJsonError: when the body is not UTF-8, in which bytes that are counted here mean something else.
    """
    if b"\0" in body:
        raise MalformedJsonError("the body holds a NUL byte: JSON is sent as UTF-8, with control characters escaped")
    if body.count(b",") + _opened(body) <= DEEPEST:
        return
    bare = _STRING.sub(b"", body)
    if bare.count(b",") + _opened(bare) > MOST_VALUES:
        raise BodyTooLargeError(f"the body holds more than {MOST_VALUES} values; send fewer")
    if _depth(bare) > DEEPEST:
        raise BodyTooLargeError(f"the body is nested more than {DEEPEST} levels deep")


def _opened(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _depth(bare: bytes) -> int:
    """The deepest level of nesting in JSON without its strings."""
    level = deepest = 0
    for bracket in _BRACKET.findall(bare):
        level += 1 if bracket in b"[{" else -1
        deepest = max(deepest, level)
    return deepest
