"""How pages and files are sent: protected, and compressed for those who take that."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import Response
from starlette.datastructures import Headers

from service.api.middleware.compression import accepts_gzip, compressed

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PROTECTING = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "same-origin",  # with "no-referrer" browsers send forms with `Origin: null`
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept-Encoding",
}
"""On every page and file: nothing comes from elsewhere, nothing runs that is written in a page."""
_UNCOMPRESSED_BYTES = 512
"""What is shorter fits in a packet anyway."""


def page(text: str, asked: Headers, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> Response:
    """A page, which no cache keeps: it shows who is signed in."""
    body = text.encode()
    told = {**PROTECTING, "Cache-Control": "no-store", **(headers or {})}
    if len(body) > _UNCOMPRESSED_BYTES and accepts_gzip(asked):
        body, told["Content-Encoding"] = compressed(body), "gzip"
    return Response(body, status_code=status, media_type="text/html", headers=told)


def redirect(location: str, headers: Mapping[str, str] | None = None) -> Response:
    """Another page to look at, by GET."""
    told = {**PROTECTING, "Cache-Control": "no-store", **(headers or {}), "Location": location}
    return Response(status_code=HTTPStatus.SEE_OTHER, headers=told)
