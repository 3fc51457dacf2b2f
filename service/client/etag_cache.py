"""A cache of the documents read last, so that an unchanged document is not sent again."""

from __future__ import annotations

import threading

from cachetools import LRUCache
from pydantic import BaseModel

from service.client.protocol import DocumentT

_KEPT = 32
"""A tuning with its evidence takes some hundred kilobytes at most."""


class EtagCache:
    """Documents by path, each with its entity tag; the least recently used go first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: LRUCache[str, tuple[str, BaseModel]] = LRUCache(_KEPT)

    def find(self, kind: type[DocumentT], path: str) -> tuple[str, DocumentT] | None:
        """Return the tag and the document last read from a path; none when it is not kept."""
        with self._lock:
            tag, document = self._kept.get(path, ("", None))
        return (tag, document) if isinstance(document, kind) else None

    def keep(self, path: str, tag: str | None, document: BaseModel) -> None:
        """Keep a document that was read; without a tag, the service cannot be asked whether it has changed."""
        with self._lock:
            self._kept.pop(path, None)
            if tag is not None:
                self._kept[path] = tag, document
