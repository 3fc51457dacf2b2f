"""The course of one tuning, from request to recommendation. Pure: it can be rebuilt from the recorded probes.

Whoever drives it (the command line, the service's coordinator, a test) runs the probes::

    while (probe := tuning.next_probe()) is not None:
        tuning.record(runner.run(probe))
    recommendation = tuning.recommendation(...)
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from tuner.requests import ProbeRequest, TuningRequest
from tuner.results import DeviceInfo, ProbeResult, Recommendation


class ProbeRunner(Protocol):
    """Whatever can run probes on one device."""

    def check(self, request: TuningRequest) -> None:
        """Build the workload without memory for its tensors, so that a wrong spec is found before any probe.

        Raises:
            SpecError: naming the field at fault.
        """

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Run one probe to its end.

        Raises:
            ProbeCancelledError: when ``should_stop`` answered true; the probe's process is gone by then.
            ProbeError: when the machinery failed.
        """

    def environment(self) -> dict[str, str]:
        """The environment variables that probes run with and the job must run with."""

    def close(self) -> None:
        """End every process. Idempotent."""


class Tuning:
    """One tuning: what to probe next and, in the end, the recommendation."""

    def __init__(
        self, request: TuningRequest, device: DeviceInfo, *, environment: dict[str, str], versions: dict[str, str]
    ) -> None:
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything the answer depends on."""
        raise NotImplementedError

    @property
    def probes(self) -> tuple[ProbeResult, ...]:
        """What was recorded so far, in order."""
        raise NotImplementedError

    def next_probe(self) -> ProbeRequest | None:
        """The next probe to run, or none when the search is over."""
        raise NotImplementedError

    def record(self, result: ProbeResult) -> None:
        """Take in a probe's result."""
        raise NotImplementedError

    def recommendation(self, *, identifier: str, created_at: datetime, total_seconds: float) -> Recommendation:
        """The answer.

        Raises:
            TuningFailedError: when the search ended without one (a workload's error, a hang), with the evidence.
        """
        raise NotImplementedError
