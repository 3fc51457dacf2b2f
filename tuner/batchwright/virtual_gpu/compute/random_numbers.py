"""Random numbers of a virtual card: of the right distribution, repeatable, not those of a real card.

The real kernel advances the offset of its device's generator. The seed and the offset before the call seed a generator
of the CPU, so that ``manual_seed``, ``get_rng_state`` and ``set_rng_state`` repeat numbers as on a card.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 2**64


class PhiloxState(NamedTuple):
    """State of a CUDA generator, from which one operator draws."""

    seed: int
    offset: int

    def cpu_generator(self) -> torch.Generator:
        """Return a generator of the CPU for this state."""
        generator = torch.Generator(device="cpu")
        generator.manual_seed(_mixed(_mixed(self.seed) + self.offset))
        return generator


def philox_state(generator: torch.Generator) -> PhiloxState:
    """Return the state of a CUDA generator."""
    return PhiloxState(generator.initial_seed(), generator.get_offset())


def saved_state(seed: Tensor, offset: Tensor) -> PhiloxState:
    """Return the state that the forward pass of an attention kernel has saved.

    Args:
        seed: the seed, or the seed and the offset (flash attention).
        offset: the offset, where it is not in ``seed``.
    """
    words = [*seed.reshape(-1).tolist(), *offset.reshape(-1).tolist()]
    return PhiloxState(words[0] % _WORD, words[1] % _WORD)


def _mixed(word: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014): near states give unrelated seeds."""
    word = (word + 0x9E3779B97F4A7C15) % _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % _WORD
    return word ^ (word >> 31)
