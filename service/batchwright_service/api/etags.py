"""Representations with entity tags, and 304 responses to callers that have the current one."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any

from fastapi import Response
from starlette.datastructures import Headers

from batchwright_service.api.compression import accepts_gzip, compressed

_DIGEST_BYTES = 16
_SEPARATOR = "-"
"""Separates the two parts of a tag."""
_TEXT = ("text/", "application/json", "image/svg+xml")
"""Begins the media types of content that is compressed."""

TAG_HEADERS: dict[str, Any] = {
    "ETag": {
        "description": "Identifies this representation; each representation has its own tag.",
        "schema": {"type": "string"},
    },
    "Cache-Control": {"description": "How long a private cache may keep the response.", "schema": {"type": "string"}},
}
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "The current representation is the one that `If-None-Match` names.", "headers": TAG_HEADERS}
}


@dataclass(frozen=True)
class Tagged:
    """A representation and its strong entity tag, a hash of the bytes."""

    body: bytes
    etag: str
    media_type: str

    def matches(self, if_none_match: str | None) -> bool:
        """Return whether `If-None-Match` names this representation, by weak comparison (RFC 9110, section 13.1.2)."""
        return if_none_match is not None and not {self.etag, "*"}.isdisjoint(_tags(if_none_match))

    def matches_stable_part(self, if_none_match: str) -> bool:
        """Return whether a tag differs at most in its volatile part, for which a long poll does not end."""
        known = {tag.strip('"').partition(_SEPARATOR)[0] for tag in _tags(if_none_match)}
        return not {self.etag.strip('"').partition(_SEPARATOR)[0], "*"}.isdisjoint(known)


def tagged(body: bytes, media_type: str = "application/json") -> Tagged:
    """Tag a representation."""
    return Tagged(body, f'"{_digest(body)}"', media_type)


def tagged_with_volatile_part(body: bytes, stable: bytes, volatile: bytes) -> Tagged:
    """Tag a JSON representation by its stable part and the part that changes all the time."""
    return Tagged(body, f'"{_digest(stable)}{_SEPARATOR}{_digest(volatile)}"', "application/json")


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()


def _tags(if_none_match: str) -> set[str]:
    return {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}


def conditional(current: Tagged, if_none_match: str | None, headers: Mapping[str, str]) -> Response:
    """Respond with the representation, or with 304 where the caller has it."""
    tagged_headers = {"ETag": current.etag, **headers}
    if current.matches(if_none_match):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=tagged_headers)
    return Response(current.body, media_type=current.media_type, headers=tagged_headers)


class StaticContent:
    """Content that does not change while the service runs: read, tagged and compressed when it is first requested."""

    def __init__(self, read: Callable[[], bytes], media_type: str = "application/json") -> None:
        self._read = read
        self._media_type = media_type

    @cached_property
    def plain(self) -> Tagged:
        """The content as it was read."""
        return tagged(self._read(), self._media_type)

    @cached_property
    def _zipped(self) -> Tagged:
        return tagged(compressed(self.plain.body), self._media_type)

    def response(self, request_headers: Headers, headers: Mapping[str, str]) -> Response:
        """Respond with the content, compressed for clients that accept gzip, or with 304 to a client that has it."""
        known, sent = request_headers.get("if-none-match"), {"Vary": "Accept-Encoding", **headers}
        if self._media_type.startswith(_TEXT) and accepts_gzip(request_headers):
            return conditional(self._zipped, known, {"Content-Encoding": "gzip", **sent})
        return conditional(self.plain, known, sent)
