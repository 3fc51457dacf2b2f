"""Use cases of devices, clusters and the queue."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from service.application.context import ApplicationContext
from service.application.rules.wait_time import RECENT, Running, expected_waits
from service.domain.fleet import Fleet, FleetStatus
from service.domain.states import State, WorkKind
from service.domain.workers import DeviceList, DeviceStatus, Queue, QueueEntry
from service.errors import NotFoundError
from service.store.models import AnnouncedDevice, ReportedFleet, Waiting, WorkFilter, WorkRow


class DeviceCases:
    """Use cases of devices, their workers and their clusters. Safe to share between threads."""

    def __init__(self, context: ApplicationContext) -> None:
        self._context = context
        self._devices = context.store.devices

    def list(self) -> DeviceList:
        """Return the served devices, with the work that runs on each."""
        return DeviceList(items=tuple(self._status(announced) for announced in self._devices.list()))

    def fleet(self) -> Fleet:
        """Return the clusters of the dispatchers, with their last reports."""
        return Fleet(items=tuple(self._cluster(reported) for reported in self._context.store.fleet.reports()))

    def _cluster(self, reported: ReportedFleet) -> FleetStatus:
        age = reported.age_seconds
        is_alive = self._context.is_recent(age)
        return FleetStatus(**dict(reported.report), alive=is_alive, report_age_seconds=age)

    def _status(self, announced: AnnouncedDevice) -> DeviceStatus:
        return DeviceStatus(
            **dict(announced.served),
            alive=self._context.is_alive(announced),
            heartbeat_age_seconds=announced.age_seconds,
            running_id=announced.running_id,
            queued=announced.queued,
        )


class QueueCases:
    """Use cases of the queue. Safe to share between threads."""

    def __init__(self, context: ApplicationContext) -> None:
        self._context = context
        self._devices = context.store.devices
        self._queue = context.store.queue
        self._work = context.store.work

    def read(self, limit: int) -> Queue:
        """Return the waiting work in the order in which it is taken, with the expected waits."""
        waiting = self._queue.waiting(limit)
        alive = [announced for announced in self._devices.list() if self._context.is_alive(announced)]
        ready = [announced for announced in alive if announced.served.unready is None]
        waits: dict[str, float | None] = {}
        for device in {entry.device for entry in waiting}:
            entries = [entry for entry in waiting if entry.device == device]
            serving = [announced for announced in ready if announced.served.device.id == device]
            waits |= self._waits(entries, serving, self._recent(device))
        return Queue(items=tuple(_entry(entry, waits[entry.id]) for entry in waiting))

    # --- helpers ---

    def _waits(
        self, entries: Sequence[Waiting], serving: Sequence[AnnouncedDevice], recent: Sequence[WorkRow]
    ) -> dict[str, float | None]:
        """Return the expected wait of each entry; work that any hardware can run gets the shortest wait."""
        waits: dict[str, float | None] = dict.fromkeys(entry.id for entry in entries)
        workers = [(announced.served.hardware, self._running(announced)) for announced in serving]
        for hardware in {entry.hardware for entry in entries if entry.hardware} | {served for served, _ in workers}:
            lane = [entry for entry in entries if entry.hardware in {None, hardware}]
            expected = expected_waits(lane, [running for served, running in workers if served == hardware], recent)
            for work_id, seconds in expected.items():
                waits[work_id] = min((wait for wait in (waits[work_id], seconds) if wait is not None), default=None)
        return waits

    def _recent(self, device: str) -> list[WorkRow]:
        """Return the newest work that succeeded on a device, of both kinds."""
        wanted = WorkFilter((State.SUCCEEDED,), device=device)
        return [row for kind in WorkKind for row in self._work.newest(kind, RECENT, None, wanted)]

    def _running(self, announced: AnnouncedDevice) -> Running | None:
        """Return the running work of a worker; None when it is free, or its work was deleted since."""
        with suppress(NotFoundError):
            if announced.running_id is not None:
                item = self._work.get(announced.running_id)
                return Running(item.kind, item.started_at)
        return None


def _entry(waiting: Waiting, expected: float | None) -> QueueEntry:
    shown = {name: value for name, value in vars(waiting).items() if name != "hardware"}
    return QueueEntry(**shown, expected_wait_seconds=expected)
