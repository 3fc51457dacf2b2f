"""The dispatcher of a cluster: a thread that reconciles the work in the store with the engine's jobs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchwright.client.documents.fleet import FleetNode, FleetReport, FleetWaiting
from batchwright.client.documents.workers import ServedDevice
from batchwright.device_traits import DeviceKind, kind_of_id
from batchwright_service.dispatch.cluster_engine import Engine, EngineError, EngineJob, JobName, JobState, NewJob, Node
from batchwright_service.dispatch.reconciliation import (
    Forget,
    Places,
    SeenJob,
    Stop,
    Submit,
    Task,
    TaskState,
    reconcile,
)
from batchwright_service.domain.hardware import ANY_DEVICE, is_served_by, need_of_lane
from batchwright_service.errors import StoreUnavailableError
from batchwright_service.observability.logging import rate_limited_logger
from batchwright_service.store.models import Beat, FleetWork
from batchwright_service.store.store import Store

_log = logging.getLogger(__name__)

_MOST_QUEUED = 500
"""Queued work that is looked at in each pass."""
_PENDING_PER_LANE = 4
"""Jobs in the engine's queue beyond one for each device that fits, so that no device waits for a pass."""
_NODE = "node-"
"""Prefix of the keys of nodes; no id of work begins with it."""
_MOST_REPORTED = 100
_BLOCKED_SECONDS = 180.0
"""Time after which a pass is blocked for good; Ray's calls end in about a minute."""
_SHOWN = 400
"""Length to which messages of an engine, which may hold the end of a log, are cut."""


