"""Imports that fail, for processes in which a package must not be needed."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override


class _Blocked(MetaPathFinder):
    """Refuses to find packages.

    Args:
        names: the packages.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._names:
            raise ImportError(f"{fullname} is blocked by the test")
        return None


def block(*names: str) -> None:
    """Have every import of these packages fail from now on, in this process.

    Raises:
        RuntimeError: when one of them was imported already.
    """
    loaded = [name for name in names if name in sys.modules]
    if loaded:
        raise RuntimeError(f"{', '.join(loaded)} was imported before it could be blocked")
    sys.meta_path.insert(0, _Blocked(frozenset(names)))
