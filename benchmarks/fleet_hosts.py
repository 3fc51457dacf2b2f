"""Simulated hosts of a fleet: the real store, heartbeats and notifications, around work that sleeps.

Started by ``fleet.py``. The argument is the JSON of a ``Plan``. Prints "ready" when every device is served, and ends
with its standard input. Each host has a loop of its own that does what the threads of its devices would do: it claims
for all devices that are free, waits for the ends of their work, and records them. A thousand threads of workers in one
interpreter would measure the interpreter.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from batchwright.client.documents.states import State
from batchwright.client.documents.workers import ServedDevice
from batchwright.schemas.results import DeviceInfo
from batchwright_service.errors import ClaimsCrowdedError, StaleLeaseError, StoreUnavailableError
from batchwright_service.store.database.transactions import open_engine
from batchwright_service.store.models import Beat, Claim, Ending
from batchwright_service.store.store import Store
from batchwright_service.worker.heartbeat import Heartbeat
from batchwright_service.worker.idle_pause import IdlePause
from batchwright_service.worker.lease import LeaseHolder, LeaseTerms
from batchwright_service.worker.worker_settings import WorkerSettings
from batchwright_service.worker_bootstrap import worker_connections

STACK_BYTES = 256 * 1024
"""Hundreds of threads share a process here."""
UPDATES_THAT_HOLD = 1_000_000
"""A job of as many updates runs until its lease is lost."""
_HOLDS = f'"updates":{UPDATES_THAT_HOLD}'
_VERSIONS = {"torch": "2.8"}
_POLL_SECONDS = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The hosts of one process."""

    url: str
    folder: str
    hosts: list[str]
    devices: int
    lease_seconds: float
    work_seconds: float


def card(index: int) -> DeviceInfo:
    """A device of a simulated host."""
    return DeviceInfo(id=f"cuda:{index}", kind="cuda", name="simulated card", total_bytes=80 * 1024**3)


def hardware() -> str:
    """The kind of every device, as work names it."""
    return f"{card(0).name}|{card(0).total_bytes}"


class Device:
    """A device of a host, as the heartbeat sees its worker. Used by the host's loop, but for ``wake``."""

    def __init__(self, served: ServedDevice, store: Store, due: threading.Event) -> None:
        self.served = served
        self.pause = IdlePause(_POLL_SECONDS, lambda: store.devices.await_work(served))
        self.holder: LeaseHolder | None = None
        self.is_idle = False
        self.ends_at: float | None = None
        self.retry_at = 0.0
        self._due = due
        self._was_woken = False

    def served_now(self) -> ServedDevice | None:
        """Return the device."""
        return self.served

    def wake(self) -> None:
        """Look for work now."""
        self._was_woken = True
        self._due.set()

    def wants_work(self) -> bool:
        """Return whether to claim now."""
        if self._was_woken:
            self._was_woken = False
            self.pause.end()
        return self.holder is None and self.pause.is_over and time.monotonic() >= self.retry_at

    def begin(self, claim: Claim, claimed_at: float, plan: Plan) -> None:
        """Run claimed work."""
        self.pause.end()
        self.holder = LeaseHolder(claim.lease, LeaseTerms(plan.lease_seconds, 0.0), claimed_at)
        self.ends_at = None if _HOLDS in claim.item.payload else time.monotonic() + plan.work_seconds

    def has_ended(self) -> bool:
        """Return whether the work has ended, or its lease."""
        if self.holder is None:
            return False
        return self.holder.reason() is not None or (self.ends_at is not None and time.monotonic() >= self.ends_at)

    def due_at(self) -> float:
        """Return the time of the next step."""
        if self.holder is not None:
            return time.monotonic() + _POLL_SECONDS if self.ends_at is None else self.ends_at
        return max(self.retry_at, time.monotonic() + self.pause.seconds)


