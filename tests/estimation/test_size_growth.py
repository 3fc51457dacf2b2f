"""Growth of bytes with the micro-batch size: polynomials for tensors, else piecewise lines."""

from collections.abc import Callable

import pytest

from batchwright.estimation.size_growth import PiecewiseLinear, Polynomial, growth_from_points

PLACES = (4, 6, 10)
SIZES = (1, 2, 3, 5, 7, 8, 9, 17, 32, 128, 2048)
MIB = 1024**2


def through(nbytes: Callable[[int], int], most: int | None = None) -> Polynomial | PiecewiseLinear:
    """Fit the growth through a function's values at the traced sizes."""
    return growth_from_points(PLACES, tuple(map(nbytes, PLACES)), most)


@pytest.mark.parametrize(
    "nbytes",
    [
        lambda _: 3072,
        lambda size: 3072 * size + 512,
        lambda size: 4 * size * size,
        lambda size: 4 * (2 * size) * (2 * size - 1),
        lambda size: 2 * size * (size - 1),
        lambda size: 4 * size * (size + 65536),
        lambda size: 4 * (size + 3) * (size + 3),
        lambda size: 2 * (2 * size + 1) * (3 * size + 5),
    ],
    ids=["fixed", "affine", "pairs", "two views", "half", "queue", "prototypes", "both affine"],
)
def test_products_of_dimensions_are_exact_at_every_size(nbytes: Callable[[int], int]) -> None:
    """Fixed, affine and quadratic products of dimensions are exact."""
    found = through(nbytes)
    assert isinstance(found, Polynomial)
    assert [found.at(size) for size in SIZES] == [nbytes(size) for size in SIZES]
    assert found.deviation == 0


@pytest.mark.parametrize("rows", range(1, 2000, 37))
@pytest.mark.parametrize("width", [768, 1000, 4096])
def test_rounded_bytes_stay_near_at_every_size(rows: int, width: int) -> None:
    """Bytes rounded down to whole rows are interpolated within a row for every four samples."""

    def nbytes(size: int) -> int:
        return rows * size // 10 * width * 4

    found = through(nbytes)
    for size in SIZES:
        assert abs(found.at(size) - nbytes(size)) <= width * 4 * (2 + size // 2)


@pytest.mark.parametrize("stops", [5, 7, 9])
def test_bounded_bytes_never_shrink(stops: int) -> None:
    """The interpolation does not decrease, although a parabola through the points would."""
    found = through(lambda size: 3072 * min(size, stops))
    interpolated = [found.at(size) for size in SIZES]
    assert isinstance(found, PiecewiseLinear)
    assert interpolated == sorted(interpolated)
    assert found.at(1) > 0
    assert found.deviation > 0


@pytest.mark.parametrize("begins", [5, 7, 9])
def test_bytes_that_begin_late_are_extrapolated_linearly(begins: int) -> None:
    """Points on an integral parabola that no tensor can have are interpolated linearly."""
    found = through(lambda size: 24 * 128 * max(0, size - begins))
    assert isinstance(found, PiecewiseLinear)
    assert found.at(2048) <= 24 * 128 * 2048
    assert found.at(1) == 0


def embedding_bytes(length: int, vocabulary: int, width: int, size: int) -> int:
    """Bytes of an fp32 sum for every row that occurs, by hand."""
    return min(length * size, vocabulary) * width * 4


@pytest.mark.parametrize(
    ("length", "vocabulary", "width"), [(4096, 32000, 4096), (2048, 32000, 4096), (1023, 50257, 768)]
)
def test_a_known_bound_makes_an_embedding_exact(length: int, vocabulary: int, width: int) -> None:
    """The bytes are exact below, at and above the size at which every row may occur."""
    most = vocabulary * width * 4
    found = through(lambda size: length * size * width * 4, most)
    assert [found.at(size) for size in SIZES] == [embedding_bytes(length, vocabulary, width, size) for size in SIZES]


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (lambda size: 4096 * size, True),
        (lambda size: 4096 * size + 256, True),  # an alignment
        (lambda _: 512, True),
        (lambda size: 4 * (size + 1), False),
        (lambda size: 64 * size * size, False),
        (lambda size: 4 * size * (size + 65536), False),  # pairs of samples, and a queue
        (lambda size: 4 * (size + 10) ** 2, False),
        (lambda size: 1000 * min(size, 8), False),
    ],
)
def test_two_sizes_tell_bytes_in_proportion(nbytes: Callable[[int], int], *, expected: bool) -> None:
    """Bytes that grow otherwise need a third size."""
    assert growth_from_points((4, 10), (nbytes(4), nbytes(10))).is_proportional is expected