class Dispatcher:
    """Reconcile until it is stopped; the interface is that of ``batchwright_service.worker.hosting.interface.Workers``.

    Nothing is kept but what saves time: another dispatcher, or this one after a restart, goes on from the store and
    the engine's jobs. Stopping it stops no job.

    An announced device is taken for dead after ``lease_seconds``.
    """

    def __init__(self, store: Store, engine: Engine, lease_seconds: float, poll_seconds: float) -> None:
        self._store = store
        self._engine = engine
        self._lease_seconds = lease_seconds
        self._poll_seconds = poll_seconds
        self._first_seen: dict[tuple[str, JobState], float] = {}
        self._last = FleetReport(engine=engine.name, address=engine.address)
        self._announced: tuple[ServedDevice, ...] = ()
        self._stopping = threading.Event()
        self._due = threading.Event()
        self._passed_at = time.monotonic()
        self._thread = threading.Thread(target=self._repeat, name="dispatcher")
        self._warnings = rate_limited_logger(_log)

    @property
    def slots(self) -> list[str]:
        """Return the name of the cluster."""
        return [f"{self._engine.name} at {self._engine.address}"]

    def start(self) -> None:
        """Start the thread. Does nothing when it runs."""
        if self._thread.ident is None:
            self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread runs and is not blocked in a pass."""
        return self._thread.is_alive() and time.monotonic() - self._passed_at < _BLOCKED_SECONDS

    def notify(self) -> None:
        """Begin the next pass now. Never blocks."""
        self._due.set()

    def request_stop(self) -> None:
        """Begin no further pass. Returns at once."""
        self._stopping.set()
        self._due.set()

    def force_stop(self) -> None:
        """Begin no further pass. Returns at once."""
        self.request_stop()

    def stop(self) -> None:
        """Stop, and wait for the end of the pass. Idempotent."""
        self.request_stop()
        if self._thread.ident is not None:
            self._thread.join()

    def _repeat(self) -> None:
        while not self._stopping.is_set():
            self._due.clear()
            try:
                self.reconcile_once()
            except StoreUnavailableError as error:
                self._warnings.warning("cannot dispatch: %s", error)
            except Exception as error:  # noqa: BLE001 - without this thread nothing would run
                self._warnings.warning("dispatching continues after an unexpected error: %s", error, exc_info=error)
            self._passed_at = time.monotonic()
            self._due.wait(self._poll_seconds)

    def reconcile_once(self) -> None:
        """Make one pass: submit, stop and forget jobs, announce devices, and report.

        Raises:
            StoreUnavailableError: when the database cannot be reached.
        """
        try:
            nodes, jobs = self._engine.nodes(), self._engine.jobs()
        except EngineError as error:
            self._warnings.warning("%s: %s", self.slots[0], error)
            self._announce([], f"{error.code}: {error}")
            self._store.fleet.report(self._last.model_copy(update={"error": str(error)}))
            return
        devices = self._devices(nodes)
        self._announce([device for found in devices.values() for device in found])
        work = self._store.fleet.work(_MOST_QUEUED, {job.name.key for job in jobs})
        seen = self._seen(jobs)
        lanes = {item.id: lane_of(item, devices) for item in work} | {
            f"{_NODE}{node.id}": Lane.of_node(node) for node in nodes
        }
        tasks = [*_node_tasks(nodes, devices), *(_task(item, lanes[item.id]) for item in work)]
        is_impossible = {task.key for task in tasks if not lanes[task.key].nodes}
        possible = [task for task in tasks if task.state is not TaskState.WAITING or task.key not in is_impossible]
        plan = reconcile(possible, seen, _PENDING_PER_LANE + sum(len(found) for found in devices.values()))
        errors = [text for action in plan.actions if (text := self._perform(action, lanes)) is not None]
        waits = plan.waits | {key: lanes[key].missing for key in is_impossible}
        waiting = tuple(
            FleetWaiting(id=task.key, device=lane.device, hardware=lane.text, reason=waits[task.key][-_SHOWN:])
            for task, lane in ((task, lanes[task.key]) for task in tasks)
            if task.state is TaskState.WAITING and task.key in waits
        )
        self._last = FleetReport(
            engine=self._engine.name,
            address=self._engine.address,
            error=errors[0] if errors else None,
            nodes=tuple(
                FleetNode(
                    id=node.id,
                    name=node.name,
                    state=node.state,
                    alive=node.alive,
                    slots=tuple(device.slot for device in devices.get(node.id, ())),
                )
                for node in nodes
            ),
            pending_jobs=sum(job.state is JobState.PENDING for job in jobs),
            running_jobs=sum(job.state is JobState.RUNNING for job in jobs),
            waiting=waiting[:_MOST_REPORTED],
        )
        self._store.fleet.report(self._last)

    def _devices(self, nodes: Sequence[Node]) -> dict[str, list[ServedDevice]]:
        """Return the announced devices of each living node."""
        kinds = {f"{self._engine.name}:{node.id}": node for node in nodes if node.alive}
        devices: dict[str, list[ServedDevice]] = {}
        for announced in self._store.devices.list():
            node = kinds.get(announced.served.owner)
            if node is not None and announced.served.device.kind in node.kinds:
                devices.setdefault(node.id, []).append(announced.served.model_copy(update={"unready": None}))
        return devices

    def _announce(self, devices: Sequence[ServedDevice], unready: str | None = None) -> None:
        """Keep devices announced; without the engine those of before, so that work can be queued for them."""
        if unready is not None:
            devices = [device.model_copy(update={"unready": unready}) for device in self._announced]
        else:
            self._announced = tuple(devices)
        changed = frozenset(device.slot for device in devices)
        self._store.devices.beat(Beat(self._lease_seconds, devices=tuple(devices), changed=changed))

    def _seen(self, jobs: Sequence[EngineJob]) -> list[SeenJob]:
        """Return the jobs with the time since this process first saw them in their state: clocks may differ."""
        now = time.monotonic()
        known = {(job.id, job.state): self._first_seen.get((job.id, job.state), now) for job in jobs}
        self._first_seen = known
        return [SeenJob(job, now - known[job.id, job.state]) for job in jobs]

    def _perform(self, action: Submit | Stop | Forget, lanes: dict[str, Lane]) -> str | None:
        """Perform an action, and return the message of the error if the engine refuses."""
        try:
            match action:
                case Submit(name):
                    _log.info("submit %s", name)
                    self._engine.submit(self._new_job(name, lanes[name.key]))
                case Stop(job_id, reason):
                    _log.info("stop %s: %s", job_id, reason)
                    self._engine.stop(job_id)
                case Forget(job_id):
                    self._engine.forget(job_id)
        except EngineError as error:
            self._warnings.warning("%s: %s", self.slots[0], error)
            return str(error)
        return None

    def _new_job(self, name: JobName, lane: Lane) -> NewJob:
        if name.key.startswith(_NODE):
            arguments = ("node", "announce", f"{self._engine.name}:{name.key.removeprefix(_NODE)}", *lane.kinds)
        else:
            arguments = ("node", "run", name.key)
        return NewJob(name, arguments, lane.kinds[0], lane.devices, lane.nodes, lane.hosts)


def _task(work: FleetWork, lane: Lane) -> Task:
    unended = TaskState.HELD if work.has_live_lease else TaskState.WAITING
    state = TaskState.ENDED if work.state.terminal else unended
    return Task(work.id, work.token, state, f"{work.device} {work.hardware}", work.seconds, lane.places)


def _node_tasks(nodes: Sequence[Node], devices: dict[str, list[ServedDevice]]) -> list[Task]:
    """Return a task for each node: to announce its devices, if it is alive and has some."""
    waiting = {node.id for node in nodes if node.alive and node.kinds and node.id not in devices}
    return [
        Task(
            f"{_NODE}{node.id}",
            0,
            TaskState.WAITING if node.id in waiting else TaskState.ENDED,
            node.id,
            places=Places(frozenset({node.id})),
        )
        for node in nodes
    ]


@dataclass(frozen=True)
class Lane:
    """Devices and nodes that a job asks of the engine."""

    device: str
    """The device, as it was requested; empty for hardware on any device."""
    text: str | None
    """The hardware, for people."""
    kinds: tuple[DeviceKind, ...]
    """The kind of the devices; of a node, all kinds."""
    devices: int
    """Number of devices that the work takes on each node; 0 for a job beside others."""
    nodes: frozenset[str]
    """Ids of the nodes that have the hardware; none where there are fewer than ``hosts``."""
    hosts: int = 1
    """Number of nodes that the work takes at once."""

    @property
    def places(self) -> Places:
        """The places that the work takes."""
        return Places(self.nodes, self.devices * self.hosts > 1, self.hosts)

    @property
    def missing(self) -> str:
        """The reason why the work waits while ``nodes`` is empty."""
        if self.hosts > 1:
            return f"there are fewer living nodes than the work takes: {self.text}"
        return f"no living node has {self.text or self.device}"

    @classmethod
    def of_node(cls, node: Node) -> Lane:
        """Return the lane of the job that announces a node's devices."""
        return cls("", None, node.kinds, 0, frozenset({node.id}))


def lane_of(work: FleetWork, devices: Mapping[str, Sequence[ServedDevice]]) -> Lane:
    """Return the lane of a piece of work, given the announced devices of each node."""
    fitting = {
        node: [one for one in found if is_served_by(work.device, work.hardware, one.device)]
        for node, found in devices.items()
    }
    count = hosts = 1
    text = work.hardware
    if work.device == ANY_DEVICE:
        need = need_of_lane(work.hardware or "")
        count, hosts, text = need.devices_per_node, need.nodes, need.in_words
    having = {node: equal for node, found in fitting.items() if len(equal := _of_one_kind(found)) >= count}
    kind = kind_of_id(work.device)
    for found in having.values():
        kind = found[0].device.kind
    nodes = frozenset(node for node, found in having.items() if found[0].device.kind == kind)
    return Lane(work.device, text, (kind,), count, nodes if len(nodes) >= hosts else frozenset(), hosts)


def _of_one_kind(devices: Sequence[ServedDevice]) -> list[ServedDevice]:
    """Return the devices of the product that a node has the most of."""
    kinds: dict[str, list[ServedDevice]] = {}
    for device in devices:
        kinds.setdefault(device.hardware, []).append(device)
    return max(kinds.values(), key=len, default=[])
