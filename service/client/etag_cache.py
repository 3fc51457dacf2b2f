"""The documents last read, so that one that has not changed need not be sent again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from pydantic import BaseModel

from service.client.protocol import DocumentT

_KEPT = 32
"""A tuning with its evidence takes some hundred kilobytes at most."""


class Copies:
    """Documents by path, with the entity tag they came with; the least recently used go first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[str, BaseModel]] = OrderedDict()

    def of(self, kind: type[DocumentT], path: str) -> tuple[str, DocumentT] | None:
        """The tag and the document last read from a path; none when it is not kept."""
        with self._lock:
            tag, document = self._kept.get(path, ("", None))
            if not isinstance(document, kind):
                return None
            self._kept.move_to_end(path)
            return tag, document

    def keep(self, path: str, tag: str | None, document: BaseModel) -> None:
        """Keep what was read; without a tag it cannot be asked for again."""
        with self._lock:
            self._kept.pop(path, None)
            if tag is not None:
                self._kept[path] = tag, document
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
