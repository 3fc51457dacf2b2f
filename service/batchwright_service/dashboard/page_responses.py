"""Responses with pages: with security headers, and compressed for clients that accept gzip."""

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import Response
from starlette.datastructures import Headers

from batchwright_service.api.compression import accepts_gzip, compressed

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "same-origin",  # with "no-referrer" browsers send forms with `Origin: null`
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept-Encoding",
}
"""Sent with every page and file: nothing is loaded from another origin, and no inline script runs."""
_UNCOMPRESSED_BYTES = 512
"""A shorter body fits in one packet uncompressed."""


def page(
    text: str, request_headers: Headers, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Make the response with a page. No cache stores it, because it depends on the signed-in key."""
    body = text.encode()
    sent = {**SECURITY_HEADERS, "Cache-Control": "no-store", **(headers or {})}
    if len(body) > _UNCOMPRESSED_BYTES and accepts_gzip(request_headers):
        body, sent["Content-Encoding"] = compressed(body), "gzip"
    return Response(body, status_code=status, media_type="text/html", headers=sent)


def redirect(location: str) -> Response:
    """Make a redirect to another page, by GET."""
    sent = {**SECURITY_HEADERS, "Cache-Control": "no-store", "Location": location}
    return Response(status_code=HTTPStatus.SEE_OTHER, headers=sent)
