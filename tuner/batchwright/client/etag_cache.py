"""A cache of the documents read last, so that an unchanged document is not sent again."""

from __future__ import annotations

import threading

from cachetools import LRUCache
from pydantic import BaseModel

from batchwright.client.http_messages import DocumentT

_MAX_DOCUMENTS = 32
"""A tuning with its evidence takes a few hundred kilobytes at most."""


class EtagCache:
    """Documents by path, each with its entity tag; the least recently used are evicted first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._documents: LRUCache[str, tuple[str, BaseModel]] = LRUCache(_MAX_DOCUMENTS)

    def find(self, kind: type[DocumentT], path: str) -> tuple[str, DocumentT] | None:
        """Return the tag and the document last read from a path, or None if it is not cached."""
        with self._lock:
            tag, document = self._documents.get(path, ("", None))
        return (tag, document) if isinstance(document, kind) else None

    def store(self, path: str, tag: str | None, document: BaseModel) -> None:
        """Cache a document. One without a tag cannot be revalidated and is not cached."""
        with self._lock:
            self._documents.pop(path, None)
            if tag is not None:
                self._documents[path] = tag, document
