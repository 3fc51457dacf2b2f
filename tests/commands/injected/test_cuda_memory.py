"""The limit of a command's card, as its context grows: a stand-in for the card tells torch's figures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from batchwright.commands.injected.memory import CudaMemory

MIB = 1024**2
TOTAL = 16_000 * MIB


class Card:
    """One card as torch reports it: memory of others, of the context, and reserved by the allocator."""

    def __init__(self, others: int) -> None:
        self.others = others
        self.context = 500 * MIB
        self.reserved = 100 * MIB
        self.limit_bytes = float(TOTAL)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 1,
            memory_reserved=lambda _index: self.reserved,
            max_memory_reserved=lambda _index: self.reserved,
            mem_get_info=lambda _index: (TOTAL - self.others - self.context - self.reserved, TOTAL),
            get_device_properties=lambda _index: SimpleNamespace(total_memory=TOTAL),
            set_per_process_memory_fraction=self._limit,
            empty_cache=self._empty_cache,
            reset_peak_memory_stats=lambda _index: None,
        )

    def _empty_cache(self) -> None:
        self.reserved = 0

    def _limit(self, fraction: float, _index: int) -> None:
        self.limit_bytes = fraction * TOTAL


def memory(card: Card, limit_bytes: int | None = 3000 * MIB) -> CudaMemory:
    """The memory of a process under a limit."""
    settings = {
        "limit_bytes": limit_bytes,
        "memory_margin": 0.0,
        "used_bytes": [card.others],
        "least_context_bytes": 250 * MIB,
    }
    return CudaMemory(card, settings)


def test_the_limit_follows_a_context_that_grows() -> None:
    """Kernels that the first update loads are part of the limit. What comes later may be another process's."""
    card = Card(others=1000 * MIB)
    limited = memory(card)
    limited.check_devices()
    assert card.limit_bytes == pytest.approx(2500 * MIB, abs=1)
    card.context = 767 * MIB
    limited.follow_contexts()
    assert card.limit_bytes == pytest.approx((3000 - 767) * MIB, abs=1)
    card.others += 300 * MIB
    limited.follow_contexts()
    assert card.limit_bytes == pytest.approx((3000 - 767) * MIB, abs=1)
    assert card.reserved == 100 * MIB


def test_an_update_that_took_what_the_context_needed_gives_its_cache_back() -> None:
    """The next update has to do with the lower limit, or runs out of memory."""
    card = Card(others=0)
    limited = memory(card)
    limited.check_devices()
    card.reserved, card.context = 2400 * MIB, 767 * MIB
    limited.follow_contexts()
    assert card.limit_bytes == pytest.approx((3000 - 767) * MIB, abs=1)
    assert card.reserved == 0


@pytest.mark.parametrize("change", [-200 * MIB, 900 * MIB, 4000 * MIB])
def test_other_processes_do_not_move_the_limit(change: int) -> None:
    """No context grows by as much in an update, or shrinks."""
    card = Card(others=1000 * MIB)
    limited = memory(card)
    limited.check_devices()
    card.others += change
    limited.follow_contexts()
    assert card.limit_bytes == pytest.approx(2500 * MIB, abs=1)


def test_a_context_grows_without_a_limit() -> None:
    """The whole card was asked for: nothing is limited."""
    card = Card(others=0)
    free = memory(card, limit_bytes=None)
    free.check_devices()
    card.context = 767 * MIB
    free.follow_contexts()
    assert card.limit_bytes == TOTAL
