"""Bodies in gzip, for those who take it."""

from __future__ import annotations

import gzip

from starlette.datastructures import Headers


def takes_gzip(headers: Headers) -> bool:
    """Whether the answer may be compressed."""
    for part in ",".join(headers.getlist("accept-encoding")).lower().split(","):
        coding, _, weight = part.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False


def compressed(body: bytes) -> bytes:
    """The same bytes are compressed to the same bytes."""
    return gzip.compress(body, mtime=0)
