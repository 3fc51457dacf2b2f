"""Extrapolate a tensor's bytes to every micro-batch size, from its bytes at a few sizes. Pure, no torch.

The dimensions of a tensor are fixed or affine in the micro-batch size. Its bytes are therefore constant, affine, or (in
a loss that compares all samples) quadratic with two real roots, both at most 1, because every dimension is at least 1
there. Other points are on no such polynomial: the bytes were rounded or bounded, or grow in steps. A quadratic through
such points would diverge, so piecewise linear interpolation is used.
"""

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isqrt
from typing import TypeAlias

from batchwright.estimation.row_sums import partial_sums_bytes

_MAX_ALIGNMENT_BYTES = 4096
"""Bytes that a workspace may have beside those in proportion to the samples."""


@dataclass(frozen=True)
class Polynomial:
    """Bytes as a polynomial of the size, ``c0 + c1*b + c2*b**2``, never below 0.

    Attributes:
        coefficients: ``c0``, ``c1`` and so on.
        max_bytes: the upper bound of the bytes; None for no bound.
        deviation: always 0.
    """

    coefficients: tuple[Fraction, ...]
    max_bytes: int | None = None
    deviation: int = 0

    @property
    def is_proportional(self) -> bool:
        """Whether the bytes are constant, or in proportion to the size but for an alignment.

        A product of two dimensions that grow has a secant that begins far above or below 0.
        """
        constant, *slopes = self.coefficients
        return not slopes or (len(slopes) == 1 and 0 <= constant <= min(_MAX_ALIGNMENT_BYTES, float(slopes[0]) / 10))

    def at(self, size: int) -> int:
        """Return the bytes at a size."""
        total = Fraction(0)
        for coefficient in reversed(self.coefficients):
            total = total * size + coefficient
        return _bounded(total, self.max_bytes)


@dataclass(frozen=True)
class PiecewiseLinear:
    """Piecewise linear interpolation; the first and the last line are extrapolated.

    Attributes:
        sizes: increasing micro-batch sizes.
        values: bytes at each size.
        max_bytes: as in ``Polynomial``.
    """

    sizes: tuple[int, ...]
    values: tuple[int, ...]
    max_bytes: int | None = None
    is_proportional: bool = False

    @property
    def deviation(self) -> int:
        """Largest distance of a point from the line through the first and the last point, in bytes."""
        (first, *between), (least, *inner) = self.sizes, self.values
        slope = Fraction(self.values[-1] - least, self.sizes[-1] - first)
        return max(
            ceil(abs(value - least - slope * (size - first))) for size, value in zip(between, inner, strict=True)
        )

    def at(self, size: int) -> int:
        """Return the bytes at a size."""
        right = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.values[right - 1 : right + 1]
        return _bounded(y0 + Fraction((y1 - y0) * (size - x0), x1 - x0), self.max_bytes)


@dataclass(frozen=True)
class SumOfGrowths:
    """Sum of a bounded and an unbounded part of a block.

    Attributes:
        bounded: bytes of the one part.
        beside: bytes of the other part.
    """

    bounded: Polynomial | PiecewiseLinear
    beside: Polynomial | PiecewiseLinear

    @property
    def deviation(self) -> int:
        """Sum of the deviations of the parts."""
        return self.bounded.deviation + self.beside.deviation

    @property
    def is_proportional(self) -> bool:
        """Whether both parts are constant, or in proportion to the size."""
        return self.bounded.is_proportional and self.beside.is_proportional

    def at(self, size: int) -> int:
        """Return the bytes at a size."""
        return self.bounded.at(size) + self.beside.at(size)


@dataclass(frozen=True)
class GrowthOfRowSums:
    """Bytes of the partial sums of a sum over dimensions (``partial_sums_bytes``).

    Attributes:
        rows: the elements of each sum.
        columns: the sums.
        width: the sums of neighbours.
        element_bytes: bytes of an element.
        threads: threads that the card runs at once.
    """

    rows: Polynomial | PiecewiseLinear
    columns: Polynomial | PiecewiseLinear
    width: Polynomial | PiecewiseLinear
    element_bytes: int
    threads: int

    @property
    def deviation(self) -> int:
        """Sum of the deviations of rows and columns: they are small beside the bytes of all blocks."""
        return self.rows.deviation + self.columns.deviation

    @property
    def is_proportional(self) -> bool:
        """True if rows and columns are constant or in proportion to the size."""
        return self.rows.is_proportional and self.columns.is_proportional

    def at(self, size: int) -> int:
        """Return the bytes at a size."""
        rows, columns, width = (growth.at(size) for growth in (self.rows, self.columns, self.width))
        return partial_sums_bytes(rows, columns, width, self.element_bytes, self.threads)


Growth: TypeAlias = Polynomial | PiecewiseLinear | SumOfGrowths | GrowthOfRowSums
_QUADRATIC_LENGTH = 3
"""Number of coefficients of a quadratic."""


def growth_from_points(
    sizes: tuple[int, ...], values: tuple[int, ...], max_bytes: int | None = None
) -> Polynomial | PiecewiseLinear:
    """Fit the polynomial of the lowest degree if it can describe a tensor, else piecewise lines.

    Args:
        sizes: increasing micro-batch sizes; a quadratic needs three.
        values: bytes at each size, without the bound.
        max_bytes: the upper bound of the bytes; None for no bound.
    """
    coefficients = _interpolated(sizes, values)
    if len(coefficients) > _QUADRATIC_LENGTH or (
        len(coefficients) == _QUADRATIC_LENGTH and not _is_product_of_dimensions(coefficients, sizes)
    ):
        return PiecewiseLinear(sizes, values, max_bytes)
    return Polynomial(coefficients, max_bytes)


def _is_product_of_dimensions(coefficients: tuple[Fraction, ...], sizes: tuple[int, ...]) -> bool:
    """Return whether a quadratic is a product of two dimensions: integral at every size, with real roots at most 1."""
    constant, linear, square = coefficients
    between = range(sizes[0], sizes[-1] + 1)
    if square < 0 or any((constant + linear * size + square * size**2).denominator != 1 for size in between):
        return False
    discriminant = linear * linear - 4 * square * constant
    if discriminant < 0:
        return False
    root = Fraction(isqrt(discriminant.numerator), isqrt(discriminant.denominator))
    return root * root == discriminant and root - linear <= 2 * square


def _interpolated(sizes: tuple[int, ...], values: tuple[int, ...]) -> tuple[Fraction, ...]:
    """Return the coefficients of the interpolating polynomial of the lowest degree (Newton's divided differences)."""
    if len(set(values)) == 1:
        return (Fraction(values[0]),)
    differences = [Fraction(value) for value in values]
    count = len(sizes)
    for order in range(1, count):
        for index in range(count - 1, order - 1, -1):
            step = sizes[index] - sizes[index - order]
            differences[index] = (differences[index] - differences[index - 1]) / step
    coefficients = [Fraction(0)] * count
    for order in range(count - 1, -1, -1):  # Horner's scheme in (b - size)
        shifted = [Fraction(0), *coefficients[:-1]]
        coefficients = [high - sizes[order] * low for high, low in zip(shifted, coefficients, strict=True)]
        coefficients[0] += differences[order]
    while len(coefficients) > 1 and coefficients[-1] == 0:
        coefficients.pop()
    return tuple(coefficients)


def _bounded(nbytes: Fraction, max_bytes: int | None) -> int:
    whole = max(0, round(nbytes))
    return whole if max_bytes is None else min(whole, max_bytes)
