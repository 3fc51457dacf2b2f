"""Devices, and the queue."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from service.application.context import ApplicationContext
from service.application.rules.wait_time import RECENT, Running, expected_waits
from service.domain.states import State, WorkKind
from service.domain.workers import DeviceList, DeviceStatus, Queue, QueueEntry
from service.errors import NotFoundError
from service.store.models import SeenDevice, Waiting, WorkFilter, WorkRow


class FleetCases:
    """What callers can ask of devices, workers and the queue. Safe to share between threads."""

    def __init__(self, context: ApplicationContext) -> None:
        self._context = context
        self._devices = context.store.devices
        self._queue = context.store.queue
        self._work = context.store.work

    def devices(self) -> DeviceList:
        """The devices, and who holds each."""
        return DeviceList(items=tuple(self._status(seen) for seen in self._devices.list()))

    def queue(self, limit: int) -> Queue:
        """What waits, in the order in which it is taken, with how long that may last."""
        waiting = self._queue.waiting(limit)
        seen = [it for it in self._devices.list() if self._context.is_alive(it) and it.served.unready is None]
        waits: dict[str, float | None] = {}
        for device in {it.device for it in waiting}:
            lines = [it for it in waiting if it.device == device]
            waits |= self._waits(lines, [it for it in seen if it.served.device.id == device], self._recent(device))
        return Queue(items=tuple(_entry(it, waits[it.id]) for it in waiting))

    # --- helpers ---

    def _status(self, seen: SeenDevice) -> DeviceStatus:
        return DeviceStatus(
            **dict(seen.served),
            alive=self._context.is_alive(seen),
            heartbeat_age_seconds=seen.age_seconds,
            running_id=seen.running_id,
            queued=seen.queued,
        )

    def _waits(
        self, lines: Sequence[Waiting], serving: Sequence[SeenDevice], recent: Sequence[WorkRow]
    ) -> dict[str, float | None]:
        """How long each may wait for workers with the hardware it needs; what goes to any has the shortest wait."""
        told: dict[str, float | None] = dict.fromkeys(it.id for it in lines)
        workers = [(it.served.hardware, self._running(it)) for it in serving]
        for kind in {it.hardware for it in lines if it.hardware} | {kind for kind, _ in workers}:
            lane = [it for it in lines if it.hardware in {None, kind}]
            expected = expected_waits(lane, [running for its_kind, running in workers if its_kind == kind], recent)
            for work_id, seconds in expected.items():
                told[work_id] = min((it for it in (told[work_id], seconds) if it is not None), default=None)
        return told

    def _recent(self, device: str) -> list[WorkRow]:
        """What ended with success on a device lately, of both kinds."""
        wanted = WorkFilter((State.SUCCEEDED,), device=device)
        return [row for kind in WorkKind for row in self._work.newest(kind, RECENT, None, wanted)]

    def _running(self, seen: SeenDevice) -> Running | None:
        """What a worker is at; none when it is free, or what it held is gone since."""
        with suppress(NotFoundError):
            if seen.running_id is not None:
                item = self._work.get(seen.running_id)
                return Running(item.kind, item.started_at)
        return None


def _entry(waiting: Waiting, expected: float | None) -> QueueEntry:
    shown = {name: value for name, value in vars(waiting).items() if name != "hardware"}
    return QueueEntry(**shown, expected_wait_seconds=expected)
