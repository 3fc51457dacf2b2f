"""Residuals of estimates are found by hardware and family, on every backend."""

import pytest

from batchwright_service.store.store import Store
from tests.support.factories import residual


def limits(store: Store, hardware: str, family: str, limit: int = 10) -> list[int]:
    """The residuals found, by their memory limits."""
    return [found.limit_bytes for found in store.residuals.newest(hardware, family, limit)]


def test_residuals_of_the_family_come_first_and_then_those_of_the_hardware(store: Store) -> None:
    """Each part is newest first, and other hardware is left out."""
    store.residuals.add("tun_1", residual(limit_bytes=1))
    store.residuals.add("tun_2", residual(limit_bytes=2, family="bert"))
    store.residuals.add("tun_3", residual(limit_bytes=3))
    store.residuals.add("tun_4", residual(limit_bytes=4, family="bert"))
    store.residuals.add("tun_5", residual(limit_bytes=5, hardware="another card"))
    assert limits(store, "card", "gpt") == [3, 1, 4, 2]
    assert limits(store, "card", "gpt", 1) == [3, 4]
    assert limits(store, "a third card", "gpt") == []


def test_a_residual_is_read_back_whole_and_added_once(store: Store) -> None:
    """A repeated call for a tuning changes nothing, and the tuning need not be stored any more."""
    first = residual(zero_expected_bytes=-5)
    store.residuals.add("tun_1", first)
    store.residuals.add("tun_1", residual(limit_bytes=2))
    assert store.residuals.newest("card", "gpt", 5) == [first]


def test_the_newest_of_a_family_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are deleted when one is added, of that family and hardware alone."""
    monkeypatch.setattr("batchwright_service.store.evidence.RESIDUALS_PER_FAMILY", 2)
    store.residuals.add("tun_0", residual(limit_bytes=9, family="bert"))
    for number in (1, 2, 3, 4):
        store.residuals.add(f"tun_{number}", residual(limit_bytes=number))
    assert limits(store, "card", "gpt") == [4, 3, 9]
