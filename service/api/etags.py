"""Representations with entity tags: 304 for what the caller has already."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import Response

_DIGEST_BYTES = 16
_ASIDE = "-"
"""Between the two parts of a tag."""

TAG_HEADERS: dict[str, Any] = {
    "ETag": {"description": "Names this representation: another one has another tag.", "schema": {"type": "string"}},
    "Cache-Control": {"description": "How long a cache of the caller's own may keep it.", "schema": {"type": "string"}},
}
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "The representation is the one that `If-None-Match` names.", "headers": TAG_HEADERS}
}


@dataclass(frozen=True)
class Tagged:
    """A representation and its strong entity tag, which is a hash of it: it changes whenever a byte does."""

    body: bytes
    etag: str
    media_type: str

    def is_known(self, if_none_match: str | None) -> bool:
        """Whether the caller has it. Tags are compared weakly, as RFC 9110 asks for here: a proxy may weaken them."""
        return if_none_match is not None and not {self.etag, "*"}.isdisjoint(_tags(if_none_match))

    def is_essentially_known(self, if_none_match: str) -> bool:
        """Return whether the caller has all of it but the aside, for which a poll does not end."""
        known = {tag.strip('"').partition(_ASIDE)[0] for tag in _tags(if_none_match)}
        return not {self.etag.strip('"').partition(_ASIDE)[0], "*"}.isdisjoint(known)


def tagged(body: bytes, media_type: str = "application/json") -> Tagged:
    """A representation with its tag."""
    return Tagged(body, f'"{_digest(body)}"', media_type)


def tagged_with_aside(body: bytes, essential: bytes, aside: bytes) -> Tagged:
    """A representation of JSON whose tag tells apart what is worth waiting for and what changes all the time."""
    return Tagged(body, f'"{_digest(essential)}{_ASIDE}{_digest(aside)}"', "application/json")


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()


def _tags(if_none_match: str) -> set[str]:
    return {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}


def conditional(current: Tagged, if_none_match: str | None, headers: Mapping[str, str]) -> Response:
    """The representation, or that it is still the one the caller has."""
    told = {"ETag": current.etag, **headers}
    if current.is_known(if_none_match):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=told)
    return Response(current.body, media_type=current.media_type, headers=told)
