"""Requests that torch's own allocator has recorded, for replays to be compared with."""

from collections.abc import Iterable, Mapping
from typing import Any


def recorded_requests(history: Iterable[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """Events and sizes of a device's history as `torch.cuda.memory._snapshot()["device_traces"]` holds it.

    A block counts as given back where it is so to the allocator's cache (`free_completed`). Blocks taken before the
    history began are left out. All streams count as one.
    """
    events: list[int] = []
    sizes: list[int] = []
    blocks: dict[int, int] = {}
    for entry in history:
        if entry["action"] == "alloc":
            blocks[entry["addr"]] = len(sizes)
            events.append(len(sizes))
            sizes.append(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in blocks:
            events.append(~blocks.pop(entry["addr"]))
    return events, sizes
