"""Use cases of devices, clusters and the queue."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from batchwright.client.documents.fleet import Fleet, FleetStatus
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.workers import DeviceList, DeviceStatus, Queue, QueueEntry
from batchwright_service.application.application_context import ApplicationContext
from batchwright_service.application.rules.hardware_matches import group_by_hardware, workers_with
from batchwright_service.application.rules.wait_time import RECENT, Running, expected_waits
from batchwright_service.domain.hardware import ANY_DEVICE, need_of_lane
from batchwright_service.errors import NotFoundError
from batchwright_service.store.models import AnnouncedDevice, WorkFilter, WorkRow
from batchwright_service.store.scheduling import Waiting

_SEARCHED = 2000
"""Most pieces of waiting work that are searched for those of one slot."""


class DeviceCases:
    """Use cases of devices, their workers and their clusters. Safe to share between threads."""

    def __init__(self, context: ApplicationContext) -> None:
        self._context = context
        self._devices = context.store.devices

    def list(self) -> DeviceList:
        """Return the served devices, with the work that runs on each."""
        found = self._devices.list()
        alive = [announced for announced in found if self._context.is_alive(announced)]
        return DeviceList(hardware=group_by_hardware(alive), items=tuple(self._status(device) for device in found))

    def fleet(self) -> Fleet:
        """Return the clusters of the dispatchers, with their last reports."""
        return Fleet(
            items=tuple(
                FleetStatus(**dict(reported.report), alive=self._context.is_recent(age), report_age_seconds=age)
                for reported in self._context.store.fleet.reports()
                for age in (reported.age_seconds,)
            )
        )

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

    def read(self, limit: int, slot: str | None = None) -> Queue:
        """Return the waiting work in the order in which it is taken, with the expected waits.

        With a ``slot``, only what its worker can take.
        """
        waiting = self._queue.waiting(limit) if slot is None else self._waiting_for(slot)[:limit]
        alive = self._context.live_workers()
        items: dict[str, QueueEntry] = {}
        lanes = {(entry.device, entry.hardware if entry.device == ANY_DEVICE else None) for entry in waiting}
        for device, lane in lanes:
            entries = [entry for entry in waiting if entry.device == device and lane in {None, entry.hardware}]
            serving = (
                [announced for announced in alive if announced.served.device.id == device]
                if lane is None
                else workers_with(need_of_lane(lane), alive)
            )
            ready = [announced for announced in serving if announced.served.unready is None]
            succeeded = WorkFilter((State.SUCCEEDED,), device=device)
            recent = [row for kind in WorkKind for row in self._work.newest(kind, RECENT, None, succeeded)]
            waits = self._waits(entries, ready, recent) if lane is None else self._lane_waits(entries, ready, recent)
            missing = f"serves {device}" if lane is None else f"has {need_of_lane(lane).in_words}"
            unserved = None if serving else f"no worker {missing}"
            items |= {entry.id: _entry(entry, waits[entry.id], unserved) for entry in entries}
        return Queue(items=tuple(items[entry.id] for entry in waiting))

    # --- helpers ---

    def _waiting_for(self, slot: str) -> list[Waiting]:
        """Return the waiting work that the worker of a slot can take; none where no worker has served it for a day.

        Work that needs several devices of a host waits for each of them.
        """
        listed = self._devices.list()
        served = next((device.served for device in listed if device.served.slot == slot), None)
        if served is None:
            return []
        serving = [device for device in listed if device.served.slot == slot or self._context.is_alive(device)]

        @cache
        def takes(lane: str) -> bool:
            return any(worker.served.slot == slot for worker in workers_with(need_of_lane(lane), serving))

        kinds = {None, served.hardware}
        return [
            entry
            for entry in self._queue.waiting(_SEARCHED)
            if (entry.device == ANY_DEVICE and takes(str(entry.hardware)))
            or (entry.device == served.device.id and entry.hardware in kinds)
        ]

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

    def _lane_waits(
        self, entries: Sequence[Waiting], serving: Sequence[AnnouncedDevice], recent: Sequence[WorkRow]
    ) -> dict[str, float | None]:
        """Return the expected wait of each entry of a lane; unknown where each takes several devices."""
        if need_of_lane(str(entries[0].hardware)).takes_several:
            return dict.fromkeys(entry.id for entry in entries)
        return expected_waits(entries, [self._running(announced) for announced in serving], recent)

    def _running(self, announced: AnnouncedDevice) -> Running | None:
        """Return the running work of a worker; None when it is free, or its work was deleted since."""
        with suppress(NotFoundError):
            if announced.running_id is not None:
                item = self._work.get(announced.running_id)
                return Running(item.kind, item.started_at)
        return None


def _entry(waiting: Waiting, expected: float | None, unserved: str | None) -> QueueEntry:
    shown = {name: value for name, value in vars(waiting).items() if name not in {"device", "hardware"}}
    is_lane = waiting.device == ANY_DEVICE
    return QueueEntry(
        **shown,
        device=waiting.device or None,
        hardware=need_of_lane(str(waiting.hardware)).in_words if is_lane else None,
        unserved=unserved,
        expected_wait_seconds=expected,
    )
