"""Run a tuning from its request to its recommendation, on a device of this host. No torch."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from typing import Protocol

from typing_extensions import override

from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.commands.templates import contents_of_files
from batchwright.driving.activities import activity_of
from batchwright.driving.loop import TuningHooks, drive
from batchwright.errors import DeviceError
from batchwright.hardware.inventory import device_failure, device_of, devices
from batchwright.hardware.matching import is_alike
from batchwright.planning.fingerprint import installed_versions
from batchwright.planning.session import TuningSession
from batchwright.planning.steps import Step
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo, ProbeResult


class TuningObserver(Protocol):
    """Shows the progress of a tuning."""

    def set_activity(self, activity: str) -> None:
        """Show what the tuning does now; an empty string when it is about to end."""

    def add(self, probe: ProbeResult) -> None:
        """Show a probe that has ended."""


def run_tuning(
    request: TuningRequest,
    observer: TuningObserver | None = None,
    warm_start: Recommendation | None = None,
    *,
    accumulates: bool = True,
    keeps_proven: bool = False,
) -> Recommendation:
    """Run a tuning to its end. An interrupt ends its processes.

    Args:
        request: what to tune, on which device of this host.
        observer: shows the steps, and each probe as it ends.
        warm_start: a recommendation for the same request, which a single probe may confirm.
        accumulates: as for ``batchwright.planning.session.TuningSession``.
        keeps_proven: whether an interrupt after a plan was proven ends the tuning with that plan.

    Raises:
        SpecError, DeviceError: before any probe; also when the data cannot be read, or the warm start is for another
            request.
        DeviceError: when a device stopped responding during a probe.
        PlanError: when the effective batch cannot be planned, before any probe or with the size that fits.
        StorageError: when the disk for temporary files is full.
        TuningFailedError: when a probe failed for a reason unrelated to the size, or the loss couples samples.
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
        try:
            drive(tuning, runner, _ForegroundHooks(device, observer))
        except KeyboardInterrupt:
            if not (keeps_proven and tuning.stop()):
                raise
    if observer is not None:
        observer.set_activity("")
    return tuning.recommendation(
        identifier=f"rec_{uuid.uuid4().hex}", created_at=datetime.now(UTC), total_seconds=time.monotonic() - began
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
