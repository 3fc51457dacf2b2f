"""Compress responses by gzip for clients that accept it."""

import gzip

from starlette.datastructures import Headers


def accepts_gzip(headers: Headers) -> bool:
    """Return whether a client accepts a response in gzip."""
    for part in ",".join(headers.getlist("accept-encoding")).lower().split(","):
        coding, _, weight = part.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False


def compressed(body: bytes) -> bytes:
    """Compress a body by gzip, reproducibly: the output depends on the body alone."""
    return gzip.compress(body, mtime=0)
