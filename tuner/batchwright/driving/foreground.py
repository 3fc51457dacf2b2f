"""Run a tuning from its request to its recommendation, on a device of this host. No torch."""

import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from typing_extensions import override

from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.commands.templates import contents_of_files
from batchwright.driving.activities import activity_of
from batchwright.driving.loop import TuningHooks, drive
from batchwright.errors import (
    BatchwrightError,
    DeviceError,
    FieldProblem,
    ProbeCancelledError,
    SpecError,
    TuningFailedError,
)
from batchwright.hardware.inventory import device_failure, device_of, devices
from batchwright.hardware.matching import is_alike
from batchwright.planning.fingerprint import (
    differences,
    fingerprinted_versions,
    installed_versions,
    request_content,
)
from batchwright.planning.session import TuningSession
from batchwright.planning.steps import Step
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.recommendation import Recommendation, StopReason
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo, ProbeResult
from batchwright.schemas.unfinished import UnfinishedTuning
from batchwright.units import format_bytes


class TuningObserver(Protocol):
    """Shows the progress of a tuning."""

    def set_activity(self, activity: str) -> None:
        """Show what the tuning does now; an empty string when it is about to end."""

    def add(self, probe: ProbeResult) -> None:
        """Show a probe that has ended."""


def run_tuning(  # noqa: PLR0913 - what a caller may decide
    request: TuningRequest,
    observer: TuningObserver | None = None,
    warm_start: Recommendation | None = None,
    *,
    accumulates: bool = True,
    resumed: UnfinishedTuning | None = None,
    time_limit_seconds: float | None = None,
    keep: Callable[[UnfinishedTuning], object] | None = None,
) -> Recommendation:
    """Run a tuning to its end. An interrupt ends its processes.

    Args:
        request: what to tune, on which device of this host.
        observer: shows the steps, and each probe as it ends.
        warm_start: a recommendation for the same request, which a single probe may confirm.
        accumulates: as for ``batchwright.planning.session.TuningSession``.
        resumed: a tuning of the same request that was stopped, from whose probes this one goes on.
        time_limit_seconds: when to stop the tuning; None for no limit.
        keep: called with what is known when the tuning is stopped by an interrupt, the time limit or an error of the
            host. If a plan was proven, an interrupt and the time limit then end the tuning with that plan.

    Raises:
        SpecError, DeviceError: before any probe; also when the data cannot be read, or the warm start or the resumed
            tuning is of another request.
        DeviceError: when a device stopped responding during a probe.
        PlanError: when the effective batch cannot be planned, before any probe or with the size that fits.
        StorageError: when the disk for temporary files is full.
        TuningFailedError: when a probe failed for a reason unrelated to the size, the loss couples samples, or the
            time limit came before a plan was proven.
    """
    began = time.monotonic()
    device = device_of(request)
    with ProbeSupervisor(device) if request.command is None else CommandSupervisor(device) as runner:
        tuning = TuningSession(
            request,
            device,
            environment=runner.environment(),
            versions={**installed_versions(), **(contents_of_files(request.command.model) if request.command else {})},
            accumulates=accumulates,
            peers=[other.id for other in devices() if other.id != device.id and is_alike(device, other)],
        )
        if warm_start is not None:
            tuning.warm_start_from(warm_start)
        if resumed is not None:
            _resume(tuning, resumed)
            began -= resumed.seconds
        deadline = None if time_limit_seconds is None else time.monotonic() + time_limit_seconds
        try:
            hooks = _ForegroundHooks(device, observer)
            drive(tuning, runner, hooks, lambda: deadline is not None and time.monotonic() > deadline)
        except (KeyboardInterrupt, BatchwrightError) as error:
            left = _unfinished(tuning, error, time.monotonic() - began)
            if keep is not None:
                keep(left)
            if keep is None or not _ends_with_plan(tuning, left.stopped_by):
                if left.stopped_by != "time-limit":
                    raise
                message = f"{left.statement}, and no plan was proven: allow more time"
                raise TuningFailedError("time-limit", message) from None
    if observer is not None:
        observer.set_activity("")
    return tuning.recommendation(
        identifier=f"rec_{uuid.uuid4().hex}", created_at=datetime.now(UTC), total_seconds=time.monotonic() - began
    )


def _ends_with_plan(tuning: TuningSession, stopped_by: StopReason) -> bool:
    """End a tuning that was stopped; return whether it has a plan: all its probes ran, or those so far prove one."""
    return stopped_by != "error" and (tuning.next_probe() is None or tuning.stop(stopped_by))


def _resume(tuning: TuningSession, stopped: UnfinishedTuning) -> None:
    """Record the probes of a tuning that was stopped.

    Raises:
        SpecError: when that tuning was made under other conditions, with every difference.
    """
    now = tuning.conditions
    if stopped.fingerprint != tuning.fingerprint:
        before, today = (
            request_content(request, device, now.environment, len(now.rank_devices))
            | {"memory_limit": format_bytes(limit), "versions": fingerprinted_versions(versions)}
            for request, device, limit, versions in (
                (stopped.request, stopped.device, stopped.memory_limit_bytes, stopped.versions),
                (now.request, now.device, now.memory_limit_bytes, now.versions),
            )
        )
        problems = [
            FieldProblem(name, f"is {then} in the stopped tuning, so its probes do not count: start a new tuning", here)
            for name, (then, here) in differences(before, today).items()
        ]
        other = FieldProblem(
            "",
            "was made with other environment variables or by another release, or changed by hand: start a new tuning",
        )
        raise SpecError(problems or [other], "tuning to resume")
    if stopped.expected is not None and tuning.expected is None:
        tuning.start_from_estimate(stopped.expected)
    for probe in stopped.probes:
        tuning.record(probe)


def _unfinished(tuning: TuningSession, error: BaseException, seconds: float) -> UnfinishedTuning:
    stopped_by: StopReason = "error"
    if isinstance(error, KeyboardInterrupt):
        stopped_by = "interrupted"
    elif isinstance(error, ProbeCancelledError):
        stopped_by = "time-limit"
    now = tuning.conditions
    return UnfinishedTuning(
        stopped_by=stopped_by,
        created_at=datetime.now(UTC),
        request=now.request,
        device=now.device,
        memory_limit_bytes=now.memory_limit_bytes,
        versions=now.versions,
        fingerprint=tuning.fingerprint,
        expected=tuning.expected,
        probes=tuning.probes,
        seconds=seconds,
    )


class _ForegroundHooks(TuningHooks):
    """Show the steps of a tuning, and name a device of this host that no longer responds."""

    def __init__(self, device: DeviceInfo, observer: TuningObserver | None) -> None:
        self._device = device
        self._observer = observer

    @override
    def begins(self, step: Step) -> None:
        if self._observer is not None:
            self._observer.set_activity(activity_of(step))

    @override
    def data_read(self, read: int, total: int) -> None:
        if self._observer is not None:
            self._observer.set_activity(f"reading the data: {read:,} of {total:,}" if total else "opening the data")

    @override
    def require_host(self, ended: str) -> None:
        if (failure := device_failure(self._device)) is not None:
            raise DeviceError(f"{failure}. {ended}") from None

    @override
    def recorded(self, result: ProbeResult) -> None:
        if self._observer is not None:
            self._observer.add(result)
