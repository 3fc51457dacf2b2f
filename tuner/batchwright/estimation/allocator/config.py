"""Settings of torch's CUDA caching allocator, and the sizes derived from them. No torch.

Checked against torch 2.13: the constants are those of `c10/core/AllocatorConfig.h`, and the notation is parsed as in
`c10/core/AllocatorConfig.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from batchwright.errors import EstimateError

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
"""`kMinLargeAlloc`: a request of at least this size gets its own segment."""
ROUND_LARGE_BYTES = 2 * MIB
"""`kRoundLarge`: such a segment's size is rounded up to a multiple of it."""
ROUNDING_INTERVALS = 16
"""`kRoundUpPowerOfTwoIntervals`: powers of two from 1 MiB to 64 GiB (`AllocatorConfig.cpp`)."""

_NO_DIVISIONS = (0,) * ROUNDING_INTERVALS


def takes_oldest_first(torch_version: str) -> bool:
    """Return whether that torch takes, of free blocks of equal size, the one in the oldest segment.

    Torch 2.13 and later do (`BlockComparatorSizeCounterAddress`); up to 2.11, the lowest address decided. Torch 2.12
    takes the block that was made first, and counts as its successors here. Seen on 2.11.0, 2.12.1, 2.13.0 and 2.14.1.
    """
    major, minor = torch_version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 12)


try:
    _OLDEST_FIRST = takes_oldest_first(metadata.version("torch"))
except metadata.PackageNotFoundError:
    _OLDEST_FIRST = True


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings that affect the placement of blocks: `PYTORCH_ALLOC_CONF`, and the order of this torch.

    Attributes:
        expandable_segments: one segment per pool that grows by pages, instead of one segment per `cudaMalloc`.
        max_split_bytes: larger blocks are neither split nor given to smaller requests; None for no such limit.
        max_non_split_rounding_bytes: how much larger than its request a block above that limit may be.
        large_segment_bytes: the segment of requests below 10 MiB, and the page of expandable segments.
        roundup_power2_divisions: for sizes from 1 MiB, 2 MiB, ... 64 GiB, the number of steps between two powers of two
            to which requests are rounded up; 0 and 1 mean rounding to 512 bytes.
        oldest_first: see ``takes_oldest_first``; as the installed torch does.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = _NO_DIVISIONS
    oldest_first: bool = _OLDEST_FIRST

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AllocatorSettings:
        """Read the settings from an environment; as in torch 2.13, the older variable takes precedence."""
        return cls.parse(environment.get("PYTORCH_CUDA_ALLOC_CONF", environment.get("PYTORCH_ALLOC_CONF", "")))

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Parse torch's notation: ``max_split_size_mb:128,expandable_segments:True``. Unknown settings are ignored.

        As in `ConfigTokenizer`, spaces are ignored, and the last of equal names counts.

        Raises:
            EstimateError: when a value is invalid, or a backend other than torch's own allocator is set.
        """
        values = dict(re.findall(r"([^,:\[\]]+):?(\[[^\]]*\]?|[^,:\[\]]*)", re.sub(r"\s", "", text)))
        if values.get("backend", "native") != "native":
            raise EstimateError(
                f"the allocator {values['backend']!r} cannot be simulated, only `backend:native` can: "
                "remove `backend` from PYTORCH_ALLOC_CONF"
            )
        large = _mebibytes(values, "large_segment_size_mb", MIN_LARGE_BYTES // MIB + 1) or LARGE_SEGMENT_BYTES
        divisions = values.get("roundup_power2_divisions")
        expandable = values.get("expandable_segments", "False")
        if expandable not in {"True", "False"}:
            raise _invalid_setting("expandable_segments", expandable, "True or False")
        return cls(
            expandable_segments=expandable == "True",
            max_split_bytes=_mebibytes(values, "max_split_size_mb", large // MIB),
            max_non_split_rounding_bytes=_mebibytes(values, "max_non_split_rounding_mb", large // MIB) or large,
            large_segment_bytes=large,
            roundup_power2_divisions=_divisions(divisions) if divisions is not None else _NO_DIVISIONS,
        )

    def rounded(self, requested: int) -> int:
        """Return the bytes of the block for a request (`round_size`, `roundup_power2_next_division`)."""
        if requested < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        power = requested.bit_length() - 1
        divisions = self.roundup_power2_divisions[min(max(power - 20, 0), ROUNDING_INTERVALS - 1)]
        if divisions <= 1 or requested <= MIN_BLOCK_BYTES * divisions:
            return rounded_up(requested, MIN_BLOCK_BYTES)
        return rounded_up(requested, (1 << power) // divisions)

    def segment_bytes(self, rounded: int) -> int:
        """Return the bytes of a new segment for a block (`get_allocation_size`)."""
        if rounded <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if rounded < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return rounded_up(rounded, ROUND_LARGE_BYTES)


DEFAULT_SETTINGS = AllocatorSettings()
EXPANDABLE_SEGMENTS = AllocatorSettings(expandable_segments=True)


def rounded_up(size: int, multiple: int) -> int:
    """Round ``size`` up to a multiple."""
    return -(-size // multiple) * multiple


def _invalid_setting(name: str, value: str, allowed: str) -> EstimateError:
    return EstimateError(
        f"`{name}:{value}` is not a setting of torch's allocator: it must be {allowed}; correct PYTORCH_ALLOC_CONF"
    )


def _mebibytes(values: Mapping[str, str], name: str, least: int) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise _invalid_setting(name, value, f"a whole number of MiB, {least} or more")
    return int(value) * MIB


def _divisions(value: str) -> tuple[int, ...]:
    """Parse the divisions of each interval (`parseRoundUpPower2Divisions`): one number, or a list by size in MiB.

    The first size of a list also applies to smaller sizes, and ``>`` to those above the preceding size.
    """
    divisions = [0] * ROUNDING_INTERVALS
    if not value.startswith("["):
        return (_power_of_two(value, value),) * ROUNDING_INTERVALS
    index = 0
    for position, entry in enumerate(value.strip("[]").split(",")):
        size, _, count = entry.partition(":")
        steps = 0 if count == "0" else _power_of_two(count, value)
        if size == ">":
            divisions[index + 1 :] = [steps] * (ROUNDING_INTERVALS - index - 1)
            continue
        index = min(_power_of_two(size, value).bit_length() - 1, ROUNDING_INTERVALS - 1)
        divisions[0 if position == 0 else index : index + 1] = [steps] * (index + 1 if position == 0 else 1)
    return tuple(divisions)


def _power_of_two(text: str, value: str) -> int:
    if not text.isdecimal() or int(text).bit_count() != 1:
        raise _invalid_setting(
            "roundup_power2_divisions", value, "made of powers of two, as in `4` or `[256:1,512:2,>:4]`"
        )
    return int(text)
