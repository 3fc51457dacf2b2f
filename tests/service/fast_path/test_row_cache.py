"""List rows are made once for each version, and their number is bounded."""

import pytest

from batchwright_service.fast_path import row_cache
from batchwright_service.fast_path.row_cache import RowCache


def test_a_row_is_made_once_for_each_version() -> None:
    """A page is found once all its versions are cached, in the requested order."""
    cache, made = RowCache[str](), list[str]()

    def make() -> str:
        made.append(f"row {len(made)}")
        return made[-1]

    assert [cache.get(version, make) for version in ("a 1", "b 1", "a 1", "a 2")] == [
        "row 0",
        "row 1",
        "row 0",
        "row 2",
    ]
    assert cache.find(["b 1", "a 2"]) == ["row 1", "row 2"]
    assert cache.find(["b 1", "c 1"]) is None
    assert cache.find([]) == []


def test_a_full_cache_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made again, and their number never exceeds the bound."""
    monkeypatch.setattr(row_cache, "_MAX_ROWS", 2)
    cache = RowCache[int]()
    for number in range(3):
        cache.get(str(number), lambda: 1)
    assert [cache.find([str(number)]) is not None for number in range(3)] == [False, False, True]
