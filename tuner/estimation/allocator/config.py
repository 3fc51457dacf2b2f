"""The settings of torch's CUDA caching allocator, and the sizes that follow from them alone. No torch.

Checked against torch 2.13: the constants are those of `c10/core/AllocatorConfig.h`, the notation is read as
`c10/core/AllocatorConfig.cpp` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.errors import EstimateError

MIB = 1024**2
MIN_BLOCK_BYTES = 512
"""`kMinBlockSize`: every size is rounded up to a multiple of it."""
SMALL_BYTES = MIB
"""`kSmallSize`: the largest request that the small pool serves."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""`kSmallBuffer`: a segment of the small pool, and its page in expandable segments."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""`large_segment_size`: the segment for requests above 1 MiB and below 10 MiB, and the page of expandable segments."""
MIN_LARGE_BYTES = 10 * MIB
"""`kMinLargeAlloc`: from here on a request gets a segment of its own size."""
ROUND_LARGE_BYTES = 2 * MIB
"""`kRoundLarge`: such a segment's size is rounded up to a multiple of it."""
ROUNDING_INTERVALS = 16
"""`kRoundUpPowerOfTwoIntervals`: powers of two from 1 MiB to 64 GiB (`AllocatorConfig.cpp`)."""

_NO_DIVISIONS = (0,) * ROUNDING_INTERVALS


@dataclass(frozen=True)
class AllocatorSettings:
    """What `PYTORCH_ALLOC_CONF` says, as far as it decides where blocks go.

    Attributes:
        expandable_segments: one segment per pool that grows by pages, instead of one segment per `cudaMalloc`.
        max_split_bytes: larger blocks are neither split nor given to smaller requests; None for no such limit.
        max_non_split_rounding_bytes: how much larger than its request a block above that limit may be.
        large_segment_bytes: the segment of requests below 10 MiB, and the page of expandable segments.
        roundup_power2_divisions: for sizes from 1 MiB, 2 MiB, ... 64 GiB on, into how many steps the way to the next
            power of two is divided for rounding up; 0 and 1 mean rounding to 512 bytes.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = _NO_DIVISIONS

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AllocatorSettings:
        """What a process with this environment uses: of the two variables torch 2.13 reads only the older, if set."""
        return cls.parse(environment.get("PYTORCH_CUDA_ALLOC_CONF", environment.get("PYTORCH_ALLOC_CONF", "")))

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Settings in torch's notation: ``max_split_size_mb:128,expandable_segments:True``. Unknown ones are skipped.

        Raises:
            EstimateError: when a value is none, or another allocator than torch's own is asked for.
        """
        values = _options(text)
        if values.get("backend", "native") != "native":
            raise EstimateError(
                f"the allocator {values['backend']!r} cannot be followed: only `backend:native` can; "
                "take `backend` out of PYTORCH_ALLOC_CONF"
            )
        large = _mebibytes(values, "large_segment_size_mb", MIN_LARGE_BYTES // MIB + 1) or LARGE_SEGMENT_BYTES
        divisions = values.get("roundup_power2_divisions")
        return cls(
            expandable_segments=_truth(values, "expandable_segments"),
            max_split_bytes=_mebibytes(values, "max_split_size_mb", large // MIB),
            max_non_split_rounding_bytes=_mebibytes(values, "max_non_split_rounding_mb", large // MIB) or large,
            large_segment_bytes=large,
            roundup_power2_divisions=_divisions(divisions) if divisions is not None else _NO_DIVISIONS,
        )

    def rounded(self, requested: int) -> int:
        """Bytes of the block for a request (`round_size`, `roundup_power2_next_division`)."""
        if requested < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        power = requested.bit_length() - 1
        divisions = self.roundup_power2_divisions[min(max(power - 20, 0), ROUNDING_INTERVALS - 1)]
        if divisions <= 1 or requested <= MIN_BLOCK_BYTES * divisions:
            return rounded_up(requested, MIN_BLOCK_BYTES)
        return rounded_up(requested, (1 << power) // divisions)

    def segment_bytes(self, rounded: int) -> int:
        """Bytes of a new segment for a block (`get_allocation_size`)."""
        if rounded <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if rounded < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return rounded_up(rounded, ROUND_LARGE_BYTES)


DEFAULT_SETTINGS = AllocatorSettings()
EXPANDABLE_SEGMENTS = AllocatorSettings(expandable_segments=True)


def rounded_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


def _options(text: str) -> dict[str, str]:
    """``a:1,b:[2:3,4:5]`` by name (`ConfigTokenizer`); spaces mean nothing, the last of two equal names counts."""
    found = re.findall(r"([^,:\[\]]+):?(\[[^\]]*\]?|[^,:\[\]]*)", re.sub(r"\s", "", text))
    return dict(found)


def _refused(name: str, value: str, allowed: str) -> EstimateError:
    return EstimateError(
        f"`{name}:{value}` is no setting of torch's allocator: it has to be {allowed}; mend PYTORCH_ALLOC_CONF"
    )


def _truth(values: Mapping[str, str], name: str) -> bool:
    value = values.get(name, "False")
    if value not in {"True", "False"}:
        raise _refused(name, value, "True or False")
    return value == "True"


def _mebibytes(values: Mapping[str, str], name: str, least: int) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise _refused(name, value, f"a whole number of MiB, {least} or more")
    return int(value) * MIB


def _divisions(value: str) -> tuple[int, ...]:
    """For every interval its divisions (`parseRoundUpPower2Divisions`): one number, or a list by size in MiB.

    The first size of a list speaks for the smaller ones too, ``>`` for those above the one before it.
    """
    divisions = [0] * ROUNDING_INTERVALS
    if not value.startswith("["):
        return (_power(value, value),) * ROUNDING_INTERVALS
    index = 0
    for position, entry in enumerate(value.strip("[]").split(",")):
        size, _, count = entry.partition(":")
        steps = 0 if count == "0" else _power(count, value)
        if size == ">":
            divisions[index + 1 :] = [steps] * (ROUNDING_INTERVALS - index - 1)
            continue
        index = min(_power(size, value).bit_length() - 1, ROUNDING_INTERVALS - 1)
        divisions[0 if position == 0 else index : index + 1] = [steps] * (index + 1 if position == 0 else 1)
    return tuple(divisions)


def _power(text: str, value: str) -> int:
    if not text.isdecimal() or int(text).bit_count() != 1:
        raise _refused("roundup_power2_divisions", value, "made of powers of two, as in `4` or `[256:1,512:2,>:4]`")
    return int(text)
