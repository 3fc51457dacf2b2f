"""Hooks that schemathesis runs before each call: see schemathesis.toml."""

import re
import uuid
from typing import Any

import schemathesis

_KEY = "Idempotency-Key"
_EXTENSIBLE = re.compile(r"[!-~]{1,219}")
"""A good key with room for what makes it new."""


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Make a good key new: under a used one the first answer comes again, also of what has been deleted meanwhile."""
    given = (case.headers or {}).get(_KEY)
    if isinstance(given, str) and _EXTENSIBLE.fullmatch(given):
        case.headers[_KEY] = given + str(uuid.uuid4())