class Host:
    """A host, with a store of its own as in a process of its own."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan = plan
        folder = Path(plan.folder, name)
        settings = WorkerSettings(name, folder, folder, plan.lease_seconds, _POLL_SECONDS, 0.0)
        folder.mkdir(parents=True)
        owner = settings.new_owner()
        self._store = Store(open_engine(plan.url, worker_connections(plan.devices)))
        self._due = threading.Event()
        self._stopping = False
        served = [
            ServedDevice(
                slot=f"{name}/{card(index).id}", owner=owner, device=card(index), environment={}, versions=_VERSIONS
            )
            for index in range(plan.devices)
        ]
        self._devices = {device.slot: Device(device, self._store, self._due) for device in served}
        listener = self._store.new_listener(owner, self)
        if listener is None:
            raise ValueError("the fleet is measured on PostgreSQL")
        self._listener = listener
        workers = list(self._devices.values())
        self._heartbeat = Heartbeat(workers, self._store.devices, settings, lambda: listener.is_live)
        self._thread = threading.Thread(target=self._repeat, name=name)

    def start(self) -> None:
        """Announce the devices, and serve them."""
        served = tuple(device.served for device in self._devices.values())
        slots = frozenset(self._devices)
        self._store.devices.beat(Beat(self._plan.lease_seconds, devices=served, changed=slots))
        self._heartbeat.start()
        self._listener.start()
        self._thread.start()
        self._heartbeat.wake()

    def request_stop(self) -> None:
        """Begin to stop."""
        self._stopping = True
        self._due.set()

    def stop(self) -> None:
        """Stop; the leases expire."""
        self.request_stop()
        self._thread.join()
        self._heartbeat.stop()
        self._listener.stop()
        self._store.close()

    def work_queued(self, slot: str) -> None:
        """Wake the device."""
        self._devices[slot].wake()

    def work_cancelled(self) -> None:
        """Send a heartbeat."""
        self._heartbeat.wake()

    def notifications_resumed(self) -> None:
        """Look for work whose notifications were lost."""
        for device in self._devices.values():
            device.wake()
        self._heartbeat.wake()

    def notifications_lost(self, error: Exception) -> None:
        """Poll until they resume."""
        _log.warning("notifications lost: %s", error)
        self._heartbeat.wake()

    def _repeat(self) -> None:
        while not self._stopping:
            self._due.clear()
            for device in self._devices.values():
                if device.has_ended():
                    self._finish(device)
            free = [device for device in self._devices.values() if device.wants_work()]
            if free:
                self._claim(free)
            due_at = min(device.due_at() for device in self._devices.values())
            self._due.wait(max(0.0, due_at - time.monotonic()))

    def _finish(self, device: Device) -> None:
        if (holder := device.holder) is None:
            return
        try:
            if holder.reason() is None:
                self._store.leases.finish(holder.lease, Ending(State.SUCCEEDED))
        except StaleLeaseError as error:
            _log.warning("%s", error)
        except StoreUnavailableError as error:
            _log.warning("%s", error)
            device.ends_at = time.monotonic() + _POLL_SECONDS
            return
        device.holder = None

    def _claim(self, free: Sequence[Device]) -> None:
        claimed_at = time.monotonic()
        try:
            for device in free:
                device.is_idle = False
            claims = self._store.leases.claim_together([(one.served, self._plan.lease_seconds) for one in free])
            for device, claim in zip(free, claims, strict=True):
                if claim is not None:
                    device.begin(claim, claimed_at, self._plan)
            for device in free:
                if device.holder is None:
                    device.pause.begin()
                    device.is_idle = True
        except ClaimsCrowdedError:
            for device in free:
                device.pause.end()
        except StoreUnavailableError as error:
            _log.warning("%s", error)
            for device in free:
                device.pause.end()
                device.retry_at = time.monotonic() + _POLL_SECONDS


def main(text: str) -> None:
    """Serve until standard input ends."""
    plan = Plan(**json.loads(text))
    threading.stack_size(STACK_BYTES)
    with ExitStack() as stack:
        hosts = [Host(plan, name) for name in plan.hosts]
        for host in hosts:
            stack.callback(host.stop)
            host.start()
        print("ready", flush=True)
        sys.stdin.read()
        for host in hosts:
            host.request_stop()


if __name__ == "__main__":
    main(sys.argv[1])
