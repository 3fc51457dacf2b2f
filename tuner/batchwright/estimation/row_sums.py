"""The partial sums that a CUDA kernel writes where it sums over dimensions before the last one. Pure.

So it sums the rows of a matrix for the gradient of a bias. After ``Reduce.cuh`` of torch 2.13 (``setReduceConfig``,
``global_memory_size``). Confirmed to the byte by what torch allocates on virtual cards: 512 to a million rows, 7 to
307,200 columns, sums and means.
"""

_THREADS_OF_A_BLOCK = 512
_THREADS_OF_A_WARP = 32
_FLOAT_BYTES = 4
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values that a thread sums: it shares its rows with other blocks from the larger number on, down to the smaller."""
_LARGEST_OFFSET = 2**31 - 1
"""Offset in bytes above which the kernel runs for halves of the outermost dimension, one after the other."""


def partial_sums_bytes(rows: int, columns: int, width: int, element_bytes: int, threads: int) -> int:
    """Return the bytes of the partial sums of a contiguous tensor; 0 where each block of threads sums whole columns.

    Args:
        rows: the elements of each sum.
        columns: the sums.
        width: the sums of neighbours: the elements after the last dimension that is summed over.
        element_bytes: bytes of an element.
        threads: threads that the card runs at once.
    """
    if not rows or not columns:
        return 0
    while rows * columns * element_bytes > _LARGEST_OFFSET:
        rows, columns = (rows, -(-columns // 2)) if columns > width else (-(-rows // 2), columns)
    vector = next(count for count in (4, 2, 1) if width % count == 0)
    vectors = columns // vector
    block = _THREADS_OF_A_BLOCK // vector
    width, height = _power(vectors, block), _power(rows, block)
    height = min(height, block // min(width, _THREADS_OF_A_WARP))
    width = min(width, block // height)
    values = -(-rows // height)
    blocks, needed = threads // (width * height), -(-vectors // width)
    if values < _MOST_VALUES or blocks < needed:
        return 0
    shares = max(min(-(-blocks // needed), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return shares * columns * width * vector * _FLOAT_BYTES if shares > 1 else 0


def _power(number: int, most: int) -> int:
    """Return the largest power of two up to ``number`` and ``most``."""
    return int(1 << min(number, most).bit_length() - 1)
