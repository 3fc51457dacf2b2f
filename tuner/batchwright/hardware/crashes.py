"""Distinguish a crash for lack of memory from a bug, by repeating the probe. No torch."""

import os
from collections.abc import Callable

from batchwright.device_traits import traits_of
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult
from batchwright.units import format_bytes

_CONTROL_FACTOR = 4

Attempt = Callable[[ProbeRequest], tuple[ProbeResult, bool]]
"""Runs a probe once, and returns its result and whether a process of it crashed."""


def run_explaining_crashes(attempt: Attempt, request: ProbeRequest, device_kind: str) -> ProbeResult:
    """Run a probe; where a process of it crashes under a limit of the CPU, run it again to learn the cause.

    Not all libraries below torch check the result of malloc. If none has said that memory was the cause, it was only if
    the process crashes twice under the limit and runs under a higher one.
    """
    first, crashed = attempt(request)
    is_explained = not crashed or first.outcome is Outcome.OOM
    if is_explained or not traits_of(device_kind).counts_host_memory or request.limit_bytes is None:
        return first
    second, crashed_again = attempt(request)
    if not crashed_again:
        return second
    # Leaves memory to the host.
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    higher = max(request.limit_bytes, min(_CONTROL_FACTOR * request.limit_bytes, available // 2))
    control, _ = attempt(request.model_copy(update={"limit_bytes": higher}))
    if control.outcome is not Outcome.FIT:
        return first
    cause = first.error_type or ""
    with_signal = f" with {cause}" if cause.startswith("SIG") else ""  # a launcher has a status of its own
    under = f"twice under {format_bytes(request.limit_bytes)}, and fits under {format_bytes(higher)}"
    message = f"crashed{with_signal} {under}"
    return first.model_copy(update={"outcome": Outcome.OOM, "message": message, "traceback": None})
