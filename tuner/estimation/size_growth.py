"""How a tensor's bytes grow with the micro-batch, from its bytes at a few sizes. Pure, no torch.

A tensor is a product of dimensions, each fixed or affine in the size: its bytes are constant, affine, or (a loss that
compares all samples) quadratic with two roots, none of them above 1, where every dimension is something. Other points
lie on no such polynomial: bytes were rounded, or bounded, or come in steps. A quadratic through them would bend upwards
or downwards without limit; lines between the points stay near.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isqrt
from typing import TypeAlias


@dataclass(frozen=True)
class Polynomial:
    """Bytes in powers of the size, ``c0 + c1*b + c2*b**2``, never below 0.

    Attributes:
        coefficients: from ``c0`` on.
        most: bytes above which nothing grows; None for no such bound.
        bend: none.
    """

    coefficients: tuple[Fraction, ...]
    most: int | None = None
    bend: int = 0

    def at(self, size: int) -> int:
        """Bytes at a size."""
        total = Fraction(0)
        for coefficient in reversed(self.coefficients):
            total = total * size + coefficient
        return _bounded(total, self.most)


@dataclass(frozen=True)
class Chords:
    """Lines between points; the outer two go on.

    Attributes:
        places: sizes, rising.
        values: bytes at each.
        most: as of ``Polynomial``.
    """

    places: tuple[int, ...]
    values: tuple[int, ...]
    most: int | None = None

    @property
    def bend(self) -> int:
        """By how many bytes the points between lie off the line through the first and the last, at most."""
        (first, *between), (least, *inner) = self.places, self.values
        slope = Fraction(self.values[-1] - least, self.places[-1] - first)
        return max(ceil(abs(it - least - slope * (place - first))) for place, it in zip(between, inner, strict=True))

    def at(self, size: int) -> int:
        """Bytes at a size."""
        right = min(max(bisect_left(self.places, size), 1), len(self.places) - 1)
        (left_place, place), (left, value) = self.places[right - 1 : right + 1], self.values[right - 1 : right + 1]
        return _bounded(left + Fraction((value - left) * (size - left_place), place - left_place), self.most)


Growth: TypeAlias = Polynomial | Chords
_PARABOLA = 3
"""Coefficients of a quadratic."""


def growth_through(places: tuple[int, ...], values: tuple[int, ...], most: int | None = None) -> Growth:
    """What passes through the points: the polynomial of the lowest degree if a tensor's bytes can be it, else lines.

    Args:
        places: sizes, rising; three tell a quadratic.
        values: bytes at each, as if nothing bounded them.
        most: the bound.
    """
    coefficients = _interpolated(places, values)
    if len(coefficients) > _PARABOLA or (
        len(coefficients) == _PARABOLA and not _may_be_a_tensors(coefficients, places)
    ):
        return Chords(places, values, most)
    return Polynomial(coefficients, most)


def _may_be_a_tensors(coefficients: tuple[Fraction, ...], places: tuple[int, ...]) -> bool:
    """Whether a quadratic is that of two dimensions: whole at every size, and a product of two that begin by 1."""
    constant, linear, square = coefficients
    between = range(places[0], places[-1] + 1)
    if square < 0 or any((constant + linear * it + square * it * it).denominator != 1 for it in between):
        return False
    discriminant = linear * linear - 4 * square * constant
    root = _root(discriminant)
    return root is not None and root - linear <= 2 * square


def _root(number: Fraction) -> Fraction | None:
    """Its square root, where that is rational."""
    if number < 0:
        return None
    root = Fraction(isqrt(number.numerator), isqrt(number.denominator))
    return root if root * root == number else None


def _interpolated(places: tuple[int, ...], values: tuple[int, ...]) -> tuple[Fraction, ...]:
    """Coefficients of the polynomial of the lowest degree through the points, by Newton's divided differences."""
    if len(set(values)) == 1:
        return (Fraction(values[0]),)
    differences = [Fraction(value) for value in values]
    count = len(places)
    for order in range(1, count):
        for index in range(count - 1, order - 1, -1):
            step = places[index] - places[index - order]
            differences[index] = (differences[index] - differences[index - 1]) / step
    coefficients = [Fraction(0)] * count
    for order in range(count - 1, -1, -1):  # Horner, in (b - place)
        shifted = [Fraction(0), *coefficients[:-1]]
        coefficients = [high - places[order] * low for high, low in zip(shifted, coefficients, strict=True)]
        coefficients[0] += differences[order]
    while len(coefficients) > 1 and coefficients[-1] == 0:
        coefficients.pop()
    return tuple(coefficients)


def _bounded(nbytes: Fraction, most: int | None) -> int:
    whole = max(0, round(nbytes))
    return whole if most is None else min(whole, most)
